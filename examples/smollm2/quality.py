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
from .policies import POLICIES, budget_bytes, wants_surprisal
from .tokens import Tokens
from .trace import Trace

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
TEXTS = ("emma", "mansfield_park", "northanger_abbey", "persuasion", "pride_and_prejudice",
         "sense_and_sensibility")
PROMPT_TOKENS = 2048
CONTINUATION_TOKENS = 128
# At the end of the continuation, fed one by one: rows of one step share what they read from the host.
TRAFFIC_TOKENS = 8


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
    """Full-cache attention mass of continuation rows that fell on tokens no longer on the device.

    Returns (missed, on_host, all) summed over rows, layers and KV heads: `missed` lay on tokens
    that no query can read any more, `on_host` on tokens that a query reads when it chooses to.
    `session` says what is where before those rows are appended.
    """
    missed = on_host = total = 0.0
    for layer, heads in enumerate(trace.masses):
        for h, mass in enumerate(heads):
            part = mass[rows]
            total += float(part.sum())
            for begin, end, tier in session.ranges(layer, h):
                if tier in ("evicted", "host", "zoomed"):
                    gone = float(part[:, begin:min(end, start)].sum())
                    if tier == "evicted":
                        missed += gone
                    else:
                        on_host += gone
    return missed, on_host, total


def teacher_force(trace, session, start):
    """Feed the continuation in steps that end where windows may move; collect everything.

    (logits, figures): missed and on_host as shares of the mass; over the last TRAFFIC_TOKENS,
    bytes copied from the host per token and the share of the windows wanted from there that were
    on the device already or on their way.
    """
    model, tokens = trace.model, trace.continuation
    logits, missed, on_host, total, at = [], 0.0, 0.0, 0.0, 0
    alone = max(0, len(tokens) - TRAFFIC_TOKENS)
    while at < len(tokens):
        if at == alone:
            before = session.traffic()
        event = session.next_event()
        take = min(16, alone - at, event - start - at if event is not None else 16) if at < alone else 1
        gone, away, seen = missed_mass(trace, session, slice(at, at + take), start + at)
        missed, on_host, total = missed + gone, on_host + away, total + seen
        logits.append(model.forward(tokens[at:at + take], session, start + at, "all"))
        at += take
    after = session.traffic()
    moved = {key: after[key] - before[key] for key in after}
    return np.concatenate(logits), {
        "missed": missed / total, "on_host": on_host / total, "moved": moved["bytes"] / (len(tokens) - alone),
        "present": moved["present"] / moved["zooms"] if moved["zooms"] else None}


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
        logits, figures = teacher_force(trace, session, n)
        kl, top1 = divergence(trace.logits, logits)
        memory = session.memory()
    finally:
        session.close()
    return {"policy": name, "share": share, "streamed": streamed, "kl": kl, "top1": top1, **figures,
            "host": memory["host"], "slots": memory["slots"], "staged": memory["staged"], "bytes": memory["bytes"], "budget": budget, "full_bytes": config.cache_bytes(length),
            "charged_bytes": memory["charged_bytes"], "read_seconds": read_seconds}


def load_traces(model, tokens, names=TEXTS, prompt=PROMPT_TOKENS, continuation=CONTINUATION_TOKENS, surprisal=False):
    """Yields (name, Trace), one at a time: a trace of 2,048 tokens holds about 450 MB.

    A text that is too short goes on with those that follow it in TEXTS.
    """
    if prompt + continuation > model.config.context:
        raise ValueError("%d tokens asked for, the model was made for %d" % (prompt + continuation, model.config.context))
    texts = {name: (DATA / (name + ".txt")).read_text(encoding="utf-8").rstrip() for name in TEXTS}
    for name in names:
        first = TEXTS.index(name)
        parts, ids = [], []
        for following in TEXTS[first:] + TEXTS[:first]:
            parts.append(texts[following])
            ids = tokens.encode("\n\n".join(parts) + "\n")
            if len(ids) >= prompt + continuation:
                break
        else:
            raise ValueError("the texts have %d tokens, %d are needed" % (len(ids), prompt + continuation))
        yield name, Trace(model, ids[:prompt], ids[prompt:prompt + continuation], surprisal=surprisal)


