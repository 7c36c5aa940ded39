# SPDX-License-Identifier: MIT
"""Context, Cache, Sequence and Step."""

from __future__ import annotations

import operator
import warnings
import weakref
from typing import Callable, Iterable, List, Optional, Sequence as SequenceOf, Tuple, Union

import numpy

from . import _abi, _config, _errors, _names, _reports
from ._config import Name
from ._library import Library, _ffi, library as _default_library
from ._tensor import floats, numpy_dtype, packed_output, pointer, tensor

NULL = _ffi.NULL
Names = Union[None, int, str, Iterable[str]]
Floats = Union[numpy.ndarray, SequenceOf[float]]
Array = Optional[numpy.ndarray]


class _Owner:
    """One reference to a C object that is given up once: by close(), by the end of a with block, or with the Python object.

    At the end of the interpreter nothing is released: a thread that still runs may be inside the library then, and the
    process gives its memory back anyway.
    """

    def _own(self, pointer, release, keep=None):
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, _release, self._library, release, pointer, keep)
        self._finalizer.atexit = False

    @property
    def closed(self) -> bool:
        """True after close()."""
        return self._pointer == NULL

    def close(self) -> None:
        """Gives the C object up now. May be called again."""
        self._pointer = NULL
        if self._finalizer is not None:
            self._finalizer()

    def __enter__(self):
        self._require()
        return self

    def __exit__(self, kind, value, trace):
        self.close()

    def _require(self):
        if self._pointer == NULL:
            raise _errors.state_error(f'the {type(self).__name__.lower()} is closed')
        return self._pointer


def _release(library, function, pointer, keep):
    # `keep` holds the functions that the C object may still call while it goes.
    library.release(function, pointer)


def surprisal(logits: numpy.ndarray, tokens: Iterable[int], *, dtype: Optional[Name] = None,
              library: Optional[Library] = None) -> numpy.ndarray:
    """float32 [rows]: -ln softmax(logits[i])[tokens[i]] in nats, of logits [rows, vocabulary] in float32, float16 or bfloat16.

    Row i is what the model says before tokens[i]: of a prompt, row t - 1 goes with token t, and token 0 has surprisal 0.
    Raises ArgumentError (shape, token out of range), NonfiniteError.
    """
    used = library or _default_library()
    desc, logits = tensor(logits, 'logits', dtype)
    ids = numpy.ascontiguousarray(tokens, dtype=numpy.int32).reshape(-1)
    if len(ids) != logits.shape[0]:
        raise ValueError(f'{len(ids)} tokens for {logits.shape[0]} rows of logits')
    nats = numpy.empty(len(ids), numpy.float32)
    used.call(used.lib.skerry_surprisal_from_logits, desc, pointer(ids, 'int32_t *'), len(ids), pointer(nats, 'float *'))
    return nats


