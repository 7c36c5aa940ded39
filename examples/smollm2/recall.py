"""Does policy "sekv" bring back the right windows? Mass, effect on the output, distance to an oracle, needles.

    python -m smollm2.recall                      from the folder examples/; examples/run recall
    python -m smollm2.recall --texts 2 --needles 12 --parts choice,needles

choice    on the full cache's own queries, nothing but sinks, recent tokens and router keys on the
          device: the share of what an oracle that fetches as much would catch, of attention mass
          and of the effect on the head's output
oracle    the quality protocol with the windows of largest true mass in place of the router's
          choice; as many of them, in the host's format, and the same bytes on the device
needles   six digits in a novel, asked for by a question that comes after compression. The digits
          are teacher-forced; found means that each was the likeliest, so that greedy decoding would
          have written them. Only contexts count in which the full cache finds them. Many of those it
          finds narrowly, so the loss of the digits says more than their number does
"""

import argparse
import json
import pathlib
import sys

import numpy as np

from .bar import Bar
from .model import Model, log_softmax
from .plain import PlainCache, causal_attention
from .policies import POLICIES, budget_bytes
from .quality import CONTINUATION_TOKENS, DATA, TEXTS, load_traces, measure, text_names
from .skerry_session import SkerrySession
from .tokens import Tokens
from .trace import Trace

# More than sinks, recent tokens and router keys need; without residents the rest stays empty.
CHOICE_SHARE = 0.5
NEEDLE_TOKENS = 1900
NEEDLE = "The secret passphrase of the %s consists of six digits: %s. "
QUESTION = "What is the secret passphrase of the %s?"
OPENING = "The secret passphrase of the %s is "
PLACES = ("north archive", "harbour gate", "old observatory", "east greenhouse", "record vault", "upper reservoir",
          "glass workshop", "south stable", "map room", "winter kitchen", "bell tower", "tide station")


def window_sums(values, sinks, window, count):
    """Sums over `count` windows of the last axis but one of values[..., tokens, d]."""
    part = values[..., sinks:sinks + count * window, :]
    return part.reshape(part.shape[:-2] + (count, window, part.shape[-1])).sum(axis=-2)


def caught(worth, candidates, chosen):
    """(worth[chosen], worth of the best as many among the candidates)."""
    best = np.sort(worth[candidates])[len(candidates) - len(chosen):]
    return float(worth[chosen].sum()), float(best.sum())


