"""The arithmetic of training: losses, schedules, segments, targets and routers, in numpy alone.

T15 and T21 to T23 are the numbers of the method's design.
"""

import unittest

import numpy as np

import support  # noqa: F401  (finds the package)
from skerry.train import losses, metrics, problem, rformat, routers, schedule, targets
from skerry.train.segments import Layout, centroids, log_sum_exp


def close(got, wanted, tolerance=1e-5):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


class Losses(unittest.TestCase):
    def test_t15_straight_through_gate(self):
        value, slope = losses.straight_through(0.15, 0.05, 0.1)
        self.assertEqual(value, 1)
        close(slope, 1.966119)
        value, slope = losses.straight_through(0.05, 0.05, 0.1)
        self.assertEqual(value, 0)
        close(slope, 2.5)
        with self.assertRaises(ValueError):
            losses.straight_through(0.15, 0.05, 0)

    def test_t21_coverage_labels(self):
        mass = [0.6, 0.25, 0.1, 0.05]
        self.assertEqual(losses.coverage_labels(mass, 0.8).tolist(), [1, 1, 0, 0])
        self.assertEqual(losses.coverage_labels(mass, 1).tolist(), [1, 1, 1, 1])
        self.assertEqual(losses.coverage_labels([0, 0, 0], 0.8).tolist(), [0, 0, 0])
        # Order and scale do not matter, rows are independent, a mass of 0 is never needed.
        rows = losses.coverage_labels([[0.5, 6, 1, 2.5], [0, 3, 0, 1]], 1)
        self.assertEqual(rows.tolist(), [[1, 1, 1, 1], [0, 1, 0, 1]])
        # A prefix that holds exactly rho is enough.
        self.assertEqual(losses.coverage_labels([0.5, 0.3, 0.2], 0.8).tolist(), [1, 1, 0])

    def test_t21_zoom_cross_entropy(self):
        close(losses.zoom_bce(np.array([0.8]), np.array([1.0])), 2.231436)
        close(losses.zoom_bce(np.array([0.8]), np.array([0.0])), 1.609438)
        close(losses.zoom_bce(np.array([0.8, 0.8]), np.array([1.0, 0.0])), (2.231436 + 1.609438) / 2)
        self.assertTrue(np.isfinite(losses.zoom_bce(np.array([0.0, 1.0]), np.array([1.0, 0.0]))))

    def test_t22_distillation_reconstruction_budget(self):
        close(losses.distillation(np.array([[0.5, 0.5]]), np.array([[0.9, 0.1]])), 0.510826)
        gates, sigma = np.array([0.5, 1]), np.array([2.0, 1])
        close(losses.reconstruction(gates, sigma), 1.0)
        close(losses.budget(np.array([1.0, 1, 0, 1]), [np.array([1.5, 2.5]), np.array([5.0])], 0.1), 3.9)

    def test_the_share_that_gates_lose_does_not_grow_with_norm_or_spans(self):
        gates, sigma = np.array([0.5, 1]), np.array([2.0, 1])
        close(losses.reconstruction_share(gates, sigma), 0.2)
        close(losses.reconstruction_share(gates, 1000 * sigma), 0.2)
        close(losses.reconstruction_share(np.tile(gates, (7, 1)), np.tile(sigma, (7, 1))), np.full(7, 0.2))
        close(losses.reconstruction_share(gates, np.zeros(2)), 0)


class Schedule(unittest.TestCase):
    def test_t23_learning_rate(self):
        rate = lambda step: schedule.learning_rate(step, 3000, 1e-3, 0.1)
        close(rate(0) * 1e6, 3.3333, 1e-4)
        close(rate(149), 5e-4, 1e-9)
        close(rate(299), 1e-3, 1e-9)
        close(rate(300), 1e-3, 1e-9)
        close(rate(1650), 5e-4, 1e-9)
        close(rate(2999) * 1e10, 3.4, 1e-1)

    def test_t23_budget_weight(self):
        self.assertEqual([schedule.budget_weight(step, 3000, 0.1, 0.5) for step in (0, 750, 1500, 3000)], [0, 0.05, 0.1, 0.1])

    def test_t23_curriculum(self):
        stages = schedule.curriculum(10, (8192, 16384, 32768))
        self.assertEqual(stages, [(0, 8192), (4, 16384), (7, 32768)])
        self.assertEqual([schedule.stage(step, stages) for step in (0, 3, 4, 6, 7, 9)], [0, 0, 1, 1, 2, 2])
        self.assertEqual(schedule.curriculum(3000, (1, 2, 3)), [(0, 1), (1000, 2), (2000, 3)])


