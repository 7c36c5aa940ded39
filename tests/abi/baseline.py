#!/usr/bin/env python3
"""The binary interface against tests/abi/baseline.txt: sizes and offsets of every public struct, values of every
enumerator, and the prototype of every exported function, as a C and as a C++ compiler see them.

    baseline.py INCLUDE_DIRECTORY C_COMPILER C++_COMPILER            compares
    baseline.py INCLUDE_DIRECTORY C_COMPILER C++_COMPILER --update   writes the table anew

A changed or missing line breaks programs that are already compiled. A new line is an addition and goes into the table
with the change that makes it.
"""
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent / "checks"))
from tap import Tap  # noqa: E402

include = pathlib.Path(sys.argv[1])
c_compiler, cpp_compiler = shlex.split(sys.argv[2]), shlex.split(sys.argv[3])
table = here / "baseline.txt"


def declarations():
    """Structs with their fields, enumerators, and prototypes, in the order of the headers."""
    structs, values, functions = [], [], []
    for header in sorted((include / "skerry").glob("*.h")):
        text = re.sub(r"/\*.*?\*/", " ", header.read_text(encoding="utf-8"), flags=re.DOTALL)
        text = re.sub(r"^[ \t]*#(?:\\\n|[^\n])*", "", text, flags=re.MULTILINE)
        for tag, body in re.findall(r"struct\s+(\w+)\s*\{(.*?)\}\s*\w*\s*;", text, flags=re.DOTALL):
            fields = []
            for declaration in filter(None, (part.strip() for part in body.split(";"))):
                pointer = re.search(r"\(\s*\*\s*(\w+)\s*\)\s*\(", declaration)
                fields += [pointer.group(1)] if pointer else [
                    re.search(r"(\w+)\s*(?:\[[^\]]*\]\s*)*$", part).group(1) for part in declaration.split(",")]
            structs.append((tag, fields))
        for body in re.findall(r"\benum\s*\w*\s*\{(.*?)\}", text, flags=re.DOTALL):
            values += re.findall(r"\b(SKERRY\w+)\b(?=\s*(?:=|,|$))", body)
        for prototype in re.findall(r"\bSKERRY_API(?:_\w+)?\s+([^;{}]*?\([^;{}]*\))\s*;", text):
            functions.append(re.sub(r"\s+", " ", prototype).replace("( ", "(").replace(" )", ")"))
    return structs, values, functions


def program(structs, values):
    lines = ["#include <stdio.h>", "#include <skerry/skerry.h>", "#include <skerry/backend.h>", "int main(void) {"]
    for tag, fields in structs:
        lines.append(f'printf("struct {tag} %u\\n", (unsigned) sizeof(struct {tag}));')
        for field in fields:
            lines.append(f'printf("field {tag}.{field} %u %u\\n", (unsigned) offsetof(struct {tag}, {field}), '
                         f'(unsigned) sizeof(((struct {tag} *) 0)->{field}));')
    for name in values:
        lines.append(f'printf("value {name} %lld\\n", (long long) {name});')
    return "\n".join([*lines, "return 0; }", ""])


def measure(compiler, standard, language, text):
    with tempfile.TemporaryDirectory() as folder:
        output = pathlib.Path(folder) / "layout"
        subprocess.run([*compiler, f"-std={standard}", f"-I{include}", "-x", language, "-", "-o", output], input=text,
                       text=True, check=True)
        return subprocess.run([output], check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()


structs, values, functions = declarations()
text = program(structs, values)
prototypes = [f"function {prototype}" for prototype in sorted(functions)]
as_c = measure(c_compiler, "c99", "c", text)
if "--update" in sys.argv:
    table.write_text("\n".join(as_c + prototypes) + "\n", encoding="utf-8")
    sys.exit(0)

tap = Tap()
tap.check(len(structs) > 10 and len(values) > 20 and len(functions) > 10, "structs, values and functions were found")
as_cpp = measure(cpp_compiler, "c++11", "c++", text)
tap.check(as_c == as_cpp, "C99 and C++11 agree", sorted(set(as_c) ^ set(as_cpp)))
if sys.maxsize <= 2**32:
    tap.skip("the table", "it holds the layouts of 64-bit machines")
else:
    now = as_c + prototypes
    committed = table.read_text(encoding="utf-8").splitlines()
    gone = [line for line in committed if line not in set(now)]
    new = [line for line in now if line not in set(committed)]
    tap.check(not gone, "nothing of the table has changed or gone", gone)
    tap.check(not new, "every addition is in the table", new)
tap.end()
