"""Finding, checking and describing the shared library."""

import os
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

from support import PACKAGE, skerry
from skerry import _abi, _library


class Load(unittest.TestCase):
    def test_the_loaded_library_has_the_version_of_the_headers(self):
        loaded = skerry.library()
        self.assertEqual(loaded.version[:2], skerry.API_VERSION[:2])
        self.assertIn('.'.join(map(str, loaded.version)), loaded.build_text)

    def test_an_explicit_path_is_opened_and_becomes_the_one_in_use(self):
        before = skerry.library()
        opened = skerry.load(before.path)
        self.assertIs(skerry.library(), opened)
        with skerry.Context() as context:
            self.assertIs(context.library, opened)

    def test_a_missing_file_is_named_and_leaves_the_library_in_use(self):
        before = skerry.library()
        with self.assertRaises(skerry.LoadError) as caught:
            skerry.load('/nowhere/libskerry.so')
        self.assertIn('/nowhere/libskerry.so', str(caught.exception))
        self.assertIs(skerry.library(), before)

    def test_another_library_is_refused(self):
        other = {'linux': 'libm.so.6', 'darwin': 'libSystem.dylib', 'win32': 'kernel32.dll'}[sys.platform]
        with self.assertRaisesRegex(skerry.LoadError, 'not this library'):
            skerry.load(other)

    def test_order_of_the_lookup(self):
        with mock.patch.dict(os.environ, {'SKERRY_LIBRARY': '/given/lib.so'}):
            self.assertEqual(_library.candidates(), ['/given/lib.so'])
        with mock.patch.dict(os.environ), mock.patch('os.path.exists', lambda path: True):
            os.environ.pop('SKERRY_LIBRARY', None)
            found = _library.candidates()
            self.assertEqual(os.path.dirname(found[0]), os.path.join(PACKAGE, 'skerry', 'lib'))
            self.assertEqual(found[-1], _library.file_names()[-1])
        if sys.platform == 'linux':
            self.assertEqual(_library.file_names(), ('libskerry.so.0.1',))

    def test_a_file_inside_the_package_is_found(self):
        # A copy of the package, so that the tree stays as it is.
        script = ("import shutil, sys, os; sys.path.insert(0, sys.argv[1]); os.environ.pop('SKERRY_LIBRARY', None); "
                  "import skerry; print(skerry.load().path)")
        with tempfile.TemporaryDirectory() as place:
            import shutil
            shutil.copytree(os.path.join(PACKAGE, 'skerry'), os.path.join(place, 'skerry'))
            os.makedirs(os.path.join(place, 'skerry', 'lib'), exist_ok=True)
            target = os.path.join(place, 'skerry', 'lib', _library.file_names()[0])
            shutil.copy(skerry.library().path, target)
            printed = subprocess.run([sys.executable, '-c', script, place], check=True, capture_output=True, text=True).stdout
            self.assertEqual(os.path.realpath(printed.strip()), os.path.realpath(target))

    def test_version_rule(self):
        number = _abi.SKERRY_API_VERSION
        self.assertTrue(_library.fits(number))
        self.assertTrue(_library.fits(number + 1))
        self.assertFalse(_library.fits(number + 1000))
        self.assertFalse(_library.fits(number - 1000 if number >= 1000 else number + 1000000))
        with mock.patch.object(_library, 'API_VERSION', (2, 3, 0)):
            self.assertTrue(_library.fits(2003000))
            self.assertTrue(_library.fits(2009001))
            self.assertFalse(_library.fits(2002009))
            self.assertFalse(_library.fits(3003000))

    def test_a_library_of_another_minor_is_refused_by_name(self):
        with mock.patch.object(_library, 'fits', lambda number: False):
            with self.assertRaisesRegex(skerry.LoadError, 'does not serve a package made for 0.1'):
                skerry.load(skerry.library().path)

    def test_a_library_without_a_function_is_refused(self):
        with mock.patch.object(_abi, 'FUNCTIONS', _abi.FUNCTIONS + ('skerry_no_such_function',)):
            with self.assertRaisesRegex(skerry.LoadError, 'skerry_no_such_function'):
                skerry.load(skerry.library().path)


class Names(unittest.TestCase):
    def test_unknown_values_have_a_name(self):
        from skerry import _names
        self.assertEqual(_names.FORMAT.name(_abi.SKERRY_FORMAT_R3), 'r3')
        self.assertEqual(_names.FORMAT.name(9999), 'other(9999)')
        self.assertEqual(_names.CPU.name(_abi.SKERRY_CPU_AVX2 | 1 << 30), ('avx2', 'other(0x40000000)'))
        self.assertEqual(_names.FORMAT.value('R3'), _abi.SKERRY_FORMAT_R3)
        self.assertEqual(_names.FORMAT.value(77), 77)
        with self.assertRaisesRegex(ValueError, "'r5' is not a format"):
            _names.FORMAT.value('r5')
        with self.assertRaises(TypeError):
            _names.FORMAT.value(None)

    def test_policies_and_their_flags_are_apart(self):
        from skerry import _names
        self.assertEqual(sorted(_names.POLICY.values), ['evict', 'full', 'qevict', 'quantise', 'sekv', 'streaming'])
        self.assertEqual(sorted(_names.POLICY_FLAGS.values), ['evict_first', 'keep_exact', 'one_way'])


if __name__ == '__main__':
    unittest.main()
