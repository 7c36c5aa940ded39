#!/usr/bin/env python3
"""docs/guarantees.md names files and cases that exist, and gives every row one place.

    guarantees.py SOURCE_ROOT
"""
import pathlib
import re
import sys

root = pathlib.Path(sys.argv[1])
sys.path.insert(0, str(root / "tests" / "checks"))
from tap import Tap  # noqa: E402

tap = Tap()
page = (root / "docs" / "guarantees.md").read_text(encoding="utf-8")
places = {}
missing_files, missing_cases, bare = [], [], []
for line in page.splitlines():
    cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
    rows = re.findall(r"\b([GP]\d+)\b", cells[0]) if cells else []
    for row in rows:
        places[row] = places.get(row, 0) + 1
    if not rows or len(cells) < 3:
        continue
    held = cells[2]
    if not re.search(r"`tests/", held):
        bare.append(rows[0])
    for path, case in re.findall(r'`(tests/[^`]+)`(?: "([^"]+)")?', held):
        if not (root / path).is_file():
            missing_files.append(f"{rows[0]}: {path}")
        elif case and f'"{case}' not in (root / path).read_text(encoding="utf-8"):
            missing_cases.append(f"{rows[0]}: {path} has no case that begins \"{case}\"")
wanted = {f"G{i}" for i in range(1, 25)} | {f"P{i:03d}" for i in range(1, 164)}
tap.check(set(places) == wanted, "every row is there and no other", sorted(set(places) ^ wanted))
tap.check(all(count == 1 for count in places.values()), "no row has two places",
          sorted(row for row, count in places.items() if count != 1))
tap.check(not bare, "a row that is held names a test", bare)
tap.check(not missing_files, "files that are named exist", missing_files)
tap.check(not missing_cases, "cases that are named exist", missing_cases)
tap.end()
