# SPDX-License-Identifier: MIT
"""Router files: writing them, reading them, and making them from checkpoints of SeKV's published training code.

A router file is a safetensors file; docs/router-files.md has its tensors and settings. This module needs numpy and nothing of the
shared library.

    python -m skerry.router_files convert sekv_step_0003000.pt router.safetensors
    python -m skerry.router_files show router.safetensors
"""

from __future__ import annotations

import argparse
import io
import json
import os
import pickle
import pickletools
import struct
import sys
import threading
import zipfile
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

import numpy

from . import _abi, _errors

VERSION = 1
METADATA_KEY = 'skerry.router'
GATE_HIDDEN = 64
MAX_CENTROIDS = 4
PRODUCTION_SUMMARY_DIM = 32
MAX_HEADER_BYTES = 1 << 20
MAX_MODEL_BYTES = 127
MAX_PICKLE_BYTES = 16 << 20

_FORMS = ('paper', 'production')
_POOLINGS = ('mean', 'centroids')
# Key: least value, largest value.
_INTEGERS = {
    'version': (VERSION, VERSION),
    'num_layers': (1, 4096),
    'num_q_heads': (1, 65536),
    'num_kv_heads': (1, 65536),
    'head_dim': (1, 2048),
    'summary_dim': (1, 2048),
    'rank_max': (0, 2048),
    'centroids': (1, MAX_CENTROIDS),
    'step': (0, (1 << 63) - 1),
}
_REQUIRED = ('form', 'model', 'num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim', 'summary_dim')
_KEYS = ('version', 'form', 'model', 'num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim', 'summary_dim', 'rank_max', 'pooling',
         'centroids', 'normalise', 'shared_keys', 'step')

_GATES = ('g_phi.mlp.0.weight', 'g_phi.mlp.0.bias', 'g_phi.mlp.2.weight', 'g_phi.mlp.2.bias', 'g_phi.mlp.4.weight',
          'g_phi.mlp.4.bias')
# The order in which tensors are written.
_TENSORS = ('W', 'W_key', 'tau', 'bias', 'temperature') + _GATES
_PAPER = ('W', 'tau') + _GATES

_BYTES = {'F32': 4, 'F16': 2, 'BF16': 2}
_NUMPY = {'F32': '<f4', 'F16': '<f2', 'BF16': '<u2'}


class Router(NamedTuple):
    """What a router file holds.

    tensors  {name: array}; F16 stays float16, BF16 is widened to float32
    config   {setting: value}, with defaults filled in
    """

    tensors: Dict[str, numpy.ndarray]
    config: Dict[str, Any]


def _refuse(cls, status, message):
    names = {value: name for name, value in vars(_abi).items() if name.startswith('SKERRY_ERROR_')}
    return cls(message, status=status, status_name=names[status])


def _format(message):
    return _refuse(_errors.FormatError, _abi.SKERRY_ERROR_FORMAT, message)


def _corrupt(message):
    return _refuse(_errors.CorruptError, _abi.SKERRY_ERROR_CORRUPT, message)


def _is_integer(value):
    return isinstance(value, (int, numpy.integer)) and not isinstance(value, (bool, numpy.bool_))


