"""Contexts, caches and sequences: plans, budgets, errors, lifetimes."""

import gc
import pickle
import subprocess
import sys
import threading
import unittest
import warnings
import weakref

import numpy

from support import PACKAGE, fill, layer, random, skerry


class Contexts(unittest.TestCase):
    def test_a_context_describes_its_cpu(self):
        with skerry.Context(workers=1) as context:
            device = context.device()
            self.assertEqual((device.type, device.index), ('cpu', 0))
            self.assertTrue(device.name.startswith('cpu'))
            self.assertEqual(device.worker_count, 2)
        with skerry.Context(cpu_disable=-1) as plain:
            self.assertEqual(plain.device().cpu_features, ())
        if 'avx512' in device.cpu_features:
            with skerry.Context(cpu_disable=['avx512', 'avx512_vnni']) as less:
                self.assertNotIn('avx512', less.device().cpu_features)

    def test_a_closed_context_says_so(self):
        context = skerry.Context()
        self.assertFalse(context.closed)
        context.close()
        context.close()
        self.assertTrue(context.closed)
        with self.assertRaisesRegex(skerry.StateError, 'context is closed'):
            context.device()

    def test_an_unknown_device_is_an_argument_error_with_its_number(self):
        with skerry.Context() as context, self.assertRaises(skerry.ArgumentError) as caught:
            context.device(99)
        self.assertEqual(caught.exception.found, 99)

    def test_caches_outlive_their_context(self):
        context = skerry.Context()
        cache = skerry.Cache([layer()], context=context)
        context.close()
        fill(cache, cache.sequence(), 20)
        cache.check()
        cache.close()
        with self.assertRaises(skerry.StateError):
            skerry.Cache([layer()], context=context)

    def test_bytes_return_to_where_they_were(self):
        with skerry.Context() as context:
            before = context.bytes()
            for _ in range(3):
                with skerry.Cache([layer(), layer()], context=context, max_sequences=2) as cache:
                    fill(cache, cache.sequence(), 40)
                    held = context.bytes()
                    self.assertEqual(held.cache_bytes, cache.memory().allocated_bytes)
                    self.assertGreater(held.object_count, before.object_count)
            self.assertEqual(context.bytes(), before)

    def test_an_object_without_references_gives_its_bytes_back(self):
        context = skerry.Context()
        before = context.bytes()
        cache = skerry.Cache([layer()], context=context)
        fill(cache, cache.sequence(), 20)
        gone = weakref.ref(cache)
        del cache
        gc.collect()
        self.assertIsNone(gone())
        self.assertEqual(context.bytes(), before)

    def test_logs_arrive_as_strings(self):
        lines = []
        with skerry.Context(log=lambda *line: lines.append(line), log_level='debug') as context:
            with skerry.Cache([layer()], context=context) as cache:
                fill(cache, cache.sequence(), 5)
        for level, part, line in lines:
            self.assertIn(level, ('error', 'warning', 'info', 'debug'))
            self.assertIsInstance(part, str)
            self.assertNotIn('\n', line)


