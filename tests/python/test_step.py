"""Append, attend, view, gather and observe against numpy."""

import threading
import unittest

import numpy

from support import attention, fill, layer, random, skerry

try:
    from ml_dtypes import bfloat16
except ImportError:
    bfloat16 = None


def to_bf16_bits(array):
    """Rounds float32 to bfloat16, nearest even, as uint16."""
    bits = numpy.ascontiguousarray(array, numpy.float32).view(numpy.uint32)
    return ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16).astype(numpy.uint16)


def from_bf16_bits(bits):
    return (bits.astype(numpy.uint32) << 16).view(numpy.float32)


# What a number is after it was stored: references attend to these, so that tolerances are those of the arithmetic.
STORED = {
    'f32': lambda array: array,
    'f16': lambda array: array.astype(numpy.float16),
    'bf16': lambda array: from_bf16_bits(to_bf16_bits(array)),
}


def largest(left, right):
    return float(numpy.max(numpy.abs(numpy.asarray(left, numpy.float64) - numpy.asarray(right, numpy.float64))))


class RoundTrip(unittest.TestCase):
    def check(self, store, given, expected, **dtype):
        keys, values = given
        with skerry.Cache([layer()], store_dtype=store) as cache:
            sequence = cache.sequence()
            with cache.step(sequence, 40) as step:
                step.append(0, keys[:40], values[:40], **dtype)
            with cache.step(sequence, 13) as step:
                step.append(0, keys[40:], values[40:], **dtype)
                for head in range(2):
                    got = step.gather(0, head)
                    self.assertEqual(got.tokens, 53)
                    numpy.testing.assert_array_equal(got.keys, expected[0][:, head])
                    numpy.testing.assert_array_equal(got.values, expected[1][:, head])
                    numpy.testing.assert_array_equal(got.positions, numpy.arange(53))
                    numpy.testing.assert_array_equal(got.bias, numpy.zeros(53, numpy.float32))
                    self.assertEqual(got.windows.dtype, numpy.int32)

    def test_float16_numbers_come_back_as_they_were(self):
        given = random((53, 2, 16), 1, numpy.float16), random((53, 2, 16), 2, numpy.float16)
        self.check('f16', given, given)
        self.check('f32', given, given)

    def test_float32_numbers_are_rounded_to_nearest_even(self):
        given = random((53, 2, 16), 1), random((53, 2, 16), 2)
        self.check('f32', given, given)
        self.check('f16', given, [STORED['f16'](array) for array in given])
        self.check('bf16', given, [STORED['bf16'](array) for array in given])

    def test_bfloat16_as_bits(self):
        given = [to_bf16_bits(random((53, 2, 16), seed)) for seed in (1, 2)]
        expected = [from_bf16_bits(array) for array in given]
        self.check('bf16', given, expected, dtype='bf16')
        self.check('f32', given, expected, dtype='bf16')

    @unittest.skipUnless(bfloat16, 'needs ml_dtypes')
    def test_bfloat16_of_ml_dtypes(self):
        given = [random((53, 2, 16), seed).astype(bfloat16) for seed in (1, 2)]
        self.check('bf16', given, [array.astype(numpy.float32) for array in given])

    def test_gather_writes_what_was_asked_for(self):
        keys, values = random((20, 2, 16), 1), random((20, 2, 16), 2)
        with skerry.Cache([layer()], store_dtype='f32') as cache, cache.step(cache.sequence(), 20) as step:
            step.append(0, keys, values)
            half = step.gather(0, 1, dtype='f16')
            self.assertEqual(half.keys.dtype, numpy.float16)
            numpy.testing.assert_array_equal(half.keys, keys[:, 1].astype(numpy.float16))
            bits = step.gather(0, 1, keys=numpy.zeros((20, 16), numpy.uint16), dtype='bf16')
            numpy.testing.assert_array_equal(bits.keys, to_bf16_bits(keys[:, 1]))
            room = numpy.full((16, 25), 7, numpy.float32)
            positions = numpy.full(30, -1, numpy.int64)
            got = step.gather(0, 0, keys=room.T, positions=positions)
            numpy.testing.assert_array_equal(room[:, :20], keys[:, 0].T)
            numpy.testing.assert_array_equal(room[:, 20:], 7)
            numpy.testing.assert_array_equal(positions, list(range(20)) + [-1] * 10)
            self.assertTrue(numpy.shares_memory(got.keys, room))
            with self.assertRaises(skerry.ArgumentError) as caught:
                step.gather(0, 0, values=numpy.zeros((19, 16), numpy.float32))
            self.assertEqual((caught.exception.found, caught.exception.allowed), (19, 20))
            with self.assertRaises(TypeError):
                step.gather(0, 0, windows=numpy.zeros(20, numpy.int64))
            with self.assertRaises(skerry.ArgumentError):
                step.gather(0, 0, windows=numpy.zeros(19, numpy.int32))

    def test_view_shows_the_same_numbers_in_place(self):
        with skerry.Cache([layer(value_dim=24)], store_dtype='f32') as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 37)
            with cache.step(sequence, 4) as step:
                step.append(0, random((4, 2, 16), 8), random((4, 2, 24), 9))
                parts, gathered = step.view(0, 1), step.gather(0, 1)
                self.assertEqual(sum(part.tokens for part in parts), 41)
                numpy.testing.assert_array_equal(numpy.concatenate([part.keys.T for part in parts]), gathered.keys)
                numpy.testing.assert_array_equal(numpy.concatenate([part.values for part in parts]), gathered.values)
                position = 0
                for part in parts:
                    self.assertEqual((part.position, part.tier, part.key_format), (position, 'full', 'f32'))
                    self.assertLessEqual(part.tokens, part.capacity)
                    self.assertFalse(part.keys.flags.writeable)
                    self.assertEqual(part.values.__array_interface__['data'][0], part.values_address)
                    position += part.tokens

    def test_a_view_outlives_its_cache(self):
        cache = skerry.Cache([layer()], store_dtype='f32')
        with cache.step(cache.sequence(), 8) as step:
            keys = random((8, 2, 16))
            step.append(0, keys, keys)
            part = step.view(0, 0)[0]
        with cache.context as context:
            held = context.bytes().cache_bytes
            cache.close()
            self.assertEqual(part.values.shape, (part.tokens, 16))
            float(part.values.sum())
            self.assertEqual(context.bytes().cache_bytes, held)
            del part
            self.assertEqual(context.bytes().cache_bytes, 0)

    def test_low_bit_parts_have_addresses_only(self):
        with skerry.Cache([layer(key_dim=64)], policy='quantise') as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 200)
            with cache.step(sequence, 1) as step:
                step.append(0, random((1, 2, 64)), random((1, 2, 64)))
                parts = step.view(0, 0, tiers='quantised')
                self.assertGreater(len(parts), 0)
                for part in parts:
                    self.assertEqual((part.tier, part.key_format, part.value_format), ('quantised', 'r3', 'r2'))
                    self.assertIsNone(part.keys)
                    self.assertNotEqual(part.keys_address, 0)
                both = len(step.view(0, 0, tiers=['full', 'quantised']))
                self.assertEqual(both, len(parts) + len(step.view(0, 0, tiers='full')))
                self.assertEqual(len(step.view(0, 0)), both)


