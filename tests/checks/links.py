#!/usr/bin/env python3
"""Every relative link of the documentation leads to a file, and to a heading where it names one.

    links.py SOURCE_ROOT
"""
import pathlib
import re
import sys

from tap import Tap

root = pathlib.Path(sys.argv[1])
tap = Tap()


def prose(text):
    """Without code blocks, whose brackets are not links."""
    return re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    found = set()
    for heading in re.findall(r"^#+\s+(.*?)\s*$", prose(path.read_text(encoding="utf-8")), flags=re.MULTILINE):
        words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        found.add(re.sub(r"[^\w\- ]", "", words).replace(" ", "-"))
    return found


pages = sorted(p for p in [*root.glob("*.md"), *(p for d in ("docs", "examples", "bindings", "backends", "tests", "src",
                                                               "include")
                                                 for p in (root / d).rglob("*.md"))]
               if not {"node_modules", "out", ".venv", "target"} & set(p.relative_to(root).parts))
tap.check(pages, "pages were found")
for page in pages:
    text = prose(page.read_text(encoding="utf-8"))
    targets = re.findall(r"\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)", text)
    targets += re.findall(r"<img[^>]*\bsrc=\"([^\"]+)\"", text)
    bad = []
    for target in targets:
        if re.match(r"[a-z][a-z0-9+.-]*:", target):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path)
        if not file.exists():
            bad.append(f"{target}: no such file")
        elif anchor and file.suffix == ".md" and anchor not in anchors(file):
            bad.append(f"{target}: no such heading")
    tap.check(not bad, f"{page.relative_to(root).as_posix()}: links lead somewhere", bad)
tap.end()
