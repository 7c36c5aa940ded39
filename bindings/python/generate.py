#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Writes skerry/_abi.py from the public headers.

The package opens the library at run time, so it needs the declarations as text and the constants as numbers. Both come from
include/skerry/, in the order of its umbrella header; nothing in _abi.py is written by hand.

    generate.py            rewrite _abi.py
    generate.py --check    exit with 1 when _abi.py does not match the headers
"""

import argparse
import ast
import operator
import os
import re
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
DEFAULT_INCLUDE = os.path.normpath(os.path.join(HERE, '..', '..', 'include'))
DEFAULT_OUTPUT = os.path.join(HERE, 'skerry', '_abi.py')

# Attributes that change nothing about how a function is called.
MARKERS = ('SKERRY_API', 'SKERRY_API_VOID')

OPERATORS = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.LShift: operator.lshift, ast.RShift: operator.rshift, ast.BitOr: operator.or_,
    ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
    ast.USub: operator.neg, ast.UAdd: operator.pos, ast.Invert: operator.invert,
}


class HeaderError(Exception):
    """A header holds something this script does not understand."""


def strip_comments(text):
    return re.sub(r'/\*.*?\*/|//[^\n]*', ' ', text, flags=re.S)


def read_header(include, name):
    with open(os.path.join(include, 'skerry', name), encoding='utf-8') as file:
        return strip_comments(file.read()).replace('\\\n', ' ')


def included_headers(include):
    """Names that the umbrella header includes, in its order."""
    return re.findall(r'#include\s+<skerry/([\w.]+)>', read_header(include, 'skerry.h'))


def preprocess(text, name):
    """Drops what only C++ sees and every directive; returns the C text and the object-like macros [(name, value text)]."""
    lines, macros, dropped = [], [], []
    for line in text.split('\n'):
        directive = re.match(r'\s*#\s*(\w+)\s*(.*)', line)
        if not directive:
            if not any(dropped):
                lines.append(line)
            continue
        word, rest = directive.group(1), directive.group(2).strip()
        if word in ('if', 'ifdef', 'ifndef'):
            dropped.append(word == 'ifdef' and rest == '__cplusplus')
        elif word == 'endif':
            dropped.pop()
        elif word == 'else' and dropped[-1]:
            dropped[-1] = False
        elif word == 'define' and not any(dropped):
            macro = re.match(r'(SKERRY_\w+)[ \t]+(\S.*)$', rest)
            if macro and '__' not in macro.group(2):
                macros.append((macro.group(1), macro.group(2).strip()))
    if dropped:
        raise HeaderError(f'{name}: a conditional is not closed')
    return '\n'.join(lines), macros


def evaluate(text, known):
    """Value of a constant expression over integers and constants that are already known."""
    version = re.fullmatch(r'SKERRY_VERSION_NUMBER\((.*),(.*),(.*)\)', text)
    if version:
        major, minor, patch = (evaluate(part.strip(), known) for part in version.groups())
        return major * 1000000 + minor * 1000 + patch

    def visit(node):
        if isinstance(node, ast.Expression):
            return visit(node.body)
        if isinstance(node, ast.Constant) and isinstance(node.value, int):
            return node.value
        if isinstance(node, ast.Name) and node.id in known:
            return known[node.id]
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](visit(node.left), visit(node.right))
        if isinstance(node, ast.UnaryOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](visit(node.operand))
        raise HeaderError(f'not a constant: {text}')

    try:
        tree = ast.parse(re.sub(r'\b(0x[0-9a-fA-F]+|\d+)[uUlL]+\b', r'\1', text), mode='eval')
    except SyntaxError as error:
        raise HeaderError(f'not a constant: {text}') from error
    return visit(tree)


def take_enums(text, known):
    """Removes anonymous enums from the text and adds their members to `known`."""
    def replace(match):
        following = 0
        for member in match.group(1).split(','):
            member = member.strip()
            if not member:
                continue
            name, _, value = (part.strip() for part in member.partition('='))
            known[name] = evaluate(value, known) if value else following
            following = known[name] + 1
        return ''
    return re.sub(r'\benum\s*\{(.*?)\}\s*;', replace, text, flags=re.S)


def tidy(text):
    """One declaration per line, struct members indented, no blank lines."""
    text = re.sub(r'\s+', ' ', text)
    text = re.sub(r' ?([(),;*]) ?', r'\1', text)
    text = re.sub(r'\*(?=\w)', ' *', text)
    text = re.sub(r'(\w)\*', r'\1 *', text)
    text = re.sub(r',', ', ', text)
    text = re.sub(r' +', ' ', text).replace('( ', '(').replace('* *', '**')
    lines, depth = [], 0
    for piece in re.findall(r'[^;{}]*[;{}]', text):
        piece = piece.strip()
        if piece.startswith('}'):
            depth -= 1
            lines.append('} ' + piece[1:].strip())
        elif piece:
            # "} name;" arrives as two pieces: the brace, then the name.
            if lines and lines[-1] == '} ':
                lines[-1] += piece
            else:
                lines.append('    ' * depth + piece)
        if piece.endswith('{'):
            depth += 1
    if depth:
        raise HeaderError('braces do not match')
    return ''.join(line + '\n' for line in lines)


def parse(include):
    """Returns (C declarations, {constant: value}, names of functions)."""
    declarations, constants = [], {}
    for name in included_headers(include):
        text, macros = preprocess(read_header(include, name), name)
        for macro, value in macros:
            try:
                constants[macro] = evaluate(value, constants)
            except HeaderError:
                continue  # not a number: attributes and statements
        text = take_enums(text, constants)
        for marker in sorted(MARKERS, key=len, reverse=True):
            text = re.sub(rf'\b{marker}\b', '', text)
        declarations.append(tidy(text))
    declarations = ''.join(declarations)
    left = re.search(r'SKERRY_\w+|#', declarations)
    if left:
        raise HeaderError(f'left over in the declarations: {left.group(0)}')
    functions = re.findall(r'^(?!typedef)[\w *]*?\b(skerry_\w+)\([^;]*;$', declarations, flags=re.M)
    if not functions or not constants:
        raise HeaderError('no functions or no constants found')
    return declarations, constants, functions


def render(include):
    """The text of _abi.py."""
    declarations, constants, functions = parse(include)
    lines = ['# SPDX-License-Identifier: MIT',
             '# Generated from include/skerry/ by bindings/python/generate.py; edit the headers instead.',
             '"""Declarations and constants of the C interface."""',
             '',
             "CDEF = '''"]
    text = '\n'.join(lines) + '\n' + declarations + "'''\n\nFUNCTIONS = (\n"
    text += ''.join(f"    '{name}',\n" for name in functions) + ')\n\n'
    text += ''.join(f'{name} = {value}\n' for name, value in constants.items())
    return text


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
    parser.add_argument('--include', default=DEFAULT_INCLUDE, help='directory that holds skerry/skerry.h')
    parser.add_argument('--output', default=DEFAULT_OUTPUT, help='file to write or to compare')
    parser.add_argument('--check', action='store_true', help='compare, write nothing')
    options = parser.parse_args(arguments)
    text = render(options.include)
    if not options.check:
        with open(options.output, 'w', encoding='utf-8', newline='\n') as file:
            file.write(text)
        return 0
    try:
        with open(options.output, encoding='utf-8') as file:
            present = file.read()
    except FileNotFoundError:
        present = ''
    if present != text:
        print('_abi.py does not match the headers; run bindings/python/generate.py', file=sys.stderr)
        return 1
    return 0


if __name__ == '__main__':
    sys.exit(main())