class Attend(unittest.TestCase):
    def run_one(self, one, store, tolerance, chunks=(30, 1, 1, 9), dtype=numpy.float32, **more):
        total = sum(chunks)
        keys, values = random((total, one.kv_heads, one.key_dim), 1), random((total, one.kv_heads, one.value_dim or one.key_dim), 2)
        queries = random((total, one.query_heads or one.kv_heads, one.key_dim), 3)
        stored = STORED[store]
        with skerry.Cache([one], store_dtype=store) as cache:
            sequence = cache.sequence()
            first = 0
            for rows in chunks:
                last = first + rows
                with cache.step(sequence, rows, positions=first) as step:
                    step.append(0, keys[first:last], values[first:last])
                    out, lse = step.attend(0, queries[first:last].astype(dtype), **more)
                wanted, wanted_lse = attention(queries[first:last], stored(keys[:last]), stored(values[:last]), first=first,
                                               scale=one.scale or None, softcap=one.softcap, sliding_window=one.sliding_window,
                                               sink_logits=more.get('sink_logits'))
                self.assertEqual(out.dtype, dtype)
                self.assertEqual(lse.dtype, numpy.float32)
                self.assertLess(largest(out, wanted), tolerance)
                self.assertLess(largest(lse, wanted_lse), tolerance)
                first = last

    def test_float32_store(self):
        self.run_one(layer(), 'f32', 1e-5)

    def test_float16_store(self):
        self.run_one(layer(), 'f16', 1e-4)

    def test_bfloat16_store(self):
        self.run_one(layer(), 'bf16', 1e-4)

    def test_head_dims_of_models(self):
        for dim in (1, 3, 64, 96, 128, 192):
            with self.subTest(dim):
                self.run_one(layer(key_dim=dim), 'f32', 1e-5)

    def test_grouped_queries(self):
        for kv_heads, query_heads in ((1, 1), (1, 8), (2, 14), (4, 4), (3, 9)):
            with self.subTest(kv_heads=kv_heads, query_heads=query_heads):
                self.run_one(layer(kv_heads=kv_heads, query_heads=query_heads), 'f32', 1e-5)

    def test_query_heads_default_to_kv_heads(self):
        self.run_one(skerry.Layer(kv_heads=3, key_dim=16), 'f32', 1e-5)

    def test_keys_and_values_of_different_width(self):
        self.run_one(layer(key_dim=24, value_dim=16), 'f32', 1e-5)
        self.run_one(layer(key_dim=16, value_dim=40), 'f32', 1e-5)

    def test_scale_softcap_window_and_sinks(self):
        self.run_one(layer(scale=0.7), 'f32', 1e-5)
        self.run_one(layer(softcap=2.0), 'f32', 1e-5)
        self.run_one(layer(sliding_window=7), 'f32', 1e-5)
        self.run_one(layer(), 'f32', 1e-5, sink_logits=[0.5, -1.0, 2.0, 0.0])

    def test_float16_queries_give_float16_output(self):
        self.run_one(layer(), 'f16', 5e-3, dtype=numpy.float16)

    def test_chunks_do_not_change_the_output(self):
        keys, values, queries = random((60, 2, 16), 1), random((60, 2, 16), 2), random((60, 4, 16), 3)
        outs = []
        for chunk in (60, 7, 1):
            with skerry.Cache([layer()]) as cache:
                sequence, out = cache.sequence(), numpy.empty((60, 4, 16), numpy.float32)
                for first in range(0, 60, chunk):
                    rows = slice(first, min(60, first + chunk))
                    with cache.step(sequence, rows.stop - first) as step:
                        step.append(0, keys[rows], values[rows])
                        step.attend(0, queries[rows], out=out[rows])
                outs.append(out)
        numpy.testing.assert_array_equal(outs[0], outs[1])
        numpy.testing.assert_array_equal(outs[0], outs[2])

    def test_any_strides(self):
        keys, values, queries = random((12, 2, 16), 1), random((12, 2, 16), 2), random((12, 4, 16), 3)
        expected, expected_lse = attention(queries, keys, values)

        def heads_first(array):
            return numpy.ascontiguousarray(array.transpose(1, 0, 2)).transpose(1, 0, 2)

        def every_other(array):
            wide = numpy.full(tuple(2 * side for side in array.shape), 9, array.dtype)
            wide[::2, ::2, ::2] = array
            return wide[::2, ::2, ::2]

        def backwards(array):
            return numpy.ascontiguousarray(array[::-1, :, ::-1])[::-1, :, ::-1]

        def unaligned(array):
            raw = numpy.zeros(array.nbytes + 1, numpy.uint8)
            moved = raw[1:].view(array.dtype).reshape(array.shape)
            moved[...] = array
            return moved
        for form in (heads_first, every_other, backwards, unaligned, numpy.asfortranarray):
            with self.subTest(form.__name__), skerry.Cache([layer()], store_dtype='f32') as cache:
                with cache.step(cache.sequence(), 12) as step:
                    step.append(0, form(keys), form(values))
                    out = numpy.full((4, 12, 40), 5, numpy.float32)
                    lse = numpy.full((4, 12), 5, numpy.float32)
                    place = out[:, :, 3:35:2].transpose(1, 0, 2)
                    got, got_lse = step.attend(0, form(queries), out=place, lse=lse.T)
                    self.assertIs(got, place)
                    self.assertLess(largest(place, expected), 1e-5)
                    self.assertLess(largest(lse.T, expected_lse), 1e-5)
                    untouched = numpy.ones(40, bool)
                    untouched[3:35:2] = False
                    numpy.testing.assert_array_equal(out[:, :, untouched], 5)

    def test_one_number_for_all(self):
        with skerry.Cache([layer()], store_dtype='f32') as cache, cache.step(cache.sequence(), 5) as step:
            step.append(0, numpy.broadcast_to(numpy.float32(0.5), (5, 2, 16)), numpy.broadcast_to(numpy.float32(2), (5, 2, 16)))
            out, lse = step.attend(0, random((5, 4, 16)))
            self.assertLess(largest(out, numpy.full(out.shape, 2.0)), 1e-6)

    def test_several_sequences_in_one_step(self):
        with skerry.Cache([layer()], store_dtype='f32', max_sequences=3) as cache:
            sequences = [cache.sequence() for _ in range(3)]
            old = [fill(cache, sequence, 5 + 4 * place, seed=10 * place)[0] for place, sequence in enumerate(sequences)]
            order, counts = [2, 0], [3, 2]
            keys, values, queries = random((5, 2, 16), 1), random((5, 2, 16), 2), random((5, 4, 16), 3)
            with cache.step([sequences[place] for place in order], counts, positions=[13, 5]) as step:
                step.append(0, keys, values)
                out, lse = step.attend(0, queries)
                with self.assertRaisesRegex(ValueError, 'name one'):
                    step.gather(0, 0)
                with self.assertRaisesRegex(ValueError, 'not in this step'):
                    step.gather(0, 0, sequences[1])
                self.assertEqual(step.gather(0, 0, sequences[0]).tokens, 7)
            row = 0
            for place, count in zip(order, counts):
                rows = slice(row, row + count)
                wanted, _ = attention(queries[rows], numpy.concatenate([old[place][0], keys[rows]]),
                                      numpy.concatenate([old[place][1], values[rows]]), first=len(old[place][0]))
                self.assertLess(largest(out[rows], wanted), 1e-5)
                row += count
            self.assertEqual([sequence.length for sequence in sequences], [7, 9, 16])

    def test_shared_layers_read_the_lower_one(self):
        layers = [layer(), layer(), layer(shared_with=0)]
        keys, values, queries = random((9, 2, 16), 1), random((9, 2, 16), 2), random((9, 4, 16), 3)
        with skerry.Cache(layers, store_dtype='f32') as cache, cache.step(cache.sequence(), 9) as step:
            step.append(0, keys, values)
            step.append(1, values, keys)
            with self.assertRaises(skerry.StateError):
                step.append(2, keys, values)
            out, _ = step.attend(2, queries)
            self.assertLess(largest(out, attention(queries, keys, values)[0]), 1e-5)

    def test_workers_do_not_change_the_output(self):
        outs = []
        for workers in (0, 3):
            with skerry.Context(workers=workers) as context, skerry.Cache([layer(key_dim=64)], context=context) as cache:
                sequence = cache.sequence()
                fill(cache, sequence, 512, chunk=128)
                with cache.step(sequence, 2) as step:
                    step.append(0, random((2, 2, 64), 5), random((2, 2, 64), 6))
                    outs.append(step.attend(0, random((2, 4, 64), 7)))
        numpy.testing.assert_array_equal(outs[0][0], outs[1][0])
        numpy.testing.assert_array_equal(outs[0][1], outs[1][1])

    def test_layers_on_several_threads(self):
        count = 6
        keys = [random((20, 2, 16), 3 * index) for index in range(count)]
        values = [random((20, 2, 16), 3 * index + 1) for index in range(count)]
        queries = [random((20, 4, 16), 3 * index + 2) for index in range(count)]
        results = [None] * count
        with skerry.Cache([layer()] * count, store_dtype='f32') as cache, cache.step(cache.sequence(), 20) as step:
            def work(index):
                step.append(index, keys[index], values[index])
                results[index] = step.attend(index, queries[index])[0]
            threads = [threading.Thread(target=work, args=(index,)) for index in range(count)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        for index in range(count):
            self.assertIsNotNone(results[index])
            self.assertLess(largest(results[index], attention(queries[index], keys[index], values[index])[0]), 1e-5)

    def test_tiers_merge_to_the_whole(self):
        with skerry.Cache([layer(key_dim=64)], policy='quantise') as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 300)
            queries = random((1, 4, 64), 5)
            with cache.step(sequence, 1) as step:
                step.append(0, random((1, 2, 64), 6), random((1, 2, 64), 7))
                whole, whole_lse = step.attend(0, queries, exact=True, score=False)
                full, full_lse = step.attend(0, queries, exact=True, tiers='full')
                low, low_lse = step.attend(0, queries, exact=True, tiers='quantised')
                merged_lse = numpy.logaddexp(full_lse, low_lse)
                merged = (full * numpy.exp(full_lse - merged_lse)[..., None] + low * numpy.exp(low_lse - merged_lse)[..., None])
                self.assertLess(largest(merged, whole), 1e-4)
                self.assertLess(largest(merged_lse, whole_lse), 1e-4)
                for head in range(2):
                    group = slice(2 * head, 2 * head + 2)
                    step.observe(0, head, merged_lse=merged_lse[:, group], queries=queries[:, group])
                with self.assertRaises(skerry.StateError):
                    step.observe(0, 0, merged_lse=merged_lse[:, :2], queries=queries[:, :2])
            cache.check()


