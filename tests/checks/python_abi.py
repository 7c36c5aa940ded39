#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""TAP: bindings/python/skerry/_abi.py matches the public headers, and the comparison notices what it has to notice."""

import os
import re
import shutil
import sys
import tempfile

from tap import Tap

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), '..', '..'))
BINDINGS = os.path.join(ROOT, 'bindings', 'python')
INCLUDE = os.path.join(ROOT, 'include')
sys.path.insert(0, BINDINGS)
sys.dont_write_bytecode = True  # nothing of a check run stays in the source tree

import generate  # noqa: E402

# (what, header, text, replacement): edits of a header that must make the file stale.
EDITS = (
    ('the value of a constant', 'base.h', 'SKERRY_ERROR_STATE         = -14', 'SKERRY_ERROR_STATE         = -19'),
    ('the value of a macro', 'version.h', '#define SKERRY_API_PATCH 0', '#define SKERRY_API_PATCH 7'),
    ('a new constant', 'cache.h', 'SKERRY_TIER_EVICTED   = 8', 'SKERRY_TIER_EVICTED   = 8, SKERRY_TIER_DISK = 9'),
    ('the type of a field', 'sequence.h', 'int64_t       begin;', 'int32_t       begin;'),
    ('an argument', 'step.h', 'skerry_step_commit(skerry_step *step, skerry_error *error)',
     'skerry_step_commit(skerry_step *step, int32_t how, skerry_error *error)'),
)


def exported(include):
    """Names that the headers mark as functions, found without the generator's own parser."""
    names = []
    for header in generate.included_headers(include):
        with open(os.path.join(include, 'skerry', header), encoding='utf-8') as file:
            text = re.sub(r'/\*.*?\*/', '', file.read(), flags=re.S)
        names += re.findall(r'^SKERRY_API(?:_VOID)?\s[^;(]*?(\w+)\(', text, flags=re.M)
    return names


def checked(include, output=generate.DEFAULT_OUTPUT):
    """True when the file matches these headers; quiet."""
    keep, sys.stderr = sys.stderr, open(os.devnull, 'w', encoding='utf-8')
    try:
        return generate.main(['--check', '--include', include, '--output', output]) == 0
    finally:
        sys.stderr.close()
        sys.stderr = keep


def edited(header, text, replacement):
    with tempfile.TemporaryDirectory() as place:
        include = os.path.join(place, 'include')
        shutil.copytree(INCLUDE, include)
        path = os.path.join(include, 'skerry', header)
        with open(path, encoding='utf-8') as file:
            before = file.read()
        with open(path, 'w', encoding='utf-8') as file:
            file.write(before.replace(text, replacement))
        return before.count(text), checked(include)


def main():
    tap = Tap()
    tap.check(checked(INCLUDE), 'the generated file matches the headers', ['run bindings/python/generate.py'])
    _, _, functions = generate.parse(INCLUDE)
    differing = sorted(set(exported(INCLUDE)) ^ set(functions))
    tap.check(functions and not differing, 'every exported function is declared', differing)
    for what, header, text, replacement in EDITS:
        found, same = edited(header, text, replacement)
        tap.check(found == 1 and not same, f'{what} makes it stale', [f'the text to edit is {found} times in {header}'])
    with tempfile.TemporaryDirectory() as place:
        target = os.path.join(place, '_abi.py')
        absent = checked(INCLUDE, target)
        generate.main(['--output', target])
        tap.check(not absent and checked(INCLUDE, target), 'a missing file is stale, a written one is not')
    tap.end()


if __name__ == '__main__':
    main()
