#!/usr/bin/env python3
"""Runs the test programs of one or more Meson build directories and counts their cases.

    tests/runner.py [--jobs N] [--suite NAME] [--quick] LANE=BUILD_DIRECTORY...

The lane 'main' runs every test; another lane runs the tests whose suites name it. Each test says in SKERRY_TEST_FORMAT
how it reports its cases: doctest or tap; one that says nothing is a single case that passes with exit status 0.
The last line is 'N passed, M failed'. A case that asserts nothing counts as failed, as does every case that a crashed
program left out.
"""
import argparse
import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree

LANE_SLOWDOWN = {"asan": 3, "tsan": 10}
TAIL_LINES = 60
FULL_FAILURES = 10  # of one program; the others by name


class Case:
    def __init__(self, name, state, detail=""):
        self.name, self.state, self.detail = name, state, detail


class Result:
    def __init__(self, lane, test, cases, output, seconds, status):
        self.lane, self.test, self.cases = lane, test, cases
        self.output, self.seconds, self.status = output, seconds, status

    def count(self, state):
        return sum(case.state == state for case in self.cases)


def suites_of(test):
    return [suite.split(":")[-1] for suite in test["suite"]]


def select(lanes, wanted_suite):
    chosen = []
    for lane, directory in lanes:
        text = subprocess.run(["meson", "introspect", "--tests", directory], check=True, stdout=subprocess.PIPE).stdout
        for test in json.loads(text):
            suites = suites_of(test)
            if lane != "main" and lane not in suites:
                continue
            if wanted_suite and wanted_suite != lane and wanted_suite not in suites:
                continue
            test["workdir"] = test["workdir"] or directory
            chosen.append((lane, test))
    return chosen


def execute(command, environment, directory, limit):
    """Returns (exit status or None after the time limit, output)."""
    with tempfile.TemporaryFile() as sink:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                                   env=environment, cwd=directory, start_new_session=True)
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            status = None
        sink.seek(0)
        return status, sink.read().decode("utf-8", "replace")


def describe(status, limit):
    if status is None:
        return f"still running after {limit} s"
    if status < 0:
        return f"ended by signal {-status}"
    return f"exit status {status}"


def doctest_cases(path):
    """Cases of a report that may end early: every one that was closed, and the name of the one that was not."""
    cases, open_name = [], None
    parser = ElementTree.XMLPullParser(["start", "end"])
    try:
        with open(path, encoding="utf-8", errors="replace") as report:
            parser.feed(report.read())
    except (ElementTree.ParseError, OSError):
        pass
    try:
        for event, node in parser.read_events():
            if node.tag != "TestCase":
                continue
            if event == "start":
                open_name = node.get("name")
                continue
            open_name = None
            name = node.get("name")
            if node.get("skipped") == "true":
                cases.append(Case(name, "skipped"))
                continue
            total = node.find("OverallResultsAsserts")
            passed, failed = int(total.get("successes")), int(total.get("failures"))
            broken = node.find(".//Exception")
            if failed or broken is not None or total.get("test_case_success") == "false":
                cases.append(Case(name, "failed", doctest_detail(node)))
            elif passed == 0:
                cases.append(Case(name, "failed", "  asserts nothing"))
            else:
                cases.append(Case(name, "passed"))
    except ElementTree.ParseError:
        pass
    return cases, open_name


def doctest_detail(node):
    lines = []
    for child in node.iter():
        if child.tag == "Expression" and child.get("success") != "true":
            expanded = (child.findtext("Expanded") or "").strip()
            lines.append(f"  {child.get('filename')}:{child.get('line')}: {child.get('type')}"
                         f"({(child.findtext('Original') or '').strip()}) is {expanded}")
        if child.tag in ("Exception", "Message", "Info"):
            text = " ".join("".join(child.itertext()).split())
            lines.append(f"  {child.tag.lower()}: {text}")
    return "\n".join(lines)


def run_doctest(command, environment, directory, limit):
    handle, report = tempfile.mkstemp(suffix=".xml")
    os.close(handle)
    try:
        status, output = execute(command + ["--reporters=xml", "--out=" + report],
                                 environment, directory, limit)
        cases, open_name = doctest_cases(report)
    finally:
        os.unlink(report)
    failed = any(case.state == "failed" for case in cases)
    if status == 0 and not failed and open_name is None:
        return status, output, cases
    if open_name is not None or status not in (0, 1) or not failed:
        cases.append(Case(open_name or "the program", "failed", "  " + describe(status, limit)))
        listed, names = execute(command + ["--list-test-cases", "--no-colors"], environment, directory, 60)
        if listed == 0:
            seen = {case.name for case in cases}
            names = [line for line in names.splitlines() if line and not line.startswith(("[doctest]", "====="))]
            cases += [Case(name, "failed", "  not run") for name in names if name not in seen]
    return status, output, cases


TAP_LINE = re.compile(r"^(not )?ok\b\s*(\d+)?\s*-?\s*(.*?)\s*(?:#\s*skip\b\s*(.*))?$", re.IGNORECASE)


