# SPDX-License-Identifier: MIT
"""Skerry: the KV cache of a language model in tiers under a byte budget.

Words and rules are those of the C interface; see docs/python.md for a first page. Every call releases the interpreter lock
while it is inside the library.
"""

from ._cache import Cache, Context, Sequence, Step, surprisal
from ._config import Budget, Callbacks, Layer, Policy, Rotary, Sekv
from ._errors import (ArgumentError, BackendError, CorruptError, DeviceLostError, FormatError, InternalError, LoadError,
                      NonfiniteError, OutOfMemoryError, OverBudgetError, SkerryError, StaleIdError, StateError, StorageError,
                      TierFullError, UnsupportedError)
from ._library import API_VERSION, Library, library, load
from ._reports import (ContextBytes, Counters, DeviceInfo, Diagnostics, Gathered, MemoryInfo, Part, Plan, Range, RouterInfo,
                       SequenceInfo, Transition)
from ._router import Router

__version__ = '0.1.0'

__all__ = [
    'API_VERSION', 'ArgumentError', 'BackendError', 'Budget', 'Cache', 'Callbacks', 'Context', 'ContextBytes', 'CorruptError',
    'Counters', 'DeviceInfo', 'DeviceLostError', 'Diagnostics', 'FormatError', 'Gathered', 'InternalError', 'Layer', 'Library',
    'LoadError', 'MemoryInfo', 'NonfiniteError', 'OutOfMemoryError', 'OverBudgetError', 'Part', 'Plan', 'Policy', 'Range',
    'Rotary', 'Router', 'RouterInfo', 'Sekv', 'Sequence', 'SequenceInfo', 'SkerryError', 'StaleIdError', 'StateError', 'Step',
    'StorageError', 'TierFullError', 'Transition', 'UnsupportedError', 'library', 'load', 'surprisal',
]