def _check_config(given, has_key_matrices):
    """The settings with defaults filled in, under the rules of the library's own reader."""
    has_key_matrices = has_key_matrices and given.get('form') != 'paper'
    for key in given:
        if key not in _KEYS:
            raise _format(f'setting {key!r} is unknown')
    config = dict(given)
    config.setdefault('version', VERSION)
    for key in _REQUIRED:
        if key not in config:
            raise _format(f'setting {key!r} is missing')
    if config['form'] not in _FORMS:
        raise _format(f"setting 'form' is none of {', '.join(_FORMS)}")
    paper = config['form'] == 'paper'
    if paper and 'rank_max' not in config:
        raise _format("setting 'rank_max' is missing")
    defaults = dict(rank_max=0, pooling='mean', normalise=paper, shared_keys=has_key_matrices, step=0)
    config = {**defaults, **config}
    if config['pooling'] not in _POOLINGS:
        raise _format(f"setting 'pooling' is none of {', '.join(_POOLINGS)}")
    mean = config['pooling'] == 'mean'
    config.setdefault('centroids', 1 if mean else MAX_CENTROIDS)
    for key, (low, high) in _INTEGERS.items():
        if key == 'summary_dim' and not paper:
            high = PRODUCTION_SUMMARY_DIM
        if key == 'rank_max' and paper:
            low = 1
        if not _is_integer(config[key]) or not low <= config[key] <= high:
            raise _format(f'setting {key!r} is no integer from {low} to {high}')
        config[key] = int(config[key])
    for key in ('normalise', 'shared_keys'):
        if not isinstance(config[key], (bool, numpy.bool_)):
            raise _format(f'setting {key!r} is neither true nor false')
        config[key] = bool(config[key])
    model = config['model']
    try:
        usable = isinstance(model, str) and '\0' not in model and len(model.encode('utf-8')) <= MAX_MODEL_BYTES
    except UnicodeEncodeError:
        usable = False
    if not usable:
        raise _format(f"setting 'model' is no text of at most {MAX_MODEL_BYTES} bytes of UTF-8")
    if config['num_q_heads'] % config['num_kv_heads']:
        raise _format("setting 'num_q_heads' is no multiple of 'num_kv_heads'")
    if mean and config['centroids'] != 1:
        raise _format("setting 'centroids' does not go with the pooling 'mean'")
    if has_key_matrices and not config['shared_keys']:
        raise _format("setting 'shared_keys' does not go with W_key, which KV heads share")
    if paper:
        for key, value in (('pooling', 'mean'), ('normalise', True), ('shared_keys', False)):
            if config[key] != value:
                raise _format(f"setting {key!r} does not go with the form 'paper'")
    return {key: config[key] for key in _KEYS}


def shapes(config: Mapping[str, Any]) -> Dict[str, Tuple[int, ...]]:
    """Shape of every tensor that a router of these settings can have; needs num_layers, num_q_heads, num_kv_heads, head_dim,
    summary_dim and rank_max."""
    layers, heads, kv_heads, dim, summary, rank = (
        int(config[key]) for key in ('num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim', 'summary_dim', 'rank_max'))
    return {
        'W': (layers, heads, summary, dim),
        'W_key': (layers, kv_heads, summary, dim),
        'tau': (layers, heads),
        'bias': (layers, heads),
        'temperature': (layers, heads),
        'g_phi.mlp.0.weight': (GATE_HIDDEN, rank + dim),
        'g_phi.mlp.0.bias': (GATE_HIDDEN,),
        'g_phi.mlp.2.weight': (GATE_HIDDEN, GATE_HIDDEN),
        'g_phi.mlp.2.bias': (GATE_HIDDEN,),
        'g_phi.mlp.4.weight': (rank, GATE_HIDDEN),
        'g_phi.mlp.4.bias': (rank,),
    }


def _check_tensors(tensors, config):
    """Names, shapes and values, as the library checks them. Arrays are numbers of any float type."""
    paper = config['form'] == 'paper'
    gates = paper or any(name in tensors for name in _GATES)
    if gates and config['rank_max'] == 0:
        raise _format("setting 'rank_max' does not go with g_phi, which needs it")
    wanted = shapes(config)
    required = {'W'} | ({'tau'} if paper else set()) | (set(_GATES) if gates else set())
    for name in _TENSORS:
        if name not in tensors:
            if name in required:
                raise _corrupt(f"tensor '{name}' is missing")
            continue
        array = tensors[name]
        if tuple(array.shape) != wanted[name]:
            raise _corrupt(f"tensor '{name}' is {list(array.shape)}; this router's is {list(wanted[name])}")
        finite = numpy.isfinite(array)
        if not finite.all():
            place = int(numpy.argmin(finite.reshape(-1)))
            raise _refuse(_errors.NonfiniteError, _abi.SKERRY_ERROR_NONFINITE,
                          f"tensor '{name}' holds a NaN or infinity at element {place}")
    if 'temperature' in tensors and not (tensors['temperature'] > 0).all():
        raise _corrupt("tensor 'temperature' is not above 0 everywhere")
    if config['shared_keys'] and 'W_key' not in tensors:
        group = config['num_q_heads'] // config['num_kv_heads']
        by_group = tensors['W'].reshape(config['num_layers'], config['num_kv_heads'], group, -1)
        if not (by_group == by_group[:, :, :1]).all():
            raise _corrupt("tensor 'W' differs between query heads of a KV head in spite of shared_keys")


