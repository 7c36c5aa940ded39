"""One reading of a text under the full cache, kept so that policies can be compared on it.

Under `prefill = whole` a policy sees the whole prompt in full precision before it
compresses, so every policy gets the same queries, keys and values for the prompt.
They are computed once here and handed to each policy by `replay`.
"""

import numpy as np

from .plain import PlainCache


class RecordingCache(PlainCache):
    """An exact cache that also keeps the queries of the prompt."""

    def __init__(self, config, capacity):
        super().__init__(config, capacity)
        self.queries = [[] for _ in range(config.layers)]
        self.recording = True

    def attend(self, layer, q, k, v, positions):
        if self.recording:
            self.queries[layer].append(q)
        return super().attend(layer, q, k, v, positions)


class Trace:
    """Prompt tokens read under the full cache, then `continuation` teacher-forced.

    cache        the exact cache, holding prompt and continuation
    logits       [continuation, vocab]: row i is the model's guess after continuation[i]
    masses       [layers][kv_heads] of [continuation, positions]: attention probability,
                 mean over the query heads that share the KV head
    """

    def __init__(self, model, tokens, continuation, spare=0, chunk=256, bar=None):
        self.model = model
        self.tokens = list(tokens)
        self.continuation = list(continuation)
        config = model.config
        n, m = len(self.tokens), len(self.continuation)
        self.cache = RecordingCache(config, n + m + spare)
        model.prefill(self.tokens, self.cache, 0, chunk, "none", bar=bar)
        self.queries = [np.concatenate(parts) for parts in self.cache.queries]
        self.cache.queries = None
        self.cache.recording = False

        self.masses = [[None] * config.kv_heads for _ in range(config.layers)]

        def watch(layer, kv_head, positions, weights):
            self.masses[layer][kv_head] = weights.mean(axis=0)

        self.cache.watch = watch
        self.logits = model.forward(self.continuation, self.cache, n, "all")
        self.cache.watch = None

    def rows(self, layer, begin, end):
        """q, k, v of the prompt's positions begin..end as Model.forward hands them over."""
        q = self.queries[layer][begin:end]
        k = np.stack([self.cache.keys(layer, h)[begin:end] for h in range(self.model.config.kv_heads)], axis=1)
        v = np.stack([self.cache.values(layer, h)[begin:end] for h in range(self.model.config.kv_heads)], axis=1)
        return q, k, v

    def replay(self, cache, layers=None, chunk=256, after=None, bar=None):
        """Hand the prompt to `cache`. `layers` maps its layers to the model's."""
        if layers is None:
            layers = range(self.model.config.layers)
        at, n = 0, len(self.tokens)
        while at < n:
            room = cache.room()
            end = min(n, at + chunk, at + room if room else n)
            positions = np.arange(at, end, dtype=np.int64)
            cache.begin(end - at, more=end < n)
            try:
                for own, theirs in enumerate(layers):
                    q, k, v = self.rows(theirs, at, end)
                    cache.attend(own, q, k, v, positions)
            except BaseException:
                cache.abort()
                raise
            cache.commit()
            if after:
                after(end)
            if bar:
                bar.step(end - at)
            at = end
