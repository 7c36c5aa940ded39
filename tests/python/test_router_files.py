"""Router files: writer, reader, and the converter of published checkpoints with what it has to refuse."""

import collections
import contextlib
import io
import json
import os
import pickle
import struct
import subprocess
import sys
import tempfile
import types
import unittest
import unittest.mock
import zipfile

import numpy

from support import PACKAGE, skerry

from skerry import router_files

SIZES = dict(num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, summary_dim=4, rank_max=6)
PAPER = dict(form='paper', model='tiny', **SIZES)
PRODUCTION = dict(form='production', model='tiny', **SIZES)
GATES = ('g_phi.mlp.0.weight', 'g_phi.mlp.0.bias', 'g_phi.mlp.2.weight', 'g_phi.mlp.2.bias', 'g_phi.mlp.4.weight', 'g_phi.mlp.4.bias')


def tensors(names, config=PAPER, dtype=numpy.float32):
    random = numpy.random.default_rng(5)
    shapes = router_files.shapes(config)
    return {name: (random.standard_normal(shapes[name]) ** 2 + 0.1).astype(dtype) for name in names}


def paper(dtype=numpy.float32):
    return tensors(('W', 'tau') + GATES, dtype=dtype)


def open_in_library(path):
    """skerry_router_info of a file, through the C library itself."""
    library = skerry.library()
    context = skerry.Context()
    desc = library.new('skerry_router_desc')
    name = library.ffi.new('char[]', os.fsencode(path))
    desc.path = name
    out = library.ffi.new('skerry_router **')
    library.call(library.lib.skerry_router_open, context._require(), desc, out)
    info = library.new('skerry_router_info')
    try:
        library.call(library.lib.skerry_router_get_info, out[0], info)
    finally:
        library.release(library.lib.skerry_router_release, out[0])
        context.close()
    return info


class Folder(unittest.TestCase):
    def setUp(self):
        self._folder = tempfile.TemporaryDirectory()
        self.addCleanup(self._folder.cleanup)

    def path(self, name='router.safetensors'):
        return os.path.join(self._folder.name, name)

    def refused(self, kind, words, function, *arguments):
        """Both the reader here and the library's refuse, where a file exists."""
        with self.assertRaisesRegex(kind, words) as caught:
            function(*arguments)
        self.assertTrue(caught.exception.status_name.startswith('SKERRY_ERROR_'))
        return caught.exception


