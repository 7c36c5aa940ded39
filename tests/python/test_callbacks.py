"""Functions that the library calls."""

import gc
import unittest
import weakref

import numpy

from support import fill, layer, random, skerry

SETTINGS = dict(policy='qevict', budget=skerry.Budget(share_ppm=250_000, length_tokens=512))


def one_token(cache, sequence, seed=0):
    with cache.step(sequence, 1) as step:
        for index, one in enumerate(cache.layers):
            step.append(index, random((1, one.kv_heads, one.key_dim), seed), random((1, one.kv_heads, one.value_dim), seed + 1))


class Called(unittest.TestCase):
    def test_layers_are_announced_once(self):
        named = []
        with skerry.Cache([layer(), layer()], callbacks=skerry.Callbacks(before_layer=named.append)) as cache:
            sequence = cache.sequence()
            with cache.step(sequence, 1) as step:
                step.append(1, random((1, 2, 16)), random((1, 2, 16)))
                self.assertEqual(named, [1])
                step.append(0, random((1, 2, 16)), random((1, 2, 16)))
                step.attend(1, random((1, 4, 16)))
                step.gather(0, 0)
            self.assertEqual(named, [1, 0])

    def test_commits_are_announced_with_their_sequences(self):
        seen = []
        callbacks = skerry.Callbacks(committed=lambda sequence, length: seen.append((sequence, length)))
        with skerry.Cache([layer()], max_sequences=2, callbacks=callbacks) as cache:
            first, second = cache.sequence(), cache.sequence()
            with cache.step([first, second], [2, 3]) as step:
                step.append(0, random((5, 2, 16)), random((5, 2, 16)))
            self.assertEqual(seen, [(first, 2), (second, 3)])
            self.assertIs(seen[0][0], first)
            cache.step(first, 1).abort()
            self.assertEqual(len(seen), 2)

    def test_transitions_tell_what_the_ranges_show(self):
        moves = []
        with skerry.Cache([layer(key_dim=64)] * 2, callbacks=skerry.Callbacks(transitions=moves.extend), **SETTINGS) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 512)
            plan, counts = cache.plan, cache.counters()
            tiers = {}
            for move in moves:
                self.assertIs(move.sequence, sequence)
                key = move.layer, move.kv_head, move.window
                if key in tiers:
                    self.assertEqual(move.from_tier, tiers[key])
                tiers[key] = move.to_tier
            for (index, head, window), tier in tiers.items():
                position = plan.sink_tokens + window * plan.window_tokens
                found = [one for one in sequence.ranges(index, head) if one.begin <= position < one.end]
                self.assertEqual([one.tier for one in found], [tier])
            demoted = sum(move.from_tier == 'full' and move.to_tier == 'quantised' for move in moves)
            self.assertEqual(demoted, counts.demotions)
            self.assertGreater(demoted, 0)
            self.assertEqual(sum(move.to_tier == 'evicted' for move in moves), counts.evictions)
            self.assertEqual(sum(move.written_bytes for move in moves), counts.record_bytes_written)

    def test_wanted_scores_decide_what_stays(self):
        asked = []

        def wanted(sequence, index, kv_head, windows):
            self.assertEqual(windows.dtype, numpy.int32)
            asked.append((sequence, index, kv_head, windows))
            return numpy.where(windows == 9, 1.0, 0.01)
        policy = skerry.Policy('qevict', quantised_share_ppm=500_000, hysteresis_ppm=1_000_000, max_moves_ppm=1_000_000)
        settings = dict(SETTINGS, policy=policy)
        with skerry.Cache([layer(key_dim=64)], callbacks=skerry.Callbacks(scores_wanted=wanted), **settings) as cache:
            sequence = cache.sequence()
            for position in range(400):
                one_token(cache, sequence, 2 * position)
            self.assertGreater(len(asked), 0)
            self.assertIs(asked[0][0], sequence)
            self.assertEqual({(index, head) for _, index, head, _ in asked}, {(0, 0), (0, 1)})
            begin = cache.plan.sink_tokens + 9 * cache.plan.window_tokens
            for head in range(2):
                tiers = {one.begin: one.tier for one in sequence.ranges(0, head)}
                self.assertEqual(tiers[begin], 'full')
                # Its neighbours came at the same rank as those that held the full tier before them.
                self.assertEqual(tiers[begin - 16], 'quantised')
                self.assertEqual(tiers[begin + 16], 'quantised')

    def test_none_leaves_the_ranking_to_the_library(self):
        prints = []
        for callbacks in (None, skerry.Callbacks(scores_wanted=lambda *arguments: None)):
            with skerry.Cache([layer(key_dim=64)], callbacks=callbacks, **SETTINGS) as cache:
                sequence = cache.sequence()
                for position in range(200):
                    one_token(cache, sequence, 2 * position)
                prints.append(sequence.fingerprint())
        self.assertEqual(prints[0], prints[1])


