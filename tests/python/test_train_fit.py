"""Capturing a teacher, fitting and refining routers on a tiny model with random weights, and going on after a stop."""

import importlib.util
import pathlib
import struct
import tempfile
import unittest

import numpy as np

import support
from skerry.train import capture, evaluate, metrics, plot, prompts, routers, targets
from skerry.train.segments import Layout

HAVE_TORCH = importlib.util.find_spec("torch") is not None
HAVE_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
LAYOUT = Layout(sinks=2, recent=8, length=4)


class Config:
    layers, width, heads, kv_heads, head_dim, norm_eps = 2, 32, 4, 2, 8, np.float32(1e-5)
    inv_freq = (1 / 10000 ** (np.arange(0, 8, 2) / 8)).astype(np.float32)


class Layer:
    pass


class Model:
    """A Llama of two layers with random weights, with the attributes of examples/smollm2/model.py."""

    config = Config

    def __init__(self, seed=0, vocab=60):
        rng = np.random.default_rng(seed)
        draw = lambda *shape: (rng.standard_normal(shape) * shape[-1] ** -0.5).astype(np.float32)
        c = Config
        self.embedding, self.head, self.final_norm = 5 * draw(vocab, c.width), 4 * draw(vocab, c.width), np.ones(c.width, np.float32)
        self.layers = []
        for _ in range(c.layers):
            layer = Layer()
            # Keys and queries are large, so that attention picks tokens.
            layer.qkv = draw((c.heads + 2 * c.kv_heads) * c.head_dim, c.width)
            layer.qkv[:(c.heads + c.kv_heads) * c.head_dim] *= 2
            layer.out, layer.gate_up, layer.down = draw(c.width, c.heads * c.head_dim), draw(96, c.width), draw(c.width, 48)
            layer.attn_norm = layer.ffn_norm = np.ones(c.width, np.float32)
            self.layers.append(layer)

    def forward(self, tokens, cache, start, logits="last", more=False):
        c, n = self.config, len(tokens)
        positions = np.arange(start, start + n)
        angle = positions[:, None, None] * c.inv_freq.astype(np.float64)

        def rotate(x):
            a, b = np.split(x.reshape(n, -1, c.head_dim), 2, -1)
            return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], -1).astype(np.float32)

        norm = lambda x: x / np.sqrt((x ** 2).mean(-1, keepdims=True) + c.norm_eps)
        x = self.embedding[tokens]
        cache.begin(n, more)
        for index, layer in enumerate(self.layers):
            q, k, v = np.split(norm(x) @ layer.qkv.T, [c.heads * c.head_dim, (c.heads + c.kv_heads) * c.head_dim], -1)
            out = cache.attend(index, rotate(q), rotate(k), v.reshape(n, c.kv_heads, c.head_dim), positions)
            x = x + out.reshape(n, -1) @ layer.out.T
            gate, up = np.split(norm(x) @ layer.gate_up.T, 2, -1)
            x = x + gate / (1 + np.exp(-gate)) * up @ layer.down.T
        cache.commit()
        return norm(x) @ self.head.T

    def prefill(self, tokens, cache, start, chunk=32, logits="last"):
        rows = [self.forward(tokens[at:at + chunk], cache, start + at) for at in range(0, len(tokens), chunk)]
        return np.concatenate(rows)


class Letters:
    """A tokenizer of single characters."""

    def encode(self, text):
        return [ord(c) % 60 for c in text]

    def decode(self, ids):
        return "".join(chr(65 + i % 20) if i % 7 else ". " for i in ids)

    def chat_start(self, text):
        return "<" + text

    def chat_ask(self, question):
        return "><" + question + ">"


def captured(folder, prompts_=3, length=160, queries=24):
    model = Model()
    for index in range(prompts_):
        rng = np.random.default_rng(index)
        ids = rng.integers(0, 60, length)
        capture.Capture.write(folder, "%03d" % index, capture.capture(model, ids, LAYOUT, queries, rng))
    return model, capture.Capture(folder)


