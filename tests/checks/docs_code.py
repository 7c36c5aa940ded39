#!/usr/bin/env python3
"""What the documentation shows compiles without a warning and does what it says.

    docs_code.py SOURCE_ROOT LIBRARY C_COMPILER

Every numbered program in examples/ builds alone, from a directory that holds nothing else, and exits with 0. Every block
marked `c` in a page compiles; one with a main is run as well, and where a block marked `output` follows it, prints exactly that.
"""
import os
import pathlib
import re
import shlex
import subprocess
import sys
import tempfile

from tap import Tap

root, library = pathlib.Path(sys.argv[1]).absolute(), pathlib.Path(sys.argv[2]).absolute()
compiler = shlex.split(sys.argv[3])
tap = Tap()
# SKERRY_DESC names the first field and leaves the others zero, which -Wextra would take for an oversight.
flags = ["-std=c99", "-Wall", "-Wextra", "-Wpedantic", "-Werror", "-Wno-missing-field-initializers", f"-I{root / 'include'}"]
FENCE = re.compile(r"^```(\w*)[ \t]*\n(.*?)^```[ \t]*$", flags=re.DOTALL | re.MULTILINE)
# Between a program and its output there may be a sentence, not another section.
APART = re.compile(r"^#", flags=re.MULTILINE)


def run(command, **more):
    result = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60, **more)
    return result.returncode, result.stdout


def build(source, program, link):
    libraries = [str(library), f"-Wl,-rpath,{library.parent}"] if link else ["-ldl"]
    status, output = run([*compiler, *flags, source.name, "-o", program.name, *libraries, "-lm"], cwd=source.parent)
    return status == 0, output.splitlines()


def try_program(name, text, folder, link=True, arguments=()):
    """Output of the program, or None when a case has failed."""
    source, program = pathlib.Path(folder) / "program.c", pathlib.Path(folder) / "program"
    source.write_text(text, encoding="utf-8")
    good, details = build(source, program, link)
    tap.check(good, f"{name}: builds alone", details)
    if not good:
        return None
    try:
        status, output = run([str(program), *arguments], cwd=folder)
    except subprocess.TimeoutExpired:
        status, output = "none within 60 s", ""
    tap.check(status == 0, f"{name}: runs", [f"exit status {status}", *output.splitlines()])
    return output if status == 0 else None


examples = sorted((root / "examples").glob("[0-9]*.c"))
tap.check(len(examples) >= 7, "numbered examples were found")
for example in examples:
    text = example.read_text(encoding="utf-8")
    opens = "#include <dlfcn.h>" in text
    with tempfile.TemporaryDirectory() as folder:
        try_program(example.name, text, folder, link=not opens, arguments=[str(library)] if opens else [])

pages = [root / "README.md", *sorted((root / "docs").rglob("*.md")), root / "examples" / "README.md"]
programs = 0
for page in pages:
    if not page.exists():
        continue
    text = page.read_text(encoding="utf-8")
    blocks = list(FENCE.finditer(text))
    for i, block in enumerate(blocks):
        if block.group(1) != "c":
            continue
        name = f"{page.relative_to(root).as_posix()}:{text.count(os.linesep, 0, block.start()) + 1}"
        code = block.group(2)
        with tempfile.TemporaryDirectory() as folder:
            if not re.search(r"^int main\(", code, flags=re.MULTILINE):
                source = pathlib.Path(folder) / "part.c"
                source.write_text(code, encoding="utf-8")
                status, output = run([*compiler, *flags, "-Wno-unused-function", "-c", source.name], cwd=folder)
                tap.check(status == 0, f"{name}: compiles", output.splitlines())
                continue
            programs += 1
            printed = try_program(name, code, folder)
        following = blocks[i + 1] if i + 1 < len(blocks) else None
        if following is None or following.group(1) != "output" or APART.search(text, block.end(), following.start()):
            continue
        if printed is not None:
            expected = following.group(2)
            tap.check(printed == expected, f"{name}: prints what the page says",
                      ["expected:", *expected.splitlines(), "printed:", *printed.splitlines()])
tap.check(programs >= 3, "programs were found in the pages")
tap.end()
