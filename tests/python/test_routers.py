"""Trained routers as objects, and in caches."""

import dataclasses
import gc
import os
import tempfile
import unittest

import numpy

from support import fill, layer, skerry
from skerry import router_files

CONFIG = dict(form='production', model='toy', num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=16, summary_dim=20,
              pooling='centroids', centroids=3, step=7)


def settings(**changes):
    given = dict(policy=skerry.Policy('sekv', window_tokens=4, period_tokens=4, recent_tokens=4, sekv=skerry.Sekv(residents=False)),
                 budget=skerry.Budget(bytes=100000, length_tokens=400), max_step_tokens=64)
    return {**given, **changes}


def with_router(router):
    given = settings()
    return {**given, 'policy': dataclasses.replace(given['policy'], sekv=dataclasses.replace(given['policy'].sekv, router=router))}


class Routers(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = os.path.join(folder.name, 'router-\u00e4.safetensors')
        matrices = numpy.random.default_rng(1).standard_normal((1, 4, 20, 16)).astype(numpy.float16)
        router_files.write(self.path, {'W': matrices, 'W_key': matrices[:, ::2]}, CONFIG)

    def test_a_path_and_bytes_hold_the_same_router(self):
        with open(self.path, 'rb') as file:
            whole = file.read()
        infos = [skerry.Router(source).info() for source in (self.path, whole, bytearray(whole), memoryview(whole))]
        self.assertEqual(infos[1:], infos[:-1])
        info = infos[0]
        self.assertEqual((info.model, info.form, info.pooling, info.centroids, info.summary_dim, info.training_step),
                         ('toy', 'production', 'centroids', 3, 20, 7))
        self.assertEqual(info.flags, ('key_matrices', 'shared_keys'))
        self.assertEqual(info.parameters, 6 * 20 * 16)
        self.assertIn('toy', repr(skerry.Router(self.path)))

    def test_what_is_no_router_is_refused(self):
        with self.assertRaises(skerry.CorruptError):
            skerry.Router(b'')
        with self.assertRaises(skerry.StorageError):
            skerry.Router(self.path + '.not')
        with self.assertRaises(TypeError):
            skerry.Router(5)

    def test_a_closed_router_says_so(self):
        router = skerry.Router(self.path)
        with router:
            self.assertFalse(router.closed)
        self.assertTrue(router.closed)
        for call in (router.info, lambda: skerry.Cache([layer()], **with_router(router))):
            with self.assertRaises(skerry.StateError):
                call()
        self.assertIn('closed', repr(router))

    def test_a_cache_keeps_it_and_plans_by_it(self):
        context = skerry.Context()
        before = context.bytes()
        router = skerry.Router(self.path, context=context)
        self.assertGreaterEqual(context.bytes().context_bytes - before.context_bytes, 4 * router.info().parameters)
        plan = context.plan([layer()], **with_router(router))
        self.assertIs(plan.router_trained, True)
        self.assertEqual(plan.router_vectors, 3)
        # int4: three lines of three words and three scales, in words; three counts (docs/format.md).
        self.assertEqual(plan.router_bytes, 2 * plan.host_windows * (36 + 8 + 3))
        cache = skerry.Cache([layer()], context=context, **with_router(router))
        del router
        gc.collect()
        with cache.sequence() as sequence:
            fill(cache, sequence, 200)
            self.assertGreater(cache.counters().zooms, 0)
            cache.check()
        cache.close()
        gc.collect()
        self.assertEqual(context.bytes(), before)

    def test_without_one_the_plan_says_so(self):
        plan = skerry.Context().plan([layer()], **settings())
        self.assertIs(plan.router_trained, False)
        self.assertEqual(plan.router_vectors, 4)

    def test_another_geometry_is_refused_by_name(self):
        router = skerry.Router(self.path)
        for layers, said in (([layer()] * 2, '1 layers, the cache has 2'), ([layer(key_dim=32)], 'key dimension is 16')):
            with self.assertRaises(skerry.FormatError) as caught:
                skerry.Cache(layers, **with_router(router))
            self.assertIn(said, str(caught.exception))

    def test_the_shipped_router_fits_its_model(self):
        path = os.path.join(os.path.dirname(__file__), '..', '..', 'examples', 'data', 'smollm2-router.safetensors')
        self.assertLess(os.path.getsize(path), 2 << 20)
        router = skerry.Router(path)
        info = router.info()
        self.assertEqual((info.model, info.layers, info.query_heads, info.kv_heads, info.key_dim, info.form),
                         ('SmolLM2-135M-Instruct', 30, 9, 3, 64, 'production'))
        layers = [skerry.Layer(kv_heads=3, query_heads=9, key_dim=64)] * 30
        given = dict(budget=skerry.Budget(share_ppm=200000, length_tokens=2048))
        trained = skerry.Context().plan(layers, policy=skerry.Policy('sekv', sekv=skerry.Sekv(router=router)), **given)
        plain = skerry.Context().plan(layers, policy='sekv', **given)
        self.assertTrue(trained.router_trained)
        self.assertLessEqual(trained.router_bytes, plain.router_bytes)

    def test_a_router_of_another_library_is_refused(self):
        other = skerry.Library(skerry.library().path)
        router = skerry.Router(self.path, context=skerry.Context(library=other))
        with self.assertRaises(ValueError):
            skerry.Cache([layer()], **with_router(router))


if __name__ == '__main__':
    unittest.main()
