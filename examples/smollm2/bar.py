"""A progress bar on standard error, silent when that is not a terminal."""

import sys
import time


class Bar:
    def __init__(self, title, total):
        self.title, self.total, self.done = title, max(1, total), 0
        self.live = sys.stderr.isatty()
        self.shown = 0.0

    def step(self, count=1):
        self.done += count
        if self.live and (time.monotonic() - self.shown > 0.1 or self.done >= self.total):
            self.shown = time.monotonic()
            filled = min(30, 30 * self.done // self.total)
            sys.stderr.write("\r%-28s [%s%s] %d/%d" % (self.title, "#" * filled, "." * (30 - filled),
                                                       self.done, self.total))
            sys.stderr.flush()

    def close(self):
        if self.live:
            sys.stderr.write("\r\033[K")
            sys.stderr.flush()
