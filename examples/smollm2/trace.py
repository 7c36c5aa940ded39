"""One reading of a text under the full cache, kept so that policies can be compared on it.

Under `prefill = whole` a policy sees the whole prompt in full precision before it
compresses, so every policy gets the same queries, keys and values for the prompt.
They are computed once here and handed to each policy by `replay`.
"""

import numpy as np

from .plain import PlainCache


class RecordingCache(PlainCache):
    """An exact cache that also keeps queries."""

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
    surprisal    [tokens + continuation] in nats, the first 0, if asked for; else None
    said         [1, vocab], the guess after the last of `tokens`, if surprisal was asked for
    """

    def __init__(self, model, tokens, continuation, spare=0, chunk=256, bar=None, surprisal=False):
        self.model = model
        self.tokens = list(tokens)
        self.continuation = list(continuation)
        config = model.config
        n, m = len(self.tokens), len(self.continuation)
        self.cache = RecordingCache(config, n + m + spare)
        whole = self.tokens + self.continuation
        self.surprisal = np.zeros(n + m) if surprisal else None
        for at in range(0, n, chunk):
            end = min(n, at + chunk)
            rows = model.forward(self.tokens[at:end], self.cache, at, "all" if surprisal else "none", end < n)
            if surprisal:
                self.note_surprisal(rows, whole, at)
                self.said = rows[-1:].copy()
            if bar:
                bar.step(end - at)

        self.masses = [[None] * config.kv_heads for _ in range(config.layers)]

        def watch(layer, kv_head, positions, weights):
            self.masses[layer][kv_head] = weights.mean(axis=0)

        self.cache.watch = watch
        self.logits = model.forward(self.continuation, self.cache, n, "all")
        self.cache.watch = None
        self.queries = [np.concatenate(parts) for parts in self.cache.queries]
        self.cache.queries = None
        self.cache.recording = False
        if surprisal:
            self.note_surprisal(self.logits, whole, n)

    def note_surprisal(self, logits, whole, at):
        """Row i of `logits` is the guess after token at + i."""
        for i in range(0, len(logits), 16):
            following = whole[at + 1 + i:at + 1 + min(i + 16, len(logits))]
            rows = logits[i:i + len(following)]
            top = rows.max(axis=1)
            spread = np.log(np.exp(rows - top[:, None]).sum(axis=1, dtype=np.float64))
            said = rows[np.arange(len(following)), following]
            self.surprisal[at + 1 + i:at + 1 + i + len(following)] = top - said + spread

    def rows(self, layer, begin, end):
        """q, k, v of positions begin..end of prompt and continuation as Model.forward hands them over."""
        q = self.queries[layer][begin:end]
        k = np.stack([self.cache.keys(layer, h)[begin:end] for h in range(self.model.config.kv_heads)], axis=1)
        v = np.stack([self.cache.values(layer, h)[begin:end] for h in range(self.model.config.kv_heads)], axis=1)
        return q, k, v

    def replay(self, cache, layers=None, chunk=256, after=None, bar=None, tokens=None):
        """Hand the prompt, or its first `tokens`, to `cache`. `layers` maps its layers to the model's."""
        if layers is None:
            layers = range(self.model.config.layers)
        at, n = 0, len(self.tokens) if tokens is None else tokens
        while at < n:
            room = cache.room()
            end = min(n, at + chunk, at + room if room else n)
            positions = np.arange(at, end, dtype=np.int64)
            cache.begin(end - at, more=end < n)
            try:
                for own, theirs in enumerate(layers):
                    q, k, v = self.rows(theirs, at, end)
                    cache.attend(own, q, k, v, positions)
                if cache.wants_surprisal:
                    cache.surprise(self.surprisal[at:end], self.said if end == len(self.tokens) else None)
            except BaseException:
                cache.abort()
                raise
            cache.commit()
            if after:
                after(end)
            if bar:
                bar.step(end - at)
            at = end
