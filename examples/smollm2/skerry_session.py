"""Skerry behind Model.forward: one sequence of one cache, in the shape of PlainCache.

What the model and the driver need from a cache, and the calls of the library it becomes:

    begin(n, more)             Cache.step(sequence, n, prefill=more)
    attend(layer, q, k, v, p)  Step.append, then Step.attend; or, with own_attention,
                               Step.append, Step.gather, attention in numpy, Step.observe;
                               policy "sekv": Step.zoom before gather, one token per step
    hear(tokens, logits)       skerry.surprisal, then Step.surprisal: policies that cut a text
                               into spans are told how surprising each token was
    commit(), abort()          Step.commit, Step.abort
    room()                     most tokens of the next step: a step that the host attends
                               itself, or whose surprisal counts, may not cross the next
                               routing event; it holds one token where the host attends and
                               every token chooses what it reads from the host tier
    next_event()               position of the next routing event, or None
    fork()                     Sequence.fork: a second reader of the same bytes
    ranges(layer, kv_head)     Sequence.ranges as (begin, end, tier name)
    memory()                   what the library says it holds
    traffic()                  what was read from the host tier so far (policy "sekv")
"""

import os
import pathlib

import numpy as np
import skerry

from .plain import causal_attention
from .policies import wants_surprisal

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
_context = None


def context():
    """One context for the process, with a thread for every core and one that copies from the host tier."""
    global _context
    if _context is None:
        _context = skerry.Context(workers=max(0, (os.cpu_count() or 1) - 1), transfers=1)
    return _context


def library_text():
    return skerry.library().build_text


def geometry(config, layers):
    rotary = skerry.Rotary(config.inv_freq, pairing="half")
    return [skerry.Layer(kv_heads=config.kv_heads, query_heads=config.heads, key_dim=config.head_dim, rotary=rotary)
            for _ in range(layers)]


def widest_recent(total, policy, **options):
    """Largest recent region whose plan fits the budget: what sinks + recent can do with those bytes."""
    low, high = policy.get("period_tokens", 16), options["budget"].length_tokens
    while low < high:
        middle = (low + high + 1) // 2
        try:
            plan = context().plan(policy=skerry.Policy(recent_tokens=middle, **policy), **options)
            fits = plan.planned_bytes <= total
        except skerry.OverBudgetError:
            fits = False
        low, high = (middle, high) if fits else (low, middle - 1)
    return low