class Captures(unittest.TestCase):
    def test_what_is_kept_is_what_the_teacher_saw(self):
        with tempfile.TemporaryDirectory() as folder:
            model, got = captured(folder, 1)
            arrays = got.read(0)
            # The same prompt in one block and in many gives the same keys; queries stand at their positions.
            cache = capture.CaptureCache(Config, 160, LAYOUT)
            logits = model.prefill(arrays["tokens"], cache, 0, chunk=160)
            np.testing.assert_allclose(arrays["keys"], cache.keys, atol=4e-3)
            np.testing.assert_allclose(arrays["queries"], cache.queries[:, arrays["positions"]], atol=4e-3)
            p = np.exp(logits - logits.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            wanted = -np.log(p[np.arange(159), arrays["tokens"][1:]])
            np.testing.assert_allclose(arrays["surprisal"], np.concatenate([[0], wanted]), atol=2e-3)
            self.assertEqual(len(arrays["positions"]), 24)
            self.assertTrue((np.diff(arrays["positions"]) > 0).all())

    def test_far_mass_leaves_the_sinks_out(self):
        cache = capture.CaptureCache(Config, 160, LAYOUT, far=40)
        Model().prefill(np.random.default_rng(0).integers(0, 60, 160), cache, 0)
        self.assertEqual(cache.far_mass[:LAYOUT.sinks + 41].max(), 0)
        self.assertGreater(cache.far_mass[60:].min(), 0)
        self.assertTrue((cache.far_mass <= cache.all_mass + 1e-9).all())
        # Two layers of four heads; what is missing is on the sinks.
        self.assertTrue((cache.all_mass < 8).all())
        mined = capture.mine(cache, 10, np.random.default_rng(0), least=42)
        ratio = cache.far_mass[42:] / cache.all_mass[42:]
        self.assertLessEqual(set(42 + np.argsort(-ratio)[:5]), set(mined.tolist()))

    def test_prompts_have_their_length_and_depend_on_seed_alone(self):
        text = "\n\n".join("Paragraph %d says. Something about nothing. And more of it." % i for i in range(400))
        tokens = Letters()
        for draw in (prompts.plain, prompts.with_questions):
            one = draw(tokens, text, 3000, np.random.default_rng(3))
            self.assertEqual(one, draw(tokens, text, 3000, np.random.default_rng(3)))
            self.assertNotEqual(one, draw(tokens, text, 3000, np.random.default_rng(4)))
            self.assertLessEqual(len(one), 3000)
            self.assertGreater(len(one), 2700)
        with self.assertRaises(ValueError):
            prompts.plain(tokens, "short", 100, np.random.default_rng(0))
        for _ in range(50):
            fact, question, answer = prompts.draw_fact(np.random.default_rng(7))
            self.assertTrue(fact.endswith(".") and question.endswith("?") and "{" not in fact + question + answer)


class Texts(unittest.TestCase):
    def test_strings_out_of_a_serialised_vector(self):
        from skerry.train import debian_texts

        def vector(version, texts, kind=16):
            out = b"X\n" + struct.pack(">iii", version, 0x040201, 0x020300)
            out += struct.pack(">i5s", 5, b"UTF-8") if version == 3 else b""
            out += struct.pack(">ii", kind, len(texts))
            for text in texts:
                data = text.encode("utf-8")
                out += struct.pack(">ii", 0x00040009, len(data)) + data
            return out

        for version in (2, 3):
            self.assertEqual(debian_texts.r_strings(vector(version, ["It is", "", "a truth \u2014"])), ["It is", "", "a truth \u2014"])
        with self.assertRaises(ValueError):
            debian_texts.r_strings(vector(3, ["x"], kind=13))
        with self.assertRaises(ValueError):
            debian_texts.r_strings(b"A\n123")

    def test_paragraphs(self):
        from skerry.train import debian_texts

        lines = ["CHAPTER I", "", "It is a", "truth.", "", "EMMA", "", "Chapter 2", "", "So.", ""]
        self.assertEqual(debian_texts.paragraphs(lines), ["It is a truth.", "So."])
        page = debian_texts.Paragraphs()
        page.feed("<head><title>x</title></head><p>One <b>two</b>\n three</p><script>no</script><ul><li>four</li></ul>")
        page.close()
        self.assertEqual(page.out, ["One two three", "four"])


class Evaluation(unittest.TestCase):
    def test_fetching_everything_costs_only_the_codes_and_the_oracle_beats_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            model = Model()
            ids = np.random.default_rng(0).integers(0, 60, 200)
            capture.Capture.write(folder, "0", capture.capture(model, ids, LAYOUT, 0, positions=np.arange(168, 200)))
            arrays = capture.Capture(folder).read(0)
            compared = {"oracle": routers.Oracle(LAYOUT), "free": routers.TrainingFree(LAYOUT)}
            got = evaluate.divergence(model, arrays, compared, shares=(0.2, 1.0), layout=LAYOUT)
            self.assertLess(got["oracle", 1.0][0], 0.02 * got["nothing", 0.0][0])
            self.assertLess(got["oracle", 0.2][0], 0.7 * got["nothing", 0.0][0])
            self.assertLess(got["free", 0.2][0], got["nothing", 0.0][0])
            self.assertLess(abs(got["free", 1.0][0] - got["oracle", 1.0][0]), 1e-5)

    def test_recall_is_1_for_the_oracle_and_random_choice_is_worse(self):
        class Random:
            def estimate(self, layer, queries, keys, positions, square):
                segments = int(LAYOUT.candidates(positions).max())
                return np.random.default_rng(0).standard_normal((queries.shape[0], queries.shape[1], segments))

        with tempfile.TemporaryDirectory() as folder:
            _, got = captured(folder, 1)
            found = evaluate.recall(got, {"oracle": routers.Oracle(LAYOUT), "random": Random()}, LAYOUT, (0.2,))
            self.assertAlmostEqual(found["oracle", 0.2][0], 1, places=4)
            self.assertLess(found["random", 0.2][0], 0.8)


@unittest.skipUnless(HAVE_MATPLOTLIB, "needs matplotlib")
class Plots(unittest.TestCase):
    def test_a_picture_comes_out(self):
        np.testing.assert_allclose(plot.smooth([1, 2, 3, 4], 2), [1, 1.5, 2.5, 3.5])
        np.testing.assert_allclose(plot.smooth_stages([1, 2, 3, 4], [2], 2), [1, 1.5, 3, 3.5])
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "loss.png"
            plot.losses(path, {0: np.ones((20, 2)), 1: np.zeros((20, 2))}, ["a", "b"], [10], colour_label="layer")
            self.assertEqual(path.read_bytes()[:4], b"\x89PNG")


@unittest.skipUnless(HAVE_TORCH, "needs torch")
class Fitting(unittest.TestCase):
    def setUp(self):
        import torch

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.place = tempfile.TemporaryDirectory()
        self.addCleanup(self.place.cleanup)
        self.folder = pathlib.Path(self.place.name)
        self.model, self.captured = captured(self.folder / "captured")

    def settings(self, **changes):
        from skerry.train.fit import Settings

        return Settings(**{**dict(rank=4, shared=False, steps=40, lengths=(100, 400), rows=16, recluster=15, checkpoint=10), **changes})

    def worst(self, tensors, layer):
        sums = np.zeros(4)
        for index in range(len(self.captured)):
            positions, queries, keys, values = self.captured.layer(index, layer)
            estimate = routers.Trained({k: v[None] for k, v in tensors.items()}, LAYOUT).estimate(0, queries, keys, positions, None)
            true = targets.targets(LAYOUT, positions, queries, keys, values)
            sums += np.array(metrics.recall(estimate, true, 2, (0.1,))[0.1])
        return sums[0] / sums[1]

    def test_estimates_are_those_of_the_device(self):
        import torch
        from skerry.train import fit, problem

        positions, queries, keys, values = self.captured.layer(0, 1)
        prompt = problem.Prompt(LAYOUT, positions, queries, keys, values)
        W, W_key = problem.principal([prompt], 4)
        router = fit.LayerRouter(W, W_key, 4)
        router.bias.data.copy_(torch.arange(4.0))
        means, counts = (torch.from_numpy(part) for part in problem.cluster(prompt.keys, W_key))
        got = router(torch.from_numpy(queries), means, counts).detach().numpy()
        tensors = {"W": W[None], "W_key": W_key[None], "bias": np.arange(4.0)[None]}
        wanted = routers.Trained(tensors, LAYOUT).estimate(0, queries, keys, positions, None)
        # Rounding before a code differs between mean-then-project and project-then-mean.
        self.assertLess(np.median(np.abs(got - wanted)), 1e-4)
        self.assertLess(np.quantile(np.abs(got - wanted), 0.98), 1e-2)

    def test_every_loss_learns(self):
        from skerry.train import fit, problem

        loaded = problem.load(self.captured, LAYOUT, 1)
        W, W_key = problem.principal(loaded, 4)
        start = self.worst({"W": W, "W_key": W_key, "bias": np.zeros(4)}, 1)
        for rank_loss, shared in (("listwise", False), ("recall", False), ("bce", False), ("listwise", True)):
            settings = self.settings(rank_loss=rank_loss, shared=shared, steps=150)
            checkpoint = fit.Checkpoint(self.folder / ("%s%d.pt" % (rank_loss, shared)), settings)
            got = fit.fit_layer(1, loaded, settings, checkpoint)
            self.assertEqual(len(got["W"]), 2 if shared else 4)
            self.assertGreater(self.worst({k: v.numpy() for k, v in got.items()}, 1), start, rank_loss)

    def test_a_stopped_fit_goes_on_to_the_same_numbers(self):
        from skerry.train import fit, problem

        settings = self.settings()
        whole = fit.fit(self.captured, range(2), settings, self.folder / "whole.pt", LAYOUT)
        loaded = problem.load(self.captured, LAYOUT, 0)
        # A stop in the middle of layer 0, away from the steps that look for clusters anew.
        self.assertIsNone(fit.fit_layer(0, loaded, settings, fit.Checkpoint(self.folder / "part.pt", settings), stop=17))
        parts = fit.fit(self.captured, range(2), settings, self.folder / "part.pt", LAYOUT)
        for name in whole:
            np.testing.assert_array_equal(whole[name], parts[name])
        again = fit.fit(self.captured, range(2), settings, self.folder / "part.pt", LAYOUT)
        np.testing.assert_array_equal(whole["W"], again["W"])
        with self.assertRaises(ValueError):
            fit.Checkpoint(self.folder / "part.pt", self.settings(steps=41))

    def test_the_open_student_is_the_teacher(self):
        import torch
        from skerry.train.student import Memory, Student

        arrays = self.captured.read(0)
        positions = np.array(arrays["positions"])
        cache = capture.CaptureCache(Config, 160, LAYOUT)
        logits = self.model.prefill(arrays["tokens"], cache, 0)
        with torch.no_grad():
            got = Student(self.model)(Memory(LAYOUT, arrays, positions)).numpy()
        self.assertLess(np.abs(got - logits[positions]).max(), 0.02 * np.abs(logits).max())

    def test_the_student_does_not_see_the_future(self):
        import torch
        from skerry.train.student import Memory, Student

        arrays = {key: np.array(value) for key, value in self.captured.read(0).items()}
        positions = arrays["positions"][:6]
        student = Student(self.model)
        with torch.no_grad():
            before = student(Memory(LAYOUT, arrays, positions))
            for name in ("keys", "values"):
                arrays[name][:, :, positions[2]:] = 7  # its own row comes from the student
            after = student(Memory(LAYOUT, arrays, positions))
        np.testing.assert_array_equal(before[:3].numpy(), after[:3].numpy())
        self.assertGreater(float((before[3:] - after[3:]).abs().max()), 0.1)

    def test_t15_gradients_of_the_gate(self):
        import torch
        from skerry.train.student import StraightThrough

        alpha = torch.tensor([[0.15], [0.05]], dtype=torch.float64, requires_grad=True)
        tau = torch.tensor([[0.05]], dtype=torch.float64, requires_grad=True)
        z = StraightThrough.apply(alpha, tau, 0.1)
        self.assertEqual(z.flatten().tolist(), [1, 0])
        z.sum().backward()
        np.testing.assert_allclose(alpha.grad.flatten(), [1.966119, 2.5], rtol=1e-5)
        np.testing.assert_allclose(tau.grad.flatten(), [-1.966119 - 2.5], rtol=1e-5)

    def refine(self, path, stop=None, **changes):
        from skerry.train import distil, fit

        tensors = fit.fit(self.captured, range(2), self.settings(), self.folder / "start.pt", LAYOUT)
        settings = distil.Settings(**{**dict(steps=12, lengths=(100, 400), rows=8, checkpoint=5, shares=(0.1, 0.3)), **changes})
        return distil.refine(self.model, self.captured, tensors, settings, path, layout=LAYOUT, stop=stop)

    def test_refining_lowers_the_divergence_and_goes_on_after_a_stop(self):
        import torch
        from skerry.train import distil, fit
        from skerry.train.gates import BestFetch
        from skerry.train.student import Memory, Student

        student = Student(self.model)
        start = fit.fit(self.captured, range(2), self.settings(), self.folder / "start.pt", LAYOUT)

        def mean_divergence(tensors):
            sums = 0
            for index in range(len(self.captured)):
                arrays = self.captured.read(index)
                memory = Memory(LAYOUT, arrays, np.array(arrays["positions"]))
                clusters = distil.clusters(self.captured, index, LAYOUT, start, 4)
                with torch.no_grad():
                    sums += float(distil.divergence(student, memory, BestFetch(tensors, 0.3).on(memory, clusters, 0.2)))
            return sums / len(self.captured)

        tensors, _ = self.refine(self.folder / "a.pt", steps=120, peak=3e-2, shares=(0.2,), rows=16)
        self.assertLess(mean_divergence(tensors), 0.97 * mean_divergence(start))
        whole, _ = self.refine(self.folder / "b.pt")
        self.refine(self.folder / "c.pt", stop=7)
        parts, history = self.refine(self.folder / "c.pt")
        self.assertEqual(len(history), 12)
        for name in whole:
            np.testing.assert_array_equal(whole[name], parts[name])

    def test_the_published_form_trains_with_all_four_losses(self):
        from skerry.train import distil

        settings = distil.Settings(steps=40, peak=2e-2, lengths=(400,), rows=8, checkpoint=50, summary_dim=4, rank_max=4, budget=1.0)
        for summaries in (False, True):
            tensors, history = distil.train_paper(self.model, self.captured, settings, self.folder / ("%d.pt" % summaries),
                                                  summaries=summaries, layout=LAYOUT)
            self.assertEqual({name: value.shape for name, value in tensors.items()}, {
                "W": (2, 4, 4, 8), "tau": (2, 4), "g_phi.mlp.0.weight": (64, 12), "g_phi.mlp.0.bias": (64,),
                "g_phi.mlp.2.weight": (64, 64), "g_phi.mlp.2.bias": (64,), "g_phi.mlp.4.weight": (4, 64), "g_phi.mlp.4.bias": (4,)})
            history = np.array(history)
            self.assertTrue(np.isfinite(history).all())
            early, late = history[:10].mean(0), history[-10:].mean(0)
            self.assertLess(late[2], early[2])  # zoom
            self.assertLess(late[3], early[3])  # the share that gates lose


    def test_the_commands_make_and_compare_files(self):
        import contextlib
        import io

        from skerry import router_files
        from skerry.train import __main__ as command

        quiet = contextlib.redirect_stderr(io.StringIO())
        out = self.folder / "router.safetensors"
        words = ["fit", str(self.folder / "captured"), str(out), "--model", "tiny", "--rank", "4", "--steps", "6"]
        with quiet:
            command.main(words)
        tensors, config = router_files.read(out)
        self.assertEqual({name: (value.dtype.name, value.shape) for name, value in tensors.items()}, {
            "W": ("float16", (2, 4, 4, 8)), "W_key": ("float16", (2, 2, 4, 8)), "bias": ("float16", (2, 4))})
        self.assertEqual((config["model"], config["form"], config["centroids"], config["step"]), ("tiny", "production", 4, 6))
        self.assertEqual((self.folder / "router.png").exists(), HAVE_MATPLOTLIB)
        with quiet, self.assertRaises(SystemExit):
            command.main(words)
        with quiet, contextlib.redirect_stdout(io.StringIO()) as printed:
            command.main(["evaluate", str(self.folder / "captured"), str(out), "--shares", "50"])
        rows = [line.split("|")[1].strip() for line in printed.getvalue().splitlines()[2:]]
        self.assertEqual(rows[0], "training-free")
        self.assertEqual(rows[-1], "router")

    def test_the_budget_term_alone_pushes_tau_up(self):
        import torch
        from skerry.train import losses
        from skerry.train.gates import Factors, Threshold
        from skerry.train.student import Memory, Student

        arrays = self.captured.read(0)
        memory = Memory(LAYOUT, arrays, np.array(arrays["positions"][-6:]))
        threshold = Threshold(2, 4, 8, 4, 4, generator=torch.Generator().manual_seed(0))
        gate, record = threshold.on(memory, [Factors.of(memory, *memory.rows(layer), 4) for layer in range(2)])
        Student(self.model)(memory, gate)
        alpha, opened, gates, _ = record[1]
        self.assertEqual(int(opened.detach().sum()), int((alpha > 0.05).sum()))
        self.assertEqual(float(opened.detach()[~memory.allowed[:, None].expand_as(opened)].sum()), 0)
        losses.budget(opened, [gates]).backward()
        self.assertTrue((threshold.tau.grad[1] < 0).all())
        self.assertTrue(any(float(p.grad.abs().max()) > 0 for p in threshold.g_phi.parameters()))


class CommandLine(unittest.TestCase):
    def test_help_and_wrong_options(self):
        import contextlib
        import io

        from skerry.train import __main__ as command

        for words in (["--help"], ["capture", "--help"], ["fit", "--help"], ["refine", "--help"], ["evaluate", "--help"]):
            with contextlib.redirect_stdout(io.StringIO()) as out, self.assertRaises(SystemExit) as end:
                command.main(words)
            self.assertEqual(end.exception.code, 0)
            self.assertIn("usage: python -m skerry.train", out.getvalue())
        for words in (["refine", "a", "b", "--model", "m"], ["refine", "a", "b", "--model", "m", "--paper", "--start", "c"],
                      ["evaluate", "a", "--needles", "3"], ["fit", "a", "b"]):
            with contextlib.redirect_stderr(io.StringIO()), self.assertRaises(SystemExit) as end:
                command.main(words)
            self.assertEqual(end.exception.code, 2)


if __name__ == "__main__":
    unittest.main()
