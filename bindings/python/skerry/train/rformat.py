# SPDX-License-Identifier: MIT
"""The R formats of docs/format.md as arithmetic: what coding and decoding a row leaves of it."""

import numpy as np

OPTIMAL_STEP = {2: 0.9957, 3: 0.5860, 4: 0.3352}
STEP_SHARES = (0.8, 0.9, 1.0, 1.1, 1.2)
FLOOR = 1e-8  # of the mean over channels (decisions.md 3)


def signs(dim):
    channel = np.arange(1, dim + 1, dtype=np.uint64)
    mask = np.uint64(0xffffffff)
    h = channel * np.uint64(0x9e3779b1) & mask
    h ^= h >> np.uint64(15)
    h = h * np.uint64(0x85ebca77) & mask
    return np.where(h >> np.uint64(31), -1, 1).astype(np.float32)


def hadamard(x):
    """Butterflies over the last axis, in blocks of the largest power of two that divides it, over the root of that."""
    dim = x.shape[-1]
    size = dim & -dim
    lead = x.shape[:-1]
    distance = 1
    while distance < size:
        pairs = x.reshape(lead + (-1, 2, distance))
        x = np.stack([pairs[..., 0, :] + pairs[..., 1, :], pairs[..., 0, :] - pairs[..., 1, :]], -2).reshape(lead + (dim,))
        distance *= 2
    return x * np.float32(1 / np.sqrt(size))


def balance(keys, square=None):
    """(mean, balance) of keys [n, d] and E[q^2] [d] of queries, rounded as an epoch stores them but for the exponent of the mean."""
    mean = keys.mean(0)
    floored = lambda x: np.maximum(x, max(FLOOR * float(x.mean()), np.finfo(np.float32).tiny))
    log2 = -0.25 * np.log2(floored(keys.var(0)))
    if square is not None:
        log2 = log2 + 0.25 * np.log2(floored(square))
    sixteenths = np.clip(np.round(16 * (log2 - log2.mean())), -126, 126)
    return mean.astype(np.float16).astype(np.float32), np.exp2(sixteenths / 16).astype(np.float32)


def coded(rows, bits, mean=None, balanced=None):
    """Rows [..., d] after one trip through r2, r3 or r4; keys with (mean, balance), values without."""
    dim = rows.shape[-1]
    y = rows.astype(np.float32)
    if mean is not None:
        y = (y - mean) * balanced
    y = hadamard(y * signs(dim))
    size, magnitude = (y * y).sum(-1, keepdims=True), np.abs(y)
    outermost = 2 ** (bits - 1) - 1
    rms = np.sqrt(size / dim)
    rms[rms == 0] = 1
    best = None
    for share in STEP_SHARES:
        level = np.minimum(np.floor(magnitude / (rms * np.float32(share * OPTIMAL_STEP[bits]))), outermost) + np.float32(0.5)
        product, squares = (magnitude * level).sum(-1, keepdims=True), (level * level).sum(-1, keepdims=True)
        gain = product * product / squares
        if best is None:
            best = [gain, level, product]
        else:
            better = gain > best[0]
            best = [np.where(better, new, old) for new, old in zip((gain, level, product), best)]
    _, level, product = best
    scale = (size / np.where(product == 0, 1, product)).astype(np.float16).astype(np.float32)
    x = hadamard(np.copysign(level, y) * scale) * signs(dim)
    return x / balanced + mean if mean is not None else x
