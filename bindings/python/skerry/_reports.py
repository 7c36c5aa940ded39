# SPDX-License-Identifier: MIT
"""What the library reports, as dataclasses with the fields of the C structs of the same name."""

import dataclasses
from typing import Any, Callable, Dict, Optional, Tuple, TypeVar

import numpy

from . import _abi, _names
from ._library import _ffi
from ._tensor import numpy_dtype

_NO_LIMIT = (1 << 64) - 1


def _limit(value):
    return None if value == _NO_LIMIT else value


def _text(value):
    return _ffi.string(value).decode('utf-8', 'replace')


Class = TypeVar('Class', bound=type)
_conversions: Dict[type, Dict[str, Callable]] = {}


def _converts(**functions: Callable) -> Callable[[Class], Class]:
    """Says which fields are not taken over as they are."""
    def mark(cls: Class) -> Class:
        _conversions[cls] = functions
        return cls
    return mark


def read(cls, struct):
    """Builds a dataclass from the struct's fields of the same names."""
    values = {}
    conversions = _conversions.get(cls, {})
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            continue  # no field of the struct: whoever reads it fills it in
        value = getattr(struct, field.name)
        convert = conversions.get(field.name)
        values[field.name] = convert(value) if convert else value
    return cls(**values)


@_converts(flags=_names.POLICY_FLAGS.name, budget_bytes=_limit, kind=_names.POLICY.name,
           fidelity=_names.FIDELITY.name, prefill=_names.PREFILL.name, score=_names.SCORE.name,
           selection=_names.SELECTION.name, full_format=_names.FORMAT.name, key_format=_names.FORMAT.name,
           value_format=_names.FORMAT.name, cpu_features=_names.CPU.name, exact_attend=bool,
           store_dtype=_names.DTYPE.name, detail_format=_names.FORMAT.name, router_trained=bool)
@dataclasses.dataclass(frozen=True)
class Plan:
    """What a cache of a description holds and costs. Bytes are of the whole cache, all sequences together."""

    flags: Tuple[str, ...]  #: policy flags in effect
    budget_bytes: Optional[int]  #: the limit in force; None: no limit
    minimum_bytes: int  #: smallest Budget.bytes that this description accepts
    planned_bytes: int  #: records, full tokens and tables at full occupancy
    pool_bytes: int  #: of these: records and full-precision tokens
    table_bytes: int  #: of these: work lists, scores, balance parameters
    staging_bytes: int  #: on top: tokens of a step in flight, scratch, the undo copy
    exact_bytes: int  #: on top: host copies
    full_cache_bytes: int  #: a full cache of length_tokens in the store dtype; 0: length unknown
    charged_bytes: int  #: paper fidelity: the published sum
    readable_tokens: int  #: per sequence and KV head at full occupancy; least over layers
    full_windows: int  #: history windows in the full tier per KV head; least over layers
    quantised_windows: int  #: the same for the quantised tier
    kind: str
    fidelity: str
    prefill: str
    window_tokens: int
    sink_tokens: int
    recent_tokens: int
    period_tokens: int
    score: str
    score_queries: int
    selection: str
    full_format: str
    key_format: str
    value_format: str
    value_group: int
    quantised_share_ppm: int
    hysteresis_ppm: int
    max_moves_ppm: int
    cpu_features: Tuple[str, ...]  #: that attend really uses for these formats
    exact_attend: bool  #: float32 path instead of 8-bit dot products on low-bit records
    store_dtype: str
    max_sequences: int
    max_step_tokens: int
    staging_tokens: int
    budget_overrun_tokens: int  #: paper fidelity: tokens by which sinks and local tokens exceed the published budget
    host_bytes: int  #: sekv, on top: host memory for detail, its tables included
    router_bytes: int  #: sekv, of table_bytes: router keys and their balance
    zoom_bytes: int  #: sekv, of pool_bytes: slots of fetched windows that are kept
    zoom_staging_bytes: int  #: sekv, of staging_bytes: slots that one layer reads from and the next is prefetched to
    host_windows: int  #: sekv: windows per KV head that can have detail; least over layers
    fetch_windows: int  #: sekv: windows read per query and KV head at length_tokens; least over layers
    detail_format: str
    refine_ppm: int
    zoom_hysteresis_ppm: int
    fetch_ppm: int
    router_trained: bool  #: sekv: Sekv.router finds windows; False: the router that needs no training
    router_vectors: int  #: sekv: vectors that stand for the keys of a window, 1 to 4


@_converts(type=_names.DEVICE.name, cpu_features=_names.CPU.name, name=_text)
@dataclasses.dataclass(frozen=True)
class DeviceInfo:
    """One device of a context."""

    type: str
    index: int
    cpu_features: Tuple[str, ...]
    worker_count: int  #: threads a parallel loop may use, the caller's included
    name: str