def run_tap(command, environment, directory, limit):
    status, output = execute(command, environment, directory, limit)
    cases, planned, detail = [], None, []
    for line in output.splitlines():
        plan = re.match(r"^1\.\.(\d+)$", line)
        match = TAP_LINE.match(line)
        if plan:
            planned = int(plan.group(1))
        elif match:
            if match.group(4) is not None:
                cases.append(Case(match.group(3), "skipped", match.group(4)))
            else:
                cases.append(Case(match.group(3), "failed" if match.group(1) else "passed"))
        elif line.startswith("#") and cases and cases[-1].state == "failed":
            cases[-1].detail += ("\n" if cases[-1].detail else "") + "  " + line[1:].strip()
    if planned is None or planned != len(cases):
        cases.append(Case("the program", "failed", f"  planned {planned} cases, reported {len(cases)}; "
                          + describe(status, limit)))
    elif status != 0 and not any(case.state == "failed" for case in cases):
        cases.append(Case("the program", "failed", "  " + describe(status, limit)))
    return status, output, cases


def run_plain(command, environment, directory, limit):
    status, output = execute(command, environment, directory, limit)
    state = "passed" if status == 0 else "failed"
    return status, output, [Case("exit status", state, "  " + describe(status, limit))]


FORMATS = {"doctest": run_doctest, "tap": run_tap, None: run_plain}


def run_test(lane, test, quick):
    environment = dict(os.environ)
    environment.update(test["env"])
    if quick:
        environment["SKERRY_QUICK"] = "1"
    limit = int(test["timeout"]) * LANE_SLOWDOWN.get(lane, 1)
    start = time.monotonic()
    try:
        runner = FORMATS[environment.get("SKERRY_TEST_FORMAT")]
        status, output, cases = runner(test["cmd"], environment, test["workdir"], limit)
    except Exception as problem:  # a program that cannot be started must not end the others
        status, output, cases = None, "", [Case("the program", "failed", f"  {problem!r}")]
    return Result(lane, test, cases, output, time.monotonic() - start, status)


def report(result, place):
    name = f"{result.lane} {suites_of(result.test)[0]}/{result.test['name']}"
    failed, skipped = result.count("failed"), result.count("skipped")
    tail = (f", {failed} FAILED" if failed else "") + (f", {skipped} skipped" if skipped else "")
    print(f"[{place}] {name}: {result.count('passed')} passed{tail} ({result.seconds:.1f} s)", flush=True)
    told = 0
    for case in result.cases:
        if case.state == "skipped":
            print(f"    skipped: {case.name}: {case.detail.strip() or 'no reason given'}")
        if case.state == "failed":
            print(f"    FAILED: {case.name}")
            told += 1
            if case.detail and told <= FULL_FAILURES:
                print("    " + case.detail.replace("\n", "\n    "))
    lines = [line for line in result.output.rstrip().splitlines() if not re.match(r"ok \d|not ok \d|# |1\.\.", line)]
    if failed and lines:
        print(f"    output of {' '.join(result.test['cmd'])}:")
        if len(lines) > TAIL_LINES:
            print(f"    ... {len(lines) - TAIL_LINES} lines before")
        print("    " + "\n    ".join(lines[-TAIL_LINES:]), flush=True)


def main():
    parser = argparse.ArgumentParser(description="Run the project's test programs.")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--suite")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("lanes", nargs="+", metavar="LANE=DIRECTORY")
    options = parser.parse_args()
    lanes = [lane.split("=", 1) for lane in options.lanes]

    tests = select(lanes, options.suite)
    if not tests:
        print("no test matches", file=sys.stderr)
        print("0 passed, 1 failed")
        return 1
    start = time.monotonic()
    results = []

    def finish(result):
        results.append(result)
        report(result, f"{len(results):3d}/{len(tests)}")

    # The long ones first, so that the last to end is a short one; alone at the end what measures time.
    shared = sorted((t for t in tests if t[1]["is_parallel"]), key=lambda t: -t[1]["timeout"])
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        futures = [pool.submit(run_test, lane, test, options.quick) for lane, test in shared]
        for future in concurrent.futures.as_completed(futures):
            finish(future.result())
    for lane, test in tests:
        if not test["is_parallel"]:
            finish(run_test(lane, test, options.quick))

    groups = {}
    for result in results:
        row = groups.setdefault((result.lane, suites_of(result.test)[0]), [0, 0, 0, 0.0])
        row[0] += result.count("passed")
        row[1] += result.count("failed")
        row[2] += result.count("skipped")
        row[3] += result.seconds
    print()
    for (lane, suite), (passed, failed, skipped, seconds) in sorted(groups.items()):
        print(f"{lane:5s} {suite:12s} {passed:6d} passed {failed:4d} failed {skipped:4d} skipped {seconds:8.1f} s")
    passed = sum(row[0] for row in groups.values())
    failed = sum(row[1] for row in groups.values())
    print(f"ran {len(results)} programs in {time.monotonic() - start:.0f} s")
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