class Plans(unittest.TestCase):
    def test_a_plan_is_what_the_cache_then_has(self):
        settings = dict(policy=skerry.Policy('qevict', key_format='r3', value_format='r2'),
                        budget=skerry.Budget(share_ppm=300_000, length_tokens=4096), max_sequences=2)
        layers = [layer(key_dim=64)] * 3
        with skerry.Context() as context:
            plan = context.plan(layers, **settings)
            with skerry.Cache(layers, context=context, **settings) as cache:
                self.assertEqual(cache.plan, plan)
                self.assertGreaterEqual(plan.budget_bytes, cache.memory().pool_bytes + cache.memory().table_bytes)
        self.assertEqual((plan.kind, plan.fidelity, plan.prefill), ('qevict', 'production', 'split'))
        self.assertEqual((plan.key_format, plan.value_format, plan.store_dtype), ('r3', 'r2', 'f16'))
        self.assertEqual((plan.window_tokens, plan.sink_tokens, plan.recent_tokens, plan.period_tokens), (16, 4, 32, 16))
        self.assertEqual((plan.score, plan.score_queries, plan.selection), ('last', 32, 'per_head'))
        # K and V, three layers, two heads, 64 channels of 2 bytes, two sequences.
        self.assertEqual(plan.full_cache_bytes, 2 * 3 * 2 * 64 * 2 * 2 * 4096)
        self.assertEqual(plan.planned_bytes, plan.pool_bytes + plan.table_bytes)
        self.assertLessEqual(plan.planned_bytes, plan.budget_bytes)
        self.assertLessEqual(plan.minimum_bytes, plan.budget_bytes)
        self.assertIsInstance(plan.exact_attend, bool)
        self.assertGreater(plan.readable_tokens, 4 + 32)

    def test_no_budget_reads_none(self):
        with skerry.Context() as context:
            plan = context.plan([layer()])
        self.assertIsNone(plan.budget_bytes)
        self.assertEqual(plan.kind, 'full')

    def test_a_budget_below_the_floor_names_the_floor(self):
        settings = dict(policy='qevict', budget=1000)
        with skerry.Context() as context:
            with self.assertRaises(skerry.OverBudgetError) as planned:
                context.plan([layer(key_dim=64)], **settings)
            with self.assertRaises(skerry.OverBudgetError) as made:
                skerry.Cache([layer(key_dim=64)], context=context, **settings)
            for error in planned.exception, made.exception:
                self.assertEqual((error.subject, error.found), ('budget', 1000))
                self.assertEqual(error.status_name, 'SKERRY_ERROR_OVER_BUDGET')
                self.assertEqual(error.allowed, error.plan.minimum_bytes)
                self.assertIn('SKERRY_ERROR_OVER_BUDGET', str(error))
            settings['budget'] = planned.exception.allowed
            with skerry.Cache([layer(key_dim=64)], context=context, **settings) as cache:
                fill(cache, cache.sequence(), 200)
                cache.check()
                memory = cache.memory()
                self.assertLessEqual(memory.pool_bytes + memory.table_bytes, memory.budget_bytes)

    def test_the_budget_can_change(self):
        with skerry.Cache([layer(key_dim=64)] * 2, policy='qevict', budget=4 << 20) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 600)
            minimum = cache.plan.minimum_bytes
            cache.set_budget(skerry.Budget(bytes=2 * minimum))
            cache.check()
            memory = cache.memory()
            self.assertEqual(memory.budget_bytes, 2 * minimum)
            self.assertLessEqual(memory.pool_bytes + memory.table_bytes, 2 * minimum)
            before = sequence.fingerprint()
            with self.assertRaises(skerry.OverBudgetError) as caught:
                cache.set_budget(minimum // 2)
            self.assertEqual(caught.exception.allowed, minimum)
            self.assertEqual(sequence.fingerprint(), before)
            self.assertEqual(cache.plan.budget_bytes, 2 * minimum)


class Errors(unittest.TestCase):
    def test_wrong_geometry_names_the_layer(self):
        with self.assertRaises(skerry.ArgumentError) as caught:
            skerry.Cache([layer(), layer(kv_heads=2, query_heads=5)])
        error = caught.exception
        self.assertEqual((error.status, error.status_name), (-10, 'SKERRY_ERROR_ARGUMENT'))
        self.assertEqual((error.subject, error.index), ('heads', 1))
        self.assertEqual(error.found, 5)
        self.assertTrue(error.message)
        self.assertIsInstance(error, ValueError)
        self.assertIsInstance(error, skerry.SkerryError)

    def test_an_error_survives_pickling(self):
        with self.assertRaises(skerry.SkerryError) as caught:
            skerry.Cache([layer(kv_heads=0)])
        again = pickle.loads(pickle.dumps(caught.exception))
        self.assertIs(type(again), type(caught.exception))
        self.assertEqual(str(again), str(caught.exception))
        self.assertEqual((again.subject, again.index, again.found), (caught.exception.subject, caught.exception.index,
                                                                     caught.exception.found))

    def test_names_that_do_not_exist(self):
        with self.assertRaisesRegex(ValueError, "'qevikt' is not a policy"):
            skerry.Cache([layer()], policy='qevikt')
        with self.assertRaisesRegex(ValueError, "'r5' is not a format"):
            skerry.Cache([layer()], policy=skerry.Policy('qevict', key_format='r5'))

    def test_a_value_that_no_c_type_holds(self):
        with self.assertRaises(OverflowError):
            skerry.Cache([layer()], max_sequences=1 << 40)

    def test_every_failing_status_has_a_class(self):
        from skerry import _abi, _errors
        negative = {value for name, value in vars(_abi).items() if name.startswith('SKERRY_ERROR_')}
        self.assertEqual(set(_errors.CLASSES), negative)

    @unittest.skipIf(sys.platform == 'win32', 'limits the address space')
    def test_memory_errors_are_python_memory_errors(self):
        # In a process of its own with little address space: the machine's own limit may be far away.
        script = (
            "import sys; sys.path.insert(0, sys.argv[1])\n"
            "import resource, skerry\n"
            "context, layers = skerry.Context(), [skerry.Layer(2, 64)] * 2\n"
            "before = context.bytes()\n"
            "resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))\n"
            "try:\n"
            "    skerry.Cache(layers, policy='qevict', budget=64 << 30, context=context)\n"
            "except MemoryError as error:\n"
            "    print(type(error).__name__, error.status_name, error.subject, context.bytes() == before)\n")
        done = subprocess.run([sys.executable, '-c', script, PACKAGE], capture_output=True, text=True)
        self.assertEqual((done.stdout, done.stderr),
                         ('OutOfMemoryError SKERRY_ERROR_OUT_OF_MEMORY host_memory True\n', ''))


class Sequences(unittest.TestCase):
    def test_a_dropped_sequence_is_stale(self):
        with skerry.Cache([layer()]) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 3)
            sequence.drop()
            for use in (sequence.drop, sequence.info, sequence.fingerprint, lambda: sequence.ranges(0, 0),
                        lambda: cache.step(sequence, 1), sequence.fork):
                with self.assertRaises(skerry.StaleIdError):
                    use()

    def test_the_block_drops_and_the_place_is_free_again(self):
        with skerry.Cache([layer()], max_sequences=1) as cache:
            with cache.sequence() as first:
                with self.assertRaises(skerry.TierFullError):
                    cache.sequence()
            with cache.sequence() as second:
                self.assertNotEqual(first, second)
                second.drop()

    def test_fork_and_truncate(self):
        with skerry.Cache([layer()], max_sequences=3) as cache:
            parent = cache.sequence()
            fill(cache, parent, 50)
            child = parent.fork(20)
            self.assertEqual((parent.length, child.length), (50, 20))
            before = parent.fingerprint()
            fill(cache, child, 10, seed=99)
            self.assertEqual(parent.fingerprint(), before)
            self.assertEqual(child.length, 30)
            whole = parent.fork()
            self.assertEqual(whole.length, 50)
            self.assertTrue(parent.can_truncate(10))
            parent.truncate(10)
            self.assertEqual(parent.length, 10)
            with self.assertRaises(skerry.ArgumentError):
                parent.truncate(11)
            cache.check()

    def test_ranges_have_no_gaps(self):
        with skerry.Cache([layer(key_dim=64)], policy='qevict', budget=skerry.Budget(share_ppm=200_000, length_tokens=1024),
                          ) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 1024)
            info = sequence.info()
            tiers = {'full': 0, 'quantised': 0, 'evicted': 0}
            for head in range(2):
                ranges = sequence.ranges(0, head)
                self.assertEqual(ranges[0].begin, 0)
                self.assertEqual(ranges[-1].end, 1024)
                for left, right in zip(ranges, ranges[1:]):
                    self.assertEqual(left.end, right.begin)
                for one in ranges:
                    tiers[one.tier] += one.end - one.begin
                    if one.tier == 'quantised':
                        self.assertEqual((one.key_format, one.value_format), ('r3', 'r2'))
            self.assertEqual(tiers, {'full': info.full_tokens, 'quantised': info.quantised_tokens,
                                     'evicted': info.evicted_tokens})
            self.assertGreater(tiers['quantised'], 0)
            self.assertGreater(tiers['evicted'], 0)
            with self.assertRaises(skerry.ArgumentError) as caught:
                sequence.ranges(0, 2)
            self.assertEqual(caught.exception.found, 2)

    def test_many_ranges_are_listed_whole(self):
        with skerry.Cache([layer(key_dim=16)], policy=skerry.Policy('evict', window_tokens=4)) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 400, chunk=100)
            ranges = sequence.ranges(0, 0)
            self.assertGreater(len(ranges), 64)
            self.assertEqual(sum(one.end - one.begin for one in ranges), 400)

    def test_two_sequences_with_the_same_tokens_have_the_same_fingerprint(self):
        with skerry.Cache([layer(), layer()], max_sequences=2) as cache:
            first, second = cache.sequence(), cache.sequence()
            fill(cache, first, 33, chunk=5)
            fill(cache, second, 33, chunk=33)
            self.assertEqual(first.fingerprint(), second.fingerprint())
            fill(cache, second, 1)
            self.assertNotEqual(first.fingerprint(), second.fingerprint())

    def test_a_sequence_of_another_cache_is_refused(self):
        with skerry.Cache([layer()]) as one, skerry.Cache([layer()]) as other:
            with self.assertRaisesRegex(ValueError, 'another cache'):
                one.step(other.sequence(), 1)


