#!/usr/bin/env python3
"""The library exports what src/skerry.map lists, and that is what the public headers declare.

    symbols.py LIBRARY MAP HEADER_DIRECTORY
"""
import pathlib
import re
import subprocess
import sys

from tap import Tap

library, map_path, header_directory = sys.argv[1:]
tap = Tap()

text = re.sub(r"/\*.*?\*/", "", pathlib.Path(map_path).read_text(encoding="utf-8"), flags=re.DOTALL)
listed, nodes, hidden = set(), [], 0
for name, body in re.findall(r"([\w.]+)\s*\{(.*?)\}", text, flags=re.DOTALL):
    nodes.append(name)
    hidden += "local:" in body and "*;" in body.split("local:")[1]
    listed |= set(re.findall(r"(\w+);", body.split("local:")[0]))
tap.check(hidden == 1, "the map hides everything else in one node", nodes)
tap.check("*" not in text.split("local:")[0], "the map lists names, no patterns")

output = subprocess.run(["nm", "-D", "--defined-only", library], check=True, stdout=subprocess.PIPE, text=True).stdout
rows = [line.split() for line in output.splitlines()]
exported = {row[2].split("@")[0] for row in rows if row[1] != "A"}
versions = {row[2] for row in rows if row[1] == "A"}
tap.check(exported, "the library exports something")
tap.check(exported == listed, "exported symbols are those of the map",
          [f"only in the library: {n}" for n in sorted(exported - listed)]
          + [f"only in the map: {n}" for n in sorted(listed - exported)])
tap.check(versions == set(nodes), "version nodes are those of the map", sorted(versions ^ set(nodes)))

declared = set()
for header in sorted(pathlib.Path(header_directory).glob("*.h")):
    source = re.sub(r"/\*.*?\*/", "", header.read_text(encoding="utf-8"), flags=re.DOTALL)
    source = re.sub(r"(\\\n|[^\n])*", lambda m: "" if m.group(0).lstrip().startswith("#") else m.group(0), source)
    declared |= set(re.findall(r"\bSKERRY_API(?:_\w+)?\b[^;{]*?\b(skerryx?_\w+)\s*\(", source))
tap.check(declared == listed, "declared functions are those of the map",
          [f"only declared: {n}" for n in sorted(declared - listed)]
          + [f"only in the map: {n}" for n in sorted(listed - declared)])
tap.end()
