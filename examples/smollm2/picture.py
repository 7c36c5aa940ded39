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


def anchors(surprisal, warm_up=64):
    """Tokens that stand out: above running mean + one standard deviation, themselves included (docs/design/spans.md)."""
    count = np.arange(1, len(surprisal) + 1)
    mean = np.cumsum(surprisal) / count
    variance = np.maximum(np.cumsum(surprisal ** 2) / count - mean ** 2, 0)
    return np.flatnonzero((surprisal > mean + np.sqrt(variance)) & (count > warm_up))


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
