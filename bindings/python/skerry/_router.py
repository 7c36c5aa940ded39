# SPDX-License-Identifier: MIT
"""Router: a trained router as the library holds it. skerry.router_files reads and writes the files themselves."""

from __future__ import annotations

import os
from typing import Optional, Union

from . import _reports
from ._cache import Context, NULL, _Owner
from ._library import _ffi


class Router(_Owner):
    """A trained router, for Sekv(router=...). Immutable; any number of caches and threads may use it.

    source   path of a router file (docs/router-files.md), or the file's bytes
    context  the Context whose memory it takes and whose library it belongs to; None: one of its own

    Caches keep the C object alive. Raises FormatError (no router file, or one that this build does not know), CorruptError,
    NonfiniteError, StorageError, OutOfMemoryError.
    """

    def __init__(self, source: Union[str, os.PathLike, bytes, bytearray, memoryview], *, context: Optional[Context] = None):
        self._pointer, self._finalizer = NULL, None
        if context is None:
            with Context() as own:
                self._open(source, own)
        else:
            self._open(source, context)

    def _open(self, source, context):
        self._library = context.library
        lib = self._library.lib
        desc = self._library.new('skerry_router_desc')
        if isinstance(source, (bytes, bytearray, memoryview)):
            keep = _ffi.from_buffer(source)
            desc.data, desc.bytes = keep, len(keep)
        else:
            keep = _ffi.new('char[]', os.fspath(source).encode('utf-8', 'surrogateescape'))
            desc.path = keep
        out = _ffi.new('skerry_router **')
        self._library.call(lib.skerry_router_open, context._require(), desc, out,
                           done=lambda: self._own(out[0], lib.skerry_router_release))

    def __repr__(self):
        return f"<skerry.Router{' closed' if self.closed else ' for ' + self.info().model}>"

    def info(self) -> _reports.RouterInfo:
        """RouterInfo: what the router was made for and holds."""
        info = self._library.new('skerry_router_info')
        self._library.call(self._library.lib.skerry_router_get_info, self._require(), info)
        return _reports.read(_reports.RouterInfo, info)
