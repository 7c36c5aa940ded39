# SPDX-License-Identifier: MIT
"""What fitting one layer needs of the captured prompts, and a starting point from their second moments."""

import numpy as np

from .routers import cut
from .segments import SLOTS, centroids, log_counts
from .targets import targets


class Prompt:
    """One prompt seen by one layer.

    positions [P]         queries [P, H, d]     keys [G, M, length, d] of the candidate segments
    log_mass [P, H, M]    lse_exact [P, H]      worth [2, P, G, M]: mass and effect summed over the group's heads, as
    allowed [P, M]                              shares of their sums over candidates
    """

    def __init__(self, layout, positions, queries, keys, values):
        found = targets(layout, positions, queries, keys, values)
        rows, heads, segments = found.log_mass.shape
        groups = keys.shape[0]
        fold = lambda x: x.reshape(rows, groups, heads // groups, segments).sum(2)
        worth = np.stack([fold(found.mass()), fold(found.effect)])
        self.positions, self.queries, self.allowed = positions, queries, found.allowed
        self.keys = cut(layout, keys, positions)
        self.log_mass, self.lse_exact = found.log_mass, found.lse_exact
        self.worth = worth / np.maximum(worth.sum(-1, keepdims=True), 1e-20)


def cluster(keys, W_key, slots=SLOTS):
    """Clusters of keys [G, M, length, d] found among W_key [G, r, d] times them: (mean keys [G, M, slots, d], ln n [G, M, slots])."""
    groups, segments, length, dim = keys.shape
    flat = keys.reshape(groups * segments, length, dim)
    seen = np.einsum("gmtd,grd->gmtr", keys, W_key, optimize=True).reshape(groups * segments, length, -1)
    found, counts = centroids(seen, slots)
    owner = ((seen[:, :, None, :] - found[:, None]) ** 2).sum(-1)
    owner[np.broadcast_to(counts[:, None, :] == 0, owner.shape)] = np.inf
    member = (owner.argmin(-1)[:, None, :] == np.arange(slots)[None, :, None]).astype(np.float32)
    counts = member.sum(-1)
    means = member @ flat / np.maximum(counts, 1)[..., None]
    shape = (groups, segments, slots)
    return means.reshape(shape + (dim,)).astype(np.float32), log_counts(counts).reshape(shape)


def root(matrix, floor=1e-6):
    """(square root, inverse square root) of a symmetric positive matrix, its spectrum floored at a share of the largest."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, floor * max(values[-1], 1e-12))
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def principal(prompts, rank, shared=False):
    """(W [H, r, d], or [G, r, d] if shared, W_key [G, r, d]): the best product of rank r for q.k / sqrt(d) in mean square over the prompts.

    Each singular value is shared evenly between both sides: distances between projected keys, which clusters are found by,
    then stand between those of plain keys and the errors that they make in logits; either end found worse clusters. A
    random rotation spreads each vector over its channels, so that one scale serves for its codes.
    """
    heads, dim = prompts[0].queries.shape[1:]
    groups = prompts[0].keys.shape[0]
    share = heads // groups
    spread = np.linalg.qr(np.random.default_rng(0).standard_normal((rank, rank)))[0]
    W, W_key = np.empty((heads, rank, dim), np.float32), np.empty((groups, rank, dim), np.float32)
    for group in range(groups):
        q = np.concatenate([p.queries[:, group * share:(group + 1) * share].reshape(-1, dim) for p in prompts]).astype(np.float64)
        k = np.concatenate([p.keys[group].reshape(-1, dim) for p in prompts]).astype(np.float64)
        query_root, query_inverse = root(q.T @ q / len(q))
        key_root, key_inverse = root(np.cov(k.T))
        left, values, right = np.linalg.svd(query_root @ key_root)
        even = np.sqrt(values[:rank, None])
        W_key[group] = spread @ (even * right[:rank]) @ key_inverse * dim ** -0.5
        W[group * share:(group + 1) * share] = spread @ (even * left[:, :rank].T) @ query_inverse * rank ** 0.5
    return W[::share] if shared else W, W_key


def load(capture, layout, layer):
    """Every prompt of a Capture, as one layer sees it."""
    return [Prompt(layout, *capture.layer(index, layer)) for index in range(len(capture))]