def measure_choice(trace, settings, bar=None):
    """Router against oracle over the continuation; a dict of shares."""
    config, n = trace.model.config, len(trace.tokens)
    length = n + len(trace.continuation)
    settings = dict(settings, sekv=dict(settings.get("sekv", {}), residents=False))
    session = SkerrySession(config, settings, budget_bytes(config, CHOICE_SHARE, length), length, n)
    plan = session.cache.plan
    sinks, window = plan.sink_tokens, plan.window_tokens
    group = config.heads // config.kv_heads
    mass, effect, same, picked, fetched, seen = np.zeros(2), np.zeros(2), 0, 0, 0, 0
    last = {}
    try:
        trace.replay(session)
        for at in range(n, length):
            positions = np.arange(at, at + 1)
            session.begin(1)
            rows = [trace.rows(layer, at, at + 1) for layer in range(config.layers)]
            for layer, row in enumerate(rows):
                session.attend(layer, *row, positions)
            session.commit()
            for layer, (q, _, _) in enumerate(rows):
                for h in range(config.kv_heads):
                    away = [((begin - sinks) // window, tier) for begin, _, tier in session.ranges(layer, h)
                            if tier in ("host", "zoomed")]
                    candidates = np.array([w for w, _ in away])
                    chosen = np.array([w for w, tier in away if tier == "zoomed"])
                    keys, values = trace.cache.keys(layer, h)[:at + 1], trace.cache.values(layer, h)[:at + 1]
                    mine = q[:, h * group:(h + 1) * group].swapaxes(0, 1)
                    out, weights = causal_attention(np.ascontiguousarray(mine), keys, values, np.arange(at + 1), positions)
                    count = int(candidates[-1]) + 1
                    masses = window_sums(weights[:, 0, :, None], sinks, window, count)       # [group, windows, 1]
                    moved = window_sums(weights[:, 0, :, None] * values, sinks, window, count) - masses * out
                    mass += caught(masses[..., 0].sum(axis=0), candidates, chosen)
                    effect += caught(np.sqrt((moved ** 2).sum(axis=-1)).sum(axis=0), candidates, chosen)
                    before = last.get((layer, h))
                    if before is not None:
                        same += len(np.intersect1d(before, chosen))
                        picked += len(chosen)
                    last[layer, h] = chosen
                    fetched, seen = fetched + len(chosen), seen + len(candidates)
            if bar:
                bar.step()
    finally:
        session.close()
    return {"mass": mass[0] / mass[1], "effect": effect[0] / effect[1], "kept": same / picked, "fetched": fetched / seen,
            "router": plan.router_bytes / config.cache_bytes(length)}


class OracleSession(SkerrySession):
    """What is on the device, attended with the windows that truly carry most mass.

    Chooses as many windows as the router would and holds the same bytes on the device. The
    windows come from a second cache that has every window in the format of the host's detail.
    """

    def __init__(self, config, settings, budget, length, prompt, prefill="whole", **options):
        super().__init__(config, settings, budget, length, prompt, prefill, own_attention=True, **options)
        self.exact = PlainCache(config, length)
        plan = self.cache.plan
        self.sinks, self.window, self.fetch = plan.sink_tokens, plan.window_tokens, plan.fetch_windows
        self.fetch_share, self.refine = plan.fetch_ppm / 1e6, plan.refine_ppm / 1e6
        coded = {"kind": "quantise", "key_format": plan.detail_format, "value_format": plan.detail_format}
        self.detail = SkerrySession(config, coded, None, length, prompt, prefill)

    def close(self):
        self.detail.close()
        super().close()

    def room(self):
        event = self.next_event()
        return None if event is None else event - self.length

    def begin(self, n, more=False):
        super().begin(n, more)
        self.exact.begin(n, more)
        self.detail.begin(n, more)

    def commit(self):
        super().commit()
        self.exact.commit()
        self.detail.commit()

    def attend(self, layer, q, k, v, positions):
        self.detail.attend(layer, q, k, v, positions)
        if not self.sequence.info().host_bytes:
            # Nothing has been compressed: exact attention is all there is.
            self.exact.watch = lambda at, h, _, weights: self.step.observe(
                at, h, masses=np.minimum(weights.mean(axis=0), 1.0), queries=q[:, h * len(weights):(h + 1) * len(weights)])
            self.step.append(layer, k, v)
            return self.exact.attend(layer, q, k, v, positions)
        self.step.append(layer, k, v)
        out = np.empty_like(q)
        group = q.shape[1] // self.kv_heads
        end = self.exact.length + len(q)
        for h in range(self.kv_heads):
            self.exact._k[layer, h, end - len(q):end] = k[:, h]
            self.exact._v[layer, h, end - len(q):end] = v[:, h]
            seen, coded = self.step.gather(layer, h), self.detail.step.gather(layer, h)
            held = [r for r in self.sequence.ranges(layer, h) if "detail" in r.flags]
            open_to = np.array([(r.begin - self.sinks) // self.window for r in held if r.tier != "full"])
            factor = np.array([1.0 if r.tier == "host" else self.refine for r in held if r.tier != "full"])
            wanted = min(self.fetch, len(open_to), int(np.ceil(len(held) * self.fetch_share)))
            masses = np.zeros((len(q), seen.tokens), np.float32)
            for i, position in enumerate(positions):
                row = np.ascontiguousarray(q[i:i + 1, h * group:(h + 1) * group].swapaxes(0, 1))
                keys, values = self.exact._k[layer, h, :position + 1], self.exact._v[layer, h, :position + 1]
                _, weights = causal_attention(row, keys, values, np.arange(position + 1), positions[i:i + 1])
                worth = window_sums(weights[:, 0, :, None], self.sinks, self.window, int(open_to[-1]) + 1)[..., 0].sum(axis=0)
                chosen = open_to[np.argsort(-worth[open_to] * factor, kind="stable")[:wanted]]
                fetched = (self.sinks + chosen[:, None] * self.window + np.arange(self.window)).ravel()
                kept = np.flatnonzero(~np.isin(seen.positions, fetched))
                at = np.concatenate([seen.positions[kept], fetched])
                order = np.argsort(at, kind="stable")
                all_keys = np.concatenate([seen.keys[kept], coded.keys[fetched]])[order]
                all_values = np.concatenate([seen.values[kept], coded.values[fetched]])[order]
                got, mass = causal_attention(row, all_keys, all_values, at[order], positions[i:i + 1])
                out[i, h * group:(h + 1) * group] = got[:, 0]
                mean = np.empty(len(at), np.float32)
                mean[order] = mass[:, 0].mean(axis=0)
                masses[i, kept] = mean[:len(kept)]
                # A window that the device holds too is scored by what its detail got.
                place = np.searchsorted(seen.positions, fetched)
                there = np.flatnonzero((place < seen.tokens) & (seen.positions[np.minimum(place, seen.tokens - 1)] == fetched))
                masses[i, place[there]] = mean[len(kept) + there]
            self.step.observe(layer, h, masses=np.minimum(masses, 1.0), queries=q[:, h * group:(h + 1) * group])
        return out


def needle_context(tokens, text, place, key, depth):
    """Token ids of a user's turn that stays open: NEEDLE_TOKENS of a novel with one sentence that holds the key."""
    ids = tokens.encode(text)[:NEEDLE_TOKENS]
    novel = tokens.decode(ids)
    cut = novel.find(". ", int(depth * len(novel)))
    cut = len(novel) if cut < 0 else cut + 2
    return tokens.encode(tokens.chat_start(novel[:cut] + NEEDLE % (place, key) + novel[cut:]))


def needle(model, tokens, name, number, cases):
    """One needle under `cases` (label -> (settings, share)): label -> (found, nats per digit); "full" among them.

    Only "full" where the full cache does not find it.
    """
    random = np.random.default_rng([number, 4])
    place, key = PLACES[random.integers(len(PLACES))], "%06d" % random.integers(100000, 1000000)
    text = (DATA / (name + ".txt")).read_text(encoding="utf-8")
    # Each use of a text starts at another sentence.
    start = text.find(". ", int(random.uniform(0, 0.15) * len(text))) + 2
    context = needle_context(tokens, text[start:], place, key, random.uniform(0.05, 0.9))
    asked = tokens.encode(tokens.chat_ask(QUESTION % place) + OPENING % place)
    answer = np.array(tokens.encode(key))
    fed = asked + list(answer[:-1])
    config, n = model.config, len(context)
    length = n + len(fed)
    trace = Trace(model, context, [tokens.end], len(fed))
    plain = trace.cache
    plain.truncate(n)

    def finds(cache):
        logits = model.prefill(fed, cache, n, logits="all")[len(asked) - 1:]
        loss = -log_softmax(logits)[np.arange(len(answer)), answer].mean()
        return bool((logits.argmax(axis=1) == answer).all()), float(loss)

    found = {"full": finds(plain)}
    for label, (settings, share) in cases.items() if found["full"][0] else ():
        session = SkerrySession(config, settings, budget_bytes(config, share, length), length, n)
        try:
            trace.replay(session)
            found[label] = finds(session)
        finally:
            session.close()
    return found


def main():
    parser = argparse.ArgumentParser(prog="smollm2.recall", description=__doc__.split("\n")[0])
    parser.add_argument("--parts", default="choice,oracle,needles")
    parser.add_argument("--texts", default="4", help="how many texts for choice and oracle, or their names")
    parser.add_argument("--fetch", default="6,12", help="percent of the windows read, comma separated, for choice")
    parser.add_argument("--shares", default="50,20,10", help="percent of a full 16-bit cache on the device, for oracle and needles")
    parser.add_argument("--needles", type=int, default=30, help="how many contexts")
    parser.add_argument("--json", help="also write the figures to this file")
    given = parser.parse_args()
    parts = given.parts.split(",")
    model, tokens = Model(), Tokens()
    names = text_names(given.texts)
    figures = {}

    shares = [float(s) / 100 for s in given.shares.split(",")]
    fetches = [float(f) / 100 for f in given.fetch.split(",")]
    choice = {fetch: [] for fetch in fetches}
    rows = {(label, share): [] for share in shares for label in ("streaming", "qevict", "sekv", "oracle")}
    for name, trace in load_traces(model, tokens, names) if set(parts) & {"choice", "oracle"} else ():
        if "choice" in parts:
            bar = Bar("choice, " + name, len(fetches) * CONTINUATION_TOKENS)
            for fetch in fetches:
                settings = {"kind": "sekv", "sekv": {"fetch_ppm": round(1e6 * fetch)}}
                choice[fetch].append(measure_choice(trace, settings, bar))
            bar.close()
        if "oracle" in parts:
            bar = Bar("oracle, " + name, len(rows))
            for label, share in rows:
                kind, opener = ("sekv", OracleSession) if label == "oracle" else (label, SkerrySession)
                rows[label, share].append(measure(trace, opener, kind, share))
                bar.step()
            bar.close()
    if "choice" in parts:
        print("choice: shares of what an oracle with the same transfer catches, %d texts" % len(names))
        print("%9s %9s %10s %10s %10s %18s" % ("fetched", "router", "mass", "effect", "kept", "worst mass, effect"))
        for fetch, found in choice.items():
            mean = {key: float(np.mean([f[key] for f in found])) for key in found[0]}
            print("%8.1f%% %8.2f%% %9.1f%% %9.1f%% %9.1f%% %8.1f%% %8.1f%%" % (
                100 * mean["fetched"], 100 * mean["router"], 100 * mean["mass"], 100 * mean["effect"], 100 * mean["kept"],
                100 * min(f["mass"] for f in found), 100 * min(f["effect"] for f in found)))
        figures["choice"] = {str(k): v for k, v in choice.items()}
    if "oracle" in parts:
        print("\noracle: KL to the full cache at equal bytes on the device, mean and worst of %d texts" % len(names))
        print("%9s %20s %20s %20s %20s" % ("bytes", "streaming", "qevict", "sekv", "sekv, oracle"))
        for share in shares:
            cells = [[row["kl"] for row in rows[label, share]] for label in ("streaming", "qevict", "sekv", "oracle")]
            print("%8.0f%% %s" % (100 * share, " ".join("%11.4f %8.4f" % (np.mean(c), max(c)) for c in cells)))
        figures["oracle"] = {"%s %g" % key: found for key, found in rows.items()}
    if "needles" in parts:
        cases = {"%s, %g %%" % (name, 100 * share): (POLICIES[name], share) for name in ("qevict", "sekv") for share in shares}
        cases["sekv, nothing in low bits"] = {"kind": "sekv", "sekv": {"residents": False}}, 0.1
        bar = Bar("needles", given.needles)
        found = []
        for number in range(given.needles):
            found.append(needle(model, tokens, TEXTS[number % len(TEXTS)], number, cases))
            bar.step()
        bar.close()
        scored = [f for f in found if f["full"][0]]
        print("\nneedles: %d contexts, the full cache answers in %d" % (len(found), len(scored)))
        for label in ("full", *cases) if scored else ():
            right, loss = sum(f[label][0] for f in scored), np.mean([f[label][1] for f in scored])
            print("  %-28s %3d of %d, %3.0f %%; %.3f nats per digit" % (label, right, len(scored), 100 * right / len(scored), loss))
        figures["needles"] = found
    if given.json:
        pathlib.Path(given.json).write_text(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
