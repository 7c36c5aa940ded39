# SPDX-License-Identifier: MIT
"""Exceptions: one class for every failure of the C library, with its fields."""

from . import _abi
from ._names import SUBJECT


class LoadError(OSError):
    """No usable shared library was found. The text lists every name that was tried and why it was refused."""


class SkerryError(Exception):
    """A call of the library failed and changed nothing (DeviceLostError and InternalError may poison their object).

    status      int, one of the SKERRY_ERROR_* numbers
    status_name str, its name ("SKERRY_ERROR_OVER_BUDGET")
    subject     str, what the error is about ("budget", "layer", "none", ...)
    index       int, layer, head, dimension or place in an array; -1: none
    found       int, the value that was refused (bytes for "budget")
    allowed     int, the value that would have been accepted, where there is one
    message     str, one line from the library
    """

    def __init__(self, message, *, status=0, status_name='', subject='none', index=-1, found=0, allowed=0):
        super().__init__(message)
        self.message = message
        self.status = status
        self.status_name = status_name
        self.subject = subject
        self.index = index
        self.found = found
        self.allowed = allowed

    def __str__(self):
        return f'{self.status_name}: {self.message}' if self.status_name else self.message

    def __reduce__(self):
        return _rebuild, (type(self), self.message, self.__dict__)


def _rebuild(cls, message, fields):
    error = cls(message)
    error.__dict__.update(fields)
    return error


class ArgumentError(SkerryError, ValueError):
    """A value is outside what the library allows."""


class StaleIdError(SkerryError):
    """The sequence was dropped."""


class StateError(SkerryError):
    """A legal call at the wrong moment: a closed object, an open step, a layer appended twice."""


class NonfiniteError(SkerryError, ValueError):
    """NaN or infinity in keys, values, queries or masses, and the cache refuses them."""


class OutOfMemoryError(SkerryError, MemoryError):
    """The machine has no memory left."""


class OverBudgetError(SkerryError):
    """The caller's own limit is too small; `allowed` is the smallest budget in bytes where the call knows it.

    plan    Plan, when the error comes from a description of a cache; else None
    """

    plan = None


class TierFullError(SkerryError):
    """No place left: max_sequences are open."""


class UnsupportedError(SkerryError):
    """This device or build cannot do it."""


class BackendError(SkerryError):
    """A backend is missing, too old or too new."""


class DeviceLostError(SkerryError):
    """The device is gone; the object is unusable."""


class StorageError(SkerryError):
    """Reading or writing a file failed."""


class FormatError(SkerryError):
    """Stored bytes were made under other settings."""


class CorruptError(SkerryError):
    """Stored bytes fail their check."""


class InternalError(SkerryError):
    """A broken invariant inside the library; please report it."""


CLASSES = {
    _abi.SKERRY_ERROR_ARGUMENT: ArgumentError,
    _abi.SKERRY_ERROR_STRUCT_SIZE: ArgumentError,
    _abi.SKERRY_ERROR_NEWER_FIELD: ArgumentError,
    _abi.SKERRY_ERROR_STALE_ID: StaleIdError,
    _abi.SKERRY_ERROR_STATE: StateError,
    _abi.SKERRY_ERROR_NONFINITE: NonfiniteError,
    _abi.SKERRY_ERROR_OUT_OF_MEMORY: OutOfMemoryError,
    _abi.SKERRY_ERROR_OVER_BUDGET: OverBudgetError,
    _abi.SKERRY_ERROR_TIER_FULL: TierFullError,
    _abi.SKERRY_ERROR_UNSUPPORTED: UnsupportedError,
    _abi.SKERRY_ERROR_BACKEND: BackendError,
    _abi.SKERRY_ERROR_DEVICE_LOST: DeviceLostError,
    _abi.SKERRY_ERROR_IO: StorageError,
    _abi.SKERRY_ERROR_FORMAT: FormatError,
    _abi.SKERRY_ERROR_CORRUPT: CorruptError,
    _abi.SKERRY_ERROR_INTERNAL: InternalError,
}


def from_status(library, status, error):
    """The exception for a failed call; `error` is the skerry_error that the call filled."""
    ffi, lib = library.ffi, library.lib
    name = ffi.string(lib.skerry_status_name(status)).decode()
    # A call that fails for a reason of its own border may leave the details empty.
    if error.status == status:
        message = ffi.string(error.message).decode('utf-8', 'replace')
        fields = dict(subject=SUBJECT.name(error.subject), index=error.index, found=error.found, allowed=error.allowed)
    else:
        message, fields = '', {}
    if not message:
        message = ffi.string(lib.skerry_status_text(status)).decode()
    return CLASSES.get(status, SkerryError)(message, status=status, status_name=name, **fields)


def state_error(message):
    """A refusal that this package makes itself, in the form the library gives it."""
    return StateError(message, status=_abi.SKERRY_ERROR_STATE, status_name='SKERRY_ERROR_STATE')


def argument_error(message, **fields):
    fields.setdefault('subject', 'argument')
    return ArgumentError(message, status=_abi.SKERRY_ERROR_ARGUMENT, status_name='SKERRY_ERROR_ARGUMENT', **fields)