def text_names(given):
    """Names of the texts for an option that is a number of them or a list."""
    if given.isdecimal():
        return TEXTS[:int(given)]
    names = tuple(given.split(","))
    unknown = set(names) - set(TEXTS)
    if unknown:
        raise SystemExit("no such text: %s; there are %s" % (", ".join(sorted(unknown)), ", ".join(TEXTS)))
    return names


def run(open_session, policies, shares, names=TEXTS, streamed=(False,), model=None, tokens=None, report=None,
        prompt=PROMPT_TOKENS):
    """Rows of means over the texts, one per (policy, share, streamed)."""
    model = model or Model()
    tokens = tokens or Tokens()
    cases = [(p, s, st) for st in streamed for s in shares for p in policies]
    found = {case: [] for case in cases}
    bar = Bar("quality", len(names) * len(cases))
    surprisal = any(wants_surprisal(POLICIES[policy]) for policy in policies)
    for name, trace in load_traces(model, tokens, names, prompt, surprisal=surprisal):
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
        mean = lambda key: float(np.mean([part[key] for part in parts])) if parts[0][key] is not None else None
        rows.append({"policy": policy, "share": share, "streamed": st, "texts": len(parts),
                     "kl": mean("kl"), "top1": mean("top1"), "missed": mean("missed"), "on_host": mean("on_host"),
                     "moved": mean("moved"), "present": mean("present"), "host": max(part["host"] for part in parts),
                     "slots": max(part["slots"] for part in parts), "staged": max(part["staged"] for part in parts),
                     "kl_worst": max(part["kl"] for part in parts),
                     "bytes": max(part["bytes"] for part in parts),
                     "budget": parts[0]["budget"], "full_bytes": parts[0]["full_bytes"]})
    return rows


def table(rows):
    lines = ["%-14s %-9s %6s %9s %9s %9s %8s %8s %10s %9s %9s %8s %10s" % (
        "policy", "mode", "share", "bytes %", "KL", "worst KL", "top-1 %", "missed %", "on host %", "host MB", "staged kB",
        "kB/token", "present %")]
    for r in rows:
        zooms = r["present"] is not None
        lines.append("%-14s %-9s %5.1f%% %9.2f %9.4f %9.4f %8.1f %8.2f %10s %9s %9s %8s %10s" % (
            r["policy"], "streamed" if r["streamed"] else "whole", 100 * r["share"],
            100 * r["bytes"] / r["full_bytes"], r["kl"], r["kl_worst"], 100 * r["top1"], 100 * r["missed"],
            "%.2f" % (100 * r["on_host"]) if zooms else "-", "%.2f" % (r["host"] / 1e6) if zooms else "-",
            "%.0f" % (r["staged"] / 1e3) if zooms else "-",
            "%.0f" % (r["moved"] / 1e3) if zooms else "-", "%.1f" % (100 * r["present"]) if zooms else "-"))
    return "\n".join(lines)


def main():
    from .skerry_session import SkerrySession

    parser = argparse.ArgumentParser(prog="smollm2.quality", description="compare policies at equal bytes")
    parser.add_argument("--shares", default="20,10", help="percent of a full 16-bit cache, comma separated")
    parser.add_argument("--policies", default="streaming,evict,quantise,qevict,sekv,qevict-paper")
    parser.add_argument("--texts", default=str(len(TEXTS)), help="how many of the texts, or their names, comma separated")
    parser.add_argument("--prompt", type=int, default=PROMPT_TOKENS,
                        help="tokens to read; texts that are too short go on with the ones that follow")
    parser.add_argument("--mode", choices=("whole", "streamed", "both"), default="whole")
    parser.add_argument("--json", help="also write every row to this file")
    given = parser.parse_args()
    modes = {"whole": (False,), "streamed": (True,), "both": (False, True)}[given.mode]
    each = []
    rows = run(SkerrySession, given.policies.split(","), [float(s) / 100 for s in given.shares.split(",")],
               text_names(given.texts), modes, report=each.append, prompt=given.prompt)
    print(table(rows))
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps({"means": rows, "texts": each}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
