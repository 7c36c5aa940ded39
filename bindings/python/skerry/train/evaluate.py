# SPDX-License-Identifier: MIT
"""Routers side by side on texts that no router has seen: recall, divergence and needles.

Fetching is simulated (`FetchCache`): every row of new tokens sees the sinks, the recent tokens and the segments that the router
picks for it per KV head, in r4; what is not fetched is absent.
"""

import numpy as np

from . import metrics, prompts, rformat, routers
from .capture import Steps
from .segments import Layout
from .targets import targets

SHARES = (0.033, 0.058, 0.117)  # 4, 7 and 14 of 120 segments: "3, 6, 12 %" of recall.md


def recall(capture, candidates, layout=Layout(), shares=SHARES, bar=None):
    """{(router, share): (mass, effect)} caught, relative to the oracle of each, over all layers and prompts of a Capture."""
    sums = {}
    for index in range(len(capture)):
        layers = capture.read(index)["queries"].shape[0]
        for layer in range(layers):
            positions, queries, keys, values = capture.layer(index, layer)
            true = targets(layout, positions, queries, keys, values)
            square = routers.mean_square(queries, keys.shape[0])
            for name, router in candidates.items():
                estimate = router.estimate(layer, queries, keys, positions, square)
                for share, parts in metrics.recall(estimate, true, keys.shape[0], shares).items():
                    sums[name, share] = sums.get((name, share), 0) + np.array(parts)
            if bar:
                bar.step()
    return {key: (s[0] / s[1], s[2] / s[3]) for key, s in sums.items()}