class Segments(unittest.TestCase):
    def test_candidates_lie_wholly_before_the_recent_tokens(self):
        layout = Layout(sinks=4, recent=32, length=16)
        # Segment 0 is positions 4 to 19; it is a candidate once the 32 newest positions begin at 20.
        self.assertEqual(layout.candidates([0, 50, 51, 66, 67]).tolist(), [0, 0, 1, 1, 2])
        self.assertEqual(layout.span(2), slice(4, 36))
        self.assertEqual(layout.count(36), 2)
        self.assertEqual(layout.count(35), 1)
        self.assertEqual(layout.count(3), 0)

    def test_centroids_of_separate_clusters_are_their_means(self):
        rng = np.random.default_rng(1)
        middles = 10 * rng.standard_normal((5, 4, 8))
        owner = rng.permutation(np.repeat(np.arange(4), [7, 5, 3, 1]))
        tokens = (middles[:, owner] + 0.01 * rng.standard_normal((5, 16, 8))).astype(np.float32)
        means, counts = centroids(tokens)
        for segment in range(5):
            found = sorted(zip(counts[segment].tolist(), means[segment].tolist()))
            wanted = sorted((int((owner == c).sum()), tokens[segment, owner == c].mean(0).tolist()) for c in range(4))
            self.assertEqual([n for n, _ in found], [n for n, _ in wanted])
            close([m for _, m in found], [m for _, m in wanted], 1e-4)

    def test_centroids_keep_the_mean_and_drop_what_is_not_needed(self):
        tokens = np.random.default_rng(2).standard_normal((9, 16, 6)).astype(np.float32)
        means, counts = centroids(tokens, weights=np.linspace(0.1, 3, 6))
        self.assertTrue((counts.sum(1) == 16).all())
        close((means * counts[..., None]).sum(1) / 16, tokens.mean(1))
        means, counts = centroids(np.ones((2, 16, 6), np.float32))
        self.assertEqual(counts.tolist(), [[16, 0, 0, 0]] * 2)
        close(means[:, 0], 1)

    def test_weights_decide_which_channel_clusters_follow(self):
        tokens = np.zeros((1, 16, 2), np.float32)
        tokens[0, :, 0], tokens[0, :, 1] = np.arange(16) % 2, np.arange(16) // 8
        for weights, channel in (([5, 0], 0), ([0, 5], 1)):
            means, counts = centroids(tokens, slots=2, weights=np.array(weights, np.float32))
            self.assertEqual(sorted(counts[0].tolist()), [8, 8])
            self.assertEqual(sorted(means[0, :, channel].tolist()), [0, 1])
            self.assertEqual(means[0, :, 1 - channel].tolist(), [0.5, 0.5])

    def test_log_sum_exp_of_nothing(self):
        self.assertEqual(log_sum_exp(np.full((2, 3), -np.inf)).tolist(), [-np.inf] * 2)
        close(log_sum_exp(np.array([1e4, 1e4])), 1e4 + np.log(2))


class Codes(unittest.TestCase):
    def test_signs_and_transform_are_those_of_the_format(self):
        pattern = sum(int(s < 0) << i for i, s in enumerate(rformat.signs(64)))
        self.assertEqual(pattern, 0x00276c8d7f4dd192)  # docs/format.md
        x = np.random.default_rng(3).standard_normal((4, 24)).astype(np.float32)
        close(rformat.hadamard(rformat.hadamard(x)), x)
        close((rformat.hadamard(x) ** 2).sum(1), (x ** 2).sum(1))

    def test_errors_are_those_of_the_format(self):
        x = np.random.default_rng(4).standard_normal((400, 128)).astype(np.float32)
        for bits, error in ((2, 0.35), (3, 0.19), (4, 0.10)):
            got = rformat.coded(x, bits)
            self.assertLess(abs(np.sqrt(((got - x) ** 2).mean()) / error - 1), 0.1, bits)
            close((got * x).sum(1) / (x * x).sum(1), np.ones(400), 1e-3)

    def test_keys_are_coded_about_their_mean(self):
        rng = np.random.default_rng(5)
        keys = (rng.standard_normal((300, 64)) * np.linspace(0.5, 4, 64) + 5).astype(np.float32)
        mean, balance = rformat.balance(keys, np.ones(64))
        got = rformat.coded(keys, 4, mean, balance)
        self.assertLess((np.sqrt(((got - keys) ** 2).mean(0)) / keys.std(0)).max(), 0.6)
        self.assertTrue(np.isfinite(rformat.coded(np.zeros((2, 64), np.float32), 2)).all())

    def test_router_codes_stay_within_half_a_step(self):
        rng = np.random.default_rng(6)
        for rank, largest in ((16, 127), (32, 7)):
            rows = rng.standard_normal((50, 4, rank)).astype(np.float32)
            step = np.abs(rows).max(-1, keepdims=True) / largest
            self.assertLess((np.abs(routers.coded_rows(rows) - rows) / step).max(), 0.51 + largest * 2.0 ** -11)
        self.assertEqual(np.abs(routers.coded_rows(np.zeros((1, 1, 32), np.float32))).max(), 0)

    def test_router_codes_of_high_rank_are_r2_about_their_mean(self):
        rows = 30 + np.random.default_rng(7).standard_normal((100, 4, 64)).astype(np.float32)
        error = np.sqrt(((routers.coded_rows(rows) - rows) ** 2).mean())
        self.assertLess(abs(error / 0.35 - 1), 0.1)