@_converts(flags=_names.ROUTER_FLAGS.name, form=_names.ROUTER_FORM.name, pooling=_names.ROUTER_POOLING.name, model=_text)
@dataclasses.dataclass(frozen=True)
class RouterInfo:
    """What a trained router was made for and holds."""

    flags: Tuple[str, ...]
    parameters: int  #: trained numbers
    weight_bytes: int  #: host memory that they take, in float32
    training_step: int  #: 0: unknown
    layers: int
    query_heads: int  #: per layer
    kv_heads: int
    key_dim: int
    summary_dim: int  #: of a projected key or query
    rank_max: int  #: ranks that the gates weigh; 0 without gates
    form: str
    pooling: str
    centroids: int  #: projected keys per segment and KV head
    model: str


@dataclasses.dataclass(frozen=True)
class ContextBytes:
    """Live host bytes of a context, by owner."""

    context_bytes: int  #: the context itself, workers
    cache_bytes: int  #: all caches together
    object_count: int  #: live allocations


@_converts(budget_bytes=_limit)
@dataclasses.dataclass(frozen=True)
class MemoryInfo:
    """Bytes that a cache holds at this moment and what its tiers use of them."""

    budget_bytes: Optional[int]  #: None: no limit
    allocated_bytes: int  #: pool + table + staging + exact + host + fixed
    pool_bytes: int  #: records and full-precision tokens, free slots included
    table_bytes: int  #: work lists, scores, balance parameters
    staging_bytes: int  #: tokens of a step in flight, scratch, the undo copy
    exact_bytes: int  #: host copies of demoted windows
    fixed_bytes: int  #: the cache object itself
    peak_bytes: int  #: largest allocated_bytes so far
    used_bytes: int  #: slots in use and tables; shared slots once
    used_full_bytes: int
    used_quantised_bytes: int
    used_dormant_bytes: int  #: ledger records that are not active
    used_exact_bytes: int
    full_cache_bytes: int  #: the same committed tokens in a full cache of the store dtype
    host_bytes: int  #: sekv: host memory for detail, its tables included
    used_host_bytes: int  #: of these: detail in use
    used_zoom_bytes: int  #: slots of fetched windows in use, kept and staged
    used_summary_bytes: int  #: sekv with fidelity paper: summary rows, and their projections for the router


@dataclasses.dataclass(frozen=True)
class Counters:
    """Counts since the cache was made."""

    steps_begun: int
    steps_committed: int
    steps_aborted: int
    tokens_appended: int
    events: int  #: routing events, per sequence and layer
    demotions: int  #: full to quantised; demotions_written + demotions_ledger
    demotions_written: int  #: a record was encoded
    demotions_ledger: int  #: an existing record was activated
    promotions: int  #: quantised to full; promotions_exact + promotions_recovered
    promotions_exact: int
    promotions_recovered: int
    evictions: int
    record_bytes_written: int
    attended_bytes: int  #: records and tiles read by attend
    nonfinite_values: int  #: replaced by 0
    details_written: int  #: sekv: windows whose detail was put on the host
    detail_bytes_written: int
    details_refused: int  #: windows that found the host tier full
    zooms: int  #: windows chosen by queries; zooms_present + zooms_fetched + zooms_late
    zooms_present: int  #: lay in a slot already, or were on their way
    zooms_fetched: int  #: copied because a query wanted them
    zooms_late: int  #: miss "skip": had not arrived
    prefetches: int  #: windows copied ahead
    fetched_bytes: int  #: copied from the host in all, prefetches included


@dataclasses.dataclass(frozen=True)
class Diagnostics:
    """How well the selection foresees attention, mean over the KV heads of the layers asked for."""

    events: int
    churn: float  #: mean share of readable history windows that changed between consecutive events
    missed_mass: float  #: estimate of the future missed mass
    lir: float  #: rescued over eligible episodes of windows outside the full tier
    lir_eligible: int
    lir_rescued: int
    quantised_mass: float  #: attention mass on quantised windows over all mass


@_converts(flags=_names.SEQUENCE_FLAGS.name)
@dataclasses.dataclass(frozen=True)
class SequenceInfo:
    """State of one sequence. Tokens by tier are summed over layers and KV heads."""

    flags: Tuple[str, ...]
    length_tokens: int  #: committed
    prefill_tokens: int  #: length when the prompt ended, or -1
    next_event_position: int  #: a host that attends itself ends its step here or before; -1: none comes
    lowest_truncate: int  #: smallest length that truncate accepts now, besides 0
    full_tokens: int
    quantised_tokens: int
    evicted_tokens: int
    used_bytes: int
    charged_bytes: int  #: paper fidelity: the method's own sum
    exact_bytes: int  #: host copies
    surprisal_tokens: int  #: tokens whose surprisal was handed over
    surprisal_mean: float  #: nats
    surprisal_variance: float
    host_tokens: int  #: sekv: tokens whose only copy is on the host, zoomed in or not
    host_bytes: int  #: sekv: detail this sequence refers to


