# SPDX-License-Identifier: MIT
"""Finding, opening and calling the shared library."""

from __future__ import annotations

import os
import sys
import threading
from typing import Union

import cffi

from . import _abi, _errors

API_VERSION = (_abi.SKERRY_API_MAJOR, _abi.SKERRY_API_MINOR, _abi.SKERRY_API_PATCH)
VARIABLE = 'SKERRY_LIBRARY'

_ffi = cffi.FFI()
_ffi.cdef(_abi.CDEF)

_thread = threading.local()


def _soname():
    """The part of the file name that names the ABI: before 1.0 every minor has its own."""
    major, minor, _ = API_VERSION
    return f'{major}.{minor}' if major == 0 else str(major)


def file_names():
    """File names of a library that these declarations fit, the most exact first."""
    version = _soname()
    if sys.platform == 'win32':
        return (f'skerry-{version}.dll', f'libskerry-{version}.dll')
    if sys.platform == 'darwin':
        return (f'libskerry.{version}.dylib',)
    return (f'libskerry.so.{version}',)


def candidates():
    """What load() without a path tries, in order: SKERRY_LIBRARY alone when it is set, else the package, then the system."""
    given = os.environ.get(VARIABLE)
    if given:
        return [given]
    here = os.path.join(os.path.dirname(os.path.abspath(__file__)), 'lib')
    beside = [os.path.join(here, name) for name in file_names()]
    return [path for path in beside if os.path.exists(path)] + list(file_names())


def fits(loaded):
    """The rule of SKERRY_VERSION_CHECK for the number that skerry_version() returned."""
    major, minor, _ = API_VERSION
    if loaded // 1000000 != major:
        return False
    if major > 0:
        return loaded >= major * 1000000 + minor * 1000
    return loaded // 1000 == _abi.SKERRY_API_VERSION // 1000


def _state():
    """Of this thread: the exception a callback left, how deep it is inside callbacks, releases that have to wait."""
    try:
        return _thread.state
    except AttributeError:
        _thread.state = _CallState()
        return _thread.state


class _CallState:
    __slots__ = ('pending', 'callbacks', 'waiting')

    def __init__(self):
        self.pending = None
        self.callbacks = 0
        self.waiting = []


class Library:
    """One opened shared library.

    path        str, what was opened
    version     (major, minor, patch) of the loaded library
    build_text  str, version, compiler and backends
    """

    def __init__(self, path):
        self.ffi = _ffi
        self._kinds = {}
        self.path = os.fspath(path)
        self.lib = _ffi.dlopen(self.path, _ffi.RTLD_NOW | _ffi.RTLD_LOCAL)
        try:
            number = self.lib.skerry_version()
        except AttributeError as error:
            raise OSError(f'not this library: {error}') from None
        self.version = (number // 1000000, number // 1000 % 1000, number % 1000)
        if not fits(number):
            wanted = '.'.join(str(part) for part in API_VERSION[:2])
            raise OSError(f"version {'.'.join(map(str, self.version))} does not serve a package made for {wanted}")
        for name in _abi.FUNCTIONS:
            if not hasattr(self.lib, name):
                raise OSError(f'{name} is missing')
        self.build_text = _ffi.string(self.lib.skerry_build_text()).decode()

    def __repr__(self):
        return f"<skerry.Library {'.'.join(map(str, self.version))} {self.path!r}>"

    def new(self, kind):
        """A zeroed struct with its size filled in."""
        try:
            pointer, size = self._kinds[kind]
        except KeyError:
            pointer, size = self._kinds[kind] = _ffi.typeof(kind + ' *'), _ffi.sizeof(kind)
        struct = _ffi.new(pointer)
        struct.struct_size = size
        return struct

    def call(self, function, *arguments, done=None):
        """Calls a function that ends in skerry_error *; returns the status when it is not negative.

        An exception that a callback raised meanwhile is raised here, after the C call has returned, whatever its result was.
        `done` is run first when the C call succeeded.
        """
        state = _state()
        if state.callbacks:
            raise _errors.state_error('a callback may not call back into the library')
        error = self.new('skerry_error')
        status = function(*arguments, error)
        failure = None if status >= 0 else _errors.from_status(self, status, error)
        if failure is None and done is not None:
            done()
        if state.waiting:
            self._run_waiting(state)
        if state.pending is not None:
            pending, state.pending = state.pending, None
            if failure is not None:
                raise pending from failure
            raise pending
        if failure is not None:
            raise failure
        return status

    def release(self, function, pointer):
        """Calls a release function. Inside a callback, where the garbage collector may run, it waits for the end of the call."""
        state = _state()
        if state.callbacks:
            state.waiting.append((function, pointer))
            return
        function(pointer)
        if state.waiting:
            self._run_waiting(state)
        if state.pending is not None:
            # There is no caller to raise to: the object may have gone by reference count.
            pending, state.pending = state.pending, None
            sys.excepthook(type(pending), pending, pending.__traceback__)

    @staticmethod
    def _run_waiting(state):
        while state.waiting:
            function, pointer = state.waiting.pop()
            function(pointer)

    def callback(self, kind, function, failed=None):
        """A C function pointer that calls `function`; an exception is kept for call() and `failed` returned in its place."""
        def guarded(*arguments):
            state = _state()
            state.callbacks += 1
            try:
                return function(*arguments)
            except BaseException as error:
                if state.pending is None:
                    state.pending = error
                return failed
            finally:
                state.callbacks -= 1
        return _ffi.callback(kind, guarded, error=failed)


_default = None
_default_lock = threading.Lock()


def load(path: Union[None, str, os.PathLike] = None) -> Library:
    """Opens the shared library and makes it the one that new contexts use.

    path    file to open; None: the file that the variable SKERRY_LIBRARY names, else skerry/lib/ inside the package, else
            the system's loader by SONAME (libskerry.so.0.1)

    Objects that exist keep the library they were made with. Returns a Library. Raises LoadError when none can be opened or
    when its version does not serve this package.
    """
    global _default
    tried = []
    for candidate in [path] if path is not None else candidates():
        try:
            opened = Library(candidate)
        except OSError as error:
            tried.append(f'{candidate}: {error}')
            continue
        with _default_lock:
            _default = opened
        return opened
    raise _errors.LoadError('no usable Skerry library: ' + '; '.join(tried))


def library() -> Library:
    """The library in use; loads it at the first call."""
    return _default if _default is not None else load()