class Context(_Owner):
    """Threads, log and devices that caches share.

    workers      threads that the library starts beside the caller's, 0 to 255; 0: it starts none
    cpu_disable  instruction sets not to use: names out of "avx2", "avx512", "avx512_vnni", or -1 for all, which leaves the
                 reference in plain C++
    transfers    threads that copy ahead between the host tier and the device (policy "sekv"), 0 to 16
    log          function(level, part, line) with three strings, or None; called on the thread that called the library
    log_level    least important level to report: "error", "warning", "info" or "debug"
    library      a Library from skerry.load(); None: the one in use

    Caches keep their context's C object alive. Raises LoadError, ArgumentError, OutOfMemoryError.
    """

    def __init__(self, *, workers: int = 0, cpu_disable: Names = None, transfers: int = 0,
                 log: Optional[Callable[[str, str, str], None]] = None, log_level: Name = 'warning',
                 library: Optional[Library] = None):
        self._pointer, self._finalizer = NULL, None
        self._library = library or _default_library()
        lib = self._library.lib
        desc = self._library.new('skerry_context_desc')
        desc.worker_count = workers
        desc.transfer_threads = transfers
        desc.cpu_disable = (1 << 32) - 1 if cpu_disable == -1 else _names.CPU.value(cpu_disable)
        keep = None
        if log is not None:
            def forward(user, level, part, line):
                log(_names.LOG_LEVEL.name(level), _ffi.string(part).decode('utf-8', 'replace'),
                    _ffi.string(line).decode('utf-8', 'replace'))
            keep = self._library.callback('skerry_log_fn', forward)
            desc.log_fn = keep
            desc.log_level = _names.LOG_LEVEL.value(log_level)
        self._keep = keep
        out = _ffi.new('skerry_context **')
        self._library.call(lib.skerry_context_create, desc, out,
                           done=lambda: self._own(out[0], lib.skerry_context_release, keep))

    def __repr__(self):
        return f"<skerry.Context{' closed' if self.closed else ''}>"

    @property
    def library(self) -> Library:
        """The Library this context was made with."""
        return self._library

    def device(self, index: int = 0) -> _reports.DeviceInfo:
        """DeviceInfo of a device; 0 is the CPU."""
        info = self._library.new('skerry_device_info')
        self._library.call(self._library.lib.skerry_context_get_device, self._require(), index, info)
        return _reports.read(_reports.DeviceInfo, info)

    def bytes(self) -> _reports.ContextBytes:
        """ContextBytes: live host bytes by owner."""
        info = _ffi.new('skerry_context_bytes *')
        self._library.call(self._library.lib.skerry_context_get_bytes, self._require(), info)
        return _reports.read(_reports.ContextBytes, info)

    def plan(self, layers: Iterable[_config.Layer], **settings) -> _reports.Plan:
        """Plan of the cache that Cache(layers, **settings) would make; allocates nothing.

        Raises OverBudgetError when the budget is below the floor: its `allowed` is the smallest budget in bytes and its
        `plan` the Plan. Raises ArgumentError, UnsupportedError.
        """
        desc, keep = _config.cache_desc(self._library, layers=layers, **settings)
        return self._plan(desc)

    def _plan(self, desc):
        info = self._library.new('skerry_plan_info')
        try:
            self._library.call(self._library.lib.skerry_cache_plan, self._require(), desc, info)
        except _errors.OverBudgetError as error:
            error.plan = _reports.read(_reports.Plan, info)
            raise
        return _reports.read(_reports.Plan, info)


