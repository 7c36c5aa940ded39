# SPDX-License-Identifier: MIT
"""A progress bar on standard error; one line per tenth where that is no terminal."""

import sys
import time


class Bar:
    def __init__(self, title, total):
        self.title, self.total, self.done = title, max(1, total), 0
        self.live = sys.stderr.isatty()
        self.began = self.shown = time.monotonic()
        self.tenth = 0

    def step(self, note="", count=1):
        self.done += count
        now = time.monotonic()
        left = (now - self.began) / self.done * (self.total - self.done)
        if self.live and (now - self.shown > 0.1 or self.done >= self.total):
            self.shown = now
            filled = min(30, 30 * self.done // self.total)
            sys.stderr.write("\r%-10s [%s%s] %d/%d  %d s left  %s\033[K" % (
                self.title, "#" * filled, "." * (30 - filled), self.done, self.total, left, note))
        elif not self.live and 10 * self.done // self.total > self.tenth:
            self.tenth = 10 * self.done // self.total
            sys.stderr.write("%s %d/%d  %d s left  %s\n" % (self.title, self.done, self.total, left, note))
        sys.stderr.flush()

    def close(self):
        if self.live:
            sys.stderr.write("\n")
            sys.stderr.flush()
