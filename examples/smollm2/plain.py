"""The exact cache: every key and value in float32, nothing ever left out."""

import numpy as np


def softmax_rows(scores):
    """Softmax over the last axis, in place; returns the log-sum-exp of each row."""
    top = scores.max(axis=-1, keepdims=True)
    scores -= top
    np.exp(scores, out=scores)
    total = scores.sum(axis=-1, keepdims=True)
    scores /= total
    return (top + np.log(total))[..., 0]


def causal_attention(q, keys, values, key_positions, query_positions, bias=None):
    """Attention of one KV head's queries. q[g, n, d], keys and values[t, d], bias[t].

    Returns (out[g, n, d], weights[g, n, t]). A key at position p is seen by
    queries at positions >= p; key positions ascend.
    """
    groups, n, d = q.shape
    scores = q.reshape(groups * n, d) @ keys.T
    scores *= np.float32(1.0 / np.sqrt(d))
    if bias is not None:
        scores += bias
    scores = scores.reshape(groups, n, len(keys))
    # Only the tail of the keys can lie ahead of a query.
    tail = int(np.searchsorted(key_positions, query_positions[0], side="right"))
    if tail < len(keys):
        hidden = key_positions[None, tail:] > query_positions[:, None]
        scores[:, :, tail:][:, hidden] = -np.inf
    softmax_rows(scores)
    return np.matmul(scores, values), scores


class PlainCache:
    """Cache object for Model.forward that keeps everything.

    `watch`, if set, is called as watch(layer, kv_head, positions, weights[g, n, t])
    after every attention, which is how attention mass is measured.
    """

    def __init__(self, config, capacity=1024):
        self.config = config
        self.length = 0
        self.watch = None
        self._pending = 0
        shape = (config.layers, config.kv_heads, capacity, config.head_dim)
        self._k = np.empty(shape, np.float32)
        self._v = np.empty(shape, np.float32)

    def room(self):
        return None

    def begin(self, n, more=False):
        need = self.length + n
        have = self._k.shape[2]
        if need > have:
            grow = lambda old: np.concatenate(
                [old, np.empty(old.shape[:2] + (max(need, 2 * have) - have, old.shape[3]), np.float32)], axis=2)
            self._k, self._v = grow(self._k), grow(self._v)
        self._pending = n

    def commit(self):
        self.length += self._pending
        self._pending = 0

    def abort(self):
        self._pending = 0

    def truncate(self, length):
        """Forget every position from `length` on."""
        if not 0 <= length <= self.length:
            raise ValueError("cannot truncate %d positions to %d" % (self.length, length))
        self.length = length

    def keys(self, layer, kv_head):
        return self._k[layer, kv_head, :self.length]

    def values(self, layer, kv_head):
        return self._v[layer, kv_head, :self.length]

    def attend(self, layer, q, k, v, positions):
        n, heads, d = q.shape
        groups = heads // self.config.kv_heads
        end = self.length + n
        out = np.empty_like(q)
        key_positions = np.arange(end)
        for h in range(self.config.kv_heads):
            self._k[layer, h, self.length:end] = k[:, h]
            self._v[layer, h, self.length:end] = v[:, h]
            mine = slice(h * groups, (h + 1) * groups)
            got, weights = causal_attention(
                np.ascontiguousarray(q[:, mine].swapaxes(0, 1)),
                self._k[layer, h, :end], self._v[layer, h, :end], key_positions, positions)
            out[:, mine] = got.swapaxes(0, 1)
            if self.watch:
                self.watch(layer, h, positions, weights)
        return out
