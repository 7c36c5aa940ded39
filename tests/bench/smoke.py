#!/usr/bin/env python3
"""The benchmark runs, and its rows have the names of rows.txt. Looks at no time.

    smoke.py BENCH_PROGRAM RSS_PROGRAM KERNELS_PROGRAM
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile

here = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(here.parent / "checks"))
from tap import Tap  # noqa: E402

tap = Tap()
listed = re.findall(r"^([a-z0-9]+(?:\.[a-z0-9_]+)+)(?:\s|$)", (here / "rows.txt").read_text(encoding="utf-8"), re.MULTILINE)
expected = [name for name in listed if not name.startswith("quality.")]

with tempfile.TemporaryDirectory() as folder:
    out = pathlib.Path(folder) / "rows.json"
    programs = ["--bench", sys.argv[1], "--rss", sys.argv[2], "--kernels", sys.argv[3]]
    done = subprocess.run([sys.executable, here / "report.py", *programs, "--smoke", "--json", out],
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    tap.check(done.returncode == 0, "the benchmark runs", done.stdout.splitlines())
    document = json.loads(out.read_text(encoding="utf-8")) if out.exists() else {"results": []}

rows = {r["name"]: r for r in document["results"]}
names = [r["name"] for r in document["results"]]
tap.check(len(expected) > 20 and names == expected, "rows are those of rows.txt, in its order",
          [f"printed: {' '.join(names)}", f"listed:  {' '.join(expected)}"])
fields = {"name", "value", "unit", "ratio", "of", "samples", "gate", "ok"}
wrong = [r["name"] for r in rows.values() if set(r) != fields or (r["gate"] is None) != (r["ok"] is None)
         or (r["of"] is None) != (r["ratio"] is None)]
tap.check(rows and not wrong, "rows have the fields that other programs read", wrong)
tap.check(document.get("machine") and document.get("probe_read_gbps", 0) > 0, "machine and read probe are in the file")
# What does not depend on time holds in a short run too.
for name in ["demote.again.bytes", "budget.over"] + [n for n in expected if n.startswith("error.")]:
    tap.check(rows.get(name, {}).get("ok") is True, name, [str(rows.get(name))])
# The quality rows run where examples/run has made its environment, and its mark has one name in both.
marks = [set(re.findall(r"\w+\.stamp", (here.parent.parent / place).read_text(encoding="utf-8")))
         for place in ("examples/run", "tests/bench/report.py")]
tap.check(marks[0] and marks[0] == marks[1], "the example's environment is known by its mark", [str(marks)])
tap.end()
