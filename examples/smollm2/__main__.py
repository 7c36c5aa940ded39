"""The main job: read a document once, answer questions under policies of different sizes.

    python -m smollm2            from the folder examples/, or examples/run from anywhere

Reads examples/data/handbook.txt under the full cache, then under every policy at 20 %
and 10 % of its bytes, and reports per policy: questions answered, true bytes, distance
to the full cache, speed, and for the policy with a host tier what lies there and what is
copied back. Skerry is run twice over, once with its own attention and once with attention
written in numpy over what `gather` hands out; both must agree.
"""

import argparse
import json
import pathlib
import sys
import time

import numpy as np

from . import picture
from .bar import Bar
from .model import Model
from .plain import PlainCache
from .policies import FIRST_SHARE, MAIN, POLICIES, budget_bytes, wants_surprisal
from .quality import CONTINUATION_TOKENS, divergence, teacher_force
from .tokens import Tokens
from .trace import Trace

DATA = pathlib.Path(__file__).resolve().parent.parent / "data"
OUT = pathlib.Path(__file__).resolve().parent.parent / "out"
ANSWER_TOKENS = 24
# Room for a question and its answer, beyond the document.
TURN_TOKENS = 64
# Of the document, what is read before compression and what after it where both ways of attention are compared. A host that attends
# itself zooms one token at a time.
BOTH_WAYS = 1024, 1088
BOTH_WAYS_QUESTIONS = 2
AGREEMENT = 2e-3


def read_questions(path):
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        question, expected = line.split("\t")
        rows.append((question, expected))
    return rows


class Answers:
    """Answers to all questions under one cache, and the speed at which they came."""

    def __init__(self, model, tokens, questions, start, fork):
        self.texts, self.right = [], []
        generated, seconds = 0, 0.0
        for question, expected in questions:
            cache, done = fork()
            ids = tokens.encode(tokens.chat_ask(question))
            logits = model.prefill(ids, cache, start)
            began = time.perf_counter()
            answer = model.generate(logits, cache, start + len(ids), ANSWER_TOKENS, tokens.end)
            seconds += time.perf_counter() - began
            generated += len(answer)
            done()
            text = tokens.decode(answer)
            self.texts.append(text)
            self.right.append(expected.lower() in text.lower())
        self.decode_rate = generated / seconds if seconds else 0.0


def plain_answers(model, tokens, questions, cache):
    start = cache.length

    def fork():
        return cache, lambda: cache.truncate(start)

    return Answers(model, tokens, questions, start, fork)


def session_answers(model, tokens, questions, session):
    def fork():
        child = session.fork()
        return child, child.close

    return Answers(model, tokens, questions, session.length, fork)


class SideBySide:
    """Two caches that are handed the same queries, keys and values; the model goes on with what the first returns.

    Fed separately, the two would drift apart by more than attention: a key that differs in its last
    bit can move a code of a low-bit record.
    """

    wants_surprisal = False

    def __init__(self, first, second):
        self.both = (first, second)
        self.seconds = [0.0, 0.0]
        self.difference = 0.0

    def room(self):
        rooms = [r for r in (cache.room() for cache in self.both) if r is not None]
        return min(rooms) if rooms else None

    def begin(self, n, more=False):
        for cache in self.both:
            cache.begin(n, more)

    def attend(self, layer, q, k, v, positions):
        found = []
        for i, cache in enumerate(self.both):
            began = time.perf_counter()
            found.append(cache.attend(layer, q, k, v, positions))
            self.seconds[i] += time.perf_counter() - began
        apart = float(np.abs(found[0] - found[1]).max() / np.abs(found[0]).max())
        # NaN has to fail, and would not survive max().
        self.difference = apart if not apart <= self.difference else self.difference
        return found[0]

    def commit(self):
        for cache in self.both:
            cache.commit()

    def abort(self):
        for cache in self.both:
            cache.abort()


