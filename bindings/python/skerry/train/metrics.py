# SPDX-License-Identifier: MIT
"""Choosing segments, and how much of what matters a choice catches (recall.md section 1)."""

import numpy as np

from .segments import log_sum_exp


def group_scores(estimate, lse_exact, groups):
    """Estimated log masses [P, H, M] -> [P, G, M]: probabilities summed over the query heads of a KV head."""
    total = np.logaddexp(lse_exact, log_sum_exp(estimate))
    rows, heads, segments = estimate.shape
    return np.exp(estimate - total[..., None]).reshape(rows, groups, heads // groups, segments).sum(2)


def best(scores, share, allowed):
    """Mask [P, G, M] of the round(share * candidates) best candidates, at least one; ties go to the lower index."""
    take = np.maximum(1, np.round(share * allowed.sum(-1))).astype(int)
    order = np.argsort(np.where(allowed[:, None, :], -scores, np.inf), axis=-1, kind="stable")
    rank = np.empty_like(order)
    np.put_along_axis(rank, order, np.broadcast_to(np.arange(order.shape[-1]), order.shape), axis=-1)
    return (rank < take[:, None, None]) & allowed[:, None, :]


def caught(chosen, worth, oracle):
    """(caught by `chosen`, caught by `oracle`), summed over all rows and heads; worth [P, G, M]."""
    return float((worth * chosen).sum(dtype=np.float64)), float((worth * oracle).sum(dtype=np.float64))


def recall(estimate, target, groups, shares):
    """{share: (mass caught, by the mass oracle, effect caught, by the effect oracle)} of one layer and prompt."""
    worth = lambda x: x.reshape(x.shape[0], groups, -1, x.shape[2]).sum(2)
    scores = group_scores(np.where(target.allowed[:, None], estimate, -np.inf), target.lse_exact, groups)
    mass, effect = worth(target.mass()), worth(target.effect)
    out = {}
    for share in shares:
        chosen = best(scores, share, target.allowed)
        out[share] = (caught(chosen, mass, best(mass, share, target.allowed)) +
                      caught(chosen, effect, best(effect, share, target.allowed)))
    return out
