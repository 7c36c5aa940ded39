# SPDX-License-Identifier: MIT
"""The teacher's pass: keys, values and some queries of every layer, per prompt one folder of .npy files.

    tokens [n] int32        surprisal [n] f32, nats, 0 for the first token
    keys, values [L, G, n, d] f16, keys as attention uses them (rotated)
    positions [P] int32     queries [L, P, H, d] f16

Attention matrices are looked at row block by row block and never kept. A model is anything with

    config.layers, .heads, .kv_heads, .head_dim
    prefill(tokens, cache, start, logits="all") -> [n, vocab], which calls per layer and block of rows
    cache.begin(n, more), cache.attend(layer, q [n, H, d], k, v [n, G, d], positions) -> [n, H, d], cache.commit()

as examples/smollm2/model.py has it.
"""

import pathlib

import numpy as np

from . import prompts as prompting
from .segments import log_sum_exp


class Steps:
    """What a teacher's cache does about steps: any length, `length` positions committed, `pending` in the open one."""

    length = pending = 0

    def room(self):
        return None

    def begin(self, n, more=False):
        self.pending = n

    def commit(self):
        self.length += self.pending
        self.pending = 0

    def abort(self):
        self.pending = 0


class CaptureCache(Steps):
    """An exact cache for one prompt that keeps queries and the share of attention that goes far back."""

    def __init__(self, config, capacity, layout, far=512):
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self.config, self.layout, self.far = config, layout, far
        self.keys, self.values = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.queries = np.empty((config.layers, capacity, config.heads, config.head_dim), np.float16)
        # Of every position: mass on keys before position - far, and on all; sinks left out of both, since every head
        # parks mass there and a router is never asked for them.
        self.far_mass, self.all_mass = np.zeros(capacity), np.zeros(capacity)

    def attend(self, layer, q, k, v, positions):
        n, heads, dim = q.shape
        share = heads // self.config.kv_heads
        end = self.length + n
        self.queries[layer, self.length:end] = q
        out = np.empty_like(q)
        hidden = np.arange(end)[None, :] > positions[:, None]
        long_ago = np.arange(end)[None, :] < positions[:, None] - self.far
        for group in range(self.config.kv_heads):
            self.keys[layer, group, self.length:end] = k[:, group]
            self.values[layer, group, self.length:end] = v[:, group]
            for head in range(group * share, (group + 1) * share):
                weights = q[:, head] @ self.keys[layer, group, :end].T
                weights *= np.float32(dim ** -0.5)
                weights[hidden] = -np.inf
                weights -= weights.max(1, keepdims=True)
                np.exp(weights, out=weights)
                weights /= weights.sum(1, keepdims=True)
                out[:, head] = weights @ self.values[layer, group, :end]
                weights[:, :self.layout.sinks] = 0
                self.all_mass[positions] += weights.sum(1)
                self.far_mass[positions] += np.einsum("nt,nt->n", weights, long_ago)
        return out


def surprisal(logits, tokens, block=64):
    """Nats per token given the logits of the row before; 0 for the first (sekv.md 1.1)."""
    tokens = np.asarray(tokens)
    out = np.zeros(len(tokens), np.float32)
    for at in range(0, len(tokens) - 1, block):
        rows = logits[at:min(at + block, len(tokens) - 1)]
        following = tokens[at + 1:at + 1 + len(rows)]
        out[at + 1:at + 1 + len(rows)] = log_sum_exp(rows) - rows[np.arange(len(rows)), following]
    return out


def mine(cache, count, rng, least, share=0.5):
    """`count` ascending positions: a share of those that look farthest back, the rest drawn evenly from the others."""
    n = cache.length
    candidates = np.arange(least, n)
    count = min(count, len(candidates))
    ratio = cache.far_mass[candidates] / np.maximum(cache.all_mass[candidates], 1e-12)
    mined = candidates[np.argsort(-ratio, kind="stable")[:int(count * share)]]
    rest = np.setdiff1d(candidates, mined)
    # One of each of equal strips, so that short and long contexts are both seen.
    strips = np.array_split(rest, count - len(mined))
    return np.sort(np.concatenate([mined, [int(rng.choice(s)) for s in strips]])).astype(np.int32)


def capture(model, tokens, layout, queries, rng=None, positions=None):
    """The arrays of one prompt as a dict. Queries at `positions`, or `queries` mined ones."""
    cache = CaptureCache(model.config, len(tokens), layout)
    logits = model.prefill(tokens, cache, 0, logits="all")
    if positions is None:
        positions = mine(cache, queries, rng, least=layout.sinks + layout.recent + 8 * layout.length)
    return {"tokens": np.asarray(tokens, np.int32), "surprisal": surprisal(logits, tokens),
            "keys": cache.keys.astype(np.float16), "values": cache.values.astype(np.float16),
            "positions": np.asarray(positions, np.int32), "queries": cache.queries[:, positions]}


class Capture:
    """Files of one folder. `layer` reads one layer of one prompt without the others."""

    ARRAYS = ("tokens", "surprisal", "keys", "values", "positions", "queries")

    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.names = sorted(path.name for path in self.folder.iterdir() if (path / "queries.npy").exists())
        if not self.names:
            raise FileNotFoundError("%s holds no captured prompts" % self.folder)

    @staticmethod
    def write(folder, name, arrays):
        place = pathlib.Path(folder) / name
        place.mkdir(parents=True, exist_ok=True)
        for key in Capture.ARRAYS:
            np.save(place / (key + ".npy"), arrays[key])

    def __len__(self):
        return len(self.names)

    def read(self, index):
        """The arrays of a prompt, mapped from its files."""
        return {key: np.load(self.folder / self.names[index] / (key + ".npy"), mmap_mode="r") for key in self.ARRAYS}

    def layer(self, index, layer):
        """(positions, queries [P, H, d], keys, values [G, n, d]) as f32."""
        arrays = self.read(index)
        return (np.array(arrays["positions"]),) + tuple(
            np.asarray(arrays[key][layer], np.float32) for key in ("queries", "keys", "values"))


def capture_texts(model, tokens, texts, out, layout, *, prompts, length, queries, long=0, questions=True, last=0, seed=0, bar=None):
    """Captures `prompts` prompts of `length` tokens, and `long` of twice that, from the texts (paths) in turn.

    With `questions` every second round over the texts is chats with facts and questions. `last` asks for the queries of the
    last so many positions, in place of mined ones. Prompts that are there already are kept: prompt i depends on the seed
    and on i alone.
    """
    texts = sorted(pathlib.Path(path) for path in texts)
    for index in range(prompts + long):
        path = texts[index % len(texts)]
        asks = questions and index // len(texts) % 2 == 1
        size = length if index < prompts else 2 * length
        name = "%03d_%s%s" % (index, path.stem, "_questions" if asks else "")
        if not (pathlib.Path(out) / name / (Capture.ARRAYS[-1] + ".npy")).exists():
            rng = np.random.default_rng([seed, index])
            draw = prompting.with_questions if asks else prompting.plain
            ids = draw(tokens, path.read_text(encoding="utf-8"), size, rng)
            positions = np.arange(len(ids) - last, len(ids)) if last else None
            Capture.write(out, name, capture(model, ids, layout, queries, rng, positions))
        if bar:
            bar.step(name)