def scene(seed=0, rows=5, heads=4, groups=2, dim=8, tokens=120):
    rng = np.random.default_rng(seed)
    positions = np.sort(rng.choice(np.arange(70, tokens), rows, replace=False))
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    return positions, draw(rows, heads, dim), draw(groups, tokens, dim), draw(groups, tokens, dim)


class Targets(unittest.TestCase):
    layout = Layout(sinks=4, recent=32, length=16)

    def attention(self, queries, keys, positions):
        share = queries.shape[1] // keys.shape[0]
        logits = np.einsum("phd,htd->pht", queries, keys.repeat(share, 0)) / np.sqrt(queries.shape[2])
        logits = np.where(np.arange(keys.shape[1])[None, None] <= positions[:, None, None], logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)

    def test_masses_and_effects_against_plain_attention(self):
        positions, queries, keys, values = scene()
        got = targets.targets(self.layout, positions, queries, keys, values)
        weights = self.attention(queries, keys, positions)
        out = np.einsum("pht,htd->phd", weights, values.repeat(2, 0))
        mass = got.mass()
        for row, position in enumerate(positions):
            for segment in range(mass.shape[2]):
                inside = slice(4 + 16 * segment, 20 + 16 * segment)
                if segment >= self.layout.candidates(position):
                    self.assertEqual(mass[row, :, segment].max(), 0)
                    self.assertEqual(got.effect[row, :, segment].max(), 0)
                    continue
                part = weights[row, :, inside]
                close(mass[row, :, segment], part.sum(1), 1e-4)
                moved = np.einsum("ht,htd->hd", part, values.repeat(2, 0)[:, inside]) - part.sum(1)[:, None] * out[row]
                close(got.effect[row, :, segment], np.linalg.norm(moved, axis=1), 1e-4)

    def test_causal_what_comes_after_a_query_changes_nothing(self):
        positions, queries, keys, values = scene(1)
        got = targets.targets(self.layout, positions[:2], queries[:2], keys, values)
        keys[:, positions[1] + 1:], values[:, positions[1] + 1:] = 99, -99
        again = targets.targets(self.layout, positions[:2], queries[:2], keys, values)
        for name in ("log_mass", "lse_exact", "effect", "allowed"):
            np.testing.assert_array_equal(getattr(got, name), getattr(again, name))

    def test_the_oracle_catches_all_that_can_be_caught(self):
        positions, queries, keys, values = scene(2)
        got = targets.targets(self.layout, positions, queries, keys, values)
        estimate = routers.Oracle(self.layout).estimate(0, queries, keys, positions, None)
        close(estimate[np.isfinite(got.log_mass)], got.log_mass[np.isfinite(got.log_mass)], 1e-4)
        for mass, best, effect, most in metrics.recall(estimate, got, 2, (0.3, 0.6)).values():
            close(mass, best, 1e-4)
            self.assertLessEqual(effect, most + 1e-6)

    def test_ties_and_least_choice(self):
        allowed = np.array([[True] * 4 + [False]])
        scores = np.array([[[1.0, 3, 3, 2, 9], [0, 0, 0, 0, 0]]])
        wanted = [[[False, True, True, False, False], [True, True, False, False, False]]]
        self.assertEqual(metrics.best(scores, 0.5, allowed).tolist(), wanted)
        self.assertEqual(metrics.best(scores, 0.01, allowed).sum(-1).tolist(), [[1, 1]])


