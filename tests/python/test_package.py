"""The package as it is installed, and its page of documentation."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import unittest

from support import PACKAGE, ROOT, skerry



def can_build():
    """setuptools makes wheels itself from 70.1 on; before, the package wheel does."""
    try:
        import setuptools
        if tuple(int(part) for part in setuptools.__version__.split('.')[:2]) < (70, 1):
            import wheel  # noqa: F401
    except ImportError:
        return False
    return True


PAGE = os.path.join(ROOT, 'docs', 'python.md')


class Documentation(unittest.TestCase):
    def test_the_examples_run(self):
        with open(PAGE, encoding='utf-8') as file:
            text = file.read()
        found = re.finditer(r'```python\n(.*?)```', text, re.S)
        blocks = [(text[:match.start()].count('\n') + 2, match.group(1)) for match in found]
        self.assertGreater(len(blocks), 5)
        names = {}
        for line, block in blocks:
            with self.subTest(line=line):
                exec(compile('\n' * (line - 1) + block, PAGE, 'exec'), names)

    def test_every_public_name_has_text(self):
        for name in skerry.__all__:
            if name != 'API_VERSION':
                self.assertTrue(getattr(skerry, name).__doc__, name)


class Installed(unittest.TestCase):
    @unittest.skipUnless(can_build(), 'needs setuptools that can make a wheel')
    def test_a_wheel_holds_every_file_and_works(self):
        with tempfile.TemporaryDirectory() as place:
            source = os.path.join(place, 'source')
            shutil.copytree(PACKAGE, source, ignore=shutil.ignore_patterns('build', '*.egg-info', '__pycache__'))
            target = os.path.join(place, 'target')
            done = subprocess.run([sys.executable, '-m', 'pip', 'install', '--quiet', '--no-deps', '--no-index',
                                   '--no-build-isolation', '--disable-pip-version-check', '--target', target, source],
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, done.stderr)
            installed = set(os.listdir(os.path.join(target, 'skerry')))
            self.assertLessEqual({name for name in os.listdir(os.path.join(PACKAGE, 'skerry')) if name != '__pycache__'}, installed)
            printed = subprocess.run(
                [sys.executable, '-c', 'import sys; sys.path.insert(0, sys.argv[1]); import skerry; skerry.load(sys.argv[2]); '
                 'print(skerry.__file__); print(skerry.Cache([skerry.Layer(1, 8)]).plan.kind)', target, skerry.library().path],
                check=True, capture_output=True, text=True).stdout.split()
            self.assertEqual(os.path.realpath(os.path.dirname(printed[0])), os.path.realpath(os.path.join(target, 'skerry')))
            self.assertEqual(printed[1], 'full')

    def test_the_version_is_that_of_the_metadata(self):
        with open(os.path.join(PACKAGE, 'pyproject.toml'), encoding='utf-8') as file:
            self.assertIn(f'version = "{skerry.__version__}"', file.read())
        self.assertEqual(skerry.__version__.split('.')[:2], [str(part) for part in skerry.API_VERSION[:2]])


if __name__ == '__main__':
    unittest.main()
