"""Draws which window sat in which tier over time: one panel per policy, or one per head while a question is answered."""

import numpy as np

# "zoomed": read from the host by the last token.
TIERS = ("ahead", "full", "zoomed", "quantised", "host", "evicted")
COLOURS = ("#ffffff", "#1b4965", "#e4572e", "#62b6cb", "#e3e3de", "#f4d9b0")


def tier_row(ranges, cells, cell, length):
    """Tier of every `cell` positions as indices into TIERS; the lowest tier in a cell wins."""
    row = np.zeros(cells, np.uint8)
    for begin, end, tier in ranges:
        end = min(end, length)
        if end > begin:
            part = slice(begin // cell, -(-end // cell))
            row[part] = np.maximum(row[part], TIERS.index(tier))
    return row


def watch_layer(trace, open_session, settings, budget, layer, kv_head, cell=8, step=16, bar=None):
    """Replay one layer of a trace, compressing from the first token on; an image [events, cells].

    Budgets are the same for every layer, so a cache of one layer behaves as that layer
    does in the whole model.
    """
    n = len(trace.tokens)
    cells = -(-n // cell)
    session = open_session(trace.model.config, settings, budget, n, n, prefill="split", layers=1)
    rows = []
    try:
        trace.replay(session, [layer], step,
                     after=lambda length: rows.append(tier_row(session.ranges(0, kv_head), cells, cell, length)),
                     bar=bar)
    finally:
        session.close()
    return np.stack(rows)


def draw(path, panels, columns, title, cell, step):
    """panels: (name, image) pairs as `watch_layer` makes them, row by row."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    lines = -(-len(panels) // columns)
    figure, axes = plt.subplots(lines, columns, figsize=(5.6 * columns, 0.9 + 2.7 * lines), squeeze=False,
                                sharex=True, sharey=True, layout="constrained")
    for axis, (name, image) in zip(axes.flat, panels):
        axis.imshow(image, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(TIERS) - 1, aspect="auto",
                    interpolation="nearest", origin="upper",
                    extent=(0, image.shape[1] * cell, image.shape[0] * step, 0))
        axis.set_title(name, fontsize=10)
    for axis in list(axes.flat)[len(panels):]:
        axis.set_axis_off()
    for axis in axes[:, 0]:
        axis.set_ylabel("tokens read")
    for axis in axes[-1, :]:
        axis.set_xlabel("position in the text")
    figure.legend(handles=[Patch(facecolor=c, edgecolor="#888888", label=t)
                           for t, c in list(zip(TIERS, COLOURS))[1:]],
                  loc="outside lower center", ncols=5, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


class Watched:
    """Ranges of some heads while tokens are fed one by one.

    pairs       (layer, KV head) as asked for
    states      [pair][token] of [(begin, end, tier)], after the token was committed
    tokens      what was fed; the answer begins at `question`
    question    tokens of the question
    start       position of the first token fed
    """

    def __init__(self, pairs, start, question):
        self.pairs, self.start, self.question = pairs, start, question
        self.states = [[] for _ in pairs]
        self.tokens = []

    @property
    def answer(self):
        return self.tokens[self.question:]


def watch_zooms(model, session, ids, pairs, limit, stop):
    """Feed `ids` and then the model's own greedy answer, one token at a time."""
    watched = Watched(pairs, session.length, len(ids))
    token, waiting = ids[0], list(ids[1:])
    while True:
        logits = model.forward([token], session, session.length)
        watched.tokens.append(token)
        for states, (layer, kv_head) in zip(watched.states, pairs):
            states.append(session.ranges(layer, kv_head))
        if waiting:
            token = waiting.pop(0)
            continue
        token = int(np.argmax(logits[-1]))
        if token == stop or len(watched.answer) == limit:
            return watched


def threshold(surprisal, warm_up=64):
    """Surprisal above which a token is an anchor: running mean + one standard deviation, the token itself included
    (docs/design/spans.md). NaN for the first tokens, which cannot be one."""
    count = np.arange(1, len(surprisal) + 1)
    mean = np.cumsum(surprisal) / count
    variance = np.maximum(np.cumsum(surprisal ** 2) / count - mean ** 2, 0)
    return np.where(count > warm_up, mean + np.sqrt(variance), np.nan)


def anchors(surprisal):
    return np.flatnonzero(surprisal > threshold(surprisal))


def spans_of(ranges, least=64, most=128):
    """(begin, end) of spans from a head's ranges, in which anchors cut them to pieces.

    The rule of docs/design/spans.md: an anchor ends a span that has `least` tokens, and no span covers more than `most` positions.
    """
    spans, rows = [], 0
    for begin, end, tier in ranges:
        if tier not in ("host", "zoomed"):
            continue
        if spans and begin > spans[-1][1] and rows < least and begin - spans[-1][0] < most:
            spans[-1][1] = end
        else:
            spans.append([begin, end])
            rows = 0
        rows += end - begin
    return spans


def draw_zooms(path, watched, surprisal, marked, title):
    """`marked`: the positions that hold the answer."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch

    length = watched.start + len(watched.tokens)
    figure, axes = plt.subplots(1 + len(watched.pairs), 1, figsize=(13, 1.9 + 2.5 * len(watched.pairs)), sharex=True,
                                height_ratios=[0.8] + [2.5] * len(watched.pairs), layout="constrained")
    top = axes[0]
    high = anchors(surprisal)
    top.vlines(np.arange(len(surprisal)), 0, surprisal, color="#b8c0c8", linewidth=0.5)
    top.plot(high, surprisal[high], ".", color="#333333", markersize=2)
    top.set_ylabel("surprisal,\nnats")
    top.set_ylim(0)
    for axis, (layer, kv_head), states in zip(axes[1:], watched.pairs, watched.states):
        image = np.stack([tier_row(ranges, length, 1, length) for ranges in states])
        axis.imshow(image, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(TIERS) - 1, aspect="auto",
                    interpolation="nearest", origin="upper", extent=(0, length, len(image), 0))
        axis.axhline(watched.question, color="#222222", linewidth=0.8, linestyle="--")
        axis.set_title("layer %d, KV head %d" % (layer, kv_head), fontsize=10)
        axis.set_ylabel("tokens: question,\nthen answer")
    for axis in axes:
        if len(marked):
            axis.axvspan(marked[0], marked[-1] + 1, ymin=0.97, ymax=1, color="#c1121f", clip_on=False)
            axis.axvline(marked[0], color="#c1121f", linewidth=0.6, alpha=0.6)
    axes[-1].set_xlabel("position in the text")
    axes[-1].set_xlim(0, length)
    kinds = sorted({int(i) for states in watched.states for ranges in states
                    for i in np.unique(tier_row(ranges, length, 1, length))})
    names = {"host": "on the host, not read", "zoomed": "read from the host", "quantised": "low bits on the device",
             "full": "full precision or 8 bits", "evicted": "gone"}
    handles = [Patch(facecolor=COLOURS[i], edgecolor="#888888", label=names[TIERS[i]]) for i in kinds if i > 0]
    handles.append(plt.Line2D([], [], color="#333333", marker=".", markersize=4, linestyle="",
                              label="anchor: surprisal above mean + 1 sd"))
    if len(marked):
        handles.append(plt.Line2D([], [], color="#c1121f", label="where the text has the answer"))
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def reads_of(watched, spans):
    """[tokens, spans]: share of the watched heads that read the span for the token."""
    begins = np.array([begin for begin, _ in spans])
    found = np.zeros((len(watched.tokens), len(spans)))
    for states in watched.states:
        for token, ranges in enumerate(states):
            zoomed = [begin for begin, _, tier in ranges if tier == "zoomed"]
            # Pieces of one span are read together; spans that began after this token's are not in its ranges.
            found[token, np.unique(np.searchsorted(begins, zoomed, side="right") - 1)] += 1
    return found / len(watched.states)


def spread_labels(positions, heights, length, room, count):
    """The `count` highest of `positions` that lie at least `room` apart, in order of position."""
    chosen = []
    for position in positions[np.argsort(-heights, kind="stable")]:
        if len(chosen) < count and all(abs(position - other) >= room for other in chosen) and position < length - room / 2:
            chosen.append(int(position))
    return sorted(chosen)


def draw_spans(path, watched, surprisal, marked, words, said, title, around=72):
    """Anchors, spans and which of them tokens read back.

    `marked`: positions that hold the answer; `words`: text of every token of the document; `said`: text of the tokens fed.
    The last panel shows `around` tokens on either side of the answer.
    """
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import LinearSegmentedColormap

    exact, grey, orange, red = "#1b4965", "#b8c0c8", "#e4572e", "#c1121f"
    heat = LinearSegmentedColormap.from_list("reads", ("#f4f4f1", "#f6c8a0", orange, "#7a1c0c"))
    ranges = watched.states[0][-1]
    spans = spans_of(ranges)
    # What lies behind the last span is exact because it is recent.
    held = {p for begin, end, tier in ranges if tier == "full" for p in range(begin, min(end, spans[-1][1]))}
    high = anchors(surprisal)
    high = high[[int(p) in held for p in high]]
    reads = reads_of(watched, spans)
    length = watched.start + len(watched.tokens)
    visible = lambda word: word.replace("\n", "\u21b5").replace("$", r"\$").strip() or "\u2423"

    figure = plt.figure(figsize=(14, 11.5), layout="constrained")
    top, strip, zooms, close = figure.subplots(4, 1, height_ratios=[2.0, 0.75, 5.2, 2.6])
    strip.sharex(top)
    zooms.sharex(top)

    top.vlines(np.arange(len(surprisal)), 0, surprisal, color=grey, linewidth=0.5)
    top.vlines(high, 0, surprisal[high], color=orange, linewidth=0.7)
    top.plot(threshold(surprisal), color="#333333", linewidth=0.9, label="threshold: running mean + 1 standard deviation")
    top.plot([], [], color=orange, label="anchor (%d tokens in full precision on the device)" % len(high))
    ceiling = surprisal[high].max() if len(high) else surprisal.max()
    for position in spread_labels(high, surprisal[high], length, length / 30, 22):
        top.annotate(visible(words[position]), (position, surprisal[position]), xytext=(0, 2), textcoords="offset points",
                     rotation=50, fontsize=7, ha="left", va="bottom", rotation_mode="anchor")
    top.set_ylim(0, 1.6 * ceiling)
    top.set_ylabel("surprisal, nats")
    top.legend(loc="upper right", ncols=2, fontsize=8, framealpha=0.9)

    for i, (begin, end) in enumerate(spans):
        strip.add_patch(plt.Rectangle((begin, 0.30), end - begin, 0.7, facecolor=("#e3e3de", "#c9cfd4")[i % 2], edgecolor="#555555",
                                      linewidth=0.6))
    for begin, end, tier in ranges:
        if tier == "full" and end - begin > 8:
            strip.add_patch(plt.Rectangle((begin, 0.30), end - begin, 0.7, facecolor=exact, edgecolor=exact))
    strip.vlines(high, 0.0, 0.26, color=orange, linewidth=0.5)
    strip.set_ylim(0, 1.05)
    strip.set_yticks([0.13, 0.65], ["anchors", "spans on the host;\nblue: exact on the device"], fontsize=8)
    strip.tick_params(axis="y", length=0)

    for token, row in enumerate(reads):
        for i in np.flatnonzero(row):
            begin, end = spans[i]
            zooms.add_patch(plt.Rectangle((begin, token), end - begin, 1, facecolor=heat(row[i]), linewidth=0))
    for begin, _ in spans:
        zooms.axvline(begin, color="#ffffff", linewidth=0.5)
    zooms.axhline(watched.question, color="#222222", linewidth=0.9, linestyle="--")
    zooms.set_facecolor(heat(0.0))
    zooms.set_ylim(len(reads), 0)
    zooms.set_xlim(0, length)
    zooms.set_yticks(np.arange(len(said)) + 0.5, [visible(word) for word in said], fontsize=6.5)
    zooms.set_ylabel("question, then answer: one token a row")
    zooms.set_xlabel("position in the text")
    bar = figure.colorbar(plt.cm.ScalarMappable(cmap=heat), ax=[top, strip, zooms], pad=0.01, aspect=40)
    bar.set_label("share of heads that read the span for this token, of %d" % len(watched.pairs))
    for axis in (top, strip, zooms):
        if len(marked):
            axis.axvline(marked[0], color=red, linewidth=0.8, alpha=0.8)
    if len(marked):
        zooms.annotate("where the text has the answer", (marked[0], len(reads)), xytext=(4, 5), textcoords="offset points",
                       color=red, fontsize=8)

    middle = marked[0] if len(marked) else int(high[len(high) // 2])
    begin = max(0, middle - around)
    end = min(len(surprisal), begin + 2 * around)
    shown = np.arange(begin, end)
    lifted = np.isin(shown, high)
    close.bar(shown, surprisal[begin:end], width=0.8, color=np.where(lifted, orange, grey))
    share = reads[watched.question:].max(axis=0)
    high_end = 1.1 * surprisal[begin:end].max()
    low, box = -0.16 * high_end, 0.12 * high_end
    for i, (first, last) in enumerate(spans):
        if last > begin and first < end:
            first, last = max(first, begin) - 0.5, min(last, end) - 0.5
            close.add_patch(plt.Rectangle((first, low), last - first, box, facecolor=heat(share[i]), edgecolor="#555555"))
    for position in shown[lifted]:
        close.add_patch(plt.Rectangle((position - 0.5, low), 1, box, facecolor=exact, edgecolor="#ffffff", linewidth=0.5))
    close.set_xlim(begin - 0.5, end - 0.5)
    close.set_ylim(1.15 * low, high_end)
    close.set_yticks([tick for tick in close.get_yticks() if 0 <= tick <= high_end])
    close.set_xticks(shown, [visible(words[p]) for p in shown], rotation=90, fontsize=6.5)
    for label, position, high_one in zip(close.get_xticklabels(), shown, lifted):
        if position in marked:
            label.set_color(red)
        elif high_one:
            label.set_color(orange)
    close.set_ylabel("surprisal, nats")
    close.set_title("around the place that has the answer: surprisal of every token; below, spans in the colour of the most reads "
                    "that a token of the answer made, anchors in blue", fontsize=9, loc="left")
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