class FetchCache(Steps):
    """Cache object of a teacher: exact while it reads the prompt, fetching for what comes after.

    `share` of the candidate segments is fetched per row and KV head; None means that all of them are there, exactly.
    """

    def __init__(self, config, capacity, layout=Layout()):
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.config, self.layout = config, layout
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.square = np.zeros((config.layers, config.kv_heads, config.head_dim))
        self.seen = np.zeros(config.layers, np.int64)
        self.router = self.share = None
        self.detail = {}  # (layer, KV head): grid, keys and values of segments in r4

    def load(self, arrays, length):
        """The first `length` positions of a captured prompt, with E[q^2] of its captured queries."""
        self.keys[:, :, :length], self.values[:, :, :length] = arrays["keys"][:, :, :length], arrays["values"][:, :, :length]
        for layer in range(self.config.layers):
            self.square[layer] = routers.mean_square(np.asarray(arrays["queries"][layer]), self.config.kv_heads)
        self.length = length

    def truncate(self, length):
        self.length = length
        whole = self.layout.count(length) * self.layout.length
        self.detail = {key: (grid, keys[:whole], values[:whole]) for key, (grid, keys, values) in self.detail.items()}

    def coded(self, layer, group, segments):
        """r4 keys and values of the first segments, coded once, under the balance of the first fetch."""
        inside = self.layout.span(segments)
        keys, values = self.keys[layer, group, inside], self.values[layer, group, inside]
        if (layer, group) not in self.detail:
            self.detail[layer, group] = rformat.balance(keys, self.square[layer, group]), keys[:0], values[:0]
        grid, old_keys, old_values = self.detail[layer, group]
        have = len(old_keys)
        if have < len(keys):
            old_keys = np.concatenate([old_keys, rformat.coded(keys[have:], 4, *grid)])
            old_values = np.concatenate([old_values, rformat.coded(values[have:], 4)])
            self.detail[layer, group] = grid, old_keys, old_values
        return old_keys[:len(keys)], old_values[:len(keys)]

    def visible(self, layer, q, positions, end):
        """(segments, chosen [P, G, M], on the device [P, end])."""
        segments = int(self.layout.candidates(positions).max(initial=0))
        inside = self.layout.span(segments)
        allowed = np.arange(segments)[None, :] < self.layout.candidates(positions)[:, None]
        device = np.arange(end)[None, :] <= positions[:, None]
        device[:, inside] &= ~np.repeat(allowed, self.layout.length, 1)
        if self.router is None:
            return segments, np.zeros((len(positions), self.config.kv_heads, segments), bool), device
        keys = self.keys[layer, :, :end]
        estimate = np.where(allowed[:, None], self.router.estimate(layer, q, keys, positions, self.square[layer]), -np.inf)
        share = q.shape[1] // self.config.kv_heads
        scaled = q * np.float32(q.shape[2] ** -0.5)
        lse = np.stack([routers.log_sum_exp(np.where(device, scaled[:, head] @ keys[head // share].T, -np.inf))
                        for head in range(q.shape[1])], 1)
        scores = metrics.group_scores(estimate, lse, self.config.kv_heads)
        return segments, metrics.best(scores, self.share, allowed), device

    def attend(self, layer, q, k, v, positions):
        n, heads, dim = q.shape
        groups = self.config.kv_heads
        end = self.length + n
        self.keys[layer, :, self.length:end] = k.swapaxes(0, 1)
        self.values[layer, :, self.length:end] = v.swapaxes(0, 1)
        out = np.empty_like(q)
        exact = self.share is None
        if exact:
            mean = self.seen[layer] / (self.seen[layer] + n)
            self.square[layer] = mean * self.square[layer] + (1 - mean) * routers.mean_square(q, groups)
            self.seen[layer] += n
            shown = np.broadcast_to((np.arange(end)[None, :] <= positions[:, None])[:, None], (n, groups, end))
        else:
            segments, chosen, device = self.visible(layer, q, positions, end)
            inside = self.layout.span(segments)
        for group in range(groups):
            keys, values = self.keys[layer, group, :end], self.values[layer, group, :end]
            mine = slice(group * (heads // groups), (group + 1) * (heads // groups))
            rows = q[:, mine].reshape(-1, dim) * np.float32(dim ** -0.5)
            near = shown[:, group] if exact else device
            logits = np.where(near[:, None], (rows @ keys.T).reshape(n, -1, end), -np.inf)
            if not exact:
                far_keys, far_values = self.coded(layer, group, segments)
                fetched = np.repeat(chosen[:, group], self.layout.length, 1)[:, None]
                logits = np.concatenate([logits, np.where(fetched, (rows @ far_keys.T).reshape(n, -1, len(far_keys)), -np.inf)], -1)
                values = np.concatenate([values, far_values])
            logits -= logits.max(-1, keepdims=True)
            np.exp(logits, out=logits)
            logits /= logits.sum(-1, keepdims=True)
            out[:, mine] = (logits.reshape(len(rows), -1) @ values).reshape(n, -1, dim)
        return out

    def fetch(self, router, share):
        """From here on `share` of the candidates, chosen by `router`; (None, 0) fetches nothing, (None, None) is exact."""
        self.router, self.share = router, share


def log_softmax(logits):
    x = logits.astype(np.float64)
    return x - routers.log_sum_exp(x)[..., None]


def divergence(model, arrays, candidates, shares=SHARES, layout=Layout()):
    """{(router, share): (mean KL, share of equal best tokens)} on the queried last tokens of a captured prompt, and ("nothing", 0)."""
    ids, start = np.asarray(arrays["tokens"]), int(arrays["positions"][0])
    cache = FetchCache(model.config, len(ids), layout)
    cache.load(arrays, start)
    square = cache.square.copy()
    full = log_softmax(model.forward(ids[start:], cache, start, "all"))
    # E[q^2] is frozen when the prompt ends.
    cache.square = square
    out = {}
    for name, router, share in [("nothing", None, 0.0)] + [(n, r, s) for n, r in candidates.items() for s in shares]:
        cache.truncate(start)
        cache.fetch(router, share)
        got = log_softmax(model.forward(ids[start:], cache, start, "all"))
        kl = float((np.exp(full) * (full - got)).sum(-1).mean())
        out[name, share] = kl, float((full.argmax(-1) == got.argmax(-1)).mean())
    return out


# Worded unlike every training fact, with a key of another length than most; asked after the prompt has been read.
NEEDLE = "The secret passphrase of the observatory consists of six digits: %s."
QUESTION = "What is the secret passphrase of the observatory?"
ANSWER = "The secret passphrase of the observatory is "


def needle(model, tokens, text, length, rng, candidates, shares=SHARES, layout=Layout()):
    """{(router, share): share of the six digits that come out}, ("full", 0) first; an answer is right at 1.

    Digits are teacher-forced: all right is what greedy decoding would have written.
    """
    digits = "".join(str(d) for d in rng.integers(0, 10, 6))
    sentences = tokens.decode(prompts.plain(tokens, text, length, rng)).split(". ")
    place = int(rng.integers(1, len(sentences) - 1))
    sentences.insert(place, (NEEDLE % digits)[:-1])
    read = tokens.encode(tokens.chat_start(". ".join(sentences)))
    asked = tokens.encode(tokens.chat_ask(QUESTION) + ANSWER)
    answer = tokens.encode(digits)
    if len(answer) != len(digits):
        raise ValueError("the tokenizer does not split digits one by one")
    cache = FetchCache(model.config, len(read) + len(asked) + len(answer), layout)
    model.prefill(read, cache, 0, logits="none")
    square = cache.square.copy()
    out = {}
    cases = [("full", None, None), ("nothing", None, 0.0)] + [(n, r, s) for n, r in candidates.items() for s in shares]
    for name, router, share in cases:
        cache.truncate(len(read))
        cache.square = square.copy()
        cache.fetch(router, share)
        logits = model.forward(asked + answer[:-1], cache, len(read), "all")[len(asked) - 1:]
        out[name, share or 0.0] = float((logits.argmax(-1) == answer).mean())
    return out
