"""Reading windows back from the host, against numpy."""

import os
import tempfile
import unittest

import numpy

from support import attention, fill, layer, random, skerry
from skerry import router_files


def make(*, sekv=None, share=None, transfers=0, layers=None, length=320, size=3.0, **more):
    """A cache whose windows of 4 tokens all leave for the host; its budget is a multiple of the full cache's bytes."""
    layers = layers or [layer(key_dim=32)]
    tokens = length * sum(one.kv_heads * (one.key_dim + one.value_dim) for one in layers) * 4
    policy = skerry.Policy('sekv', window_tokens=4, sink_tokens=2, recent_tokens=4, period_tokens=4, score_queries=8, sekv=sekv)
    return skerry.Cache(layers, context=skerry.Context(transfers=transfers), policy=policy, store_dtype='f32', max_step_tokens=64,
                        budget=skerry.Budget(bytes=int(tokens * size), length_tokens=length, **more))


class Sekv(unittest.TestCase):
    def test_everything_read_back_in_the_stores_own_numbers_is_full_attention(self):
        options = skerry.Sekv(residents=False, fetch_ppm=1000000, detail_format='f32')
        with make(sekv=options, transfers=2) as cache:
            sequence = cache.sequence()
            (keys, values), = fill(cache, sequence, 200, seed=1, chunk=50)
            for turn in range(20):
                key, value = random((1, 2, 32), 100 + turn), random((1, 2, 32), 200 + turn)
                query = random((1, 4, 32), 300 + turn)
                keys, values = numpy.concatenate([keys, key]), numpy.concatenate([values, value])
                with cache.step(sequence, 1) as step:
                    step.append(0, key, value)
                    step.zoom(0, query)
                    for head in range(2):
                        got = step.gather(0, head)
                        numpy.testing.assert_array_equal(got.positions, numpy.arange(len(keys)))
                        numpy.testing.assert_array_equal(got.keys, keys[:, head])
                        numpy.testing.assert_array_equal(got.values, values[:, head])
                    out, lse = step.attend(0, query)
                wanted, wanted_lse = attention(query, keys, values, first=len(keys) - 1)
                numpy.testing.assert_allclose(out, wanted, atol=1e-4)
                numpy.testing.assert_allclose(lse, wanted_lse, atol=1e-4)
            cache.check()
            counters, info, memory = cache.counters(), sequence.info(), cache.memory()
            self.assertEqual(counters.zooms, counters.zooms_present + counters.zooms_fetched + counters.zooms_late)
            self.assertGreater(counters.zooms_fetched, 0)
            self.assertEqual(counters.zooms_late, 0)
            self.assertGreater(info.host_tokens, 2 * 190)
            self.assertEqual(info.evicted_tokens, 0)
            self.assertEqual(memory.host_bytes, cache.plan.host_bytes)
            self.assertGreater(memory.used_host_bytes, 0)

    def test_as_published_with_everything_expanded_is_full_attention_to_the_prompt(self):
        config = dict(form='paper', model='toy', num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=32, summary_dim=4, rank_max=32)
        shapes = router_files.shapes(dict(config))
        tensors = {name: numpy.zeros(shape, numpy.float32) for name, shape in shapes.items() if name in router_files._PAPER}
        tensors['g_phi.mlp.4.bias'][:] = 40   # gates of 1
        with tempfile.TemporaryDirectory() as folder:
            path = os.path.join(folder, 'router.safetensors')
            router_files.write(path, tensors, config)
            router = skerry.Router(path)
        options = skerry.Sekv(router=router, absent_rows=True, group_choice=True, budget_entries=100000, span_min_tokens=0)
        with skerry.Cache([layer(key_dim=32)], policy=skerry.Policy('sekv', fidelity='paper', sekv=options), store_dtype='f32',
                          staging_tokens=256) as cache:
            sequence = cache.sequence()
            keys, values, nats = random((150, 2, 32), 1), random((150, 2, 32), 2), numpy.abs(random((150,), 3))
            with cache.step(sequence, 150) as step:
                step.append(0, keys, values)
                step.attend(0, random((150, 4, 32), 4))
                step.surprisal(nats)
            for turn in range(3):
                query = random((1, 4, 32), 10 + turn)
                with cache.step(sequence, 1) as step:
                    step.append(0, random((1, 2, 32), 20 + turn), random((1, 2, 32), 30 + turn))
                    out, lse = step.attend(0, query)
                wanted, wanted_lse = attention(query, keys, values, first=149)
                numpy.testing.assert_allclose(out, wanted, atol=2e-5)
                numpy.testing.assert_allclose(lse, wanted_lse, atol=2e-5)
            tiers = {piece.tier for piece in sequence.ranges(0, 0)}
            self.assertEqual(tiers, {'full', 'summary', 'evicted'})
            self.assertGreater(cache.memory().used_summary_bytes, 0)
            self.assertEqual(cache.plan.fidelity, 'paper')
            with self.assertRaises(skerry.ArgumentError):
                sequence.truncate(100)
        with self.assertRaises(skerry.ArgumentError):
            skerry.Context().plan([layer(key_dim=32)], policy=skerry.Policy('sekv', fidelity='paper'))

    def test_options_and_what_became_of_them(self):
        options = skerry.Sekv(detail_format='r8', fetch_ppm=250000, refine_ppm=500000, hysteresis_ppm=3000000)
        with make(sekv=options, size=0.6) as cache:
            plan = cache.plan
            self.assertEqual((plan.fetch_ppm, plan.refine_ppm, plan.zoom_hysteresis_ppm), (250000, 500000, 3000000))
            self.assertEqual(plan.detail_format, 'r8')
            self.assertGreater(plan.host_windows, 0)
            self.assertGreaterEqual(plan.fetch_windows, plan.host_windows // 4)
        with make(size=0.6) as cache:
            self.assertEqual(cache.plan.fetch_ppm, 120000)
            self.assertEqual(cache.plan.detail_format, 'r4')

    def test_ranges_name_the_host_and_what_was_read(self):
        with make(sekv=skerry.Sekv(residents=False, fetch_ppm=100000)) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 200, chunk=50)
            ranges = sequence.ranges(0, 0)
            host = [one for one in ranges if one.tier == 'host']
            self.assertGreater(len(host), 40)
            self.assertTrue(all('detail' in one.flags and one.bytes == 0 and one.key_format == 'r4' for one in host))
            read = [one for one in ranges if 'zoomed' in one.flags]
            self.assertGreater(len(read), 2)
            self.assertLess(len(read), 8)
            self.assertEqual(sequence.info().host_tokens, 2 * 4 * len(host))

    def test_copies_by_threads_change_nothing(self):
        outs = []
        for transfers in (0, 2):
            with make(sekv=skerry.Sekv(residents=False, keep_windows=3), transfers=transfers) as cache:
                sequence = cache.sequence()
                fill(cache, sequence, 120, seed=5, chunk=40)
                with cache.step(sequence, 1) as step:
                    step.append(0, random((1, 2, 32), 7), random((1, 2, 32), 8))
                    outs.append(step.attend(0, random((1, 4, 32), 9))[0].copy())
                outs.append(numpy.uint64(sequence.fingerprint()))
        numpy.testing.assert_array_equal(outs[0], outs[2])
        self.assertEqual(outs[1], outs[3])

    def test_refusals(self):
        with self.assertRaises(skerry.SkerryError):
            skerry.Cache([layer()], policy=skerry.Policy('sekv'))  # no budget
        with self.assertRaises(skerry.SkerryError):
            make(sekv=skerry.Sekv(fetch_ppm=1000001))
        with self.assertRaises(skerry.SkerryError):
            skerry.Cache([layer()], policy=skerry.Policy('qevict', sekv=skerry.Sekv()))
        with make() as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 100, chunk=50)
            with cache.step(sequence, 2) as step:
                step.append(0, random((2, 2, 32), 1), random((2, 2, 32), 2))
                with self.assertRaises(skerry.SkerryError):
                    step.zoom(0, random((2, 4, 32), 3))
                step.attend(0, random((2, 4, 32), 3))


if __name__ == '__main__':
    unittest.main()