class Writing(Folder):
    def test_what_is_written_reads_back_here_and_in_the_library(self):
        cases = (
            (paper(), dict(PAPER, step=3000)),
            (paper(numpy.float16), PAPER),
            (tensors(('W',)), PRODUCTION),
            (tensors(('W', 'W_key', 'bias', 'temperature'), dtype=numpy.float16),
             dict(PRODUCTION, pooling='centroids', centroids=3, normalise=True, model='ümläut')),
            (tensors(('W', 'tau') + GATES), dict(PRODUCTION, pooling='centroids')),
        )
        for given, config in cases:
            with self.subTest(config=config):
                router_files.write(self.path(), given, config)
                found, settings = router_files.read(self.path())
                self.assertEqual(set(found), set(given))
                for name, array in given.items():
                    self.assertEqual(found[name].dtype, array.dtype)
                    numpy.testing.assert_array_equal(found[name], array)
                self.assertEqual({key: settings[key] for key in config}, config)
                info = open_in_library(self.path())
                self.assertEqual(info.parameters, sum(array.size for array in given.values()))
                self.assertEqual((info.layers, info.query_heads, info.kv_heads, info.key_dim, info.summary_dim), (2, 4, 2, 8, 4))
                self.assertEqual(skerry.library().ffi.string(info.model).decode(), config['model'])
                self.assertEqual(info.training_step, config.get('step', 0))
                self.assertEqual(info.centroids, settings['centroids'])
                again = self.path('again')
                router_files.write(again, found, settings)
                with open(self.path(), 'rb') as one, open(again, 'rb') as other:
                    self.assertEqual(one.read(), other.read())

    def test_defaults_follow_the_form(self):
        router_files.write(self.path(), paper(), PAPER)
        config = router_files.read(self.path()).config
        self.assertEqual((config['pooling'], config['centroids'], config['normalise'], config['shared_keys']), ('mean', 1, True, False))
        router_files.write(self.path(), tensors(('W', 'W_key')), dict(PRODUCTION, pooling='centroids'))
        config = router_files.read(self.path()).config
        self.assertEqual((config['centroids'], config['normalise'], config['shared_keys'], config['version']), (4, False, True, 1))

    def test_bfloat16_is_stored_as_it_is_and_widened_when_read(self):
        class BFloat16:
            """As much of an ml_dtypes array as the writer uses."""
            def __init__(self, values):
                self.bits = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)
                self.dtype = types.SimpleNamespace(name='bfloat16')

            def view(self, dtype):
                return self.bits.view(dtype)

            def astype(self, dtype):
                return (self.bits.astype(numpy.uint32) << 16).view(numpy.float32).astype(dtype)

        values = tensors(('W',))['W']
        given = BFloat16(values)
        with unittest.mock.patch.object(router_files.numpy, 'asarray', lambda array: array):
            name, data, stored = router_files._stored('W', given)
        self.assertEqual((name, len(data)), ('BF16', 2 * values.size))
        numpy.testing.assert_array_equal(stored, given.astype(numpy.float32))
        # A file with such a tensor, made by hand.
        router_files.write(self.path(), {'W': values.astype(numpy.float16)}, PRODUCTION)
        with open(self.path(), 'rb') as file:
            whole = file.read()
        with open(self.path(), 'wb') as file:
            header = whole[8:8 + int.from_bytes(whole[:8], 'little')].rstrip().replace(b'"F16"', b'"BF16"')
            file.write(len(header).to_bytes(8, 'little') + header + data)
        numpy.testing.assert_array_equal(router_files.read(self.path()).tensors['W'], given.astype(numpy.float32))
        self.assertEqual(open_in_library(self.path()).parameters, values.size)

    def test_T24_parameters_of_the_published_routers(self):
        for layers, heads, total in ((28, 24, 2769728), (32, 32, 4211872), (48, 40, 7882784)):
            shapes = router_files.shapes(dict(num_layers=layers, num_q_heads=heads, num_kv_heads=8, head_dim=128, summary_dim=32,
                                              rank_max=32))
            self.assertEqual(sum(int(numpy.prod(shapes[name])) for name in ('W', 'tau') + GATES), total)
        self.assertEqual(sum(int(numpy.prod(shapes[name])) for name in GATES), 16544)

    def test_T24_a_missing_tensor_or_a_wrong_shape_is_named(self):
        for name in ('W', 'tau') + GATES:
            fewer = paper()
            del fewer[name]
            self.refused(skerry.CorruptError, f"'{name}' is missing", router_files.write, self.path(), fewer, PAPER)
            wrong = paper()
            wrong[name] = numpy.concatenate([wrong[name], wrong[name]])
            self.refused(skerry.CorruptError, f"'{name}' is \\[", router_files.write, self.path(), wrong, PAPER)
        self.refused(skerry.CorruptError, "'g_phi.mlp.2.bias' is missing", router_files.write, self.path(),
                     tensors(('W',) + GATES[:3] + GATES[4:]), PRODUCTION)
        self.assertEqual(os.listdir(os.path.dirname(self.path())), [])

    def test_values_and_types_that_no_router_has(self):
        for bad in (numpy.nan, numpy.inf):
            given = paper()
            given['tau'][1, 2] = bad
            self.refused(skerry.NonfiniteError, "'tau' .* element 6", router_files.write, self.path(), given, PAPER)
        given = tensors(('W', 'temperature'))
        given['temperature'][0, 0] = 0
        self.refused(skerry.CorruptError, "'temperature'", router_files.write, self.path(), given, PRODUCTION)
        self.refused(skerry.CorruptError, "'W' differs", router_files.write, self.path(), tensors(('W',)),
                     dict(PRODUCTION, shared_keys=True))
        same = tensors(('W',))
        same['W'][:, 1::2] = same['W'][:, ::2]
        router_files.write(self.path(), same, dict(PRODUCTION, shared_keys=True))
        self.assertEqual(router_files.read(self.path()).config['shared_keys'], True)
        for dtype in (numpy.float64, numpy.int32, numpy.dtype('>f4')):
            with self.assertRaisesRegex(TypeError, "'W'"):
                router_files.write(self.path(), {'W': tensors(('W',))['W'].astype(dtype)}, PRODUCTION)
        with self.assertRaisesRegex(TypeError, "'w'"):
            router_files.write(self.path(), dict(tensors(('W',)), w=numpy.zeros(1, numpy.float32)), PRODUCTION)
        with self.assertRaisesRegex(TypeError, "'W_key'"):
            router_files.write(self.path(), dict(paper(), **tensors(('W_key',))), PAPER)

    def test_settings_are_refused_by_name(self):
        for change, words in (
                (dict(normalize=True), "'normalize' is unknown"), (dict(form='Paper'), "'form'"), (dict(num_layers=0), "'num_layers'"),
                (dict(num_layers=True), "'num_layers'"), (dict(num_layers=2.0), "'num_layers'"), (dict(num_q_heads=3), "'num_q_heads'"),
                (dict(summary_dim=33), "'summary_dim' is no integer from 1 to 32"), (dict(rank_max=-1), "'rank_max'"),
                (dict(model='m' * 128), "'model'"), (dict(model='a\0b'), "'model'"), (dict(model='\ud800'), "'model'"),
                (dict(model=7), "'model'"),
                (dict(pooling='max'), "'pooling'"), (dict(centroids=2), "'centroids'"),
                (dict(centroids=5, pooling='centroids'), "'centroids'"),
                (dict(normalise=1), "'normalise'"), (dict(version=2), "'version'"), (dict(step=-1), "'step'")):
            with self.subTest(change=change):
                self.refused(skerry.FormatError, words, router_files.write, self.path(), tensors(('W',)), dict(PRODUCTION, **change))
        for key in ('form', 'model', 'num_layers', 'num_q_heads', 'num_kv_heads', 'head_dim', 'summary_dim'):
            less = {name: value for name, value in PRODUCTION.items() if name != key}
            self.refused(skerry.FormatError, f"'{key}' is missing", router_files.write, self.path(), tensors(('W',)), less)
        for change in (dict(pooling='centroids'), dict(normalise=False), dict(shared_keys=True)):
            self.refused(skerry.FormatError, f"'{next(iter(change))}' does not go", router_files.write, self.path(), paper(),
                         dict(PAPER, **change))
        self.refused(skerry.FormatError, "'rank_max'", router_files.write, self.path(), paper(), dict(PAPER, rank_max=0))
        self.refused(skerry.FormatError, "'shared_keys' does not go", router_files.write, self.path(), tensors(('W', 'W_key')),
                     dict(PRODUCTION, shared_keys=False))

    def test_a_file_that_is_there_is_replaced_as_a_whole_or_kept(self):
        router_files.write(self.path(), tensors(('W',)), PRODUCTION)
        with open(self.path(), 'rb') as file:
            before = file.read()
        with self.assertRaises(skerry.CorruptError):
            router_files.write(self.path(), {}, PRODUCTION)
        with unittest.mock.patch.object(router_files.os, 'replace', side_effect=OSError('no')), self.assertRaises(OSError):
            router_files.write(self.path(), paper(), PAPER)
        with open(self.path(), 'rb') as file:
            self.assertEqual(file.read(), before)
        self.assertEqual(os.listdir(os.path.dirname(self.path())), ['router.safetensors'])
        router_files.write(self.path(), paper(), PAPER)
        self.assertEqual(router_files.read(self.path()).config['form'], 'paper')


