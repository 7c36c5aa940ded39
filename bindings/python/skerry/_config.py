# SPDX-License-Identifier: MIT
"""What a cache is made from, and how it becomes a skerry_cache_desc."""

import dataclasses
from typing import TYPE_CHECKING, Callable, Optional, Sequence as SequenceOf, Union

import numpy

from . import _abi, _names
from ._library import _ffi
from ._tensor import pointer

if TYPE_CHECKING:
    from ._router import Router

Name = Union[str, int]


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotary position embedding of a layer; needed where keys are stored un-rotated (policy "qevict", fidelity "paper").

    inverse_frequencies  [dims / 2], radians per position
    dims                 rotated leading channels, even; None: twice the number of frequencies
    pairing              "half" (channel i with i + dims / 2) or "interleaved" (2 i with 2 i + 1)
    attention_factor     multiplies cos and sin
    """

    inverse_frequencies: SequenceOf[float]
    dims: Optional[int] = None
    pairing: Name = 'half'
    attention_factor: float = 1.0


@dataclasses.dataclass(frozen=True)
class Layer:
    """Geometry of one layer. Zero stands for the default in brackets.

    kv_heads        at least 1
    key_dim         channels of a key, at least 1
    query_heads     a multiple of kv_heads [kv_heads]
    value_dim       channels of a value [key_dim]
    sliding_window  tokens a query sees, its own included [all]
    shared_with     index of a lower layer whose cache this one reads; None: its own
    scale           factor of q.k [1 / sqrt(key_dim)]
    softcap         c in c tanh(x / c) on the scaled logits [none]
    rotary          Rotary, or None
    """

    kv_heads: int
    key_dim: int
    query_heads: int = 0
    value_dim: int = 0
    sliding_window: int = 0
    shared_with: Optional[int] = None
    scale: float = 0.0
    softcap: float = 0.0
    rotary: Optional[Rotary] = None


@dataclasses.dataclass(frozen=True)
class Policy:
    """How a cache compresses. None chooses the default of the kind and fidelity; Cache.plan tells what was chosen.

    kind                 "full", "streaming", "evict", "quantise", "qevict" or "sekv"
    fidelity             "production" or "paper"
    prefill              "split" or "whole": when windows may move while a prompt is read
    window_tokens        1 to 128
    sink_tokens          0: none
    recent_tokens        tokens at the end that stay in full precision
    period_tokens        between routing events
    score                "cumulative", "age", "decayed", "last" or "worst"
    score_queries        queries that "last" and "worst" look back
    selection            "per_head" or "per_layer"
    full_format          of windows routed to the full tier: the store's own, or "r8"
    key_format           of the quantised tier: "r2", "r3", "r4", "r8", "c2", "c4"
    value_format         the same for values
    value_group          "c2", "c4": channels that share a value scale
    quantised_share_ppm  of the history's bytes, parts per million
    hysteresis_ppm       a resident keeps its tier unless beaten by this factor
    max_moves_ppm        windows of one KV head that may move at an event
    sekv                 Sekv: options of kind "sekv"
    keep_exact           demoted windows keep their exact tokens in host memory while Budget.exact_bytes has room
    one_way              no promotion
    evict_first          paper fidelity: an event counts the tokens before the step's own
    """

    kind: Name = 'full'
    fidelity: Name = 'production'
    prefill: Name = 'split'
    window_tokens: Optional[int] = None
    sink_tokens: Optional[int] = None
    recent_tokens: Optional[int] = None
    period_tokens: Optional[int] = None
    score: Name = 'default'
    score_queries: Optional[int] = None
    selection: Name = 'default'
    full_format: Name = 'default'
    key_format: Name = 'default'
    value_format: Name = 'default'
    value_group: Optional[int] = None
    quantised_share_ppm: Optional[int] = None
    hysteresis_ppm: Optional[int] = None
    max_moves_ppm: Optional[int] = None
    sekv: Optional['Sekv'] = None
    keep_exact: bool = False
    one_way: bool = False
    evict_first: bool = False


@dataclasses.dataclass(frozen=True)
class Sekv:
    """Options of policy "sekv". None chooses the default; Cache.plan tells what was chosen.

    detail_format     of a window on the host: "r2", "r3", "r4", "r8", "l32", "l16", "l8", "l4", or the store's own
    fetch_ppm         of the history's windows, read from the host per query and KV head, parts per million
    refine_ppm        worth of reading the detail of a window that the device holds in low bits, against one that it does not hold
    hysteresis_ppm    a window that was chosen at the position before counts this much more
    keep_windows      fetched windows per KV head that may stay on the device for the next query, out of the budget
    miss              "wait" for what has not arrived, or "skip" it
    residents         False: the device keeps no low-bit records
    segmentation      "fixed" windows, or spans by "surprisal"
    span_min_tokens   an anchor ends a span that has this many tokens
    span_max_tokens   positions a span covers at most, 128 at most
    anchor_threshold  standard deviations above the running mean
    detail_rank       of low-rank detail, most components per side
    detail_error      largest relative error of detail; each window takes the smallest format that keeps it; 0: no bound
    router            Router that was trained for this model; None: the router that needs no training
    shared_bases      True: low-rank detail may lie on the basis of an earlier window, where that keeps detail_error and is smallest

    With fidelity "paper", where span_min_tokens (0: none) is the length below which a span stays at full resolution:

    budget_entries    most keys that one query head may attend to; None: no limit
    absent_rows       True: rows of the resolution that a head did not choose are absent, not of weight 1e-6
    value_gates       True: values are weighted by gates of their own singular values, not by those of the keys
    group_choice      True: under budget_entries the heads of a KV group choose as one
    second_order      True: summary rows know the spread of their keys
    """

    detail_format: Name = 'default'
    fetch_ppm: Optional[int] = None
    refine_ppm: Optional[int] = None
    hysteresis_ppm: Optional[int] = None
    keep_windows: int = 0
    miss: Name = 'wait'
    residents: bool = True
    segmentation: Name = 'default'
    span_min_tokens: Optional[int] = None
    span_max_tokens: Optional[int] = None
    anchor_threshold: float = 0.0
    detail_rank: Optional[int] = None
    detail_error: float = 0.0
    router: Optional['Router'] = None
    shared_bases: bool = False
    budget_entries: Optional[int] = None
    absent_rows: bool = False
    value_gates: bool = False
    group_choice: bool = False
    second_order: bool = False


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many bytes a cache may hold. All zero: no limit.

    bytes            for all sequences together; 0: from share_ppm
    share_ppm        parts per million of a full cache of length_tokens per sequence
    length_tokens    the length the budget is meant for, generation included
    full_bytes       limit of the full tier's history windows
    quantised_bytes  limit of the quantised tier
    exact_bytes      host memory for exact copies, on top of `bytes`
    host_bytes       host memory for the detail of policy "sekv", on top of `bytes`; 0: what length_tokens asks for
    """

    bytes: int = 0
    share_ppm: int = 0
    length_tokens: int = 0
    full_bytes: int = 0
    quantised_bytes: int = 0
    exact_bytes: int = 0
    host_bytes: int = 0


