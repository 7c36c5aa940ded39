"""Sizes and offsets that cffi computes against those of the C compiler, and fields of the dataclasses against the structs."""

import dataclasses
import os
import shutil
import subprocess
import tempfile
import unittest

from support import ROOT, skerry
from skerry import _abi, _config
from skerry._library import _ffi

COMPILER = shutil.which('cc') or shutil.which('gcc')


def structs():
    for name in _ffi.list_types()[0]:
        kind = _ffi.typeof(name)
        if kind.kind == 'struct' and kind.fields:
            yield name, kind


class Layout(unittest.TestCase):
    @unittest.skipUnless(COMPILER, 'needs a C compiler')
    def test_structs_and_constants_are_those_of_the_compiler(self):
        lines, expected = [], []
        for name, kind in structs():
            lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
            expected.append(f'{name} {_ffi.sizeof(kind)}')
            for field, detail in kind.fields:
                lines.append(f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));')
                expected.append(f'{name}.{field} {detail.offset}')
        for name, value in vars(_abi).items():
            if name.startswith('SKERRY_'):
                lines.append(f'printf("{name} %lld\\n", (long long) {name});')
                expected.append(f'{name} {value}')
        self.assertGreater(len(expected), 300)
        with tempfile.TemporaryDirectory() as place:
            source, program = os.path.join(place, 'layout.c'), os.path.join(place, 'layout')
            with open(source, 'w', encoding='utf-8') as file:
                file.write('#include <stdio.h>\n#include <skerry/skerry.h>\nint main(void) {\n' + '\n'.join(lines)
                           + '\nreturn 0;\n}\n')
            subprocess.run([COMPILER, '-std=c99', '-I', os.path.join(ROOT, 'include'), source, '-o', program], check=True)
            printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split('\n')
        self.assertEqual(printed[:-1], expected)

    def test_reports_have_every_field(self):
        pairs = {
            skerry.Plan: 'skerry_plan_info', skerry.DeviceInfo: 'skerry_device_info',
            skerry.ContextBytes: 'skerry_context_bytes', skerry.MemoryInfo: 'skerry_memory_info',
            skerry.Counters: 'skerry_counters', skerry.Diagnostics: 'skerry_diagnostics',
            skerry.SequenceInfo: 'skerry_seq_info', skerry.Range: 'skerry_range', skerry.Part: 'skerry_part',
            skerry.Layer: 'skerry_layer_desc', skerry.Policy: 'skerry_policy_desc', skerry.Budget: 'skerry_budget_desc',
            skerry.Rotary: 'skerry_rotary_desc', skerry.Callbacks: 'skerry_callbacks_desc', skerry.RouterInfo: 'skerry_router_info',
        }
        more = {skerry.Policy: {'keep_exact', 'one_way', 'evict_first'}, skerry.Part: {'keys_address', 'values_address'},
                skerry.Range: {'detail_error'}}
        flags_spread = (skerry.Layer, skerry.Policy, skerry.Budget, skerry.Rotary, skerry.Callbacks)
        for cls, name in pairs.items():
            expected = {field for field, _ in _ffi.typeof(name).fields} - {'struct_size', 'reserved', 'user'}
            if cls in flags_spread:
                expected -= {'flags'}
            expected |= more.get(cls, set())
            with self.subTest(cls.__name__):
                self.assertEqual({field.name for field in dataclasses.fields(cls)}, expected)

    def test_descriptions_carry_every_field(self):
        library = skerry.library()
        policy = skerry.Policy('qevict', fidelity='paper', prefill='whole', window_tokens=8, sink_tokens=5, recent_tokens=32,
                               period_tokens=9, score='worst', score_queries=18, selection='per_layer', full_format='r8',
                               key_format='c2', value_format='c4', value_group=32, quantised_share_ppm=700000,
                               hysteresis_ppm=1100000, max_moves_ppm=250000, keep_exact=True, evict_first=True)
        rotary = skerry.Rotary([1.0, 0.5, 0.25, 0.125], pairing='interleaved', attention_factor=1.25)
        layers = [skerry.Layer(2, 16, query_heads=4, value_dim=24, sliding_window=64, scale=0.5, softcap=30.0, rotary=rotary),
                  skerry.Layer(2, 16, query_heads=4, value_dim=24, shared_with=0)]
        budget = skerry.Budget(bytes=1 << 40, share_ppm=3, length_tokens=4096, full_bytes=5, quantised_bytes=6, exact_bytes=7, host_bytes=8)
        desc, keep = _config.cache_desc(library, layers=layers, policy=policy, budget=budget, store_dtype='bf16', max_sequences=3,
                                        max_step_tokens=11, staging_tokens=12, nonfinite='zero', exact_attend=True)

        def fields(struct):
            return {name: getattr(struct, name) for name, _ in _ffi.typeof(struct[0]).fields}
        made = fields(desc.policy)
        self.assertEqual(made, dict(
            struct_size=_ffi.sizeof('skerry_policy_desc'), flags=_abi.SKERRY_POLICY_KEEP_EXACT | _abi.SKERRY_POLICY_EVICT_FIRST,
            kind=_abi.SKERRY_POLICY_QEVICT, fidelity=_abi.SKERRY_FIDELITY_PAPER, prefill=_abi.SKERRY_PREFILL_WHOLE,
            window_tokens=8, sink_tokens=5, recent_tokens=32, period_tokens=9, score=_abi.SKERRY_SCORE_WORST, score_queries=18,
            selection=_abi.SKERRY_SELECTION_PER_LAYER, full_format=_abi.SKERRY_FORMAT_R8, key_format=_abi.SKERRY_FORMAT_C2,
            value_format=_abi.SKERRY_FORMAT_C4, value_group=32, quantised_share_ppm=700000, hysteresis_ppm=1100000,
            max_moves_ppm=250000, reserved=0, sekv=_ffi.NULL))
        self.assertEqual(fields(desc.budget), dict(
            struct_size=_ffi.sizeof('skerry_budget_desc'), flags=0, bytes=1 << 40, share_ppm=3, reserved=0, length_tokens=4096,
            full_bytes=5, quantised_bytes=6, exact_bytes=7, host_bytes=8))
        first, second = desc.layers[0], desc.layers[1]
        self.assertEqual((first.kv_heads, first.query_heads, first.key_dim, first.value_dim, first.sliding_window, first.scale,
                          first.softcap, first.flags), (2, 4, 16, 24, 64, 0.5, 30.0, 0))
        self.assertEqual((second.flags, second.shared_with), (_abi.SKERRY_LAYER_SHARED, 0))
        self.assertEqual((first.rotary.dims, first.rotary.pairing, first.rotary.attention_factor),
                         (8, _abi.SKERRY_ROTARY_INTERLEAVED, 1.25))
        self.assertEqual([first.rotary.inverse_frequencies[place] for place in range(4)], [1.0, 0.5, 0.25, 0.125])
        self.assertEqual((desc.layer_count, desc.store_dtype, desc.max_sequences, desc.max_step_tokens, desc.staging_tokens,
                          desc.nonfinite, desc.flags),
                         (2, _abi.SKERRY_DTYPE_BF16, 3, 11, 12, _abi.SKERRY_NONFINITE_ZERO, _abi.SKERRY_CACHE_EXACT_ATTEND))
        self.assertEqual(desc.callbacks, _ffi.NULL)
        sekv = skerry.Sekv(detail_format='l8', fetch_ppm=60000, refine_ppm=3, hysteresis_ppm=4000000, keep_windows=5, miss='skip',
                           residents=False, segmentation='surprisal', span_min_tokens=32, span_max_tokens=96, anchor_threshold=1.5,
                           detail_rank=8, detail_error=0.25, shared_bases=True, budget_entries=77, absent_rows=True, value_gates=True,
                           group_choice=True, second_order=True)
        found, keep = _config.cache_desc(library, layers=layers, policy=skerry.Policy('sekv', sekv=sekv))
        made = fields(found.policy.sekv)
        made.pop('router')
        self.assertEqual(made, dict(
            struct_size=_ffi.sizeof('skerry_sekv_desc'),
            flags=(_abi.SKERRY_SEKV_NO_RESIDENTS | _abi.SKERRY_SEKV_SHARED_BASES | _abi.SKERRY_SEKV_ABSENT_ROWS
                   | _abi.SKERRY_SEKV_VALUE_GATES | _abi.SKERRY_SEKV_GROUP_CHOICE | _abi.SKERRY_SEKV_SECOND_ORDER),
            detail_format=_abi.SKERRY_FORMAT_L8, fetch_ppm=60000, refine_ppm=3, hysteresis_ppm=4000000, keep_windows=5,
            miss=_abi.SKERRY_ZOOM_SKIP, segmentation=_abi.SKERRY_SEGMENTS_SURPRISAL, span_min_tokens=32, span_max_tokens=96,
            anchor_threshold=1.5, detail_rank=8, detail_error=0.25, budget_entries=77, reserved=0))
        none, keep = _config.cache_desc(library, layers=layers, policy=skerry.Policy('streaming', sink_tokens=0))
        self.assertEqual(none.policy.sink_tokens, _abi.SKERRY_NONE_TOKENS)
        self.assertEqual(none.budget, _ffi.NULL)


if __name__ == '__main__':
    unittest.main()