class SkerrySession:
    """A cache with one sequence in it.

    settings       keyword arguments of skerry.Policy
    budget         bytes of one sequence, or None for no limit
    length         tokens the budget is meant for, generation included
    prompt         longest prompt; held in full precision while it is read under prefill "whole"
    prefill        "whole": compress once when the prompt ends; "split": from the first event on
    forks          sequences that may be open beside this one
    own_attention  attend in numpy over what `gather` hands out, and report the masses
    exact          float32 attention instead of 8-bit dot products on low-bit records
    layers         layers of the cache; None: those of the model
    """

    def __init__(self, config, settings, budget, length, prompt, prefill="whole", forks=0, own_attention=False,
                 exact=False, layers=None, chunk=256):
        self.kv_heads = config.kv_heads
        self.own_attention = own_attention
        self.sequences = 1 + forks
        self.budget = budget
        # The published method compresses only when a prompt ends; to work from the first
        # token on, its prompt has to end with the first step.
        self.marks_prompt = prefill == "whole" or settings.get("fidelity") != "paper"
        limit = None if budget is None else skerry.Budget(bytes=budget * self.sequences, length_tokens=length)
        self.zooms = settings["kind"] == "sekv"
        self.wants_surprisal = wants_surprisal(settings)
        self.said = None
        policy = dict(settings, prefill=prefill)
        sekv = dict(policy.pop("sekv", {}))
        if "router" in policy:
            sekv["router"] = skerry.Router(str(DATA / policy.pop("router")), context=context())
        if sekv:
            policy["sekv"] = skerry.Sekv(**sekv)
        options = {"layers": geometry(config, layers or config.layers), "budget": limit,
                   "max_sequences": self.sequences, "max_step_tokens": chunk,
                   "staging_tokens": prompt if prefill == "whole" else 0, "exact_attend": exact}
        if settings["kind"] == "streaming" and budget is not None:
            # Its default keeps 32 recent tokens whatever the budget, which no other policy is held to.
            policy["recent_tokens"] = widest_recent(budget * self.sequences, policy=policy, **options)
        self.cache = skerry.Cache(policy=skerry.Policy(**policy), context=context(), **options)
        self.sequence = self.cache.sequence()
        self.step = None
        self.owner = True

    @property
    def length(self):
        return self.sequence.length

    def next_event(self):
        info = self.sequence.info()
        return info.next_event_position if info.next_event_position > info.length_tokens else None

    def room(self):
        # The host tier is empty while a whole prompt is read; from then on a step zooms, with one token.
        if self.own_attention and self.zooms and self.sequence.info().host_bytes > 0:
            return 1
        if not self.own_attention and not self.wants_surprisal:
            return None
        event = self.next_event()
        return None if event is None else event - self.length

    def begin(self, n, more=False):
        self.step = self.cache.step(self.sequence, n, prefill=more and self.marks_prompt)

    def attend(self, layer, q, k, v, positions):
        self.step.append(layer, k, v)
        if not self.own_attention:
            return self.step.attend(layer, q)[0]
        out = np.empty_like(q)
        group = q.shape[1] // self.kv_heads
        if self.zooms and len(q) == 1:
            self.step.zoom(layer, q)
        for h in range(self.kv_heads):
            mine = slice(h * group, (h + 1) * group)
            seen = self.step.gather(layer, h)
            got, weights = causal_attention(np.ascontiguousarray(q[:, mine].swapaxes(0, 1)), seen.keys, seen.values,
                                            seen.positions, positions, seen.bias)
            out[:, mine] = got.swapaxes(0, 1)
            self.step.observe(layer, h, masses=np.minimum(weights.mean(axis=0), 1.0), queries=q[:, mine])
        return out

    def hear(self, tokens, logits):
        """logits[n, vocab] of the step's tokens; those of the step before say how surprising the first token is."""
        nats = np.zeros(len(tokens), np.float32)
        if self.said is not None:
            nats[:1] = skerry.surprisal(self.said, tokens[:1])
        if len(tokens) > 1:
            nats[1:] = skerry.surprisal(logits[:-1], tokens[1:])
        self.surprise(nats, logits[-1:].copy())

    def surprise(self, nats, said):
        """nats[n] of the step's tokens, known already; `said`: logits of the last one."""
        self.step.surprisal(nats)
        self.said = said

    def commit(self):
        self.step.commit()
        self.step = None

    def abort(self):
        self.step.abort()
        self.step = None

    def fork(self):
        child = object.__new__(SkerrySession)
        child.__dict__.update(self.__dict__)
        child.sequence = self.sequence.fork()
        child.owner = False
        return child

    def close(self):
        if self.owner:
            self.cache.close()
        else:
            self.sequence.drop()

    def ranges(self, layer, kv_head):
        """(begin, end, tier); the tier of a window that the last token read from the host is "zoomed"."""
        return [(r.begin, r.end, "zoomed" if "zoomed" in r.flags else r.tier)
                for r in self.sequence.ranges(layer, kv_head)]

    def memory(self):
        """Bytes as the library reports them.

        bytes      what one sequence costs: under a budget everything that is held for it, free
                   slots and tables included; without one, the slots in use
        slots      of these: windows read from the host that stay (policy "sekv")
        staged     of the staging: what one layer reads from the host, and the next
        host       host memory of one sequence on top, its tables included
        staging    held on top while a step is in flight and a prompt is read
        """
        held = self.cache.memory()
        whole = held.pool_bytes + held.table_bytes
        return {"bytes": held.used_bytes if self.budget is None else whole // self.sequences,
                "used": held.used_bytes, "pool": held.pool_bytes, "table": held.table_bytes,
                "staging": held.staging_bytes, "fixed": held.fixed_bytes, "peak": held.peak_bytes,
                "host": held.host_bytes // self.sequences, "slots": self.cache.plan.zoom_bytes // self.sequences,
                "staged": self.cache.plan.zoom_staging_bytes,
                "charged_bytes": self.sequence.info().charged_bytes}

    def traffic(self):
        """What queries chose to read from the host tier since the cache was made, and what was copied for it."""
        held = self.cache.counters()
        return {"zooms": held.zooms, "present": held.zooms_present, "bytes": held.fetched_bytes}