@dataclasses.dataclass
class Callbacks:
    """Functions that the library calls during a step, on the thread that called it. None may call back into the library.

    before_layer(layer)
        A layer is named for the first time in the open step.
    scores_wanted(sequence, layer, kv_head, windows) -> masses or None
        An event is due and nothing was attended or observed since the last one. `windows` is an int32 array of window
        indices; return as many attention masses in [0, 1], or None: the windows are then ranked by what is known.
    transitions(moves)
        All moves of a committed step, a list of Transition in the order they were made.
    committed(sequence, length_tokens)
        A step was committed; called once per sequence.

    An exception raised in one is raised again by the call that led to it, once the library has finished that call. A commit
    that raises for this reason has committed.
    """

    before_layer: Optional[Callable] = None
    scores_wanted: Optional[Callable] = None
    transitions: Optional[Callable] = None
    committed: Optional[Callable] = None


def _number(value):
    return 0 if value is None else value


def as_policy(given):
    return given if isinstance(given, Policy) else Policy(kind=given)


def as_budget(given):
    if given is None or isinstance(given, Budget):
        return given
    return Budget(bytes=given)


def resolved(layer):
    """The layer with its defaults filled in, as far as shapes depend on them."""
    return dataclasses.replace(layer, query_heads=layer.query_heads or layer.kv_heads, value_dim=layer.value_dim or layer.key_dim)


def rotary_desc(library, rotary, keep):
    frequencies = numpy.ascontiguousarray(rotary.inverse_frequencies, dtype=numpy.float32)
    desc = library.new('skerry_rotary_desc')
    desc.inverse_frequencies = pointer(frequencies, 'float *')
    desc.dims = 2 * frequencies.size if rotary.dims is None else rotary.dims
    if 2 * frequencies.size < desc.dims:
        raise ValueError(f'{desc.dims} rotary dims need {desc.dims // 2} frequencies, not {frequencies.size}')
    desc.pairing = _names.PAIRING.value(rotary.pairing)
    desc.attention_factor = rotary.attention_factor
    keep += [frequencies, desc]
    return desc


