"""A few lines of the Test Anything Protocol, shared by the checks."""
import sys


class Tap:
    def __init__(self):
        self.count = self.failed = 0

    def check(self, good, name, details=()):
        """`details` are printed when the check fails, the first twenty."""
        self.count += 1
        self.failed += not good
        print(f"{'ok' if good else 'not ok'} {self.count} - {name}")
        if not good:
            for line in list(details)[:20]:
                print(f"# {line}")

    def skip(self, name, reason):
        self.count += 1
        print(f"ok {self.count} - {name} # skip {reason}")

    def end(self):
        print(f"1..{self.count}")
        sys.exit(1 if self.failed else 0)