class Cache(_Owner):
    """Keys and values of many sequences of one model, under one budget.

    layers           a Layer per layer of the model
    policy           Policy, or the name of a kind: "full", "streaming", "evict", "quantise", "qevict"
    budget           Budget, a number of bytes, or None: no limit
    store_dtype      of full-precision tokens: "f32", "f16" or "bf16"
    max_sequences    1 to 65535
    max_step_tokens  of one sequence in one step; 0 means 256
    staging_tokens   prefill "whole": longest prompt held in full precision; 0 means max_step_tokens
    nonfinite        NaN and infinity: "refuse" them or store "zero"
    exact_attend     attend in float32 throughout instead of 8-bit dot products on low-bit records
    callbacks        Callbacks, or None
    context          Context, or None: one of its own

    With a budget, everything the cache will ever hold is allocated here. One thread at a time may use a cache; within an open
    step, different layers may be appended and attended from different threads.
    Raises ArgumentError, OverBudgetError (see Context.plan), UnsupportedError, OutOfMemoryError.
    """

    def __init__(self, layers: Iterable[_config.Layer], *, policy: Union[_config.Policy, Name] = 'full',
                 budget: Union[None, int, _config.Budget] = None, store_dtype: Name = 'f16', max_sequences: int = 1,
                 max_step_tokens: int = 0, staging_tokens: int = 0, nonfinite: Name = 'refuse', exact_attend: bool = False,
                 callbacks: Optional[_config.Callbacks] = None, context: Optional[Context] = None):
        self._pointer, self._finalizer = NULL, None
        self.context = Context() if context is None else context
        self._library = self.context.library
        self._abandoned: list = []
        self._sequences: weakref.WeakValueDictionary[int, Sequence] = weakref.WeakValueDictionary()
        self.layers = tuple(_config.resolved(layer) for layer in layers)
        lib = self._library.lib
        table, functions = _callback_table(self._library, callbacks, weakref.ref(self))
        desc, keep = _config.cache_desc(
            self._library, layers=self.layers, policy=policy, budget=budget, store_dtype=store_dtype,
            max_sequences=max_sequences, max_step_tokens=max_step_tokens, staging_tokens=staging_tokens, nonfinite=nonfinite,
            exact_attend=exact_attend, callbacks=table)
        out = _ffi.new('skerry_cache **')
        # The C object calls into the context's log and these callbacks until it is gone.
        self._alive = alive = (functions, self.context._keep)
        try:
            self._library.call(lib.skerry_cache_create, self.context._require(), desc, out,
                               done=lambda: self._own(out[0], lib.skerry_cache_release, alive))
        except _errors.OverBudgetError as error:
            try:
                error.plan = self.context._plan(desc)
            except _errors.OverBudgetError as again:
                error.plan = again.plan
            raise

    def __repr__(self):
        return f"<skerry.Cache {len(self.layers)} layers{', closed' if self.closed else ''}>"

    def _call(self, function, *arguments, done=None):
        pointer = self._require()
        # A step whose Python object went away unfinished is undone here and not where it went: that may have been any thread.
        while self._abandoned:
            self._library.release(self._library.lib.skerry_step_abort, self._abandoned.pop())
        return self._library.call(function, pointer, *arguments, done=done)

    @property
    def plan(self) -> _reports.Plan:
        """Plan: the configuration in effect."""
        info = self._library.new('skerry_plan_info')
        self._library.call(self._library.lib.skerry_cache_get_plan, self._require(), info)
        return _reports.read(_reports.Plan, info)

    def set_budget(self, budget: Union[None, int, _config.Budget]) -> None:
        """Changes the budget (Budget, bytes, or None) at once or not at all; no step may be open.

        Raises OverBudgetError (`allowed` is the minimum), StateError, OutOfMemoryError, ArgumentError.
        """
        desc = _config.budget_desc(self._library, _config.as_budget(budget) or _config.Budget())
        self._call(self._library.lib.skerry_cache_set_budget, desc)

    def check(self) -> None:
        """Walks every table and counter; raises InternalError at the first broken invariant."""
        self._call(self._library.lib.skerry_cache_check)

    def memory(self) -> _reports.MemoryInfo:
        """MemoryInfo: bytes held now, by owner and by tier."""
        info = self._library.new('skerry_memory_info')
        self._call(self._library.lib.skerry_cache_get_memory, info)
        return _reports.read(_reports.MemoryInfo, info)

    def counters(self) -> _reports.Counters:
        """Counters since the cache was made."""
        info = self._library.new('skerry_counters')
        self._call(self._library.lib.skerry_cache_get_counters, info)
        return _reports.read(_reports.Counters, info)

    def sequence(self) -> Sequence:
        """Opens an empty Sequence. Raises TierFullError (max_sequences), StateError (open step), OutOfMemoryError."""
        return self._new_sequence(self._library.lib.skerry_seq_create)

    def _new_sequence(self, function, *arguments):
        out = _ffi.new('skerry_seq *')
        try:
            self._call(function, *arguments, out)
        except BaseException:
            if out.bits:  # made, but a callback raised
                self._call(self._library.lib.skerry_seq_drop, out[0])
            raise
        return self._sequence(out.bits)

    def _sequence(self, bits):
        known = self._sequences.get(bits)
        if known is None:
            known = self._sequences[bits] = Sequence(self, bits)
        return known

    def step(self, sequences: Union[Sequence, Iterable[Sequence]], tokens: Union[int, Iterable[int]], *,
             positions: Union[None, int, Iterable[int]] = None, prefill: bool = False) -> Step:
        """Opens a Step that appends `tokens` tokens to a sequence, or tokens[i] to sequences[i].

        sequences  a Sequence, or a list of different ones
        tokens     at least 1 each; rows of all arrays follow in this order
        positions  first position of each, checked against what is stored; None: not checked
        prefill    these tokens are part of a prompt that goes on

        Reserves every byte the step can need, or fails with nothing changed. One step may be open per cache.
        Raises StaleIdError, ArgumentError, StateError, OverBudgetError, OutOfMemoryError.
        """
        members = [sequences] if isinstance(sequences, Sequence) else list(sequences)
        single = isinstance(sequences, Sequence)
        rows = _integers(tokens, single, len(members), 'token counts')
        desc = self._library.new('skerry_step_desc')
        ids = _ffi.new('skerry_seq[]', len(members))
        for place, sequence in enumerate(members):
            if sequence.cache is not self:
                raise ValueError('the sequence is of another cache')
            ids[place].bits = sequence.id
        counts = _ffi.new('int32_t[]', rows)
        desc.seqs, desc.token_counts, desc.seq_count = ids, counts, len(members)
        if positions is not None:
            first = _ffi.new('int64_t[]', _integers(positions, single, len(members), 'positions'))
            desc.positions = first
        if prefill:
            desc.flags = _abi.SKERRY_STEP_PREFILL
        step = Step(self, members, rows)
        out = _ffi.new('skerry_step **')
        self._call(self._library.lib.skerry_step_begin, desc, out, done=lambda: step._begun(out[0]))
        return step