def layer_desc(library, layer, keep):
    desc = library.new('skerry_layer_desc')
    for name in ('kv_heads', 'query_heads', 'key_dim', 'value_dim', 'sliding_window', 'scale', 'softcap'):
        setattr(desc, name, getattr(layer, name))
    if layer.shared_with is not None:
        desc.flags = _abi.SKERRY_LAYER_SHARED
        desc.shared_with = layer.shared_with
    if layer.rotary is not None:
        desc.rotary = rotary_desc(library, layer.rotary, keep)
    keep.append(desc)
    return desc


def policy_desc(library, policy, keep):
    desc = library.new('skerry_policy_desc')
    desc.kind = _names.POLICY.value(policy.kind)
    desc.fidelity = _names.FIDELITY.value(policy.fidelity)
    desc.prefill = _names.PREFILL.value(policy.prefill)
    desc.score = _names.SCORE.value(policy.score)
    desc.selection = _names.SELECTION.value(policy.selection)
    for name in ('full_format', 'key_format', 'value_format'):
        setattr(desc, name, _names.FORMAT.value(getattr(policy, name)))
    for name in ('window_tokens', 'recent_tokens', 'period_tokens', 'score_queries', 'value_group', 'quantised_share_ppm',
                 'hysteresis_ppm', 'max_moves_ppm'):
        setattr(desc, name, _number(getattr(policy, name)))
    desc.sink_tokens = _abi.SKERRY_NONE_TOKENS if policy.sink_tokens == 0 else _number(policy.sink_tokens)
    desc.flags = (_abi.SKERRY_POLICY_KEEP_EXACT * bool(policy.keep_exact) | _abi.SKERRY_POLICY_ONE_WAY * bool(policy.one_way)
                  | _abi.SKERRY_POLICY_EVICT_FIRST * bool(policy.evict_first))
    if policy.sekv is not None:
        desc.sekv = sekv_desc(library, policy.sekv, keep)
    keep.append(desc)
    return desc


def sekv_desc(library, sekv, keep):
    desc = library.new('skerry_sekv_desc')
    desc.detail_format = _names.FORMAT.value(sekv.detail_format)
    for name in ('fetch_ppm', 'refine_ppm', 'hysteresis_ppm', 'budget_entries', 'span_max_tokens', 'anchor_threshold', 'detail_rank',
                 'detail_error'):
        setattr(desc, name, _number(getattr(sekv, name)))
    desc.span_min_tokens = _abi.SKERRY_NONE_TOKENS if sekv.span_min_tokens == 0 else _number(sekv.span_min_tokens)
    desc.segmentation = _names.SEGMENTS.value(sekv.segmentation)
    desc.keep_windows = sekv.keep_windows
    desc.miss = _names.ZOOM_MISS.value(sekv.miss)
    for name, is_set in (('NO_RESIDENTS', not sekv.residents), ('SHARED_BASES', sekv.shared_bases), ('ABSENT_ROWS', sekv.absent_rows),
                         ('VALUE_GATES', sekv.value_gates), ('GROUP_CHOICE', sekv.group_choice), ('SECOND_ORDER', sekv.second_order)):
        desc.flags |= getattr(_abi, 'SKERRY_SEKV_' + name) * bool(is_set)
    if sekv.router is not None:
        if sekv.router._library is not library:
            raise ValueError('the router belongs to another Library than the cache')
        desc.router = sekv.router._require()
        keep.append(sekv.router)
    keep.append(desc)
    return desc


def budget_desc(library, budget):
    desc = library.new('skerry_budget_desc')
    for field in dataclasses.fields(Budget):
        setattr(desc, field.name, getattr(budget, field.name))
    return desc


def cache_desc(library, *, layers, policy='full', budget=None, store_dtype='f16', max_sequences=1, max_step_tokens=0,
               staging_tokens=0, nonfinite='refuse', exact_attend=False, callbacks=None):
    """(skerry_cache_desc *, everything it points to)."""
    keep = []
    desc = library.new('skerry_cache_desc')
    made = [layer_desc(library, layer, keep) for layer in layers]
    table = _ffi.new('const skerry_layer_desc *[]', made)
    desc.layers = table
    desc.layer_count = len(made)
    desc.policy = policy_desc(library, as_policy(policy), keep)
    budget = as_budget(budget)
    if budget is not None:
        limits = budget_desc(library, budget)
        desc.budget = limits  # what is read back from a field does not own it
        keep.append(limits)
    if callbacks is not None:
        desc.callbacks = callbacks
    desc.store_dtype = _names.DTYPE.value(store_dtype)
    desc.max_sequences = max_sequences
    desc.max_step_tokens = max_step_tokens
    desc.staging_tokens = staging_tokens
    desc.nonfinite = _names.NONFINITE.value(nonfinite)
    if exact_attend:
        desc.flags = _abi.SKERRY_CACHE_EXACT_ATTEND
    keep += [table, callbacks]
    return desc, keep