def _stored(name, array):
    """(type name, little-endian bytes, the numbers as stored) of one array."""
    array = numpy.asarray(array)
    if array.dtype.name == 'bfloat16':
        return 'BF16', array.view(numpy.uint16).astype('<u2').tobytes(), array.astype(numpy.float32)
    if array.dtype == numpy.float16:
        return 'F16', array.astype('<f2').tobytes(), array
    if array.dtype == numpy.float32:
        return 'F32', array.astype('<f4').tobytes(), array
    raise TypeError(f"tensor '{name}' is {array.dtype}; a router file holds float32, float16 or bfloat16")


def _replace(path, parts):
    """The file is there as a whole or not at all."""
    temporary = f'{os.fsdecode(path)}.{os.getpid()}-{threading.get_ident()}.tmp'
    try:
        with open(temporary, 'wb') as file:
            for part in parts:
                file.write(part)
        os.replace(temporary, path)
    except BaseException:
        if os.path.exists(temporary):
            os.unlink(temporary)
        raise


def write(path, tensors: Mapping[str, numpy.ndarray], config: Mapping[str, Any]) -> None:
    """Writes a router file; replaces one that is there in one step.

    tensors  {name: array} of float32, float16 or bfloat16 (ml_dtypes), stored in the type they come in. W [num_layers, num_q_heads,
             summary_dim, head_dim] always; tau and the six g_phi tensors for the form "paper"; the others of shapes() as wanted
    config   form ("paper" or "production"), model, num_layers, num_q_heads, num_kv_heads, head_dim, summary_dim; rank_max, pooling
             ("mean" or "centroids"), centroids, normalise, shared_keys, step where they differ from their defaults

    The same arguments give the same bytes. Raises FormatError (a setting), CorruptError (a tensor is missing or has another shape),
    NonfiniteError, TypeError (another number type, a name that is no router's), OSError.
    """
    for name in tensors:
        if name not in (_PAPER if config.get('form') == 'paper' else _TENSORS):
            raise TypeError(f'{name!r} is no tensor of such a router')
    stored = {name: _stored(name, tensors[name]) for name in _TENSORS if name in tensors}
    config = _check_config(config, 'W_key' in stored)
    _check_tensors({name: values for name, (_, _, values) in stored.items()}, config)
    header: Dict[str, Any] = {'__metadata__': {METADATA_KEY: json.dumps(config, ensure_ascii=False)}}
    offset = 0
    for name, (dtype, data, values) in stored.items():
        header[name] = dict(dtype=dtype, shape=list(values.shape), data_offsets=[offset, offset + len(data)])
        offset += len(data)
    text = json.dumps(header, ensure_ascii=False, separators=(',', ':')).encode('utf-8')
    text += b' ' * (-len(text) % 8)
    _replace(path, [len(text).to_bytes(8, 'little'), text, *(data for _, data, _ in stored.values())])


def _json(text, what):
    def pairs(members):
        names = [name for name, _ in members]
        if len(set(names)) != len(names):
            raise ValueError('an object has two members of one name')
        return dict(members)

    def no_constant(name):
        raise ValueError(f'{name} is no JSON')

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise _corrupt(f'{what} is not right JSON: {error}') from None
    if not isinstance(value, dict):
        raise _corrupt(f'{what} is not right JSON: it is no object')
    return value