class Routers(unittest.TestCase):
    layout = Layout(sinks=4, recent=32, length=16)

    def test_bytes(self):
        tensors = lambda rank: {"W": np.zeros((1, 2, rank, 64))}
        self.assertEqual(routers.TrainingFree().bytes(64), 76)
        self.assertEqual(routers.Trained(tensors(16)).bytes(64), 76)
        self.assertEqual(routers.Trained(tensors(32)).bytes(64), 76)
        self.assertEqual(routers.Trained(tensors(64)).bytes(64), 76)

    def test_few_kinds_of_keys_are_estimated_exactly_but_for_codes(self):
        positions, queries, keys, values = scene(3, dim=8, tokens=200)
        kinds = keys[:, :4]
        keys = kinds[:, np.random.default_rng(3).integers(0, 4, 200)]
        exact = targets.targets(self.layout, positions, queries, keys, values).log_mass
        seen = np.isfinite(exact)
        square = routers.mean_square(queries, 2)
        # At 4 bits the codes hold these rows to a few per cent; the clusters themselves lose nothing.
        got = routers.TrainingFree(self.layout, bits=4).estimate(0, queries, keys, positions, square)
        self.assertLess(np.abs(got - exact)[seen].max(), 0.6)
        whole = np.broadcast_to(np.eye(8, dtype=np.float32), (1, 4, 8, 8))
        got = routers.Trained({"W": whole, "W_key": whole[:, :2], "bias": np.zeros((1, 4))}, self.layout).estimate(
            0, queries, keys, positions, square)
        self.assertLess(np.abs(got - exact)[seen].max(), 0.05)

    def test_bias_and_temperature(self):
        positions, queries, keys, _ = scene(4)
        W = np.random.default_rng(4).standard_normal((1, 4, 8, 8)).astype(np.float32)
        plain = {"W": W, "W_key": W[:, :2], "bias": np.zeros((1, 4))}
        ask = lambda tensors: routers.Trained(tensors, self.layout).estimate(0, queries, keys, positions, None)
        close(ask({**plain, "bias": np.array([[1, 2, 3, 4.0]])}) - ask(plain), np.arange(1, 5)[None, :, None] + 0 * ask(plain), 1e-4)
        close(ask({**plain, "temperature": np.full((1, 4), 0.5)}), ask({**plain, "W": 0.5 * W}), 1e-4)

    def test_a_shared_query_projection_is_that_of_every_head(self):
        positions, queries, keys, _ = scene(5)
        W = np.random.default_rng(5).standard_normal((1, 2, 8, 8)).astype(np.float32)
        ask = lambda first: routers.Trained({"W": first, "W_key": W, "bias": np.zeros((1, 4))}, self.layout).estimate(
            0, queries, keys, positions, None)
        np.testing.assert_array_equal(ask(W), ask(W.repeat(2, 1)))

    def test_principal_of_full_rank_is_exact(self):
        rng = np.random.default_rng(5)

        class Prompt:
            queries = rng.standard_normal((50, 4, 8)).astype(np.float32)
            keys = rng.standard_normal((2, 9, 16, 8)).astype(np.float32)

        W, W_key = problem.principal([Prompt], 8)
        for head in range(4):
            close(W[head].T @ W_key[head // 2] * 8 ** -0.5, np.eye(8) * 8 ** -0.5, 1e-4)

    def test_principal_keeps_what_queries_and_keys_share(self):
        rng = np.random.default_rng(6)

        class Prompt:
            # Keys vary most in channel 0, which no query reads; channels 1 and 2 carry every product.
            keys = (rng.standard_normal((1, 20, 16, 4)) * [50, 3, 1, 0.01]).astype(np.float32)
            queries = (rng.standard_normal((80, 2, 4)) * [1e-4, 1, 1, 1]).astype(np.float32)

        W, W_key = problem.principal([Prompt], 2)
        flat = Prompt.keys.reshape(-1, 4)
        true = Prompt.queries[:, 0] @ flat.T
        got = Prompt.queries[:, 0] @ W[0].T @ W_key[0] @ flat.T * 2 ** -0.5 * 4 ** 0.5
        self.assertLess(np.abs(got - true).max(), 0.1 * np.abs(true).max())


if __name__ == "__main__":
    unittest.main()
