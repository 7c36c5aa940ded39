#!/usr/bin/env python3
"""Objects compiled for one instruction set leave no code that the linker could pick for the whole library.

A weak copy of an inline function in such an object may become the only copy, and then runs on machines without the
instructions.

    isa_leak.py ARCHIVE...
"""
import re
import subprocess
import sys

from tap import Tap

tap = Tap()
for archive in sys.argv[1:]:
    name = archive.rsplit("/", 1)[-1]
    output = subprocess.run(["nm", "-C", "--defined-only", archive], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = [row.split(None, 2) for row in output.splitlines()]
    rows = [row for row in rows if len(row) == 3]
    tap.check(rows, f"{name}: has symbols")
    weak = [row[2] for row in rows if row[1] in "WVuwvi"]
    tap.check(not weak, f"{name}: no weak symbols", weak)
    stray = [row[2] for row in rows if row[1] in "TDBR" and not re.match(r"(skerry_|skerry::)", row[2])]
    tap.check(not stray, f"{name}: every global symbol is a kernel's or its table's", stray)
if len(sys.argv) == 1:
    tap.skip("objects of one instruction set", "this build has none")
tap.end()
