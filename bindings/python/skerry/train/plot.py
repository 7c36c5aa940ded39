# SPDX-License-Identifier: MIT
"""Loss curves as a picture."""

import numpy as np


def smooth(values, window):
    """Running mean over `window` steps, as long as the values."""
    values = np.asarray(values, np.float64)
    sums = np.concatenate([[0], np.cumsum(values)])
    at = np.arange(1, len(values) + 1)
    first = np.maximum(0, at - window)
    return (sums[at] - sums[first]) / (at - first)


def smooth_stages(values, stages, window):
    """`smooth`, begun anew at every step of `stages`."""
    return np.concatenate([smooth(part, window) for part in np.split(np.asarray(values), list(stages))])


def losses(path, curves, titles, stages=(), window=25, colour_label=None):
    """One panel per title; curves {label: [steps, panels]}. With numbers as labels, colour runs with the number."""
    import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, len(titles), figsize=(5 * len(titles), 3.6), squeeze=False)
    numbers = [label for label in curves if isinstance(label, (int, np.integer))]
    shades = matplotlib.colormaps["viridis"]
    for column, (panel, title) in enumerate(zip(panels[0], titles)):
        for label, values in curves.items():
            colour = shades(label / max(1, max(numbers))) if numbers else None
            values = smooth_stages(np.asarray(values)[:, column], stages, window)
            panel.plot(values, color=colour, linewidth=0.9, label=None if numbers else label)
        if numbers:
            mean = np.mean([smooth_stages(np.asarray(values)[:, column], stages, window) for values in curves.values()], 0)
            panel.plot(mean, color="black", linewidth=1.8, label="mean over layers")
        for step in stages:
            panel.axvline(step, color="0.8", linewidth=0.8, zorder=0)
        panel.set_title(title)
        panel.set_xlabel("step")
        panel.grid(True, alpha=0.25)
        panel.legend(frameon=False)
    if numbers and len(numbers) > 1:
        scale = matplotlib.cm.ScalarMappable(matplotlib.colors.Normalize(0, max(numbers)), shades)
        figure.colorbar(scale, ax=panels[0][-1], label=colour_label)
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
