#!/usr/bin/env python3
"""Runs the measuring programs and prints their rows as a table; --json writes them to a file.

    report.py --bench PROGRAM --rss PROGRAM --kernels PROGRAM [--quick | --smoke] [--only PREFIX] [--quality] [--json FILE]

Called by tests/bench/run, which builds the programs.
"""
import argparse
import json
import math
import os
import pathlib
import platform
import re
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
FEW_SAMPLES = 5  # as in bench.cpp
POLICIES = ("evict", "evict-last", "evict-cumulative", "qevict", "qevict-paper")


def row(name, value, unit, ratio=None, of=None, gate=None, bound=None):
    ok = None
    if gate is not None:
        gated = value if of is None else ratio
        ok = gated >= bound if gate == ">=" else gated <= bound
    return {"name": name, "value": value, "unit": unit, "ratio": ratio, "of": of,
            "samples": None, "gate": None if gate is None else f"{gate} {bound:g}", "ok": ok}


def machine():
    name, memory = platform.machine(), None
    try:
        for line in open("/proc/cpuinfo", encoding="utf-8", errors="replace"):
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        pass
    return {"cpu": name, "processors": os.cpu_count(), "memory_bytes": memory, "load": round(os.getloadavg()[0], 2),
            "system": platform.system() + " " + platform.release()}


def program_rows(command):
    """Rows of a program that prints JSON lines, each handed out as it comes."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode != 0:
        raise SystemExit(f"{' '.join(map(str, command))}: exit status {process.returncode}")


def rss_rows(program, policies):
    """Growth over allocated bytes, the largest of several policies; a process each, since freed memory hides growth."""
    worst = grown = 0
    for policy in policies:
        done = subprocess.run([program, policy], stdout=subprocess.PIPE, text=True)
        match = re.search(r"grew by (\d+) KB, allocated (\d+) KB, .* ratio ([\d.]+)", done.stdout)
        if not match:
            return [row("rss.vs_reported", None, "MB")]
        if float(match[3]) >= worst:
            worst, grown = float(match[3]), int(match[1]) / 1e3
    return [row("rss.vs_reported", grown, "MB", worst, "allocated_bytes", "<=", 1.05)]


def quality_rows(texts):
    with tempfile.TemporaryDirectory() as folder:
        out = pathlib.Path(folder) / "quality.json"
        command = [ROOT / "examples" / "run", "quality", "--shares", "20", "--policies", ",".join(POLICIES), "--json", out]
        if texts:
            command += ["--texts", str(texts)]
        if subprocess.run(command, stdout=sys.stderr).returncode != 0:
            raise SystemExit("examples/run quality failed")
        kl = {mean["policy"]: mean["kl"] for mean in json.loads(out.read_text())["means"]}
    qevict = kl["qevict"]
    best = min(value for name, value in kl.items() if name.startswith("evict"))
    return [row("quality.qevict.kl", qevict, "nats"),
            row("quality.qevict.vs_paper", qevict, "nats", qevict / kl["qevict-paper"], "KL of qevict-paper", "<=", 0.25),
            row("quality.qevict.vs_evict", qevict, "nats", qevict / best, "KL of the best evict", "<=", 0.4)]


def shown(number):
    if number is None or not math.isfinite(number):
        return "-"
    return f"{number:.0f}" if float(number).is_integer() and abs(number) < 1e9 else f"{number:.3g}" if abs(number) < 1000 else f"{number:.0f}"


def print_row(r):
    ratio = "" if r["of"] is None else f"{shown(r['ratio'])} of {r['of']}" if "faster" not in r["of"] else f"{shown(r['ratio'])} {r['of']}"
    verdict = "" if r["gate"] is None else f"{r['gate']:>8}  {'ok' if r['ok'] else 'MISSED'}"
    mark = "~" if r["samples"] is not None and r["samples"] < FEW_SAMPLES else ""
    print(f"{r['name']:26} {mark + shown(r['value']):>9} {r['unit']:14} {ratio:36} {verdict}".rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(prog="tests/bench/run", description="measure the library")
    parser.add_argument("--bench", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--rss", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--kernels", required=True, help=argparse.SUPPRESS)
    parser.add_argument("--smoke", action="store_true", help="a few tokens, to see that everything runs; the figures mean nothing")
    parser.add_argument("--quick", action="store_true", help="fewer rounds: within a minute on two cores")
    parser.add_argument("--only", default="", help="rows of one part: attend, append, demote, budget, error, route, lowrank or rss")
    parser.add_argument("--quality", action="store_true", help="also the quality protocol on SmolLM2-135M")
    parser.add_argument("--texts", type=int, default=0, help="texts of the quality protocol; 0: all")
    parser.add_argument("--json", help="write machine and rows to this file")
    given = parser.parse_args()

    command = [given.bench] + ["--smoke"] * given.smoke + ["--quick"] * (given.quick and not given.smoke)
    results, about = [], {}

    def take(rows):
        for r in rows:
            if "name" not in r:
                about.update(r)
                continue
            results.append(r)
            print_row(r)

    host = machine()
    print(f"{host['cpu']}, {host['processors']} processors, load {host['load']}", flush=True)
    if given.only not in ("route", "lowrank", "rss"):
        take(program_rows(command + (["--only", given.only] if given.only else [])))
    if given.only in ("", "route"):
        size = ["--tokens", "1024", "--rounds", "2", "--megabytes", "1"] if given.smoke else ["--rounds", "9"] if given.quick else []
        take(program_rows([given.kernels, "--route"] + size))
    if given.only in ("", "lowrank"):
        take(program_rows([given.kernels, "--lowrank", "--rounds", "2" if given.smoke else "9" if given.quick else "25"]))
    if given.only in ("", "rss"):
        take(rss_rows(given.rss, ("full",) if given.smoke else ("full", "evict", "qevict")))
    if not given.quality:
        print("quality.*: not run; --quality runs them")
    elif not (ROOT / ".venv" / "examples.stamp").exists():
        print("quality.*: not run; they need the .venv that examples/run makes")
    else:
        take(quality_rows(given.texts))
    if about.get("probe_read_gbps") is not None:
        print(f"read probe {about['probe_read_gbps']:.1f} GB/s with {about['threads']} threads; {about['device']}; "
              f"{100 * about['undisturbed_samples']:.0f} % of the samples undisturbed")
    if any(r["samples"] is not None and r["samples"] < FEW_SAMPLES for r in results):
        print("~ the machine is busy: what the threads ran over their number, not time on the clock")
    if given.json:
        document = {"machine": {**host, **{k: about[k] for k in about if k != "probe_read_gbps"}},
                    "probe_read_gbps": about.get("probe_read_gbps"), "results": results}
        pathlib.Path(given.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    missed = [r["name"] for r in results if r["ok"] is False]
    if missed and not given.smoke:
        print(f"{len(missed)} of {sum(r['ok'] is not None for r in results)} gates missed: {', '.join(missed)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