class Reading(Folder):
    def both_refuse(self, data, kind):
        with open(self.path(), 'wb') as file:
            file.write(data)
        with self.assertRaises(kind):
            router_files.read(self.path())
        with self.assertRaises(kind):
            open_in_library(self.path())

    def test_this_reader_and_the_library_agree_on_damaged_files(self):
        router_files.write(self.path(), tensors(('W', 'bias')), PRODUCTION)
        with open(self.path(), 'rb') as file:
            whole = file.read()
        header = 8 + int.from_bytes(whole[:8], 'little')
        for length in [*range(0, header, 7), header, len(whole) - 1]:
            self.both_refuse(whole[:length], skerry.CorruptError)
        self.both_refuse(whole + b'\0', skerry.CorruptError)
        outcomes = collections.Counter()
        for place in range(0, header):
            for value in b'"}9':
                data = whole[:place] + bytes([value]) + whole[place + 1:]
                with open(self.path(), 'wb') as file:
                    file.write(data)
                results = []
                for reader in (router_files.read, open_in_library):
                    try:
                        reader(self.path())
                        results.append('ok')
                    except skerry.SkerryError as error:
                        results.append(error.status_name)
                self.assertEqual(results[0], results[1], (place, value))
                outcomes[results[0]] += 1
        self.assertLessEqual({'SKERRY_ERROR_CORRUPT', 'SKERRY_ERROR_FORMAT'}, set(outcomes))

    def test_other_programs_tensors_are_left_out(self):
        header = {'__metadata__': {'skerry.router': json.dumps(dict(PRODUCTION, version=1)), 'format': 'pt'},
                  'x': dict(dtype='I64', shape=[1], data_offsets=[0, 8]),
                  'W': dict(dtype='F32', shape=[2, 4, 4, 8], data_offsets=[8, 1032])}
        text = json.dumps(header).encode()
        with open(self.path(), 'wb') as file:
            file.write(len(text).to_bytes(8, 'little') + text + bytes(1032))
        self.assertEqual(list(router_files.read(self.path()).tensors), ['W'])
        self.assertEqual(open_in_library(self.path()).parameters, 256)

    def test_a_file_of_another_kind_says_so(self):
        text = b'{"W":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
        self.both_refuse(len(text).to_bytes(8, 'little') + text + bytes(4), skerry.FormatError)
        self.both_refuse(b'PK\3\4' + bytes(200), skerry.CorruptError)
        with self.assertRaises(FileNotFoundError):
            router_files.read(self.path('absent'))
        with self.assertRaises(skerry.StorageError):
            open_in_library(self.path('absent'))


