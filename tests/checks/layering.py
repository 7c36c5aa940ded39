#!/usr/bin/env python3
"""Includes go downward, and operating-system headers stay in base/ and io/.

    layering.py SOURCE_ROOT
"""
import pathlib
import re
import sys

from tap import Tap

root = pathlib.Path(sys.argv[1])
tap = Tap()

LEVEL = {"base": 0, "codec": 1, "model": 2, "store": 3, "backend": 3, "stats": 3, "seq": 4, "policy": 5, "io": 5,
         "step": 6, "api": 7}
OS_ALLOWED = {"base", "io"}
OS_HEADER = re.compile(r"(sys|linux|mach|arpa|netinet)/|(unistd|pthread|fcntl|sched|signal|dlfcn|windows|poll|dirent|"
                       r"termios|malloc|io|process|semaphore|mman|immintrin|x86intrin|arm_neon|cpuid)\.h$")
# Streams, file paths and what can throw std::system_error bring static constructors; see base/sync and base/workers.
STD_FORBIDDEN = {"iostream", "fstream", "sstream", "ostream", "istream", "filesystem", "thread", "regex", "locale",
                 "iomanip", "typeinfo", "typeindex", "any", "future",
                 "mutex", "shared_mutex", "condition_variable", "system_error"}
INCLUDE = re.compile(r'^\s*#\s*include\s*(<([^>]+)>|"([^"]+)")', re.MULTILINE)


def includes(path):
    for match in INCLUDE.finditer(path.read_text(encoding="utf-8")):
        yield match.group(2), match.group(3)


def sources(directory):
    return sorted(p for p in directory.rglob("*") if p.suffix in (".cpp", ".hpp", ".h", ".c", ".cu", ".cuh"))


unknown = [d.name for d in (root / "src").iterdir() if d.is_dir() and d.name not in LEVEL]
tap.check(not unknown, "every directory of src/ has its place in the order", unknown)

seen = 0
for layer in sorted(LEVEL, key=LEVEL.get):
    bad = []
    for path in sources(root / "src" / layer):
        seen += 1
        for system, own in includes(path):
            place = path.relative_to(root)
            if own is not None:
                target = own.split("/")[0]
                if own == "limits.hpp":
                    continue
                if not (root / "src" / own).is_file():
                    bad.append(f"{place}: \"{own}\" is not a path below src/")
                elif target != layer and LEVEL[target] >= LEVEL[layer]:
                    bad.append(f"{place}: {layer} may not include {target} ({own})")
            elif system.startswith("skerry/"):
                continue
            elif OS_HEADER.search(system) and layer not in OS_ALLOWED:
                bad.append(f"{place}: <{system}> belongs in base/ or io/")
            elif system in STD_FORBIDDEN:
                bad.append(f"{place}: <{system}> is not for the library")
    tap.check(not bad, f"src/{layer}: includes only itself and lower layers", bad)
tap.check(seen > 0, "sources were found")

bad = []
for path in sources(root / "backends"):
    backend = path.relative_to(root / "backends").parts[0]
    for system, own in includes(path):
        place = path.relative_to(root)
        if own is not None:
            near = (path.parent / own).is_file() or (root / "backends" / backend / own).is_file() \
                or (own.split("/")[0] == backend and (root / "backends" / own).is_file())
            if not near and own.split("/")[0] not in ("base", "codec"):
                bad.append(f"{place}: \"{own}\"; a backend sees include/, base/ and codec/")
        elif system in STD_FORBIDDEN:
            bad.append(f"{place}: <{system}> is not for the library")
tap.check(not bad, "backends see include/, src/base, src/codec and themselves", bad)

bad = []
for directory in ("examples", "bindings"):
    for path in sources(root / directory):
        bad += [f"{path.relative_to(root)}: \"{own}\"" for _, own in includes(path)
                if own and (root / "src" / own).is_file() and not (path.parent / own).is_file()]
tap.check(not bad, "examples and bindings include public headers only", bad)
tap.end()
