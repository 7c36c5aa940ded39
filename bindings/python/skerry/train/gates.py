# SPDX-License-Identifier: MIT
"""What opens a segment: the production router's choice of the best, or the published router's threshold."""

import torch

from .fit import HIDDEN, LayerRouter, log_scores
from .student import Gated, StraightThrough


class BestFetch(torch.nn.Module):
    """Opens the best `share` of the candidates per KV head.

    The gradient is that of a sigmoid of the distance, in nats, from the middle of the last one in and the first one out.
    """

    def __init__(self, tensors, sharpness):
        super().__init__()
        self.routers = torch.nn.ModuleList()
        for W, W_key, bias in zip(tensors["W"], tensors["W_key"], tensors["bias"]):
            router = LayerRouter(W, W_key, len(bias))
            router.bias.data.copy_(torch.as_tensor(bias))
            self.routers.append(router)
        self.sharpness = sharpness

    def tensors(self):
        return {name: torch.stack([getattr(router, name).detach() for router in self.routers]).numpy() for name in ("W", "W_key", "bias")}

    def on(self, memory, clusters, share):
        """The gate of one memory: clusters[layer] = (means [G, M, slots, d], ln n [G, M, slots])."""
        take = (share * memory.allowed.sum(-1)).round().long().clamp_min(1)
        hidden = ~memory.allowed[:, None]

        def gate(layer, q, near, own, keys, values):
            groups = keys.shape[0]
            means, counts = (part[:, :memory.segments] for part in clusters[layer])
            estimate = self.routers[layer](q, means, counts).masked_fill(hidden, HIDDEN)
            lse = torch.cat([near, own], -1).logsumexp(-1).flatten(1)
            scores = log_scores(estimate, lse, groups)
            ranked = scores.detach().sort(-1, descending=True).values
            at = take[:, None, None].expand(-1, groups, 1)
            edge = 0.5 * (ranked.gather(-1, at - 1) + ranked.gather(-1, at.clamp_max(memory.segments - 1)).clamp_min(-50))
            # Rows without a single candidate have an edge of -inf; nothing is open there.
            opened = StraightThrough.apply(scores.clamp_min(-50), edge.clamp_min(-50), self.sharpness)
            return Gated(opened.repeat_interleave(q.shape[1] // groups, 1), memory.cut(keys), memory.cut(values))

        return gate


class RankGates(torch.nn.Module):
    """g_phi (sekv.md 2.3): singular values over the first and the span's direction -> a gate in (0, 1) per rank."""

    def __init__(self, rank_max, dim, hidden=64):
        super().__init__()
        self.rank_max = rank_max
        self.mlp = torch.nn.Sequential(torch.nn.Linear(rank_max + dim, hidden), torch.nn.GELU(), torch.nn.Linear(hidden, hidden),
                                       torch.nn.GELU(), torch.nn.Linear(hidden, rank_max))

    def forward(self, sigma, mean):
        """sigma [..., r], mean [..., d] -> [..., r]"""
        rank = sigma.shape[-1]
        shape = sigma / (sigma[..., :1] + 1e-8)
        shape = torch.nn.functional.pad(shape, (0, self.rank_max - rank))
        direction = mean / mean.norm(dim=-1, keepdim=True).clamp_min(1e-8)
        return torch.sigmoid(self.mlp(torch.cat([shape, direction], -1)))[..., :rank]


class Threshold(torch.nn.Module):
    """Opens a segment per query head where sigmoid(score / sqrt(d') + ln length) > tau, and rebuilds it through rank gates."""

    def __init__(self, layers, heads, dim, rank, rank_max, tau=0.05, temperature=0.1, generator=None, start=None):
        super().__init__()
        self.W = torch.nn.Parameter(torch.empty(layers, heads, rank, dim))
        bound = (6 / (rank + dim)) ** 0.5
        torch.nn.init.uniform_(self.W, -bound, bound, generator=generator)
        if start is not None:
            self.W.data.copy_(start)
        self.tau = torch.nn.Parameter(torch.full((layers, heads), tau))
        self.g_phi = RankGates(rank_max, dim)
        self.temperature = temperature

    def tensors(self):
        """Under the names of the published checkpoint (sekv.md 6.6)."""
        return {name: value.detach().numpy() for name, value in self.state_dict().items()}

    def on(self, memory, factors, summaries=False):
        """(gate, record): factors[layer] as Factors; the record collects alpha, z and rank gates of each layer for the losses."""
        record = []
        hidden = ~memory.allowed[:, None]

        def gate(layer, q, near, own, keys, values):
            one = factors[layer].first(memory.segments)
            share = q.shape[1] // keys.shape[0]
            mean = one.mean_keys.repeat_interleave(share, 0)
            key_side = torch.einsum("hmd,hrd->hmr", mean, self.W[layer])
            key_side = key_side / key_side.norm(dim=-1, keepdim=True).clamp_min(1e-8)
            query_side = torch.einsum("phd,hrd->phr", q, self.W[layer])
            score = torch.einsum("phr,hmr->phm", query_side, key_side) * self.W.shape[2] ** -0.5
            alpha = torch.sigmoid(score + torch.log(torch.tensor(float(memory.layout.length)))).masked_fill(hidden, 0)
            opened = StraightThrough.apply(alpha, self.tau[layer][:, None], self.temperature)
            # One set of gates, from the keys' singular values, for keys and values alike (sekv.md 8.2, 12).
            gates = self.g_phi(one.key_sigma, one.mean_keys)
            record.append((alpha, opened, gates, one))
            rebuilt = one.rebuild(gates)
            rows = (one.mean_keys, one.mean_values) if summaries else (None, None)
            return Gated(opened, *rebuilt, *rows)

        return gate, record


class Factors:
    """Uncentred factors of the keys and values of every segment of a layer, and their surprisal-weighted means.

    key_left [G, M, length, r], key_sigma [G, M, r], key_right [G, M, r, d], the same for values; mean_keys, mean_values [G, M, d].
    """

    NAMES = ("key_left", "key_sigma", "key_right", "value_left", "value_sigma", "value_right", "mean_keys", "mean_values")

    def __init__(self, parts):
        self.parts = parts
        for name, part in zip(self.NAMES, parts):
            setattr(self, name, part)

    @staticmethod
    def of(memory, keys, values, rank_max):
        parts = []
        rows = [memory.cut(x) for x in (keys, values)]
        for x in rows:
            left, sigma, right = torch.linalg.svd(x, full_matrices=False)
            parts += [left[..., :rank_max], sigma[..., :rank_max], right[..., :rank_max, :]]
        surprisal = torch.tensor(memory.arrays["surprisal"][memory.inside]).reshape(memory.segments, memory.layout.length)
        total = surprisal.sum(-1, keepdim=True)
        weights = torch.where(total > 0, surprisal / total.clamp_min(1e-20), torch.full_like(surprisal, 1 / memory.layout.length))
        parts += [torch.einsum("mt,gmtd->gmd", weights, x) for x in rows]
        return Factors(parts)

    def first(self, segments):
        return Factors([part[:, :segments] for part in self.parts])

    def rebuild(self, gates):
        return ((self.key_left * (gates * self.key_sigma)[..., None, :]) @ self.key_right,
                (self.value_left * (gates * self.value_sigma)[..., None, :]) @ self.value_right)