def _range_flags(flags):
    return _names.RANGE_FLAGS.name(flags & (1 << _abi.SKERRY_DETAIL_ERROR_SHIFT) - 1)


@_converts(tier=_names.TIER.name, key_format=_names.FORMAT.name, value_format=_names.FORMAT.name, flags=_range_flags)
@dataclasses.dataclass(frozen=True)
class Range:
    """A run of positions of one KV head in one tier: the sinks, one window, or a run of evicted windows."""

    begin: int
    end: int
    tier: str
    key_format: str
    value_format: str
    flags: Tuple[str, ...]
    score: float  #: in units of attention mass
    bytes: int  #: held, dormant records included
    detail_error: float = 0.0  #: sekv: relative error of the detail's keys or values, whichever is larger; 0: not measured


def read_range(struct):
    return dataclasses.replace(read(Range, struct), detail_error=(struct.flags >> _abi.SKERRY_DETAIL_ERROR_SHIFT) / 32768)


@dataclasses.dataclass(frozen=True)
class Transition:
    """One window that changed tier."""

    sequence: Any  #: Sequence
    position: int  #: of the event
    window: int
    layer: int
    kv_head: int
    from_tier: str
    to_tier: str
    key_format: str  #: after the move; "default" when evicted
    value_format: str
    written_bytes: int  #: 0 when an existing record was activated again
    score: float


def read_transition(move, sequence):
    return Transition(sequence=sequence, position=move.position, window=move.window, layer=move.layer, kv_head=move.kv_head,
                      from_tier=_names.TIER.name(getattr(move, 'from')), to_tier=_names.TIER.name(move.to),
                      key_format=_names.FORMAT.name(move.key_format), value_format=_names.FORMAT.name(move.value_format),
                      written_bytes=move.written_bytes, score=move.score)


@dataclasses.dataclass(frozen=True)
class Gathered:
    """Readable tokens of one sequence, layer and KV head in position order.

    keys       [tokens, key_dim], as attention uses them
    values     [tokens, value_dim]
    positions  [tokens] int64
    bias       [tokens] float32, to be added to the scaled logit
    windows    [tokens] int32, index of the window, or -1 for sinks
    """

    keys: numpy.ndarray
    values: numpy.ndarray
    positions: numpy.ndarray
    bias: numpy.ndarray
    windows: numpy.ndarray

    @property
    def tokens(self):
        return len(self.positions)


@dataclasses.dataclass(frozen=True)
class Part:
    """Consecutive tokens of one KV head where they lie in the cache. Only until the step ends.

    keys    [key_dim, tokens] for full formats, else None
    values  [tokens, value_dim] for full formats, else None
    keys_address, values_address
            of the first byte, for every format; the layout of low-bit formats is that of the C interface

    Both arrays are read-only windows into the cache's memory. After the step has ended they may show other tokens: copy what
    is kept.
    """

    position: int  #: of the first token
    tokens: int
    capacity: int  #: tokens that the part has room for
    tier: str
    key_format: str
    value_format: str
    window: int  #: index of the window, or -1 for sinks
    keys: Optional[numpy.ndarray]
    values: Optional[numpy.ndarray]
    keys_address: int
    values_address: int


_ELEMENTS = {
    _abi.SKERRY_FORMAT_F32: 'f32',
    _abi.SKERRY_FORMAT_F16: 'f16',
    _abi.SKERRY_FORMAT_BF16: 'bf16',
}


def _window(owner, pointer, code, shape):
    """A read-only array over the cache's memory; `owner` lives as long as the array does."""
    if code not in _ELEMENTS:
        return None
    kind = numpy_dtype(_ELEMENTS[code])
    count = shape[0] * shape[1]
    memory = _Memory(int(_ffi.cast('uintptr_t', pointer)), count * kind.itemsize, owner)
    array = numpy.asarray(memory).view(kind).reshape(shape)
    array.flags.writeable = False
    return array


class _Memory:
    """Bytes at an address, for numpy; keeps the owner of the bytes."""

    def __init__(self, address, size, owner):
        self.owner = owner
        self.__array_interface__ = {'data': (address, True), 'shape': (size,), 'typestr': '|u1', 'version': 3}


def read_part(part, layer, owner):
    keys = _window(owner, part.keys, part.key_format, (layer.key_dim, part.capacity))
    values = _window(owner, part.values, part.value_format, (part.capacity, layer.value_dim))
    return Part(position=part.position, tokens=part.tokens, capacity=part.capacity, tier=_names.TIER.name(part.tier),
                key_format=_names.FORMAT.name(part.key_format), value_format=_names.FORMAT.name(part.value_format),
                window=part.window, keys=None if keys is None else keys[:, :part.tokens],
                values=None if values is None else values[:part.tokens],
                keys_address=int(_ffi.cast('uintptr_t', part.keys)), values_address=int(_ffi.cast('uintptr_t', part.values)))