class Observe(unittest.TestCase):
    def test_masses_of_the_caller_do_what_attend_does(self):
        policy = skerry.Policy('qevict', quantised_share_ppm=500_000)
        settings = dict(policy=policy, store_dtype='f32', budget=skerry.Budget(share_ppm=130_000, length_tokens=512))
        moved = []
        for own in (False, True):
            with skerry.Cache([layer(key_dim=64)], **settings) as cache:
                sequence = cache.sequence()
                for position in range(512):
                    keys, values = random((1, 2, 64), 3 * position), random((1, 2, 64), 3 * position + 1)
                    queries = random((1, 4, 64), 3 * position + 2)
                    with cache.step(sequence, 1) as step:
                        step.append(0, keys, values)
                        if not own:
                            step.attend(0, queries, exact=True)
                            continue
                        for head in range(2):
                            got = step.gather(0, head)
                            group = queries[:, 2 * head:2 * head + 2]
                            logits = numpy.einsum('rhd,td->rht', group.astype(float), got.keys.astype(float)) / 8 + got.bias
                            weights = numpy.exp(logits - logits.max(axis=2, keepdims=True))
                            weights /= weights.sum(axis=2, keepdims=True)
                            step.observe(0, head, masses=weights.mean(axis=1), queries=group)
                moved.append([[(one.begin, one.end, one.tier) for one in sequence.ranges(0, head)] for head in range(2)])
                tiers = {tier for head in moved[-1] for _, _, tier in head}
                self.assertEqual(tiers, {'full', 'quantised', 'evicted'})
        self.assertEqual(moved[0], moved[1])

    def test_wrong_masses_are_refused(self):
        with skerry.Cache([layer()]) as cache, cache.step(cache.sequence(), 3) as step:
            step.append(0, random((3, 2, 16)), random((3, 2, 16)))
            for masses, kind in ((numpy.zeros((2, 3)), skerry.ArgumentError), (numpy.zeros(3), skerry.ArgumentError),
                                 (numpy.zeros((3, 4)), skerry.ArgumentError),
                                 (numpy.full((3, 3), 1.5), skerry.ArgumentError),
                                 (numpy.full((3, 3), numpy.nan), skerry.NonfiniteError)):
                with self.assertRaises(kind):
                    step.observe(0, 0, masses=masses)
            step.observe(0, 0, masses=numpy.tril(numpy.full((3, 3), 0.25)))

    def test_surprisal(self):
        with skerry.Cache([layer()]) as cache:
            sequence = cache.sequence()
            step = cache.step(sequence, 3)
            step.append(0, random((3, 2, 16)), random((3, 2, 16)))
            with self.assertRaises(skerry.ArgumentError):
                step.surprisal([1.0])
            with self.assertRaises(skerry.NonfiniteError):
                step.surprisal([1.0, -1.0, 0.0])
            step.surprisal([1.0, 0.0, 2.5])
            step.commit()
            info = sequence.info()
            self.assertEqual(info.surprisal_tokens, 3)
            self.assertAlmostEqual(info.surprisal_mean, 3.5 / 3, places=6)
            self.assertAlmostEqual(info.surprisal_variance, numpy.var([1.0, 0.0, 2.5]), places=6)


