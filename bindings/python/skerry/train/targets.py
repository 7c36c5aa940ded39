# SPDX-License-Identifier: MIT
"""What a router should have answered: exact masses and output effects of segments, per query head."""

import dataclasses

import numpy as np

from .segments import log_sum_exp


@dataclasses.dataclass
class Targets:
    """Of one layer and prompt; P queries, H query heads, M segments. -inf and 0 where a segment is no candidate.

    log_mass    [P, H, M]  logit mass: log of the sum of exp(q.k / sqrt(d)) over the segment's tokens
    lse_exact   [P, H]     the same over the tokens that stay on the device
    effect      [P, H, M]  ||P_s (vbar_s - o)||: how far the head's output moves by this segment (recall.md section 1)
    allowed     [P, M]     candidates
    """

    log_mass: np.ndarray
    lse_exact: np.ndarray
    effect: np.ndarray
    allowed: np.ndarray

    def mass(self):
        """[P, H, M] attention probability of each segment."""
        total = np.logaddexp(self.lse_exact, log_sum_exp(self.log_mass))
        return np.exp(self.log_mass - total[..., None])


def targets(layout, positions, queries, keys, values):
    """queries [P, H, d] at `positions`, keys and values [G, N, d] of every position of the prompt -> Targets."""
    positions = np.asarray(positions)
    rows, heads, dim = queries.shape
    groups, tokens = keys.shape[:2]
    share = heads // groups
    segments = int(layout.candidates(positions).max(initial=0))
    inside = layout.span(segments)
    allowed = np.arange(segments)[None, :] < layout.candidates(positions)[:, None]
    device = np.arange(tokens)[None, :] <= positions[:, None]
    device[:, inside] &= ~np.repeat(allowed, layout.length, axis=1)
    queries = queries.astype(np.float32) * np.float32(dim ** -0.5)
    log_mass = np.empty((rows, heads, segments), np.float32)
    lse_exact = np.empty((rows, heads), np.float32)
    effect = np.empty((rows, heads, segments), np.float32)
    for head in range(heads):
        k, v = keys[head // share].astype(np.float32), values[head // share].astype(np.float32)
        logits = queries[:, head] @ k.T
        on_device = np.where(device, logits, -np.inf)
        lse_exact[:, head] = log_sum_exp(on_device)
        far = logits[:, inside].reshape(rows, segments, layout.length)
        log_mass[:, head] = np.where(allowed, log_sum_exp(far), -np.inf)
        total = np.logaddexp(lse_exact[:, head], log_sum_exp(log_mass[:, head]))[:, None]
        weights = np.where(allowed[..., None], np.exp(far - total[..., None]), 0)
        near = np.exp(on_device - total) @ v
        moved = np.matmul(weights.swapaxes(0, 1), v[inside].reshape(segments, layout.length, dim)).swapaxes(0, 1)
        out = near + moved.sum(1)
        effect[:, head] = np.linalg.norm(moved - weights.sum(-1)[..., None] * out[:, None, :], axis=-1)
    return Targets(log_mass, lse_exact, effect, allowed)