class Job:
    def __init__(self, open_session, questions_limit=None, text="handbook"):
        self.open_session = open_session
        self.model, self.tokens = Model(), Tokens()
        self.config = self.model.config
        document = (DATA / (text + ".txt")).read_text(encoding="utf-8").rstrip()
        ids = self.tokens.encode(self.tokens.chat_start(document))
        self.prompt, self.continuation = ids[:-CONTINUATION_TOKENS], ids[-CONTINUATION_TOKENS:]
        self.length = len(ids) + TURN_TOKENS
        self.questions = read_questions(DATA / (text + ".questions.tsv"))[:questions_limit]
        self.full_bytes = self.config.cache_bytes(self.length)
        self.watched = {}

    def read_plain(self):
        """The full cache: what everything else is compared with."""
        bar = Bar("full cache", len(self.prompt))
        began = time.perf_counter()
        self.trace = Trace(self.model, self.prompt, self.continuation, TURN_TOKENS, bar=bar,
                           surprisal=True)
        seconds = time.perf_counter() - began
        bar.close()
        self.plain_read_rate = (len(self.prompt) + len(self.continuation)) / seconds
        self.plain = plain_answers(self.model, self.tokens, self.questions, self.trace.cache)
        # Questions that the full cache gets wrong say nothing about a policy.
        self.scored = [i for i, right in enumerate(self.plain.right) if right]
        return {"policy": "full (numpy)", "share": 1.0, "bytes": self.config.cache_bytes(self.length, 4), "kl": 0.0,
                "top1": 1.0, "missed": 0.0, "present": None, "right": len(self.scored), "scored": len(self.scored),
                "read_rate": self.plain_read_rate, "decode_rate": self.plain.decode_rate,
                "answers": self.plain.texts}

    def session(self, name, budget, length=None, **options):
        return self.open_session(self.config, POLICIES[name], budget, length or self.length, len(self.prompt), forks=1,
                                 **options)

    def run_policy(self, name, share, pairs=None, question=0):
        """One policy at one size, on the recorded prompt; with `pairs` of (layer, KV head) also what they read for a question."""
        budget = None if name == "full" else budget_bytes(self.config, share, self.length)
        bar = Bar("%s, %g %%" % (name, 100 * share), len(self.prompt))
        session = self.session(name, budget)
        try:
            self.trace.replay(session, bar=bar)
            logits, figures = teacher_force(self.trace, session, len(self.prompt))
            kl, top1 = divergence(self.trace.logits, logits)
            memory = session.memory()
            answers = session_answers(self.model, self.tokens, self.questions, session)
            if pairs:
                self.watch(name, share, session, pairs, question)
        finally:
            session.close()
            bar.close()
        return {"policy": name, "share": share, "bytes": memory["bytes"], "budget": budget, "memory": memory,
                "kl": kl, "top1": top1, **figures, "read_rate": None, "decode_rate": answers.decode_rate,
                "right": sum(answers.right[i] for i in self.scored), "scored": len(self.scored),
                "answers": answers.texts}

    def run_both_ways(self, name, share):
        """The beginning of the recorded document, what follows it and questions, attended both ways side by side."""
        begin, end = BOTH_WAYS
        length = end + TURN_TOKENS
        bar = Bar("two ways to attend", begin)
        sessions = [self.session(name, budget_bytes(self.config, share, length), length, own_attention=own, exact=True)
                    for own in (False, True)]
        try:
            both = SideBySide(*sessions)
            self.trace.replay(both, bar=bar, tokens=begin)
            self.model.prefill(self.prompt[begin:end], both, begin, 16, "none")
            moved = sum(sessions[0].ranges(layer, h) != sessions[1].ranges(layer, h)
                        for layer in range(self.config.layers) for h in range(self.config.kv_heads))
            answers = [session_answers(self.model, self.tokens, self.questions[:BOTH_WAYS_QUESTIONS], s) for s in sessions]
        finally:
            for session in sessions:
                session.close()
            bar.close()
        return {"difference": both.difference, "seconds": both.seconds, "moved": moved, "answers": answers}

    def run_end_to_end(self, name, share):
        """Nothing recorded: the model reads the document's beginning through Skerry. (tokens per second, KL to the full cache)"""
        begin, end = BOTH_WAYS
        bar = Bar("end to end", begin)
        session, exact = self.session(name, budget_bytes(self.config, share, end), end), PlainCache(self.config, end)
        try:
            began = time.perf_counter()
            self.model.prefill(self.prompt[:begin], session, 0, logits="none", prompt=True, bar=bar)
            seconds = time.perf_counter() - began
            logits = self.model.prefill(self.prompt[begin:end], session, begin, 16, "all")
        finally:
            session.close()
            bar.close()
        self.model.prefill(self.prompt[:begin], exact, 0, logits="none")
        expected = self.model.prefill(self.prompt[begin:end], exact, begin, logits="all")
        return begin / seconds, divergence(expected, logits)[0]

    def watch(self, name, share, session, pairs, question):
        """One question and its answer, token by token: what lies where, and what each token reads from the host."""
        text, expected = self.questions[question]
        child = session.fork()
        try:
            watched = picture.watch_zooms(self.model, child, self.tokens.encode(self.tokens.chat_ask(text)), pairs,
                                          ANSWER_TOKENS, self.tokens.end)
        finally:
            child.close()
        said = " ".join(self.tokens.decode(watched.answer).split())
        self.watched[name] = watched, self.find(expected), "%s at %g %% of the bytes. \"%s\" \"%s\"" % (
            name, 100 * share, text, said)

    def draw_zooms(self, path):
        watched, marked, title = self.watched["sekv"]
        picture.draw_zooms(path, watched, self.trace.surprisal, marked, title)

    def draw_spans(self, path):
        watched, marked, title = self.watched["sekv-spans"]
        words = [self.tokens.decode([token]) for token in self.prompt + self.continuation]
        said = [self.tokens.decode([token]) for token in watched.tokens]
        picture.draw_spans(path, watched, self.trace.surprisal, marked, words, said, title)

    def find(self, text):
        """Positions of the document's tokens whose text has a part in the first occurrence of `text`."""
        ids = self.prompt + self.continuation
        begin = self.tokens.decode(ids).lower().find(text.lower())
        if begin < 0:
            return range(0)
        at, positions = 0, []
        for position, token in enumerate(ids):
            end = at + len(self.tokens.decode([token]))
            if at < begin + len(text) and end > begin:
                positions.append(position)
            at = end
        return range(positions[0], positions[-1] + 1)

    def draw(self, path, shares, layer, kv_head):
        cell, step = 8, 16
        # Spans are cut when a prompt ends; there is nothing to see while it is read.
        cases = [(name, share) for name in MAIN if not wants_surprisal(POLICIES[name]) for share in shares]
        bar = Bar("picture", len(cases) * len(self.prompt))
        panels = []
        for name, share in cases:
            budget = budget_bytes(self.config, share, len(self.prompt)) // self.config.layers
            panels.append(("%s, %g %%" % (name, 100 * share),
                           picture.watch_layer(self.trace, self.open_session, POLICIES[name], budget, layer, kv_head,
                                               cell, step, bar)))
        bar.close()
        picture.draw(path, panels, len(shares), "Tier of every position of layer %d, KV head %d, as the text is read" %
                     (layer, kv_head), cell, step)