class Refusals(unittest.TestCase):
    def setUp(self):
        self.cache = skerry.Cache([layer(), layer()])
        self.sequence = self.cache.sequence()
        fill(self.cache, self.sequence, 5)
        self.before = self.sequence.fingerprint()
        self.step = self.cache.step(self.sequence, 3)
        self.good = random((3, 2, 16), 1)

    def tearDown(self):
        self.step.abort()
        self.assertEqual(self.sequence.fingerprint(), self.before)
        self.cache.check()
        self.cache.close()

    def test_wrong_shapes(self):
        for keys in (self.good[:2], self.good[:, :1], self.good[:, :, :15], self.good[0], self.good[None]):
            with self.subTest(keys.shape), self.assertRaises(skerry.ArgumentError):
                self.step.append(0, keys, self.good)
        with self.assertRaises(skerry.ArgumentError) as caught:
            self.step.append(0, self.good, self.good[:, :, :7])
        self.assertEqual((caught.exception.subject, caught.exception.index), ('tensor', 2))
        self.assertEqual((caught.exception.found, caught.exception.allowed), (7, 16))
        self.step.append(0, self.good, self.good)

    def test_wrong_types(self):
        for keys in (self.good.astype(numpy.float64), self.good.astype('>f4'), self.good.astype(numpy.int16), self.good.tolist(),
                     self.good.astype(numpy.uint16)):
            with self.assertRaises(TypeError):
                self.step.append(0, keys, self.good)
        with self.assertRaises(TypeError):
            self.step.append(0, self.good, self.good, dtype='bf16')

    def test_wrong_layers(self):
        with self.assertRaises(skerry.ArgumentError) as caught:
            self.step.append(2, self.good, self.good)
        self.assertEqual((caught.exception.subject, caught.exception.found), ('layer', 2))
        with self.assertRaises(skerry.ArgumentError):
            self.step.attend(-1, random((3, 4, 16)))

    def test_wrong_moments(self):
        with self.assertRaises(skerry.StateError):
            self.step.attend(0, random((3, 4, 16)))
        with self.assertRaises(skerry.StateError):
            self.step.gather(0, 0)
        with self.assertRaises(skerry.StateError):
            self.step.view(0, 0)
        self.step.append(0, self.good, self.good)
        with self.assertRaises(skerry.StateError) as caught:
            self.step.append(0, self.good, self.good)
        self.assertEqual(caught.exception.status_name, 'SKERRY_ERROR_STATE')
        with self.assertRaises(skerry.StateError):
            self.step.commit()  # layer 1 is missing
        self.assertTrue(self.step.open)
        with self.assertRaises(skerry.StateError):
            self.cache.step(self.sequence, 1)
        with self.assertRaises(skerry.StateError):
            self.sequence.drop()

    def test_outputs_that_cannot_be_written(self):
        self.step.append(0, self.good, self.good)
        queries = random((3, 4, 16))
        locked = numpy.zeros((3, 4, 16), numpy.float32)
        locked.flags.writeable = False
        for out in (locked, numpy.zeros((3, 4, 15), numpy.float32), numpy.zeros((3, 2, 16), numpy.float32)):
            with self.assertRaises(skerry.ArgumentError):
                self.step.attend(0, queries, out=out)
        with self.assertRaises(TypeError):
            self.step.attend(0, queries, out=numpy.zeros((3, 4, 16)))
        with self.assertRaises(skerry.ArgumentError):
            self.step.attend(0, queries, lse=numpy.zeros((3, 4), numpy.float16))
        with self.assertRaises(skerry.ArgumentError):
            self.step.attend(0, queries, sink_logits=[0.0, 0.0])

    def test_values_that_are_not_finite(self):
        for bad in (numpy.nan, numpy.inf, -numpy.inf):
            keys = self.good.copy()
            keys[1, 0, 3] = bad
            with self.assertRaises(skerry.NonfiniteError) as caught:
                self.step.append(0, keys, self.good)
            self.assertEqual((caught.exception.subject, caught.exception.index), ('values', 1))
        self.step.append(0, self.good, self.good)

    def test_wrong_steps(self):
        self.step.abort()
        cache, sequence = self.cache, self.sequence
        for use in (lambda: cache.step(sequence, 0), lambda: cache.step(sequence, 257),
                    lambda: cache.step(sequence, 1, positions=4),
                    lambda: cache.step([sequence, sequence], [1, 1]), lambda: cache.step([], [])):
            with self.assertRaises(skerry.ArgumentError):
                use()
        with self.assertRaises(ValueError):
            cache.step([sequence], [1, 2])
        with self.assertRaises(ValueError):
            cache.step([sequence], [1], positions=[5, 6])
        with self.assertRaises(TypeError):
            cache.step(sequence, 1.0)

    def test_zero_for_values_that_are_not_finite(self):
        with skerry.Cache([layer()], nonfinite='zero', store_dtype='f32') as cache, cache.step(cache.sequence(), 3) as step:
            keys = self.good.copy()
            keys[1, 0, 3] = numpy.nan
            step.append(0, keys, self.good)
            keys[1, 0, 3] = 0
            numpy.testing.assert_array_equal(step.gather(0, 0).keys, keys[:, 0])
            step.commit()
            self.assertEqual(cache.counters().nonfinite_values, 1)