def _integers(given, single, count, what) -> List[int]:
    numbers = [operator.index(one) for one in ([given] if single else given)]
    if len(numbers) != count:
        raise ValueError(f'{count} sequences but {len(numbers)} {what}')
    return numbers


class Sequence:
    """One sequence of a cache: an id with methods. Made by Cache.sequence() and fork().

    It lives until drop() or until its cache goes, not until this object goes; as a context manager it is dropped at the end of
    the block. Every method raises StaleIdError after drop().
    """

    __slots__ = ('cache', 'id', '__weakref__')

    def __init__(self, cache, bits):
        self.cache = cache
        self.id = bits

    def __repr__(self):
        return f'<skerry.Sequence {self.id:#x}>'

    def __eq__(self, other):
        return isinstance(other, Sequence) and self.cache is other.cache and self.id == other.id

    def __hash__(self):
        return hash((id(self.cache), self.id))

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        try:
            if not self.cache.closed:
                self.drop()
        except _errors.StaleIdError:
            pass  # dropped inside the block
        except _errors.SkerryError:
            if kind is None:
                raise

    def _call(self, name, *arguments):
        seq = _ffi.new('skerry_seq *')
        seq.bits = self.id
        return self.cache._call(getattr(self.cache._library.lib, name), seq[0], *arguments)

    def drop(self) -> None:
        """Drops the sequence. Raises StaleIdError, StateError (it is in the open step)."""
        self._call('skerry_seq_drop')

    def fork(self, length: Optional[int] = None) -> Sequence:
        """Opens a Sequence that continues this one from `length` tokens (None: all); bytes are shared until one changes.

        Raises ArgumentError (not a length that truncate accepts), TierFullError, StateError, OutOfMemoryError.
        """
        seq = _ffi.new('skerry_seq *')
        seq.bits = self.id
        return self.cache._new_sequence(self.cache._library.lib.skerry_seq_fork, seq[0], -1 if length is None else length)

    def truncate(self, length: int) -> None:
        """Shortens to `length` tokens: 0, or at least info().lowest_truncate.

        Raises ArgumentError (`allowed` is lowest_truncate), StateError.
        """
        self._call('skerry_seq_truncate', length)

    def can_truncate(self, length: int, ahead: int = 0) -> bool:
        """Would truncate(length) still be legal after `ahead` more tokens?"""
        return self._call('skerry_seq_can_truncate', length, ahead) == _abi.SKERRY_OK

    def info(self) -> _reports.SequenceInfo:
        """SequenceInfo."""
        info = self.cache._library.new('skerry_seq_info')
        self._call('skerry_seq_get_info', info)
        return _reports.read(_reports.SequenceInfo, info)

    @property
    def length(self) -> int:
        """Committed tokens."""
        return self.info().length_tokens

    def ranges(self, layer: int, kv_head: int) -> List[_reports.Range]:
        """List of Range: where the tokens of a layer and KV head are, in position order, without gaps.

        Raises ArgumentError.
        """
        capacity = 64
        needed = _ffi.new('int32_t *')
        while True:
            ranges = _ffi.new('skerry_range[]', capacity)
            status = self._call('skerry_seq_list_ranges', layer, kv_head, ranges, capacity, needed)
            if status != _abi.SKERRY_INCOMPLETE:
                return [_reports.read_range(ranges[place]) for place in range(needed[0])]
            capacity = needed[0]

    def fingerprint(self) -> int:
        """Hash (int) of everything stored: positions, tiers, bytes, scores."""
        out = _ffi.new('uint64_t *')
        self._call('skerry_seq_fingerprint', out)
        return out[0]

    def diagnostics(self, layer: Optional[int] = None) -> _reports.Diagnostics:
        """Diagnostics of one layer, or of all. Raises ArgumentError."""
        info = self.cache._library.new('skerry_diagnostics')
        self._call('skerry_seq_get_diagnostics', -1 if layer is None else layer, info)
        return _reports.read(_reports.Diagnostics, info)


