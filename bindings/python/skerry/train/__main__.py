# SPDX-License-Identifier: MIT
"""Command line: python -m skerry.train capture | fit | refine | evaluate (docs/training.md)."""

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import sys

import numpy as np

from .bar import Bar
from .segments import SLOTS, Layout


RANK_LOSSES = {"listwise": "divergence of shares, nats", "recall": "share missed by the soft choice", "bce": "zoom cross entropy"}


def teacher(name):
    """(model, tokens) of the package `name`, which has modules model (class Model) and tokens (class Tokens)."""
    return importlib.import_module(name + ".model").Model(), importlib.import_module(name + ".tokens").Tokens()


def text_files(folder):
    texts = sorted(folder.glob("*.txt"))
    if not texts:
        raise SystemExit("no .txt files in %s" % folder)
    return texts


def capture(given):
    from .capture import capture_texts

    texts = text_files(given.texts)
    model, tokens = teacher(given.teacher)
    bar = Bar("capture", given.prompts + given.long)
    capture_texts(model, tokens, texts, given.out, Layout(), prompts=given.prompts, length=given.length, queries=given.queries,
                  long=given.long, questions=not given.plain, last=given.last, seed=given.seed, bar=bar)
    bar.close()


def write_router(path, tensors, model, step):
    """A production router in f16."""
    from ..router_files import write

    layers, groups, rank, dim = tensors["W_key"].shape
    heads = tensors["bias"].shape[1]
    config = dict(form="production", model=model, num_layers=layers, num_q_heads=heads, num_kv_heads=groups, head_dim=dim,
                  summary_dim=rank, pooling="centroids", centroids=SLOTS, step=step)
    # The file has a matrix per query head.
    tensors = {**tensors, "W": tensors["W"].repeat(heads // tensors["W"].shape[1], 1)}
    # Beyond f16 becomes an infinity, which write() names.
    with np.errstate(over="ignore"):
        write(path, {name: np.asarray(value, np.float16) for name, value in tensors.items()}, config)


def read_router(path):
    from ..router_files import read

    tensors, config = read(path)
    if config["form"] != "production" or "W_key" not in tensors:
        raise SystemExit("%s is no production router with a key projection" % path)
    return {"bias": np.zeros(tensors["W"].shape[:2]), **tensors}, config


def torch_threads(count, seed):
    import torch

    torch.set_num_threads(count)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    return torch


def settings_from(cls, given):
    return cls(**{field.name: getattr(given, field.name) for field in dataclasses.fields(cls) if hasattr(given, field.name)})


def draw(out, *curves, **options):
    """The plot beside a router file, where matplotlib is installed."""
    from . import plot

    if importlib.util.find_spec("matplotlib"):
        plot.losses(out.with_suffix(".png"), *curves, **options)
    else:
        print("matplotlib is not installed: no plot", file=sys.stderr)


def fit(given):
    torch_threads(given.threads, given.seed)
    from . import schedule
    from .capture import Capture
    from .fit import Checkpoint, Settings
    from .fit import fit as fit_layers

    captured, settings = Capture(given.captured), settings_from(Settings, given)
    layers = range(captured.read(0)["keys"].shape[0])
    if given.out.exists():
        raise SystemExit("%s is there already" % given.out)
    # A file of zeros first: what a file cannot hold is refused before the work, not after it.
    _, groups, _, dim = captured.read(0)["keys"].shape
    heads = captured.read(0)["queries"].shape[2]
    shape = (len(layers), groups, settings.rank, dim)
    write_router(given.out, {"W": np.zeros(shape), "W_key": np.zeros(shape), "bias": np.zeros((len(layers), heads))}, given.model, 0)
    given.out.unlink()
    bar = Bar("fit", len(layers) * settings.steps)
    checkpoint = given.out.with_suffix(".checkpoint")
    tensors = fit_layers(captured, layers, settings, checkpoint, bar=bar)
    bar.close()
    write_router(given.out, tensors, given.model, settings.steps)
    history = Checkpoint(checkpoint, settings).state["history"]
    draw(given.out, history, [RANK_LOSSES[settings.rank_loss], "divergence of masses, nats"],
         [first for first, _ in schedule.curriculum(settings.steps, settings.lengths)[1:]], colour_label="layer")


def refine(given):
    torch_threads(given.threads, given.seed)
    from . import distil
    from .capture import Capture

    model, _ = teacher(given.teacher)
    settings, captured = settings_from(distil.Settings, given), Capture(given.captured)
    bar = Bar("refine", settings.steps)
    checkpoint = given.out.with_suffix(".checkpoint")
    if given.paper:
        from ..router_files import write

        tensors, history = distil.train_paper(model, captured, settings, checkpoint, summaries=given.summaries, bar=bar)
        config = dict(form="paper", model=given.model, num_layers=model.config.layers, num_q_heads=model.config.heads,
                      num_kv_heads=model.config.kv_heads, head_dim=model.config.head_dim, summary_dim=settings.summary_dim,
                      rank_max=settings.rank_max, step=settings.steps)
        write(given.out, {name: np.asarray(value, np.float32) for name, value in tensors.items()}, config)
        titles = ["total", "distillation", "zoom", "reconstruction share", "budget"]
    else:
        start, config = read_router(given.start)
        tensors, history = distil.refine(model, captured, start, settings, checkpoint, slots=config["centroids"], bar=bar)
        write_router(given.out, tensors, given.model, config["step"] + settings.steps)
        titles = ["KL to the teacher, nats"]
    bar.close()
    draw(given.out, {"per step": history}, titles)


def evaluate(given):
    from . import evaluate as judge
    from . import routers
    from .capture import Capture

    candidates = {"training-free": routers.TrainingFree(), "training-free, metric 1/2": routers.TrainingFree(metric=0.5),
                  "training-free, metric 1": routers.TrainingFree(metric=1.0)}
    for path in given.router:
        candidates[path.stem] = routers.Trained(read_router(path)[0])
    shares = tuple(float(part) / 100 for part in given.shares.split(","))
    captured = Capture(given.captured)
    layers, _, _, dim = captured.read(0)["keys"].shape
    rows = {}
    bar = Bar("recall", len(captured) * layers)
    for key, value in judge.recall(captured, candidates, shares=shares, bar=bar).items():
        rows.setdefault(key, {}).update(mass=value[0], effect=value[1])
    bar.close()
    if given.kl or given.needles:
        model, tokens = teacher(given.teacher)
        compared = {"oracle": routers.Oracle(), **candidates}
    if given.kl:
        bar = Bar("KL", len(captured))
        found = []
        for index in range(min(given.kl, len(captured))):
            found.append(judge.divergence(model, captured.read(index), compared, shares))
            bar.step()
        bar.close()
        for key in found[0]:
            kl = [one[key][0] for one in found]
            rows.setdefault(key, {}).update(kl=float(np.mean(kl)), kl_worst=max(kl), top1=float(np.mean([one[key][1] for one in found])))
    if given.needles:
        texts = text_files(given.texts)
        bar = Bar("needles", given.needles)
        found = []
        for index in range(given.needles):
            text = texts[index % len(texts)].read_text(encoding="utf-8")
            one = judge.needle(model, tokens, text, given.length, np.random.default_rng([given.seed, index]), compared, shares)
            # What the full cache cannot answer says nothing about a router.
            if one["full", 0.0] == 1:
                found.append(one)
            bar.step()
        bar.close()
        for key in found[0] if found else ():
            digits = [one[key] for one in found]
            rows.setdefault(key, {}).update(right=sum(x == 1 for x in digits), asked=len(digits), digits=float(np.mean(digits)))
    lines = []
    for (name, share), row in rows.items():
        bytes_ = compared_bytes(candidates, name, dim)
        lines.append(dict(router=name, fetched=share, bytes=bytes_, **row))
    print(table(lines))
    if given.json:
        given.json.write_text(json.dumps(lines, indent=1) + "\n", encoding="utf-8")


def compared_bytes(candidates, name, dim):
    return candidates[name].bytes(dim) if name in candidates else 0


def table(lines):
    """A Markdown table; a cell is empty where a figure was not asked for."""
    show = lambda row, key, form: form % row[key] if key in row else ""
    out = ["| router | bytes | fetched | mass | effect | KL | worst KL | top-1 | needles | digits |",
           "|---|---|---|---|---|---|---|---|---|---|"]
    for row in sorted(lines, key=lambda row: row["fetched"]):
        cells = [row["router"], "%d" % row["bytes"], "%.1f %%" % (100 * row["fetched"]) if row["router"] != "full" else "all",
                 show(row, "mass", "%.3f"), show(row, "effect", "%.3f"), show(row, "kl", "%.4f"), show(row, "kl_worst", "%.4f"),
                 show(row, "top1", "%.3f"), "%d / %d" % (row["right"], row["asked"]) if "asked" in row else "",
                 show(row, "digits", "%.2f")]
        out.append("| " + " | ".join(cells) + " |")
    return "\n".join(out)


def numbers(kind):
    return lambda text: tuple(kind(part) for part in text.split(","))


def arguments():
    parser = argparse.ArgumentParser(prog="python -m skerry.train", description="Train a router for one model (docs/training.md).")
    commands = parser.add_subparsers(dest="command", required=True)
    whole = argparse.ArgumentDefaultsHelpFormatter

    one = commands.add_parser("capture", help="run the teacher over texts and keep what a router learns from", formatter_class=whole)
    one.add_argument("texts", type=pathlib.Path, help="folder of .txt files")
    one.add_argument("out", type=pathlib.Path, help="folder for the captured prompts, 53 MB each at 2,048 tokens of SmolLM2-135M")
    one.add_argument("--teacher", default="smollm2", help="package with the modules model and tokens")
    one.add_argument("--prompts", type=int, default=22, help="prompts of --length tokens, from the texts in turn")
    one.add_argument("--length", type=int, default=2048, help="tokens of a prompt")
    one.add_argument("--long", type=int, default=2, help="further prompts of twice the length")
    one.add_argument("--queries", type=int, default=192, help="query positions kept per prompt, half of them mined")
    one.add_argument("--plain", action="store_true", help="no chats with questions")
    one.add_argument("--last", type=int, default=0, help="keep the queries of the last so many positions, not mined ones")
    one.add_argument("--seed", type=int, default=0, help="of every random draw")
    one.set_defaults(run=capture)

    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("captured", type=pathlib.Path, help="folder of captured prompts")
    common.add_argument("out", type=pathlib.Path, help="router file to write; a checkpoint and a plot lie beside it")
    common.add_argument("--model", required=True, help="name of the model, for the file")
    common.add_argument("--seed", type=int, default=0, help="of every random draw")
    common.add_argument("--threads", type=int, default=1, help="of PyTorch; the result depends on it in the last bits")
    common.add_argument("--checkpoint", type=int, default=100, help="steps between checkpoints; the same command goes on from the last")

    one = commands.add_parser("fit", parents=[common], help="fit a production router, layer by layer", formatter_class=whole)
    one.add_argument("--steps", type=int, default=300, help="per layer")
    one.add_argument("--rank", type=int, default=32, help="d' of the projections: up to 16 are coded in int8, up to 32 in int4, more in r2")
    one.add_argument("--shared", action="store_true", help="one query projection per KV head, not one per query head")
    one.add_argument("--peak", type=float, default=6e-2, help="highest learning rate, in units of a tensor's size")
    one.add_argument("--lengths", type=numbers(int), default="512,1024,4096", help="curriculum: queries below these positions")
    one.add_argument("--rank-loss", choices=("listwise", "recall", "bce"), default="listwise", help="what pushes the right segments up")
    one.add_argument("--effect", type=float, default=0.5, help="share of the output effect in what a choice should catch")
    one.add_argument("--mass", type=float, default=0.5, help="weight of the divergence of masses")
    one.set_defaults(run=fit)

    one = commands.add_parser("refine", parents=[common], help="train all layers jointly against the teacher's distributions",
                              formatter_class=whole)
    one.add_argument("--teacher", default="smollm2", help="package with the modules model and tokens")
    one.add_argument("--start", type=pathlib.Path, help="router file to go on from")
    one.add_argument("--paper", action="store_true", help="train the published form with its four losses, from scratch")
    one.add_argument("--summaries", action="store_true", help="with --paper: closed spans are seen by their summary rows")
    one.add_argument("--steps", type=int, default=150)
    one.add_argument("--peak", type=float, default=1e-3, help="highest learning rate")
    one.add_argument("--rows", type=int, default=24, help="positions per step")
    one.set_defaults(run=refine)

    one = commands.add_parser("evaluate", help="compare routers on captured prompts that none has seen", formatter_class=whole)
    one.add_argument("captured", type=pathlib.Path, help="folder of prompts captured with --last")
    one.add_argument("router", type=pathlib.Path, nargs="*", help="router files; the training-free router is always there")
    one.add_argument("--teacher", default="smollm2", help="package with the modules model and tokens")
    one.add_argument("--shares", default="3.3,5.8,11.7", help="percent of the candidates that are fetched")
    one.add_argument("--kl", type=int, default=0, help="measure divergence on the first so many prompts")
    one.add_argument("--needles", type=int, default=0, help="so many contexts with a key and a question that comes after")
    one.add_argument("--texts", type=pathlib.Path, help="folder of .txt files for --needles")
    one.add_argument("--length", type=int, default=1900, help="tokens of a needle's context")
    one.add_argument("--seed", type=int, default=0)
    one.add_argument("--json", type=pathlib.Path, help="also write the rows to this file")
    one.set_defaults(run=evaluate)
    return parser


def main(given=None):
    parser = arguments()
    given = parser.parse_args(given)
    if given.command == "refine" and bool(given.start) == given.paper:
        parser.error("refine takes either --start or --paper")
    if given.command == "evaluate" and given.needles and not given.texts:
        parser.error("--needles takes --texts")
    given.run(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