class Raised(unittest.TestCase):
    def test_an_exception_comes_out_of_the_call(self):
        def refuse(index):
            raise KeyError('layer', index)
        with skerry.Cache([layer()], callbacks=skerry.Callbacks(before_layer=refuse)) as cache:
            sequence = cache.sequence()
            with self.assertRaises(KeyError) as caught:
                with cache.step(sequence, 1) as step:
                    step.append(0, random((1, 2, 16)), random((1, 2, 16)))
            self.assertEqual(caught.exception.args, ('layer', 0))
            self.assertFalse(step.open)
            self.assertEqual(sequence.length, 0)
            cache.check()

    def test_a_commit_whose_callback_raises_has_committed(self):
        failing = [True]

        def committed(sequence, length):
            if failing:
                raise RuntimeError('no')
        with skerry.Cache([layer()], callbacks=skerry.Callbacks(committed=committed)) as cache:
            sequence = cache.sequence()
            with self.assertRaisesRegex(RuntimeError, 'no'):
                one_token(cache, sequence)
            self.assertEqual(sequence.length, 1)
            failing.clear()
            one_token(cache, sequence)
            self.assertEqual(sequence.length, 2)

    def test_the_first_of_several_is_raised_and_none_stays(self):
        raised = []

        def committed(sequence, length):
            raised.append(length)
            raise RuntimeError(f'number {len(raised)}')
        with skerry.Cache([layer()], max_sequences=2, callbacks=skerry.Callbacks(committed=committed)) as cache:
            with self.assertRaisesRegex(RuntimeError, 'number 1'):
                with cache.step([cache.sequence(), cache.sequence()], [1, 2]) as step:
                    step.append(0, random((3, 2, 16)), random((3, 2, 16)))
            self.assertEqual(raised, [1, 2])
            cache.check()

    def test_wrong_masses_come_out_as_an_exception(self):
        with skerry.Cache([layer(key_dim=64)], callbacks=skerry.Callbacks(scores_wanted=lambda *arguments: [0.5, 0.5, 0.5] * 99),
                          **SETTINGS) as cache:
            sequence = cache.sequence()
            with self.assertRaisesRegex(ValueError, 'scores_wanted returned shape'):
                for position in range(300):
                    one_token(cache, sequence, 2 * position)
            cache.check()

    def test_calling_back_in_is_refused(self):
        holder, refused = [], []

        def before(index):
            try:
                holder[0].memory()
            except skerry.StateError as error:
                refused.append(str(error))
        with skerry.Cache([layer()], callbacks=skerry.Callbacks(before_layer=before)) as cache:
            holder.append(cache)
            one_token(cache, cache.sequence())
            self.assertEqual(len(refused), 1)
            self.assertIn('may not call back', refused[0])
            holder.clear()

    def test_an_object_that_goes_inside_a_callback_is_released_after_the_call(self):
        context = skerry.Context()
        before = context.bytes().cache_bytes
        other, during = [skerry.Cache([layer()], context=context)], []

        def drop(index):
            other.clear()
            gc.collect()
        with skerry.Cache([layer()], callbacks=skerry.Callbacks(before_layer=drop)) as cache:
            self.assertGreater(context.bytes().cache_bytes, before)
            one_token(cache, cache.sequence())
            self.assertEqual(context.bytes().cache_bytes, before)

    def test_callbacks_do_not_keep_a_cache_alive(self):
        class Host:
            def committed(self, sequence, length):
                self.length = length
        host = Host()
        cache = skerry.Cache([layer()], callbacks=skerry.Callbacks(committed=host.committed))
        one_token(cache, cache.sequence())
        self.assertEqual(host.length, 1)
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        self.assertIsNone(gone())


if __name__ == '__main__':
    unittest.main()