def _entries(header, data_bytes):
    """[(name, type, shape, begin, end)] by place; refuses what does not tile the data."""
    found = []
    for name, entry in header.items():
        if name == '__metadata__':
            continue
        well_formed = (isinstance(entry, dict) and set(entry) == {'dtype', 'shape', 'data_offsets'} and isinstance(entry['dtype'], str)
                       and isinstance(entry['shape'], list) and isinstance(entry['data_offsets'], list)
                       and len(entry['data_offsets']) == 2
                       and all(_is_integer(n) and n >= 0 for n in entry['shape'] + entry['data_offsets']))
        if not well_formed:
            raise _corrupt(f'tensor {name!r} has no usable dtype, shape and data_offsets')
        begin, end = entry['data_offsets']
        if not begin <= end <= data_bytes:
            raise _corrupt(f'tensor {name!r} ends at byte {end} of {data_bytes} bytes of data; the file is cut off or wrong')
        size = _BYTES.get(entry['dtype'])
        for dim in entry['shape']:
            size = size and size * dim
        if size is not None and end - begin != size:
            raise _corrupt(f'tensor {name!r} has {end - begin} bytes; its shape takes {size}')
        found.append((name, entry['dtype'], tuple(entry['shape']), begin, end))
    found.sort(key=lambda entry: entry[3:])
    place = 0
    for name, _, _, begin, end in found:
        if begin != place:
            raise _corrupt(f"tensor {name!r} {'overlaps another' if begin < place else 'comes after a gap'}")
        place = end
    if place != data_bytes:
        raise _corrupt(f'{data_bytes - place} bytes after the last tensor')
    return found


