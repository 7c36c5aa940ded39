# SPDX-License-Identifier: MIT
"""numpy arrays as skerry_tensor, in place."""

import numpy

from . import _abi, _errors
from ._library import _ffi
from ._names import DTYPE

try:
    from ml_dtypes import bfloat16 as _bfloat16
except ImportError:
    _bfloat16 = None

_FLOAT32 = numpy.dtype(numpy.float32)
_FLOAT16 = numpy.dtype(numpy.float16)
_UINT16 = numpy.dtype(numpy.uint16)


def dtype_of(array, name, declared=None):
    """SKERRY_DTYPE_* of an array; `declared` ("bf16") says what uint16 numbers are."""
    kind = array.dtype
    if kind == _FLOAT32:
        found = _abi.SKERRY_DTYPE_F32
    elif kind == _FLOAT16:
        found = _abi.SKERRY_DTYPE_F16
    elif kind.name == 'bfloat16' and kind.itemsize == 2:
        found = _abi.SKERRY_DTYPE_BF16
    elif kind == _UINT16 and declared is not None and DTYPE.value(declared) == _abi.SKERRY_DTYPE_BF16:
        return _abi.SKERRY_DTYPE_BF16
    else:
        hint = '; uint16 needs dtype="bf16"' if kind == _UINT16 else ''
        raise TypeError(f'{name}: numbers are float32, float16 or bfloat16, not {kind}{hint}')
    if declared is not None and DTYPE.value(declared) != found:
        raise TypeError(f'{name}: dtype={declared!r} does not match an array of {kind}')
    return found


def numpy_dtype(name):
    """numpy type for arrays that this package makes; bf16 is uint16 where ml_dtypes is not installed."""
    value = DTYPE.value(name)
    if value == _abi.SKERRY_DTYPE_F32:
        return _FLOAT32
    if value == _abi.SKERRY_DTYPE_F16:
        return _FLOAT16
    if value == _abi.SKERRY_DTYPE_BF16:
        return _UINT16 if _bfloat16 is None else numpy.dtype(_bfloat16)
    raise ValueError(f'no numpy type for {name!r}')


# Looked up once: a model makes four of these calls per layer and token.
_TENSOR = _ffi.typeof('skerry_tensor *')
_VOID = _ffi.typeof('void *')


def pointer(array, kind):
    """Address of an array's first number as a C pointer."""
    return _ffi.cast(kind, array.ctypes.data)


def tensor(array, name, declared=None, writable=False):
    """(skerry_tensor *, the array it points into). The array has to live until the C call returns.

    Strides are taken over as they are. An input whose strides or address are not whole elements is copied; an output is refused.
    """
    if not isinstance(array, numpy.ndarray):
        raise TypeError(f'{name}: a numpy array is needed, not {type(array).__name__}')
    dtype = dtype_of(array, name, declared)
    size = array.dtype.itemsize
    if not 1 <= array.ndim <= 4:
        raise _errors.argument_error(f'{name}: 1 to 4 dimensions are needed', subject='tensor', found=array.ndim, allowed=4)
    if writable and not array.flags.writeable:
        raise _errors.argument_error(f'{name}: the array is read-only', subject='tensor')
    if not array.flags.aligned or any(stride % size for stride in array.strides):
        if writable:
            raise _errors.argument_error(f'{name}: strides and address must be whole elements', subject='tensor')
        array = array.copy()
    strides = tuple(stride // size for stride in array.strides)
    data = pointer(array, _VOID)
    return _ffi.new(_TENSOR, (data, 0, dtype, array.ndim, array.shape, strides, _abi.SKERRY_DEVICE_CPU, 0)), array


def floats(array, name, shape):
    """(float *, keeper) of a packed float32 copy of `array`, or of the array itself where it is one. None stays NULL."""
    if array is None:
        return _ffi.NULL, None
    packed = numpy.ascontiguousarray(array, dtype=numpy.float32)
    if packed.shape != shape:
        raise _errors.argument_error(f'{name}: shape {packed.shape} instead of {shape}', subject='tensor')
    return pointer(packed, 'float *'), packed


def packed_output(array, name, kind, tokens):
    """Checks a caller's one-dimensional output of an exact type with room for `tokens`; returns it."""
    if not isinstance(array, numpy.ndarray) or array.dtype != numpy.dtype(kind):
        raise TypeError(f'{name}: a numpy array of {numpy.dtype(kind)} is needed')
    if array.ndim != 1 or not array.flags.c_contiguous or not array.flags.writeable or array.shape[0] < tokens:
        raise _errors.argument_error(f'{name}: a writable packed array of at least {tokens} numbers is needed', subject='tensor',
                                     found=array.size, allowed=tokens)
    return array
