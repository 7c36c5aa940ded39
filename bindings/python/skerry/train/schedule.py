# SPDX-License-Identifier: MIT
"""Learning rate, budget weight and curriculum as functions of the step."""

import math


def learning_rate(step, steps, peak=1e-3, warmup=0.1):
    """Linear warm-up over a share of the steps, then a cosine to 0."""
    warm = int(steps * warmup)
    if step < warm:
        return peak * (step + 1) / warm
    return peak * 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def budget_weight(step, steps, final=0.1, anneal=0.5):
    """Linear from 0 to `final` over a share of the steps."""
    return final * min(1.0, step / (steps * anneal)) if anneal > 0 else final


def curriculum(steps, lengths):
    """[(first step, length)]: stages as even as they can be, the earliest ones longer by the remainder."""
    each, extra = divmod(steps, len(lengths))
    stages, at = [], 0
    for index, length in enumerate(lengths):
        stages.append((at, length))
        at += each + (index < extra)
    return stages


def stage(step, stages):
    """Index of the stage that `step` belongs to."""
    return max(index for index, (first, _) in enumerate(stages) if first <= step)