def print_row(row, full_bytes):
    rate = lambda value: "%8.1f" % value if value else "%8s" % "-"
    share = "%5.0f%%" % (100 * row["share"])
    line = "%-14s %6s %9.2f %8.1f%% %8.4f %7.1f%% %8.2f%% %6s %s %s" % (
        row["policy"], share, row["bytes"] / 1e6, 100 * row["bytes"] / full_bytes, row["kl"], 100 * row["top1"],
        100 * row["missed"], "%d/%d" % (row["right"], row["scored"]), rate(row["read_rate"]),
        rate(row["decode_rate"]))
    if row["present"] is not None:
        line += "%8.1f%% %8.2f %9.0f %8.1f%%" % (100 * row["on_host"], row["memory"]["host"] / 1e6, row["moved"] / 1e3,
                                               100 * row["present"])
    print(line, flush=True)


def main():
    from .skerry_session import SkerrySession, library_text

    parser = argparse.ArgumentParser(prog="smollm2", description="read a document, answer questions, compare policies")
    parser.add_argument("--out", default=str(OUT), help="folder for the picture and the figures")
    parser.add_argument("--shares", default="20,10", help="percent of the full 16-bit cache, comma separated")
    parser.add_argument("--questions", type=int, help="ask only so many questions")
    parser.add_argument("--layer", type=int, default=14, help="layer in the picture of tiers")
    parser.add_argument("--kv-head", type=int, default=0, help="KV head in the picture of tiers")
    parser.add_argument("--heads", default="4:1,14:0,21:2", help="layer:KV head, comma separated, in the picture of zooms")
    parser.add_argument("--question", type=int, default=0, help="which question the pictures of zooms and of spans show, from 0")
    given = parser.parse_args()
    shares = [float(s) / 100 for s in given.shares.split(",")]
    out = pathlib.Path(given.out)
    out.mkdir(parents=True, exist_ok=True)

    print(library_text())
    job = Job(SkerrySession, given.questions)
    print("document: %d tokens read, then %d teacher-forced, then %d questions that come unseen" %
          (len(job.prompt), len(job.continuation), len(job.questions)))
    print("full 16-bit cache of %d tokens: %.2f MB\n" % (job.length, job.full_bytes / 1e6))
    print("%-14s %6s %9s %9s %8s %8s %9s %6s %8s %8s %8s %8s %9s %9s" % (
        "policy", "budget", "MB", "of full", "KL", "top-1", "missed", "right", "read t/s", "gen t/s", "on host", "host MB",
        "kB/token", "present"))
    rows = [job.read_plain()]
    print_row(rows[0], job.full_bytes)
    rows.append(job.run_policy("full", 1.0))
    print_row(rows[-1], job.full_bytes)
    every = [(layer, h) for layer in range(0, job.config.layers, 2) for h in range(job.config.kv_heads)]
    pairs = [tuple(map(int, pair.split(":"))) for pair in given.heads.split(",")]
    watched = {("sekv", shares[-1]): pairs, ("sekv-spans", shares[0]): every}
    for share in shares:
        for name in MAIN:
            if name in FIRST_SHARE and share != shares[0]:
                continue
            rows.append(job.run_policy(name, share, watched.get((name, share)), given.question))
            print_row(rows[-1], job.full_bytes)

    print("\nanswers")
    for i, (question, expected) in enumerate(job.questions):
        print("  %s" % question)
        for row in rows:
            if row["policy"] == "full":
                continue
            label = row["policy"] if row["share"] == 1.0 else "%s %g %%" % (row["policy"], 100 * row["share"])
            right = expected.lower() in row["answers"][i].lower()
            print("    %-18s %s %s" % (label, "+" if right else "-", " ".join(row["answers"][i].split())))

    difference = {}
    for name in ("qevict", "sekv"):
        print("\ntwo ways to attend, %s at %g %%, %d tokens of the document and questions" % (
            name, 100 * shares[0], BOTH_WAYS[1]))
        ways = job.run_both_ways(name, shares[0])
        difference[name], (ours, theirs) = ways["difference"], ways["answers"]
        for label, answers, seconds in (("Skerry's attention", ours, ways["seconds"][0]),
                                        ("numpy over gather", theirs, ways["seconds"][1])):
            print("  %-20s %.1f s of attention for the document, %.1f tokens/s generated" % (label, seconds, answers.decode_rate))
        print("  largest difference between their outputs: %.2e of the largest output of a layer (allowed: %.0e)" %
              (difference[name], AGREEMENT))
        print("  heads whose windows sit in other tiers: %d of %d; answers that are the same: %d of %d" %
              (ways["moved"], job.config.layers * job.config.kv_heads,
               sum(a == b for a, b in zip(ours.texts, theirs.texts)), len(ours.texts)))

    # One policy will do: all read a prompt alike, and compress when it ends.
    rate, kl = job.run_end_to_end("sekv", shares[0])
    print("\nnothing recorded, the model reading through Skerry, sekv at %g %%: %.0f tokens/s, KL %.4f" % (
        100 * shares[0], rate, kl))

    tiers, zooms, spans, figures = out / "tiers.png", out / "zooms.png", out / "spans.png", out / "figures.json"
    job.draw(tiers, shares, given.layer, given.kv_head)
    job.draw_zooms(zooms)
    job.draw_spans(spans)
    figures.write_text(json.dumps({"rows": rows, "agreement": difference}, indent=1, default=float))
    print("\nwrote %s, %s, %s and %s" % (tiers, zooms, spans, figures))
    over = [r for r in rows if r.get("budget") and r["bytes"] > r["budget"]]
    for row in over:
        print("over budget: %s at %g %%: %d bytes of %d" % (row["policy"], 100 * row["share"], row["bytes"],
                                                            row["budget"]))
    # Written so that NaN disagrees.
    apart = [name for name, value in difference.items() if not value <= AGREEMENT]
    for name in apart:
        print("the two ways to attend disagree: %s" % name)
    return 0 if not apart and not over else 1


if __name__ == "__main__":
    sys.exit(main())
