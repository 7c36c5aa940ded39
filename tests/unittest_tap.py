#!/usr/bin/env python3
"""Runs the unittest files of a directory and prints one TAP line for each test method.

    unittest_tap.py DIRECTORY [PATTERN]
"""
import os
import sys
import traceback
import unittest


class TapResult(unittest.TestResult):
    def __init__(self):
        super().__init__()
        self.count = 0
        self.details = []

    def startTest(self, test):
        super().startTest(test)
        self.details = []
        self.reason = None

    def addError(self, test, error):
        super().addError(test, error)
        self.note(test, error)

    def addFailure(self, test, error):
        super().addFailure(test, error)
        self.note(test, error)

    def addSubTest(self, test, subtest, error):
        super().addSubTest(test, subtest, error)
        if error is not None:
            self.note(subtest, error)

    def addSkip(self, test, reason):
        super().addSkip(test, reason)
        self.reason = reason

    def addUnexpectedSuccess(self, test):
        super().addUnexpectedSuccess(test)
        self.details.append("passed, though marked as an expected failure")

    def note(self, test, error):
        self.details += "".join(traceback.format_exception(*error)).rstrip().splitlines()
        # A failure of setUpClass or of an import belongs to no test method, so nothing else reports it.
        if not isinstance(test, unittest.TestCase):
            self.stopTest(test)

    def stopTest(self, test):
        super().stopTest(test)
        self.count += 1
        skip = f" # skip {self.reason}" if getattr(self, "reason", None) is not None and not self.details else ""
        print(f"{'not ok' if self.details else 'ok'} {self.count} - {test.id()}{skip}")
        for line in self.details[-30:]:
            print(f"# {line}")
        self.details = []
        sys.stdout.flush()


def main():
    directory = sys.argv[1]
    pattern = sys.argv[2] if len(sys.argv) > 2 else "test_*.py"
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    sys.dont_write_bytecode = True
    result = TapResult()
    unittest.defaultTestLoader.discover(directory, pattern, top_level_dir=directory).run(result)
    print(f"1..{result.count}")
    bad = result.failures or result.errors or result.unexpectedSuccesses or result.count == 0
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