def _abandon(abandoned, pointer):
    abandoned.append(pointer)
    warnings.warn('a skerry.Step went away without commit() or abort(); it is undone at the next call of its cache',
                  ResourceWarning, stacklevel=2)


class Step:
    """Tokens on their way into one or more sequences. Made by Cache.step().

        with cache.step(sequence, 4) as step:
            for layer in range(len(cache.layers)):
                step.append(layer, keys, values)
                out, lse = step.attend(layer, queries)

    The block commits at its end and aborts when an exception leaves it. Each layer is appended once before it is attended,
    viewed or gathered. Arrays are float32, float16 or ml_dtypes.bfloat16, or uint16 together with dtype="bf16"; any strides of
    whole elements are used in place. `tokens` is the number of rows: those of all sequences together.
    """

    def __init__(self, cache, sequences, counts):
        self.cache = cache
        self.sequences = tuple(sequences)
        self.counts = tuple(counts)
        self._library = cache._library
        self._pointer = NULL
        self._finalizer = None

    def _begun(self, pointer):
        self._pointer = pointer
        self._finalizer = weakref.finalize(self, _abandon, self.cache._abandoned, pointer)
        self._finalizer.atexit = False

    def _ended(self):
        self._pointer = NULL
        self._finalizer.detach()

    def _require(self):
        if self._pointer == NULL:
            raise _errors.state_error('the step has ended')
        self.cache._require()
        return self._pointer

    def __repr__(self):
        return f"<skerry.Step {self.tokens} tokens, {'open' if self.open else 'ended'}>"

    def __enter__(self):
        self._require()
        return self

    def __exit__(self, kind, value, trace):
        if not self.open:
            return
        if kind is not None:
            self.abort()
            return
        try:
            self.commit()
        except BaseException:
            # A refused commit leaves the step open; one whose callback raised does not.
            self.abort()
            raise

    @property
    def open(self) -> bool:
        """True until commit() or abort()."""
        return self._pointer != NULL and not self.cache.closed

    @property
    def tokens(self) -> int:
        """Rows of every array of this step."""
        return sum(self.counts)

    def _index(self, sequence):
        if sequence is None:
            if len(self.sequences) != 1:
                raise ValueError('name one of the sequences of the step')
            return 0
        if isinstance(sequence, Sequence):
            try:
                return self.sequences.index(sequence)
            except ValueError:
                raise ValueError('the sequence is not in this step') from None
        return operator.index(sequence)

    def _layer(self, layer):
        layer = operator.index(layer)
        if not 0 <= layer < len(self.cache.layers):
            raise _errors.argument_error(f'layer {layer} of {len(self.cache.layers)}', subject='layer', index=layer, found=layer,
                                         allowed=len(self.cache.layers) - 1)
        return self.cache.layers[layer]

    def append(self, layer: int, keys: numpy.ndarray, values: numpy.ndarray, *, dtype: Optional[Name] = None) -> None:
        """Stores keys [tokens, kv_heads, key_dim], as attention uses them, and values [tokens, kv_heads, value_dim].

        Raises ArgumentError (shape, layer), StateError (appended already, shared layer), NonfiniteError.
        """
        k, keys = tensor(keys, 'keys', dtype)
        v, values = tensor(values, 'values', dtype)
        self._library.call(self._library.lib.skerry_step_append, self._require(), layer, k, v, NULL)

    def attend(self, layer: int, queries: numpy.ndarray, *, out: Array = None, lse: Array = None, dtype: Optional[Name] = None,
               out_dtype: Optional[Name] = None, sink_logits: Optional[Floats] = None, tiers: Names = None, exact: bool = False,
               score: bool = True) -> Tuple[numpy.ndarray, numpy.ndarray]:
        """Causal attention of queries [tokens, query_heads, key_dim] over what is stored; returns (out, lse).

        out          array to write, [tokens, query_heads, value_dim], any strides; None: a new one
        lse          float32 array to write, [tokens, query_heads]: log of the sum of exp(logits), -inf when nothing was seen
        dtype        "bf16" when `queries` (and `out`) are uint16
        out_dtype    of a new `out`; None: that of the queries
        sink_logits  [query_heads]: a logit per head that takes mass and has value 0
        tiers        "full" or "quantised" alone; None: all. A part of the tiers never scores: give the merged lse to observe()
        exact        float32 throughout
        score        add the masses to the scores

        Raises ArgumentError, StateError, NonfiniteError, UnsupportedError.
        """
        geometry = self._layer(layer)
        desc = self._library.new('skerry_attend_desc')
        q, queries = tensor(queries, 'queries', dtype)
        if out is None:
            kind = queries.dtype if out_dtype is None else numpy_dtype(out_dtype)
            out = numpy.empty((self.tokens, geometry.query_heads, geometry.value_dim), kind)
        if lse is None:
            lse = numpy.empty((self.tokens, geometry.query_heads), numpy.float32)
        declared = 'bf16' if out.dtype == numpy.uint16 and 'bf16' in (dtype, out_dtype) else None
        o, _ = tensor(out, 'out', declared, writable=True)
        l, _ = tensor(lse, 'lse', writable=True)
        sinks, kept = floats(sink_logits, 'sink_logits', (geometry.query_heads,))
        desc.queries, desc.out, desc.lse, desc.sink_logits = q, o, l, sinks
        desc.layer = layer
        desc.tiers = _names.TIERS.value(tiers)
        desc.flags = _abi.SKERRY_ATTEND_EXACT * bool(exact) | _abi.SKERRY_ATTEND_NO_SCORE * (not score)
        self._library.call(self._library.lib.skerry_step_attend, self._require(), desc)
        return out, lse

    def view(self, layer: int, kv_head: int, sequence: Union[None, int, Sequence] = None, *,
             tiers: Names = None) -> List[_reports.Part]:
        """List of Part: where the readable tokens of a KV head lie, in position order, without a copy; until the step ends.

        Raises ArgumentError, StateError (layer not appended).
        """
        geometry = self._layer(layer)
        place, mask = self._index(sequence), _names.TIERS.value(tiers)
        needed = _ffi.new('int32_t *')
        capacity = 64
        while True:
            parts = _ffi.new('skerry_part[]', capacity)
            status = self._library.call(self._library.lib.skerry_step_view, self._require(), place, layer, kv_head, mask, parts,
                                        capacity, needed)
            if status != _abi.SKERRY_INCOMPLETE:
                break
            capacity = needed[0]
        owner = _Retained(self.cache)
        return [_reports.read_part(parts[index], geometry, owner) for index in range(needed[0])]

    def zoom(self, layer: int, queries: numpy.ndarray, *, dtype: Optional[Name] = None) -> None:
        """For a host that attends itself, policy "sekv": every KV head chooses by `queries` [sequences, query_heads, key_dim] what it reads
        from the host and fetches it; view, gather and observe of the layer then have it. One token per sequence in the step.

        Raises ArgumentError, StateError (more than one token, layer not appended), NonfiniteError.
        """
        q, queries = tensor(queries, 'queries', dtype)
        self._library.call(self._library.lib.skerry_step_zoom, self._require(), layer, q, NULL)

    def gather(self, layer: int, kv_head: int, sequence: Union[None, int, Sequence] = None, *, keys: Array = None,
               values: Array = None, positions: Array = None, bias: Array = None, windows: Array = None, dtype: Name = 'f32',
               tiers: Names = None) -> _reports.Gathered:
        """Gathered: copies of the readable tokens of a KV head in position order.

        keys, values               arrays to write, [>= tokens, key_dim] and [>= tokens, value_dim], any strides; None: new ones
        positions, bias, windows   packed arrays to write, [>= tokens] of int64, float32 and int32; None: new ones
        dtype                      "f32", "f16" or "bf16": of new keys and values
        tiers                      "full" or "quantised" alone; None: all

        Raises ArgumentError, StateError (layer not appended).
        """
        geometry = self._layer(layer)
        call, lib = self._library.call, self._library.lib
        desc = self._library.new('skerry_gather_desc')
        desc.seq_index, desc.layer, desc.kv_head = self._index(sequence), layer, kv_head
        desc.tiers = _names.TIERS.value(tiers)
        needed = _ffi.new('int32_t *')
        call(lib.skerry_step_gather, self._require(), desc, needed)
        tokens = needed[0]
        keys = numpy.empty((tokens, geometry.key_dim), numpy_dtype(dtype)) if keys is None else keys
        values = numpy.empty((tokens, geometry.value_dim), numpy_dtype(dtype)) if values is None else values
        positions = numpy.empty(tokens, numpy.int64) if positions is None else positions
        bias = numpy.empty(tokens, numpy.float32) if bias is None else bias
        windows = numpy.empty(tokens, numpy.int32) if windows is None else windows
        if tokens:
            k, _ = tensor(keys, 'keys', dtype if keys.dtype == numpy.uint16 else None, writable=True)
            v, _ = tensor(values, 'values', dtype if values.dtype == numpy.uint16 else None, writable=True)
            desc.keys, desc.values = k, v
            desc.positions = pointer(packed_output(positions, 'positions', numpy.int64, tokens), 'int64_t *')
            desc.bias = pointer(packed_output(bias, 'bias', numpy.float32, tokens), 'float *')
            desc.windows = pointer(packed_output(windows, 'windows', numpy.int32, tokens), 'int32_t *')
            if call(lib.skerry_step_gather, self._require(), desc, needed) == _abi.SKERRY_INCOMPLETE:
                raise _errors.argument_error(f'an output has no room for {tokens} tokens', subject='tensor',
                                             found=min(len(keys), len(values)), allowed=tokens)
        return _reports.Gathered(keys[:tokens], values[:tokens], positions[:tokens], bias[:tokens], windows[:tokens])

    def observe(self, layer: int, kv_head: int, sequence: Union[None, int, Sequence] = None, *, masses: Optional[Floats] = None,
                merged_lse: Optional[Floats] = None, queries: Array = None, dtype: Optional[Name] = None) -> None:
        """Reports the attention that the caller computed itself, for one sequence, layer and KV head.

        masses      [rows, gathered tokens]: per row of the sequence, the probability of each token of gather() over all tiers,
                    mean over the group's query heads
        merged_lse  [rows, query_heads / kv_heads]: log-sum-exp over all tiers after an attend over some; needs `queries`
        queries     [rows, query_heads / kv_heads, key_dim] of the head's group

        Raises ArgumentError, StateError (layer not appended, scored already), NonfiniteError.
        """
        geometry = self._layer(layer)
        place = self._index(sequence)
        rows = self.counts[place] if 0 <= place < len(self.counts) else 0
        desc = self._library.new('skerry_observe_desc')
        if masses is not None:
            masses = numpy.asarray(masses)
            if masses.ndim != 2:
                raise _errors.argument_error('masses: two dimensions are needed', subject='tensor', found=masses.ndim, allowed=2)
            desc.token_count = masses.shape[1]
            desc.masses, masses = floats(masses, 'masses', (rows, masses.shape[1]))
        group = geometry.query_heads // geometry.kv_heads
        desc.merged_lse, kept = floats(merged_lse, 'merged_lse', (rows, group))
        if queries is not None:
            q, queries = tensor(queries, 'queries', dtype)
            desc.queries = q
        desc.seq_index, desc.layer, desc.kv_head = place, layer, kv_head
        self._library.call(self._library.lib.skerry_step_observe, self._require(), desc)

    def surprisal(self, nats: Floats, sequence: Union[None, int, Sequence] = None) -> None:
        """Hands over -ln p(token | before) of the sequence's tokens of this step, in nats. Raises ArgumentError, NonfiniteError."""
        place = self._index(sequence)
        packed = numpy.ascontiguousarray(nats, dtype=numpy.float32).reshape(-1)
        self._library.call(self._library.lib.skerry_step_surprisal, self._require(), place,
                           pointer(packed, 'float *'), packed.size)

    def commit(self) -> None:
        """Makes the step part of its sequences and runs the routing events that are due.

        Raises StateError when a layer that stores was not appended; the step then stays open.
        """
        self._library.call(self._library.lib.skerry_step_commit, self._require(), done=self._ended)

    def abort(self) -> None:
        """Undoes the step as if it had never begun. Does nothing when it has ended."""
        if self.open:
            pointer = self._pointer
            self._ended()
            self._library.release(self._library.lib.skerry_step_abort, pointer)


