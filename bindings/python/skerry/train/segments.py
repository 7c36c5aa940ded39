# SPDX-License-Identifier: MIT
"""Segments of a prompt, and the centroids that stand for their keys."""

import dataclasses

import numpy as np

SLOTS = 4  # centroids a router key has room for (docs/format.md, "Router keys")
LLOYD_STEPS = 6  # recall.md section 7


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which positions are segments. Sinks and the last `recent` positions before and with a query stay on the device."""

    sinks: int = 4
    recent: int = 32
    length: int = 16

    def count(self, tokens):
        """Whole segments among the first `tokens` positions."""
        return max(0, (tokens - self.sinks) // self.length)

    def candidates(self, positions):
        """How many segments lie wholly before the recent region of a query at each of `positions` (causal: the first so many)."""
        return np.maximum(0, (np.asarray(positions) + 1 - self.recent - self.sinks) // self.length)

    def span(self, segments):
        """The positions of the first `segments` segments, as a slice."""
        return slice(self.sinks, self.sinks + segments * self.length)


def centroids(tokens, slots=SLOTS, weights=None, steps=LLOYD_STEPS):
    """k-means of every segment by itself.

    tokens [segments, length, d], weights [d] of the channels in distances -> centroids [segments, slots, d],
    counts [segments, slots]. The first seed is the token farthest from the mean, each next one the token farthest from its
    nearest seed; ties go to the lower index. A slot without tokens has count 0 and is zero.
    """
    tokens = np.asarray(tokens, np.float32)
    seen = tokens if weights is None else tokens * weights
    segments = len(tokens)
    every = np.arange(segments)

    def distance(points):
        return ((seen - points[:, None, :]) ** 2).sum(-1)

    nearest = distance(seen.mean(1))
    means = np.zeros((segments, slots, tokens.shape[2]), np.float32)
    for slot in range(slots):
        means[:, slot] = seen[every, nearest.argmax(1)]
        to_seed = distance(means[:, slot])
        nearest = to_seed if slot == 0 else np.minimum(nearest, to_seed)
    for step in range(steps):
        owner = np.stack([distance(means[:, slot]) for slot in range(slots)], -1).argmin(-1)
        member = (owner[:, None, :] == np.arange(slots)[None, :, None]).astype(np.float32)
        counts = member.sum(-1)
        means = member @ (seen if step + 1 < steps else tokens) / np.maximum(counts, 1)[..., None]
    return means, counts.astype(np.int32)


def log_counts(counts):
    """ln n, and -inf where a slot is empty."""
    with np.errstate(divide="ignore"):
        return np.log(counts.astype(np.float32))


def log_sum_exp(x, axis=-1):
    """In the type of `x`; -inf where every term is."""
    top = np.max(x, axis=axis, keepdims=True)
    shift = np.where(np.isfinite(top), top, 0)
    with np.errstate(divide="ignore"):
        return np.squeeze(shift + np.log(np.exp(x - shift).sum(axis=axis, keepdims=True)), axis)
