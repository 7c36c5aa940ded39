"""What the tests of the Python package share: finding the package, small caches, and attention in numpy."""

import os
import sys

import numpy

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
PACKAGE = os.path.join(ROOT, 'bindings', 'python')
if PACKAGE not in sys.path:
    sys.path.insert(0, PACKAGE)

import skerry  # noqa: E402


def layer(**changes):
    settings = dict(kv_heads=2, query_heads=4, key_dim=16)
    settings.update(changes)
    return skerry.Layer(**settings)


def random(shape, seed=0, dtype=numpy.float32):
    return numpy.random.default_rng(seed).standard_normal(shape).astype(dtype)


def attention(queries, keys, values, *, first=0, scale=None, softcap=0.0, sliding_window=0, sink_logits=None):
    """Causal attention in float64: queries [rows, query_heads, d], keys and values [tokens, kv_heads, d].

    Row r stands at position first + r. Returns (out, lse).
    """
    queries, keys, values = (numpy.asarray(array, numpy.float64) for array in (queries, keys, values))
    rows, heads, dim = queries.shape
    group = heads // keys.shape[1]
    logits = numpy.einsum('rhd,thd->rht', queries, numpy.repeat(keys, group, axis=1)) * (scale or dim ** -0.5)
    if softcap:
        logits = softcap * numpy.tanh(logits / softcap)
    row = first + numpy.arange(rows)[:, None]
    token = numpy.arange(keys.shape[0])[None, :]
    hidden = token > row
    if sliding_window:
        hidden |= token <= row - sliding_window
    logits = numpy.where(hidden[:, None, :], -numpy.inf, logits)
    if sink_logits is not None:
        sinks = numpy.broadcast_to(numpy.asarray(sink_logits, numpy.float64)[None, :, None], (rows, heads, 1))
        logits = numpy.concatenate([logits, sinks], axis=2)
    top = logits.max(axis=2, keepdims=True)
    weights = numpy.exp(logits - top)
    total = weights.sum(axis=2, keepdims=True)
    lse = (top + numpy.log(total))[..., 0]
    weights = (weights / total)[:, :, :keys.shape[0]]
    return numpy.einsum('rht,thd->rhd', weights, numpy.repeat(values, group, axis=1)), lse


def fill(cache, sequence, tokens, *, seed=0, chunk=16, attend=True, prefill=False):
    """Appends random tokens to every layer that stores, in steps of `chunk`; returns per layer (keys, values)."""
    kept = [(random((tokens, one.kv_heads, one.key_dim), seed + 3 * index),
             random((tokens, one.kv_heads, one.value_dim), seed + 3 * index + 1))
            for index, one in enumerate(cache.layers)]
    queries = [random((tokens, one.query_heads, one.key_dim), seed + 3 * index + 2) for index, one in enumerate(cache.layers)]
    for begin in range(0, tokens, chunk):
        end = min(begin + chunk, tokens)
        with cache.step(sequence, end - begin, prefill=prefill) as step:
            for index, (keys, values) in enumerate(kept):
                step.append(index, keys[begin:end], values[begin:end])
                if attend:
                    step.attend(index, queries[index][begin:end])
    return kept