class Reports(unittest.TestCase):
    def test_memory_adds_up(self):
        for settings in (dict(), dict(policy='qevict', budget=1 << 20), dict(policy='streaming'),
                         dict(policy=skerry.Policy('qevict', keep_exact=True),
                              budget=skerry.Budget(bytes=1 << 20, exact_bytes=1 << 18))):
            with self.subTest(settings), skerry.Cache([layer(key_dim=64)] * 2, **settings) as cache:
                fill(cache, cache.sequence(), 300)
                memory = cache.memory()
                self.assertEqual(memory.allocated_bytes, memory.pool_bytes + memory.table_bytes + memory.staging_bytes
                                 + memory.exact_bytes + memory.fixed_bytes)
                self.assertGreaterEqual(memory.peak_bytes, memory.allocated_bytes)
                self.assertLessEqual(memory.used_bytes, memory.pool_bytes + memory.table_bytes)
                self.assertLessEqual(memory.used_full_bytes + memory.used_quantised_bytes, memory.used_bytes)
                self.assertEqual(memory.full_cache_bytes, 300 * 2 * 2 * 2 * 64 * 2)
                if memory.budget_bytes is not None:
                    self.assertLessEqual(memory.pool_bytes + memory.table_bytes, memory.budget_bytes)

    def test_counters_add_up(self):
        with skerry.Cache([layer(key_dim=64)], policy='qevict', budget=skerry.Budget(share_ppm=200_000, length_tokens=1024),
                          ) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 1024, chunk=64)
            cache.step(sequence, 1).abort()
            counts = cache.counters()
            self.assertEqual((counts.steps_begun, counts.steps_committed, counts.steps_aborted), (17, 16, 1))
            self.assertEqual(counts.tokens_appended, 1024)
            self.assertEqual(counts.demotions, counts.demotions_written + counts.demotions_ledger)
            self.assertEqual(counts.promotions, counts.promotions_exact + counts.promotions_recovered)
            self.assertGreater(counts.demotions_written, 0)
            self.assertGreater(counts.evictions, 0)
            self.assertGreater(counts.record_bytes_written, 0)
            self.assertGreater(counts.attended_bytes, 0)

    def test_diagnostics(self):
        with skerry.Cache([layer(key_dim=64)] * 2, policy='qevict', budget=skerry.Budget(share_ppm=200_000, length_tokens=1024),
                          ) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 1024, chunk=64)
            everything, first = sequence.diagnostics(), sequence.diagnostics(0)
            self.assertGreater(first.events, 0)
            self.assertGreaterEqual(everything.events, first.events)
            for report in everything, first:
                for share in report.churn, report.missed_mass, report.lir, report.quantised_mass:
                    self.assertTrue(0 <= share <= 1, report)
                self.assertLessEqual(report.lir_rescued, report.lir_eligible)
            with self.assertRaises(skerry.ArgumentError):
                sequence.diagnostics(2)


