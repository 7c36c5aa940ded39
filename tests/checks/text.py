#!/usr/bin/env python3
"""What no committed file may hold, and what the top level may hold.

    text.py SOURCE_ROOT
"""
import os
import pathlib
import re
import subprocess
import sys

from tap import Tap

root = pathlib.Path(sys.argv[1])
tap = Tap()

TOP_LEVEL = {"meson.build", "meson_options.txt", "include", "src", "backends", "bindings", "tests", "examples", "docs",
             "LICENSE", "README.md"}
SOURCE = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".comp", ".rs"}
TEXT = SOURCE | {".py", ".md", ".build", ".txt", ".toml", ".map", ".sh", ".yml", ".json", ".tsv", ""}
MAX_BYTES = 2_000_000
# Spelt in two halves, so that this file passes its own check.
MARKS = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")
MACHINE = re.compile(r"(?<![\w.])/(?:wo" r"rk|ro" r"ot|ho" r"me|Us" r"ers|farm)/\w")


def committed():
    """Files git knows; in an export without git, every file that is not a build's."""
    try:
        output = subprocess.run(["git", "-C", root, "ls-files", "-z"], check=True, stdout=subprocess.PIPE,
                                stderr=subprocess.DEVNULL).stdout.decode()
        names = [name for name in output.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        names = []
    if not names:
        for folder, below, files in os.walk(root):
            below[:] = [d for d in below if d not in ("build", ".venv", ".git", "__pycache__", "out")]
            names += [os.path.relpath(os.path.join(folder, f), root) for f in files]
    return [name for name in names if (root / name).is_file()]


names = committed()
tap.check(len(names) > 20, "files were found")
top = sorted({name.split("/")[0] for name in names})
extra = [name for name in top if name not in TOP_LEVEL and not name.startswith(".")]
tap.check(not extra, "the top level holds what it should", extra)
big = [f"{name}: {(root / name).stat().st_size} bytes" for name in names if (root / name).stat().st_size > MAX_BYTES]
tap.check(not big, "no file above 2 MB", big)

marks, machine, trailing, long_lines, endings, tabs = [], [], [], [], [], []
for name in names:
    suffix = pathlib.PurePosixPath(name).suffix
    if suffix not in TEXT or name.startswith("examples/data/"):
        continue
    raw = (root / name).read_bytes()
    if b"\0" in raw:
        continue
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError:
        endings.append(f"{name}: not UTF-8")
        continue
    if text and (not text.endswith("\n") or text.endswith("\n\n") or "\r" in text):
        endings.append(name)
    limit = 140 if suffix in SOURCE else None
    for number, line in enumerate(text.split("\n"), 1):
        place = f"{name}:{number}"
        if MARKS.search(line):
            marks.append(place)
        if MACHINE.search(line):
            machine.append(place)
        if line != line.rstrip():
            trailing.append(place)
        if limit and len(line) > limit:
            long_lines.append(f"{place}: {len(line)} columns")
        if suffix in SOURCE and "\t" in line:
            tabs.append(place)
tap.check(not marks, "no mark of unfinished work", marks)
tap.check(not machine, "no path of somebody's machine", machine)
tap.check(not trailing, "no trailing white space", trailing)
tap.check(not long_lines, "sources keep within 140 columns", long_lines)
tap.check(not tabs, "sources are indented with spaces", tabs)
tap.check(not endings, "text files are UTF-8 and end in one newline", endings)

scripts = [name for name in names if not pathlib.PurePosixPath(name).suffix and name.split("/")[-1] == "run"]
tap.check("tests/run" in scripts and all(os.access(root / name, os.X_OK) for name in scripts),
          "every script named run is executable", scripts)
tap.end()
