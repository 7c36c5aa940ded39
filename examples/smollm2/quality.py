"""The quality protocol: how far a policy moves the model's next-token distribution.

Protocol (whole): 2,048 tokens are read under the full cache, compressed once, and
128 tokens are teacher-forced while the policy goes on working; means over six texts
or more, every policy at the same physical bytes. Beside it (streamed): the same
texts, but the policy works from the first token on.

    python -m smollm2.quality                     from the folder examples/
    python -m smollm2.quality --shares 20 --policies qevict,quantise --texts 2

As a module: `load_traces`, then `measure` per policy, or `run` for a table of rows.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

from .bar import Bar
from .model import Model, log_softmax
from .policies import POLICIES, budget_bytes
from .tokens import Tokens
from .trace import Trace

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
TEXTS = ("emma", "mansfield_park", "northanger_abbey", "persuasion", "pride_and_prejudice",
         "sense_and_sensibility")
PROMPT_TOKENS = 2048
CONTINUATION_TOKENS = 128


def divergence(full_logits, logits):
    """(mean KL from full to policy in nats, share of equal best tokens), row by row."""
    kl = 0.0
    for at in range(0, len(logits), 16):
        p = log_softmax(full_logits[at:at + 16])
        q = log_softmax(logits[at:at + 16])
        kl += float((np.exp(p) * (p - q)).sum())
    same = full_logits.argmax(axis=1) == logits.argmax(axis=1)
    return kl / len(logits), float(same.mean())


def missed_mass(trace, session, rows, start):
    """Full-cache attention mass of continuation rows that fell on tokens no longer readable.

    Returns (missed, all) summed over rows, layers and KV heads; `session` says what
    is readable before those rows are appended.
    """
    missed = total = 0.0
    for layer, heads in enumerate(trace.masses):
        for h, mass in enumerate(heads):
            part = mass[rows]
            total += float(part.sum())
            for begin, end, tier in session.ranges(layer, h):
                if tier == "evicted":
                    missed += float(part[:, begin:min(end, start)].sum())
    return missed, total


def teacher_force(trace, session, start):
    """Feed the continuation in steps that end where windows may move; collect everything."""
    model, tokens = trace.model, trace.continuation
    logits, missed, total, at = [], 0.0, 0.0, 0
    while at < len(tokens):
        event = session.next_event()
        take = min(16, len(tokens) - at, event - start - at if event is not None else 16)
        gone, seen = missed_mass(trace, session, slice(at, at + take), start + at)
        missed, total = missed + gone, total + seen
        logits.append(model.forward(tokens[at:at + take], session, start + at, "all"))
        at += take
    return np.concatenate(logits), missed / total


def measure(trace, open_session, name, share, streamed=False, **options):
    """One text under one policy; a dict of figures.

    `open_session(config, settings, budget, length, prompt, prefill=..., **options)` makes
    the session; SkerrySession is one such callable.
    """
    model, config = trace.model, trace.model.config
    n = len(trace.tokens)
    length = n + len(trace.continuation)
    budget = None if name == "full" else budget_bytes(config, share, length)
    session = open_session(config, POLICIES[name], budget, length, n,
                           prefill="split" if streamed else "whole", **options)
    try:
        began = time.perf_counter()
        if streamed:
            model.prefill(trace.tokens, session, 0, logits="none", prompt=True)
        else:
            trace.replay(session)
        read_seconds = time.perf_counter() - began
        logits, missed = teacher_force(trace, session, n)
        kl, top1 = divergence(trace.logits, logits)
        memory = session.memory()
    finally:
        session.close()
    return {"policy": name, "share": share, "streamed": streamed, "kl": kl, "top1": top1, "missed": missed,
            "bytes": memory["bytes"], "budget": budget, "full_bytes": config.cache_bytes(length),
            "charged_bytes": memory["charged_bytes"], "read_seconds": read_seconds}


def load_traces(model, tokens, names=TEXTS, prompt=PROMPT_TOKENS, continuation=CONTINUATION_TOKENS):
    """Yields (name, Trace), one at a time: a trace of 2,048 tokens holds about 450 MB."""
    for name in names:
        ids = tokens.encode((DATA / (name + ".txt")).read_text(encoding="utf-8"))
        if len(ids) < prompt + continuation:
            raise ValueError("%s has %d tokens, %d are needed" % (name, len(ids), prompt + continuation))
        yield name, Trace(model, ids[:prompt], ids[prompt:prompt + continuation])


def run(open_session, policies, shares, names=TEXTS, streamed=(False,), model=None, tokens=None, report=None):
    """Rows of means over the texts, one per (policy, share, streamed)."""
    model = model or Model()
    tokens = tokens or Tokens()
    cases = [(p, s, st) for st in streamed for s in shares for p in policies]
    found = {case: [] for case in cases}
    bar = Bar("quality", len(names) * len(cases))
    for name, trace in load_traces(model, tokens, names):
        for policy, share, st in cases:
            row = measure(trace, open_session, policy, share, st)
            row["text"] = name
            found[policy, share, st].append(row)
            if report:
                report(row)
            bar.step()
        del trace
    bar.close()
    rows = []
    for (policy, share, st), parts in found.items():
        mean = lambda key: float(np.mean([part[key] for part in parts]))
        rows.append({"policy": policy, "share": share, "streamed": st, "texts": len(parts),
                     "kl": mean("kl"), "top1": mean("top1"), "missed": mean("missed"),
                     "kl_worst": max(part["kl"] for part in parts),
                     "bytes": max(part["bytes"] for part in parts),
                     "budget": parts[0]["budget"], "full_bytes": parts[0]["full_bytes"]})
    return rows


def table(rows):
    lines = ["%-14s %-9s %6s %9s %9s %9s %8s %8s" % ("policy", "mode", "share", "bytes %", "KL", "worst KL",
                                                     "top-1 %", "missed %")]
    for r in rows:
        lines.append("%-14s %-9s %5.1f%% %9.2f %9.4f %9.4f %8.1f %8.2f" % (
            r["policy"], "streamed" if r["streamed"] else "whole", 100 * r["share"],
            100 * r["bytes"] / r["full_bytes"], r["kl"], r["kl_worst"], 100 * r["top1"], 100 * r["missed"]))
    return "\n".join(lines)


def main():
    from .skerry_session import SkerrySession

    parser = argparse.ArgumentParser(prog="smollm2.quality", description="compare policies at equal bytes")
    parser.add_argument("--shares", default="20,10", help="percent of a full 16-bit cache, comma separated")
    parser.add_argument("--policies", default="streaming,evict,quantise,qevict,qevict-paper")
    parser.add_argument("--texts", type=int, default=len(TEXTS), help="how many of the texts")
    parser.add_argument("--mode", choices=("whole", "streamed", "both"), default="whole")
    parser.add_argument("--json", help="also write every row to this file")
    given = parser.parse_args()
    modes = {"whole": (False,), "streamed": (True,), "both": (False, True)}[given.mode]
    each = []
    rows = run(SkerrySession, given.policies.split(","), [float(s) / 100 for s in given.shares.split(",")],
               TEXTS[:given.texts], modes, report=each.append)
    print(table(rows))
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"means": rows, "texts": each}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