class Lifetimes(unittest.TestCase):
    def test_a_closed_cache_refuses_everything(self):
        cache = skerry.Cache([layer()])
        sequence = cache.sequence()
        step = cache.step(sequence, 1)
        cache.close()
        for use in (cache.memory, cache.check, cache.sequence, sequence.info, step.commit, lambda: cache.plan,
                    lambda: step.append(0, random((1, 2, 16)), random((1, 2, 16)))):
            with self.assertRaisesRegex(skerry.StateError, 'cache is closed'):
                use()
        self.assertFalse(step.open)
        step.abort()
        cache.close()

    def test_a_forgotten_step_is_undone(self):
        with skerry.Cache([layer()]) as cache:
            sequence = cache.sequence()
            fill(cache, sequence, 5)
            before = sequence.fingerprint()
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter('always')
                step = cache.step(sequence, 2)
                step.append(0, random((2, 2, 16)), random((2, 2, 16)))
                del step
                gc.collect()
            self.assertEqual([one.category for one in seen], [ResourceWarning])
            self.assertEqual(sequence.fingerprint(), before)
            fill(cache, sequence, 1)
            self.assertEqual(sequence.length, 6)

    def test_the_interpreter_ends_quietly_with_everything_open(self):
        script = (
            "import sys; sys.path.insert(0, sys.argv[1]); import skerry, numpy\n"
            "context = skerry.Context(workers=2, log=lambda *line: None, log_level='debug')\n"
            "cache = skerry.Cache([skerry.Layer(1, 8)], context=context, callbacks=skerry.Callbacks(before_layer=print))\n"
            "sequence = cache.sequence()\n"
            "step = cache.step(sequence, 1)\n"
            "step.append(0, numpy.zeros((1, 1, 8), 'f4'), numpy.zeros((1, 1, 8), 'f4'))\n"
            "loop = [cache, step]; loop.append(loop)\n")
        done = subprocess.run([sys.executable, '-c', script, PACKAGE], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr), (0, '0\n', ''))

    def test_caches_on_several_threads(self):
        context = skerry.Context(workers=1)
        prints, failures = [], []

        def work():
            try:
                with skerry.Cache([layer()], policy='qevict', context=context) as cache:
                    sequence = cache.sequence()
                    fill(cache, sequence, 120)
                    prints.append(sequence.fingerprint())
            except BaseException as error:
                failures.append(error)
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])
        self.assertEqual(len(set(prints)), 1)
        self.assertEqual(len(prints), 4)


if __name__ == '__main__':
    unittest.main()