class Transactions(unittest.TestCase):
    def test_an_exception_in_the_block_leaves_no_trace(self):
        settings = dict(policy='qevict', budget=skerry.Budget(share_ppm=250_000, length_tokens=512))
        for tokens in (10, 200):
            with self.subTest(tokens), skerry.Cache([layer(key_dim=64)] * 2, **settings) as cache:
                sequence = cache.sequence()
                fill(cache, sequence, tokens)
                before = sequence.fingerprint(), sequence.info(), cache.memory(), sequence.ranges(1, 1)
                with self.assertRaises(ZeroDivisionError):
                    with cache.step(sequence, 40) as step:
                        for index in range(2):
                            step.append(index, random((40, 2, 64), 1), random((40, 2, 64), 2))
                            step.attend(index, random((40, 4, 64), 3))
                        1 / 0
                self.assertFalse(step.open)
                after = sequence.fingerprint(), sequence.info(), cache.memory(), sequence.ranges(1, 1)
                self.assertEqual(after, before)
                cache.check()

    def test_a_block_that_cannot_commit_aborts(self):
        with skerry.Cache([layer(), layer()]) as cache:
            sequence = cache.sequence()
            with self.assertRaises(skerry.StateError):
                with cache.step(sequence, 1) as step:
                    step.append(0, random((1, 2, 16)), random((1, 2, 16)))
            self.assertFalse(step.open)
            self.assertEqual(sequence.length, 0)
            fill(cache, sequence, 4)
            self.assertEqual(sequence.length, 4)

    def test_commit_inside_the_block(self):
        with skerry.Cache([layer()]) as cache:
            sequence = cache.sequence()
            with cache.step(sequence, 2) as step:
                step.append(0, random((2, 2, 16)), random((2, 2, 16)))
                step.commit()
                with self.assertRaisesRegex(skerry.StateError, 'step has ended'):
                    step.attend(0, random((2, 4, 16)))
            self.assertEqual(sequence.length, 2)
            step.abort()
            self.assertEqual(sequence.length, 2)

    def test_whole_prompts(self):
        policy = skerry.Policy('qevict', prefill='whole')
        with skerry.Cache([layer(key_dim=64)], policy=policy, budget=skerry.Budget(share_ppm=250_000, length_tokens=512),
                          staging_tokens=512, max_step_tokens=128) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 384, chunk=128, prefill=True)
            self.assertEqual(sequence.info().flags, ('prefilling',))
            self.assertEqual(sequence.info().quantised_tokens, 0)
            fill(cache, sequence, 1)
            self.assertEqual(sequence.info().flags, ())
            self.assertGreater(sequence.info().quantised_tokens, 0)


if __name__ == '__main__':
    unittest.main()