def read(path) -> Router:
    """Reads a router file and checks it as the library does.

    Returns Router(tensors, config); write(path, *read(path)) stores the same router. Tensors that are no router's are left out. Raises
    FormatError, CorruptError, NonfiniteError, OSError.
    """
    with open(path, 'rb') as file:
        size = os.fstat(file.fileno()).st_size
        length = int.from_bytes(file.read(8), 'little')
        if size < 8 or length > size - 8 or length > MAX_HEADER_BYTES:
            raise _corrupt('the file is cut off, or no safetensors file')
        try:
            text = file.read(length).decode('utf-8')
        except UnicodeDecodeError:
            raise _corrupt('the header is not UTF-8') from None
        if not text.startswith('{'):
            raise _corrupt('the header is no object')
        header = _json(text, 'the header')
        entries = _entries(header, size - 8 - length)
        metadata = header.get('__metadata__', {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise _corrupt('__metadata__ holds something other than strings')
        if METADATA_KEY not in metadata:
            raise _format(f'the file has no {METADATA_KEY!r} in its __metadata__: it is not a router of this library')
        given = _json(metadata[METADATA_KEY], METADATA_KEY)
        if 'version' not in given:
            raise _format("setting 'version' is missing")
        known = [entry for entry in entries if entry[0] in (_PAPER if given.get('form') == 'paper' else _TENSORS)]
        config = _check_config(given, any(entry[0] == 'W_key' for entry in known))
        tensors = {}
        for name, dtype, shape, begin, end in known:
            if dtype not in _BYTES:
                raise _format(f'tensor {name!r} is {dtype}; a router has F32, F16 or BF16')
            file.seek(8 + length + begin)
            data = file.read(end - begin)
            if len(data) != end - begin:
                raise _corrupt('the file became shorter meanwhile')
            array = numpy.frombuffer(data, _NUMPY[dtype])
            if dtype == 'BF16':
                array = (array.astype(numpy.uint32) << 16).view(numpy.float32)
            else:
                array = array.astype(array.dtype.newbyteorder('='))
            tensors[name] = array.reshape(shape)
    _check_tensors(tensors, config)
    return Router({name: tensors[name] for name in _TENSORS if name in tensors}, config)


# ---- checkpoints of the published training code (docs/router-files.md) ----


class _Bag:
    """Stands for an object of a class that is not imported: attributes, no behaviour."""

    def __new__(cls, *_, **__):
        return object.__new__(cls)

    def __init__(self, *_, **__):
        pass

    def __setstate__(self, state):
        # Frozen dataclasses with slots leave the values of their fields, other objects with slots (dict, slots).
        if isinstance(state, list):
            self.__dict__['fields'] = state
        for part in state if isinstance(state, tuple) else (state,):
            if isinstance(part, dict):
                self.__dict__.update({str(key): value for key, value in part.items()})


class _StorageType:
    """Stands for torch.FloatStorage and its like."""

    __slots__ = ('name',)

    def __init__(self, name):
        self.name = name


class _Storage:
    """The numbers of a tensor, in a member of the archive."""

    __slots__ = ('kind', 'key', 'count')

    def __init__(self, kind, key, count):
        self.kind, self.key, self.count = kind, key, count


class _Tensor:
    """A tensor that is not read yet."""

    __slots__ = ('storage', 'offset', 'size', 'stride')

    def __init__(self, storage, offset, size, stride):
        self.storage, self.offset, self.size, self.stride = storage, offset, size, stride


# Storage class: number type of the file; None: a class that checkpoints name, and routers do not hold.
_STORAGES: Dict[str, Optional[str]] = {
    'FloatStorage': '<f4', 'HalfStorage': '<f2', 'BFloat16Storage': 'bfloat16',
    'DoubleStorage': None, 'LongStorage': None, 'IntStorage': None, 'ShortStorage': None, 'CharStorage': None, 'ByteStorage': None,
    'BoolStorage': None,
}


class _Unpickler(pickle.Unpickler):
    """Builds dictionaries, lists, numbers and the stand-ins above, and calls nothing else.

    A pickle can set the attributes of what find_class hands out. So that is made anew for each load, or is a built-in type that refuses;
    and attributes of stand-ins are checked where they are used.
    """

    def find_class(self, module, name):
        full = f'{module}.{name}'
        if full == 'torch._utils._rebuild_tensor_v2':
            return lambda storage, offset, size, stride, *_: _Tensor(storage, offset, size, stride)
        if full == 'collections.OrderedDict':
            return dict
        if module == 'torch' and name in _STORAGES:
            return _StorageType(name)
        if module == 'sekv' or module.startswith('sekv.'):
            return type('Bag', (_Bag,), {})
        raise _format(f'the checkpoint names {full}, which no checkpoint of a router needs; refused')

    def persistent_load(self, pid):
        if not (isinstance(pid, tuple) and len(pid) >= 5 and pid[0] == 'storage' and isinstance(pid[1], _StorageType)):
            raise _format('the checkpoint refers to something that is no storage of a tensor')
        return _Storage(pid[1].name, pid[2], pid[4])


# What zipfile raises for archives that are wrong in one way or another.
_ZIP_ERRORS = (zipfile.BadZipFile, EOFError, RuntimeError, OverflowError, ValueError, struct.error)


def _member(archive, name):
    try:
        info = archive.getinfo(name)
    except KeyError:
        raise _corrupt(f'the checkpoint has no {name}') from None
    # torch.save stores; what is compressed could be any size.
    if info.compress_type != zipfile.ZIP_STORED:
        raise _format(f'{name} is compressed, which torch.save does not do; refused')
    # The place is counted from the archive's end, and lies before the file where its front was cut off.
    if info.header_offset < 0:
        raise _corrupt(f'{name} of the checkpoint cannot be read: the front of the archive is missing')
    return info


def _read_member(archive, name):
    try:
        return archive.read(_member(archive, name))
    except _ZIP_ERRORS as error:
        raise _corrupt(f'{name} of the checkpoint cannot be read: {error}') from None


def _unpickle(data):
    try:
        for opcode, argument, _ in pickletools.genops(data):
            # Extension codes go round find_class when this process has registered and used them.
            if opcode.name.startswith('EXT'):
                raise _format('the checkpoint uses extension codes of pickle; refused')
            # The memo is as long as its largest number says, whatever is in it.
            if opcode.name in ('PUT', 'BINPUT', 'LONG_BINPUT') and argument > len(data):
                raise _corrupt('the pickle of the checkpoint remembers more than it can hold')
        return _Unpickler(io.BytesIO(data)).load()
    except _errors.SkerryError:
        raise
    except Exception as error:  # a pickle can raise anything, and none of it means more than this
        raise _corrupt(f'the pickle of the checkpoint cannot be read: {type(error).__name__}') from None


def _array(archive, prefix, name, tensor):
    """Contiguous float32 array of one tensor of a checkpoint."""
    storage = getattr(tensor, 'storage', None)
    if not isinstance(tensor, _Tensor) or not isinstance(storage, _Storage):
        raise _format(f"'{name}' of the checkpoint is no tensor")
    dtype = _STORAGES.get(storage.kind) if isinstance(storage.kind, str) else None
    if dtype is None:
        raise _format(f"tensor '{name}' is stored as torch.{storage.kind}; a router has floats of 16 or 32 bits")
    size, stride, offset, count = tensor.size, tensor.stride, tensor.offset, storage.count
    usable = (isinstance(size, tuple) and isinstance(stride, tuple) and len(size) == len(stride) <= 8 and isinstance(storage.key, str)
              and all(_is_integer(n) for n in (*size, *stride, offset, count)) and min((*size, *stride, offset, count)) >= 0)
    if not usable:
        raise _corrupt(f"tensor '{name}' of the checkpoint has no usable shape and place")
    data = _read_member(archive, f'{prefix}/data/{storage.key}')
    last = offset + sum((n - 1) * step for n, step in zip(size, stride))
    if len(data) != (4 if dtype == '<f4' else 2) * count or 0 in size or last >= count:
        raise _corrupt(f"tensor '{name}' reaches outside its storage of {len(data)} bytes")
    # A view may name one number many times over, so its size is checked before it is copied.
    elements = 1
    for n in size:
        elements *= n
    if elements > count:
        raise _corrupt(f"tensor '{name}' has {elements} numbers in a storage of {count}")
    numbers = numpy.frombuffer(data, '<u2' if dtype == 'bfloat16' else dtype)
    if dtype == 'bfloat16':
        numbers = (numbers.astype(numpy.uint32) << 16).view(numpy.float32)
    # The stride of a dimension of 1 says nothing, and may be any number.
    steps = [step * numbers.itemsize if n > 1 else 0 for n, step in zip(size, stride)]
    view = numpy.lib.stride_tricks.as_strided(numbers[offset:], size, steps)
    return numpy.ascontiguousarray(view, numpy.float32)


# Fields of the published dataclasses in their order, for those that were pickled without names. The shapes of the tensors, which the
# numbers are compared with, tell when a version has others.
_FIELDS = {
    'model_spec': ('name', 'hf_id', 'num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim', 'group_size', 'is_instruct'),
    'config': ('model', 'segmentation', 'memory', 'routing', 'loss', 'train', 'paths'),
    'memory': ('r_max', 'summary_dim'),
}


def _take(holder, names, what):
    """Attribute or item by a path of names."""
    value = holder
    for place, name in enumerate(names):
        if isinstance(value, _Bag):
            value = value.__dict__
            fields, known = value.get('fields'), _FIELDS.get(names[place - 1], ()) if place else ()
            if isinstance(fields, list) and len(fields) == len(known):
                value = dict(zip(known, fields))
        if not isinstance(value, dict) or name not in value:
            raise _corrupt(f"{what} has no '{'.'.join(names)}'")
        value = value[name]
    return value


def _take_integer(holder, names, what):
    value = _take(holder, names, what)
    if not _is_integer(value):
        raise _corrupt(f"'{'.'.join(names)}' of {what} is no integer")
    return int(value)


def _checkpoint(path) -> Router:
    try:
        archive = zipfile.ZipFile(path)
    except _ZIP_ERRORS as error:
        raise _corrupt(f'the checkpoint is no zip archive that can be read: {error}') from None
    with archive:
        pickles = [name for name in archive.namelist() if name.endswith('/data.pkl') and name.count('/') == 1]
        if len(pickles) != 1:
            raise _corrupt('the checkpoint has no data.pkl, or more than one')
        prefix = pickles[0][:-len('/data.pkl')]
        if _member(archive, pickles[0]).file_size > MAX_PICKLE_BYTES:
            raise _corrupt(f'data.pkl of the checkpoint is larger than {MAX_PICKLE_BYTES} bytes')
        # Older versions of torch wrote no such member, on little-endian machines.
        if f'{prefix}/byteorder' in archive.namelist():
            order = _read_member(archive, f'{prefix}/byteorder')
            if order != b'little':
                raise _format(f"the checkpoint's byte order is {order[:16].decode('latin-1')!r}; only little-endian ones are read")
        content = _unpickle(_read_member(archive, pickles[0]))
        if not isinstance(content, dict):
            raise _corrupt('the checkpoint is no dictionary')
        model = _take(content, ['model_spec', 'name'], 'the checkpoint')
        if not isinstance(model, str):
            raise _corrupt("'model_spec.name' of the checkpoint is no text")
        spec = {key: _take_integer(content, ['model_spec', key], 'the checkpoint')
                for key in ('num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim')}
        config = dict(form='paper', model=model, **spec,
                      summary_dim=_take_integer(content, ['config', 'memory', 'summary_dim'], 'the checkpoint'),
                      rank_max=_take_integer(content, ['config', 'memory', 'r_max'], 'the checkpoint'),
                      step=_take_integer(content, ['step'], 'the checkpoint'))
        config = _check_config(config, False)
        trained = _take(content, ['trainable_parameters'], 'the checkpoint')
        if not isinstance(trained, dict):
            raise _corrupt("'trainable_parameters' of the checkpoint is no dictionary")
        tensors = {}
        for name in _PAPER:
            if name not in trained:
                raise _corrupt(f"tensor '{name}' is missing")
            tensors[name] = _array(archive, prefix, name, trained[name])
    _check_tensors(tensors, config)
    return Router(tensors, config)


def convert_checkpoint(path, out, dtype: str = 'f32') -> Dict[str, Any]:
    """Makes a router file of the form "paper" from a checkpoint of SeKV's training code (sekv_step_0003000.pt). Needs no torch, and runs
    nothing of the checkpoint: only tensors, plain values and the attributes of its own classes are taken out of the pickle.

    dtype  "f32", or "f16": half the size, rounded to nearest even

    Returns the settings written. Raises FormatError (names what is refused), CorruptError (names the tensor or field), NonfiniteError (also
    where a number is too large for f16), OSError.
    """
    if dtype not in ('f32', 'f16'):
        raise ValueError(f'{dtype!r} is neither "f32" nor "f16"')
    tensors, config = _checkpoint(path)
    if dtype == 'f16':
        with numpy.errstate(over='ignore'):  # becomes an infinity, which write() names
            tensors = {name: array.astype(numpy.float16) for name, array in tensors.items()}
    write(out, tensors, config)
    return config


def main(arguments: Optional[List[str]] = None) -> int:
    """The command line. Returns 0, or 1 after a message on the error output."""
    parser = argparse.ArgumentParser(prog='python -m skerry.router_files', description='Router files of Skerry.')
    commands = parser.add_subparsers(dest='command', required=True)
    convert = commands.add_parser('convert', help='make a router file from a checkpoint of the published training code')
    convert.add_argument('checkpoint', help='sekv_step_0003000.pt')
    convert.add_argument('out', help='router.safetensors')
    convert.add_argument('--dtype', choices=('f32', 'f16'), default='f32', help='of the numbers in the file (f32)')
    show = commands.add_parser('show', help='check a router file and print its settings and tensors')
    show.add_argument('file', help='router.safetensors')
    options = parser.parse_args(arguments)
    try:
        if options.command == 'convert':
            convert_checkpoint(options.checkpoint, options.out, options.dtype)
        tensors, config = read(options.out if options.command == 'convert' else options.file)
    except (_errors.SkerryError, OSError) as error:
        print(f'router_files: {error}', file=sys.stderr)
        return 1
    for key, value in config.items():
        print(f'{key:12} {json.dumps(value, ensure_ascii=False)}')
    for name, array in tensors.items():
        print(f'{name:19} {array.dtype.name} {list(array.shape)}')
    print(f'{sum(array.size for array in tensors.values())} parameters')
    return 0


if __name__ == '__main__':
    sys.exit(main())
