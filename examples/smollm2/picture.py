"""Draws which window sat in which tier over time, one panel per policy."""

import numpy as np

TIERS = ("ahead", "full", "quantised", "evicted")
COLOURS = ("#ffffff", "#1b4965", "#62b6cb", "#f4d9b0")


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
                  loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