class _Retained:
    """A reference of its own to a cache, for arrays that point into it."""

    def __init__(self, cache):
        pointer = cache._library.lib.skerry_cache_retain(cache._require())
        finalizer = weakref.finalize(self, _release, cache._library, cache._library.lib.skerry_cache_release, pointer, cache)
        finalizer.atexit = False


def _callback_table(library, callbacks, cache):
    """(skerry_callbacks_desc *, the C functions to keep); `cache` is a weak reference, so that nothing keeps itself alive."""
    if callbacks is None:
        return None, ()
    desc = library.new('skerry_callbacks_desc')
    kept = []

    def put(name, function, failed=None):
        if getattr(callbacks, name) is not None:
            made = library.callback(_CALLBACK_TYPES[name].type, function, failed)
            kept.append(made)
            setattr(desc, name, made)

    def before_layer(user, layer):
        callbacks.before_layer(layer)

    def scores_wanted(user, seq, layer, kv_head, windows, count, masses):
        listed = numpy.frombuffer(_ffi.buffer(windows, 4 * count), numpy.int32).copy()
        given = callbacks.scores_wanted(cache()._sequence(seq.bits), layer, kv_head, listed)
        if given is None:
            return 0
        given = numpy.asarray(given, numpy.float32)
        if given.shape != (count,):
            raise ValueError(f'scores_wanted returned shape {given.shape} instead of {(count,)}')
        numpy.frombuffer(_ffi.buffer(masses, 4 * count), numpy.float32)[:] = given
        return 1

    def transitions(user, moves, count):
        callbacks.transitions([_reports.read_transition(moves[place], cache()._sequence(moves[place].seq.bits))
                               for place in range(count)])

    def committed(user, seq, length):
        callbacks.committed(cache()._sequence(seq.bits), length)

    put('before_layer', before_layer)
    put('scores_wanted', scores_wanted, 0)
    put('transitions', transitions)
    put('committed', committed)
    return desc, tuple(kept)


_CALLBACK_TYPES = dict(_ffi.typeof('skerry_callbacks_desc').fields)
