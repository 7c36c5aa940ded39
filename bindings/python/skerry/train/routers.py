# SPDX-License-Identifier: MIT
"""Routers as arithmetic: estimates of every segment's log mass, from what the device would hold of it.

`estimate(layer, queries, keys, positions, square)` takes queries [P, H, d] and keys [G, N, d] of one layer and prompt, and
E[q^2] [G, d] of queries seen so far, and returns [P, H, M] for as many segments as the last query may fetch.
"""

import numpy as np

from . import rformat
from .segments import SLOTS, Layout, centroids, log_counts, log_sum_exp


def cut(layout, keys, positions):
    """Keys of the candidate segments, [G, M, length, d]."""
    segments = int(layout.candidates(positions).max(initial=0))
    return keys[:, layout.span(segments)].reshape(keys.shape[0], segments, layout.length, -1)


def mean_square(queries, groups):
    """E[q^2] per channel of queries [P, H, d], over rows and the heads of a KV head: [G, d]."""
    rows, heads, dim = queries.shape
    return (queries.astype(np.float32) ** 2).reshape(rows, groups, heads // groups, dim).mean((0, 2))


class Oracle:
    """The true masses."""

    def __init__(self, layout=Layout()):
        self.layout = layout

    def bytes(self, dim):
        return 0

    def estimate(self, layer, queries, keys, positions, square):
        share = queries.shape[1] // keys.shape[0]
        cutted = cut(self.layout, keys, positions).repeat(share, 0)
        logits = np.einsum("phd,hmtd->phmt", queries * np.float32(queries.shape[2] ** -0.5), cutted, optimize=True)
        return log_sum_exp(logits)


class TrainingFree:
    """Centroids of post-RoPE keys in r2 (recall.md section 7).

    Channels count with (E[q^2]) ^ (metric / 2) in distances: 0 is plain keys, 1 the errors that channels make in logits.
    """

    def __init__(self, layout=Layout(), slots=SLOTS, bits=2, metric=0.0):
        self.layout, self.slots, self.bits, self.metric = layout, slots, bits, metric

    def bytes(self, dim):
        """Bytes of a segment and KV head: codes and an f16 scale per centroid, and a count of one byte."""
        return self.slots * (dim * self.bits // 8 + 2) + self.slots

    def estimate(self, layer, queries, keys, positions, square):
        rows, heads, dim = queries.shape
        groups = keys.shape[0]
        share = heads // groups
        cutted = cut(self.layout, keys, positions)
        out = np.empty((rows, heads, cutted.shape[1]), np.float32)
        for group in range(groups):
            means, counts = centroids(cutted[group], self.slots, square[group] ** (self.metric / 2))
            mean, balance = rformat.balance(cutted[group].reshape(-1, dim), square[group])
            coded = rformat.coded(means, self.bits, mean, balance)
            mine = queries[:, group * share:(group + 1) * share] * np.float32(dim ** -0.5)
            logits = np.einsum("phd,mcd->phmc", mine, coded, optimize=True) + log_counts(counts)
            out[:, group * share:(group + 1) * share] = log_sum_exp(logits)
        return out


def coded_rows(rows):
    """Rows [segments, slots, rank] after a trip through codes with one f16 scale each, of at most 16 bytes a row at rank 64.

    Up to rank 16 int8 and up to 32 int4; above, r2 about the mean of all rows.
    """
    rank = rows.shape[-1]
    if rank > 32:
        mean = rows.reshape(-1, rank).mean(0).astype(np.float16).astype(np.float32)
        return rformat.coded(rows, 2, mean, np.float32(1))
    largest = 127 if rank <= 16 else 7
    scale = (np.abs(rows).max(-1, keepdims=True) / largest).astype(np.float16).astype(np.float32)
    codes = np.clip(np.round(rows / np.where(scale == 0, 1, scale)), -largest, largest)
    return codes * scale


def row_bytes(rank):
    """Codes and scale of one row."""
    return 2 + (rank if rank <= 16 else (rank + 1) // 2 if rank <= 32 else (rank + 3) // 4)


class Trained:
    """Projected centroids in integer codes.

    tensors: W [L, H, r, d], or [L, G, r, d] where the heads of a KV head share it, W_key [L, G, r, d], bias [L, H] and,
    optional, temperature [L, H]. Clusters are found among the projected keys.
    """

    def __init__(self, tensors, layout=Layout(), slots=SLOTS):
        self.tensors = {name: np.asarray(value, np.float32) for name, value in tensors.items()}
        self.layout, self.slots = layout, slots

    def bytes(self, dim):
        """Bytes of a segment and KV head: codes and an f16 scale per vector, and a count of one byte."""
        return self.slots * row_bytes(self.tensors["W"].shape[2]) + self.slots

    def estimate(self, layer, queries, keys, positions, square):
        W, W_key, bias = (self.tensors[name][layer] for name in ("W", "W_key", "bias"))
        rows, heads, _ = queries.shape
        groups, rank = W_key.shape[:2]
        share = heads // groups
        cutted = cut(self.layout, keys, positions)
        out = np.empty((rows, heads, cutted.shape[1]), np.float32)
        for group in range(groups):
            means, counts = centroids(cutted[group] @ W_key[group].T, self.slots)
            means = coded_rows(means)
            for head in range(group * share, (group + 1) * share):
                projected = queries[:, head] @ W[head * len(W) // heads].T * np.float32(rank ** -0.5)
                if "temperature" in self.tensors:
                    projected *= self.tensors["temperature"][layer, head]
                out[:, head] = log_sum_exp(np.einsum("pr,mcr->pmc", projected, means, optimize=True) + log_counts(counts)) + bias[head]
        return out
