# SPDX-License-Identifier: MIT
"""The teacher again in torch, run at single positions over a captured memory, with gates on the segments.

Causal: a row sees the memory up to its own position, segments wholly before its recent tokens through their gates, and itself. Keys and
values of other positions are the frozen teacher's; a row's own come from the student.

The teacher is examples/smollm2/model.py's Model, or one with its attributes: embedding, head, final_norm, layers with attn_norm,
qkv, out, ffn_norm, gate_up, down, and config with inv_freq and norm_eps.
"""

import numpy as np
import torch

from . import losses


class StraightThrough(torch.autograd.Function):
    """1[gate > threshold] forward, the slope of losses.straight_through backward."""

    @staticmethod
    def forward(context, gate, threshold, temperature):
        value, slope = losses.straight_through(gate.detach().numpy(), threshold.detach().numpy(), temperature)
        context.save_for_backward(torch.from_numpy(slope).to(gate.dtype))
        context.shapes = gate.shape, threshold.shape
        return torch.from_numpy(value).to(gate.dtype)

    @staticmethod
    def backward(context, gradient):
        slope, = context.saved_tensors
        toward = gradient * slope
        return toward.sum_to_size(context.shapes[0]), -toward.sum_to_size(context.shapes[1]), None


def rms_norm(x, weight, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + float(eps)) * weight


def rotate(x, positions, inv_freq):
    """x [P, heads, d]; channel i pairs with i + d / 2."""
    angle = positions[:, None, None].double() * inv_freq.double()
    cos, sin = angle.cos().float(), angle.sin().float()
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


class Memory:
    """One captured prompt up to the last of `positions`."""

    def __init__(self, layout, arrays, positions):
        self.layout, self.arrays = layout, arrays
        self.positions = torch.from_numpy(np.asarray(positions, np.int64))
        self.tokens = torch.from_numpy(np.asarray(arrays["tokens"], np.int64)[positions])
        self.end = int(positions[-1]) + 1
        candidates = layout.candidates(positions)
        self.segments = int(candidates.max(initial=0))
        self.allowed = torch.from_numpy(np.arange(self.segments)[None, :] < candidates[:, None])
        others = np.arange(self.end)[None, :] < np.asarray(positions)[:, None]
        self.inside = layout.span(self.segments)
        others[:, self.inside] &= ~np.repeat(self.allowed.numpy(), layout.length, 1)
        self.near = torch.from_numpy(others)  # on the device, the row's own token apart

    def rows(self, layer):
        """keys, values [G, end, d]."""
        return tuple(torch.from_numpy(np.asarray(self.arrays[name][layer, :, :self.end], np.float32)) for name in ("keys", "values"))

    def cut(self, x):
        """[G, end, d] -> [G, M, length, d]"""
        return x[:, self.inside].reshape(x.shape[0], self.segments, self.layout.length, x.shape[2])


class Student(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.config = model.config
        keep = lambda array: torch.from_numpy(np.array(array, np.float32))
        self.embedding, self.head, self.final_norm = keep(model.embedding), keep(model.head), keep(model.final_norm)
        self.inv_freq = keep(model.config.inv_freq)
        names = ("attn_norm", "qkv", "out", "ffn_norm", "gate_up", "down")
        self.layers = [{name: keep(getattr(layer, name)) for name in names} for layer in model.layers]

    def attend(self, memory, layer, q, k, v, gate):
        """One layer's attention of rows q [P, H, d] with their own k, v [P, G, d]. `gate` as for forward."""
        rows, heads, dim = q.shape
        groups = k.shape[1]
        share = heads // groups
        keys, values = memory.rows(layer)
        fold = lambda x: x.reshape(rows, groups, share, -1)
        logits = torch.einsum("pgsd,gtd->pgst", fold(q), keys) * dim ** -0.5
        own = torch.einsum("pgsd,pgd->pgs", fold(q), k)[..., None] * dim ** -0.5
        near = logits.masked_fill(~memory.near[:, None, None], -torch.inf)
        extra_weights = extra_values = None
        if gate is None or not memory.segments:
            shown = memory.near.clone()
            shown[:, memory.inside] |= memory.allowed.repeat_interleave(memory.layout.length, 1)
            near = logits.masked_fill(~shown[:, None, None], -torch.inf)
        else:
            got = gate(layer, q, near, own, keys, values)
            far_keys, far_values = got.keys.flatten(1, 2), got.values.flatten(1, 2)
            far = torch.einsum("pgsd,gtd->pgst", fold(q), far_keys) * dim ** -0.5
            opened = fold(got.open).repeat_interleave(memory.layout.length, -1)
        peak = torch.maximum(near.amax(-1, keepdim=True), own).detach()
        if gate is not None and memory.segments:
            peak = torch.maximum(peak, far.amax(-1, keepdim=True)).detach()
            # Gates multiply weights: a closed segment is absent, and its gate still has a gradient.
            weights = (far - peak).exp() * opened
            extra_weights, extra_values = [weights], [far_values]
            if got.summary_keys is not None:
                coarse = torch.einsum("pgsd,gmd->pgsm", fold(q), got.summary_keys) * dim ** -0.5 + np.log(memory.layout.length)
                closed = fold((1 - got.open) * memory.allowed[:, None])
                extra_weights.append((coarse - peak).exp() * closed)
                extra_values.append(got.summary_values)
        near, own = (near - peak).exp(), (own - peak).exp()
        total = near.sum(-1, keepdim=True) + own
        out = torch.einsum("pgst,gtd->pgsd", near, values) + own * v[:, :, None]
        for weights, far_values in zip(extra_weights or (), extra_values or ()):
            total = total + weights.sum(-1, keepdim=True)
            out = out + torch.einsum("pgst,gtd->pgsd", weights, far_values)
        return (out / total).reshape(rows, heads, dim)

    def forward(self, memory, gate=None):
        """Logits [P, vocab] at the memory's positions.

        gate(layer, q, near, own, keys, values) returns a `Gated`; None shows everything, which is the teacher.
        """
        c = self.config
        x = self.embedding[memory.tokens]
        q_rows, k_rows = c.heads * c.head_dim, c.kv_heads * c.head_dim
        for index, layer in enumerate(self.layers):
            qkv = rms_norm(x, layer["attn_norm"], c.norm_eps) @ layer["qkv"].T
            q = rotate(qkv[:, :q_rows].reshape(-1, c.heads, c.head_dim), memory.positions, self.inv_freq)
            k = rotate(qkv[:, q_rows:q_rows + k_rows].reshape(-1, c.kv_heads, c.head_dim), memory.positions, self.inv_freq)
            v = qkv[:, q_rows + k_rows:].reshape(-1, c.kv_heads, c.head_dim)
            x = x + self.attend(memory, index, q, k, v, gate).flatten(1) @ layer["out"].T
            hidden, up = (rms_norm(x, layer["ffn_norm"], c.norm_eps) @ layer["gate_up"].T).chunk(2, -1)
            x = x + (torch.nn.functional.silu(hidden) * up) @ layer["down"].T
        return rms_norm(x, self.final_norm, c.norm_eps) @ self.head.T


class Gated:
    """What a gate says about one layer.

    open [P, H, M]; keys, values [G, M, length, d] of the detail; summary_keys, summary_values [G, M, d] or None.
    """

    def __init__(self, opened, keys, values, summary_keys=None, summary_values=None):
        self.open, self.keys, self.values = opened, keys, values
        self.summary_keys, self.summary_values = summary_keys, summary_values