# ---- checkpoints, as torch.save writes them ----


class Named:
    """Pickles as a global of any name, whether or not it can be imported."""

    def __init__(self, module, name):
        self.module, self.name = module, name


class Call:
    """Pickles as the call of a global."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments


class Instance:
    """Pickles as an object of a class that cannot be imported here."""

    def __init__(self, module, name, state, slots=False):
        self.kind, self.state, self.slots = Named(module, name), state, slots


class Storage:
    def __init__(self, key, data, kind='FloatStorage', count=None):
        self.key, self.data, self.kind = key, data, kind
        self.count = len(data) // 4 if count is None else count


class Pickler(pickle._Pickler):
    """Protocol 2, like torch.save, with the stand-ins above; in Python, so that opcodes can be written by hand."""

    def persistent_id(self, value):
        if isinstance(value, Storage):
            return ('storage', Named('torch', value.kind), value.key, 'cpu', value.count)
        return None

    def save(self, value, save_persistent_id=True):
        if isinstance(value, Named):
            return self.write(pickle.GLOBAL + f'{value.module}\n{value.name}\n'.encode())
        if isinstance(value, Call):
            self.save(value.function)
            self.save(value.arguments)
            return self.write(pickle.REDUCE)
        if isinstance(value, Instance):
            self.save(value.kind)
            self.save(())
            self.write(pickle.NEWOBJ)
            self.save((None, value.state) if value.slots else value.state)
            return self.write(pickle.BUILD)
        return super().save(value, save_persistent_id)


class Fields(Instance):
    """As a frozen dataclass with slots pickles: the values of its fields in a list."""

    def __init__(self, module, name, state):
        super().__init__(module, name, list(state.values()))


def rebuilt(storage, size, stride=None, offset=0):
    if stride is None:
        stride, step = [], 1
        for n in reversed(size):
            stride.insert(0, step)
            step *= n
    return Call(Named('torch._utils', '_rebuild_tensor_v2'), storage, offset, tuple(size), tuple(stride), False,
                Call(Named('collections', 'OrderedDict')))


def stored(values):
    """Tensors of a checkpoint, each with a storage of its own."""
    return {name: rebuilt(Storage(str(index), array.astype('<f4').tobytes()), array.shape)
            for index, (name, array) in enumerate(values.items())}


def content(parameters, **changes):
    spec = dict(name='llama-3.2-3b', hf_id='meta/Llama', num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, group_size=2,
                is_instruct=True)
    memory = dict(r_max=6, summary_dim=4)
    spec.update(changes.pop('spec', {}))
    memory.update(changes.pop('memory', {}))
    config = dict(model=Instance('sekv.config', 'ModelConfig', dict(name='llama-3.2-3b', hf_id=None)),
                  memory=Instance('sekv.config', 'MemoryConfig', memory, slots=True), train=dict(curriculum=[8192, 16384]))
    whole = dict(step=3000, model_spec=Instance('sekv.models.registry', 'ModelSpec', spec),
                 config=Instance('sekv.config', 'Config', config), trainable_parameters=parameters)
    whole.update(changes)
    return whole


def storages(value):
    """Every Storage within a tree of the stand-ins."""
    if isinstance(value, Storage):
        yield value
    elif isinstance(value, Call):
        yield from storages(value.arguments)
    elif isinstance(value, Instance):
        yield from storages(value.state)
    elif isinstance(value, dict):
        for item in value.values():
            yield from storages(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from storages(item)


def pickled(value):
    out = io.BytesIO()
    Pickler(out, 2).dump(value)
    return out.getvalue()


class Converting(Folder):
    def save(self, value, *, name='sekv_step_0003000.pt', data=None, byteorder=b'little', compression=zipfile.ZIP_STORED, prefix='archive'):
        path = self.path(name)
        with zipfile.ZipFile(path, 'w', compression) as archive:
            archive.writestr(f'{prefix}/data.pkl', pickled(value) if data is None else data)
            if byteorder is not None:
                archive.writestr(f'{prefix}/byteorder', byteorder)
            for storage in {one.key: one for one in storages(value)}.values():
                archive.writestr(f'{prefix}/data/{storage.key}', storage.data)
            archive.writestr(f'{prefix}/version', b'3\n')
        return path

    def convert(self, path, **settings):
        return router_files.convert_checkpoint(path, self.path(), **settings)

    def refuse(self, kind, words, value, **how):
        """Refused, and no file is left."""
        error = self.refused(kind, words, self.convert, self.save(value, **how))
        self.assertFalse(os.path.exists(self.path()))
        return error

    def test_a_checkpoint_becomes_the_same_router(self):
        values = paper()
        config = self.convert(self.save(content(collections.OrderedDict(stored(values)))))
        self.assertEqual({key: config[key] for key in ('form', 'model', 'step', *SIZES)},
                         dict(SIZES, form='paper', model='llama-3.2-3b', step=3000))
        found = router_files.read(self.path()).tensors
        self.assertEqual(set(found), set(values))
        for name in values:
            numpy.testing.assert_array_equal(found[name], values[name])
        info = open_in_library(self.path())
        self.assertEqual(info.parameters, sum(array.size for array in values.values()))
        self.assertEqual(info.training_step, 3000)

    def test_other_names_of_the_archive_no_byte_order_and_extra_tensors(self):
        values = stored(paper())
        values['extra'] = rebuilt(Storage('99', bytes(16), 'LongStorage', 2), (2,))
        self.convert(self.save(content(values), prefix='sekv_step_0003000', byteorder=None))
        self.assertEqual(set(router_files.read(self.path()).tensors), set(paper()))

    def test_dataclasses_that_were_pickled_without_names(self):
        config = dict(model=1, segmentation=2, memory=Fields('sekv.config', 'Memory', dict(r_max=6, summary_dim=4)), routing=3, loss=4,
                      train=5, paths=6)
        spec = dict(name='qwen2.5-14b', hf_id='x', num_layers=2, num_q_heads=4, num_kv_heads=2, head_dim=8, group_size=2, is_instruct=True)
        value = content(stored(paper()), config=Fields('sekv.config', 'Config', config), model_spec=Fields('sekv.models', 'Spec', spec))
        self.assertEqual(self.convert(self.save(value))['model'], 'qwen2.5-14b')
        os.unlink(self.path())
        # With a field more, the order is not known.
        value['model_spec'] = Fields('sekv.models', 'Spec', dict(spec, more=1))
        self.refuse(skerry.CorruptError, 'model_spec.name', value)
        # In another order, the numbers do not fit the tensors.
        value['model_spec'] = Fields('sekv.models', 'Spec', spec)
        config['memory'] = Fields('sekv.config', 'Memory', dict(summary_dim=4, r_max=6))
        value['config'] = Fields('sekv.config', 'Config', config)
        self.refuse(skerry.CorruptError, "'W' is", value)

    def test_views_halves_and_shared_storages(self):
        values = paper()
        parameters = stored(values)
        # Transposed, behind an offset, in a storage that another tensor shares.
        w = values['W'].transpose(0, 1, 3, 2)
        both = Storage('50', numpy.concatenate([numpy.zeros(3), w.reshape(-1), values['tau'].reshape(-1)]).astype('<f4').tobytes())
        parameters['W'] = rebuilt(both, values['W'].shape, (128, 32, 1, 4), 3)
        parameters['tau'] = rebuilt(both, (2, 4), (4, 1), 3 + w.size)
        half = values['g_phi.mlp.0.bias'].astype('<f2')
        parameters['g_phi.mlp.0.bias'] = rebuilt(Storage('51', half.tobytes(), 'HalfStorage', 64), (64,))
        brain = (values['g_phi.mlp.2.bias'].view(numpy.uint32) >> 16).astype('<u2')
        parameters['g_phi.mlp.2.bias'] = rebuilt(Storage('52', brain.tobytes(), 'BFloat16Storage', 64), (64,))
        self.convert(self.save(content(parameters)))
        found = router_files.read(self.path()).tensors
        numpy.testing.assert_array_equal(found['W'], values['W'])
        numpy.testing.assert_array_equal(found['tau'], values['tau'])
        numpy.testing.assert_array_equal(found['g_phi.mlp.0.bias'], half.astype(numpy.float32))
        numpy.testing.assert_array_equal(found['g_phi.mlp.2.bias'], (brain.astype(numpy.uint32) << 16).view(numpy.float32))

    def test_f16_halves_the_file_and_names_what_does_not_fit(self):
        values = paper()
        path = self.save(content(stored(values)))
        self.convert(path, dtype='f16')
        for name, array in router_files.read(self.path()).tensors.items():
            numpy.testing.assert_array_equal(array, values[name].astype(numpy.float16))
        values['tau'][1, 3] = 70000
        with self.assertRaisesRegex(skerry.NonfiniteError, "'tau' .* element 7"):
            self.convert(self.save(content(stored(values))), dtype='f16')
        with self.assertRaises(ValueError):
            self.convert(path, dtype='f64')

    def test_code_is_not_run_whatever_way_it_is_named(self):
        marker = self.path('ran')
        touch = f"open({marker!r}, 'w').close()"
        attacks = {
            'builtins.exec': Call(Named('builtins', 'exec'), touch),
            '__builtin__.eval': Call(Named('__builtin__', 'eval'), touch),
            'os.system': Call(Named('os', 'system'), f'touch {marker}'),
            'posix.system': Call(Named('posix', 'system'), f'touch {marker}'),
            'subprocess.Popen': Call(Named('subprocess', 'Popen'), ['touch', marker]),
            'builtins.getattr': Call(Named('builtins', 'getattr'), Named('sekv', 'x'), '__class__'),
            'torch.load': Call(Named('torch', 'load'), marker),
            'torch.serialization.load': Call(Named('torch.serialization', 'load'), marker),
            'torch.FloatStorage.__init__': Named('torch', 'FloatStorage.__init__'),
            'torch._utils._rebuild_tensor': Call(Named('torch._utils', '_rebuild_tensor')),
            'collections.deque': Call(Named('collections', 'deque')),
            'sekvx.Config': Named('sekvx', 'Config'),
            'numpy.core.multiarray._reconstruct': Call(Named('numpy.core.multiarray', '_reconstruct')),
            'skerry.router_files._Bag': Named('skerry.router_files', '_Bag'),
        }
        for name, attack in attacks.items():
            with self.subTest(name=name):
                self.refuse(skerry.FormatError, name.replace('.', r'\.'), content(stored(paper()), step=attack))
                # As an object of a class with a state, too.
                if isinstance(attack, Call):
                    instance = Instance(attack.function.module, attack.function.name, {})
                    self.refuse(skerry.FormatError, name.replace('.', r'\.'), content(stored(paper()), extra=instance))
        self.assertFalse(os.path.exists(marker))

    def test_opcodes_that_name_globals_in_other_ways_are_refused_alike(self):
        marker = self.path('ran')
        command = f'touch {marker}'.encode()
        programs = {
            'INST': b"(S'" + command + b"'\nios\nsystem\n.",
            'OBJ': b'(cos\nsystem\nS\'' + command + b"'\no.",
            'STACK_GLOBAL': b'\x80\x04\x8c\x02os\x8c\x06system\x93\x8c' + bytes([len(command)]) + command + b'\x85R.',
            'EXT1': b'\x80\x02\x82\x01.',
            'EXT2': b'\x80\x02\x83\x01\x00.',
            'EXT4': b'\x80\x02\x84\x01\x00\x00\x00.',
            'PERSID': b'Px\n.',
            'BINPERSID': b'\x80\x02K\x01Q.',
        }
        for name, program in programs.items():
            with self.subTest(name=name):
                error = self.refuse(skerry.FormatError, 'refused|refers', None, data=program)
                self.assertTrue(str(error))
        self.assertFalse(os.path.exists(marker))
        # Would take 32 GB of memory.
        self.refuse(skerry.CorruptError, 'remembers', None, data=b'\x80\x02Nr\xff\xff\xff\xff.')
        self.refuse(skerry.CorruptError, 'remembers', None, data=b'Np4294967295\n.')
        # Registered and used elsewhere in this process, an extension code would not even ask.
        import copyreg
        copyreg.add_extension('os', 'system', 1)
        self.addCleanup(copyreg.remove_extension, 'os', 'system', 1)
        pickle.loads(programs['EXT1'])
        self.refuse(skerry.FormatError, 'extension', None,
                    data=b"\x80\x02\x82\x01X" + struct.pack('<I', len(command)) + command + b'\x85R.')
        self.assertFalse(os.path.exists(marker))

    def test_attributes_that_a_pickle_sets_change_nothing_for_later_files(self):
        def build(target, state):
            return target, state

        class Builds(Pickler):
            def save(self, value, save_persistent_id=True):
                if isinstance(value, tuple) and len(value) == 2 and isinstance(value[0], Named) and isinstance(value[1], tuple):
                    super().save(value[0])
                    super().save(value[1])
                    return self.write(pickle.BUILD)
                return super().save(value, save_persistent_id)

        for target in (Named('torch', 'FloatStorage'), Named('torch._utils', '_rebuild_tensor_v2'), Named('collections', 'OrderedDict'),
                       Named('sekv', 'Config')):
            out = io.BytesIO()
            Builds(out, 2).dump(content({}, extra=build(target, (None, {'name': 'LongStorage', 'kind': 1, '__doc__': 'x'}))))
            with self.assertRaises(skerry.SkerryError):
                self.convert(self.save(None, data=out.getvalue()))
        self.convert(self.save(content(stored(paper()))))
        self.assertEqual(open_in_library(self.path()).parameters, sum(array.size for array in paper().values()))

    def test_T24_a_missing_tensor_or_a_wrong_shape_is_named(self):
        for name in ('W', 'tau') + GATES:
            fewer = stored(paper())
            del fewer[name]
            self.refuse(skerry.CorruptError, f"'{name}' is missing", content(fewer))
            wrong = paper()
            wrong[name] = numpy.concatenate([wrong[name], wrong[name]])
            self.refuse(skerry.CorruptError, f"'{name}' is \\[", content(stored(wrong)))
            broken = paper()
            broken[name].reshape(-1)[-1] = numpy.nan
            self.refuse(skerry.NonfiniteError, f"'{name}'", content(stored(broken)))
            other = stored(paper())
            other[name] = [1.0]
            self.refuse(skerry.FormatError, f"'{name}' of the checkpoint is no tensor", content(other))

    def test_storages_that_no_router_has(self):
        for kind in ('LongStorage', 'DoubleStorage', 'BoolStorage', 'ByteStorage'):
            wrong = stored(paper())
            wrong['tau'] = rebuilt(Storage('70', bytes(64), kind, 8), (2, 4))
            self.refuse(skerry.FormatError, f"'tau' is stored as torch.{kind}", content(wrong))
        wrong = stored(paper())
        wrong['tau'] = rebuilt(Storage('70', bytes(32), 'UntypedStorage', 8), (2, 4))
        self.refuse(skerry.FormatError, 'torch.UntypedStorage', content(wrong))
        for storage, size, stride, offset in (
                (Storage('70', bytes(28)), (2, 4), (4, 1), 0),  # too short
                (Storage('70', bytes(28), count=8), (2, 4), (4, 1), 0),  # its length is a lie
                (Storage('70', bytes(32)), (2, 4), (4, 1), 1),
                (Storage('70', bytes(32)), (2, 4), (5, 1), 0),
                (Storage('70', bytes(32)), (2, 4), (-4, 1), 4),
                (Storage('70', bytes(32)), (2, 4), (4, 1), -1),
                (Storage('70', bytes(4)), (2, 4), (0, 0), 0),  # one number, named eight times
                (Storage('70', bytes(32)), (2, 4), (1 << 62, 1), 0),
                (Storage('70', bytes(32)), (2, 4), (4,), 0),
                (Storage('70', bytes(32)), (2, 0), (4, 1), 0),
                (Storage('70', bytes(32)), (1,) * 70, (1,) * 70, 0)):
            wrong = stored(paper())
            wrong['tau'] = rebuilt(storage, size, stride, offset)
            self.refuse(skerry.CorruptError, "'tau'", content(wrong))
        # Strides of dimensions of 1 are any number in real checkpoints.
        values = tensors(('W', 'tau') + GATES, config=dict(PAPER, num_layers=1))
        parameters = stored(values)
        parameters['tau'] = rebuilt(Storage('70', values['tau'].astype('<f4').tobytes()), (1, 4), (1 << 70, 1))
        self.convert(self.save(content(parameters, spec=dict(num_layers=1))))
        numpy.testing.assert_array_equal(router_files.read(self.path()).tensors['tau'], values['tau'])

    def test_fields_that_are_missing_or_wrong_are_named(self):
        parameters = stored(paper())
        for key in ('step', 'model_spec', 'config', 'trainable_parameters'):
            less = content(parameters)
            del less[key]
            self.refuse(skerry.CorruptError, key, less)
        self.refuse(skerry.CorruptError, 'model_spec.num_layers', content(parameters, spec=dict(num_layers='2')))
        self.refuse(skerry.CorruptError, 'config.memory.r_max', content(parameters, memory=dict(r_max=None)))
        self.refuse(skerry.CorruptError, 'model_spec.name', content(parameters, spec=dict(name=7)))
        self.refuse(skerry.CorruptError, "'W' is", content(parameters, spec=dict(num_q_heads=8)))
        self.refuse(skerry.CorruptError, "'g_phi.mlp.0.weight' is", content(parameters, memory=dict(r_max=7)))
        self.refuse(skerry.FormatError, "'num_q_heads'", content(parameters, spec=dict(num_q_heads=3)))
        self.refuse(skerry.CorruptError, 'trainable_parameters', content([1]))
        self.refuse(skerry.CorruptError, 'no dictionary', [1, 2])

    def test_archives_that_torch_does_not_write(self):
        good = content(stored(paper()))
        self.refuse(skerry.FormatError, "byte order is 'big'", good, byteorder=b'big')
        self.refuse(skerry.FormatError, 'compressed', good, compression=zipfile.ZIP_DEFLATED)
        self.refuse(skerry.CorruptError, 'data.pkl', good, prefix='a/b')
        path = self.save(good)
        with zipfile.ZipFile(path, 'a') as archive:
            archive.writestr('second/data.pkl', b'N.')
        self.refused(skerry.CorruptError, 'more than one', self.convert, path)
        path = self.save(good)
        with open(path, 'rb') as file:
            whole = file.read()
        with zipfile.ZipFile(path) as archive:
            place = archive.getinfo('archive/data/0').header_offset + 200
        damaged = whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1:]
        with open(path, 'wb') as file:
            file.write(damaged)
        self.refused(skerry.CorruptError, 'data/0 of the checkpoint cannot be read', self.convert, path)
        for data in (b'', b'PK', b'not a checkpoint', whole[:len(whole) // 2], whole[100:]):
            with open(path, 'wb') as file:
                file.write(data)
            self.refused(skerry.CorruptError, 'zip|the front of the archive', self.convert, path)
        missing = content(stored(paper()))
        with zipfile.ZipFile(path, 'w') as archive:
            archive.writestr('archive/data.pkl', pickled(missing))
        self.refused(skerry.CorruptError, 'no archive/data/0', self.convert, path)
        with self.assertRaises(FileNotFoundError):
            self.convert(self.path('absent.pt'))

    def test_every_truncation_and_change_of_the_pickle_is_refused_or_read(self):
        good = content(stored(paper()))
        data = pickled(good)
        path = self.save(good)
        with open(path, 'rb') as file:
            whole = file.read()

        def read(changed):
            # Renaming the first pickle leaves its bytes behind in a member that nothing reads.
            archive = io.BytesIO(whole.replace(b'archive/data.pkl', b'archive/data.old'))
            with zipfile.ZipFile(archive, 'a') as file:
                file.writestr('archive/data.pkl', changed)
            return router_files._checkpoint(archive)

        self.assertEqual(read(data).config['model'], 'llama-3.2-3b')
        for length in range(0, len(data), 3):
            with self.assertRaises(skerry.SkerryError):
                read(data[:length])
        outcomes = collections.Counter()
        for place in range(0, len(data), 2):
            changed = data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1:]
            try:
                read(changed)
                outcomes['read'] += 1
            except skerry.SkerryError as error:
                outcomes[error.status_name] += 1
        self.assertGreater(outcomes['SKERRY_ERROR_CORRUPT'], 100)
        self.assertGreater(outcomes['read'], 0)


class CommandLine(Folder):
    def run_main(self, *arguments):
        out, error = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
            status = router_files.main(list(arguments))
        return status, out.getvalue(), error.getvalue()

    def test_convert_and_show(self):
        checkpoint = Converting.save(self, content(stored(paper())))
        done = subprocess.run([sys.executable, '-m', 'skerry.router_files', 'convert', checkpoint, self.path(), '--dtype', 'f16'],
                              capture_output=True, text=True, env=dict(os.environ, PYTHONPATH=PACKAGE, SKERRY_LIBRARY='/nowhere'))
        self.assertEqual((done.returncode, done.stderr), (0, ''))
        self.assertIn('"llama-3.2-3b"', done.stdout)
        self.assertIn(f'{sum(array.size for array in paper().values())} parameters', done.stdout)
        status, text, _ = self.run_main('show', self.path())
        self.assertEqual((status, text), (0, done.stdout))
        self.assertIn('float16 [2, 4, 4, 8]', text)

    def test_failures_are_one_line_and_status_1(self):
        status, text, error = self.run_main('show', self.path('absent'))
        self.assertEqual((status, text), (1, ''))
        self.assertEqual(error.count('\n'), 1)
        with open(self.path('bad.pt'), 'wb') as file:
            file.write(b'bad')
        status, _, error = self.run_main('convert', self.path('bad.pt'), self.path())
        self.assertEqual(status, 1)
        self.assertIn('SKERRY_ERROR_CORRUPT', error)
        self.assertFalse(os.path.exists(self.path()))
        for arguments in ([], ['convert', 'x'], ['other']):
            with self.assertRaises(SystemExit), contextlib.redirect_stderr(io.StringIO()):
                router_files.main(arguments)


if __name__ == '__main__':
    unittest.main()
