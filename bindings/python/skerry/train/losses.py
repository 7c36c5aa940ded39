# SPDX-License-Identifier: MIT
"""The losses of SeKV (arXiv 2606.31145; the design's numbers T15, T21-T23) and those of the production router.

`xp` is numpy or torch: the arithmetic is the same, and the tests hold it against numbers without torch.
"""

import numpy as np

EPSILON = 1e-6  # bound of a gate in the cross entropy
TEACHER_LEAST = 1e-12


def coverage_labels(mass, rho):
    """mass [..., S] -> 1 for the shortest run of largest masses that holds `rho` of the row, 0 elsewhere and in empty rows.

    A mass is in while those before it, in descending order, hold less than rho; the share is compared with a slack of
    1e-6, so that rho = 1 takes every mass whatever the rounding.
    """
    mass = np.asarray(mass, np.float64)
    total = mass.sum(-1, keepdims=True)
    share = np.divide(mass, total, out=np.zeros_like(mass), where=total > 0)
    order = np.argsort(-share, axis=-1, kind="stable")
    ranked = np.take_along_axis(share, order, -1)
    before = np.cumsum(ranked, -1) - ranked
    labels = np.zeros_like(mass)
    np.put_along_axis(labels, order, ((before < rho - 1e-6) & (ranked > 0)).astype(np.float64), -1)
    return labels


def zoom_bce(gate, label, positive_weight=10.0, xp=np):
    """Mean weighted cross entropy of gates in (0, 1) against coverage labels."""
    gate = xp.clip(gate, EPSILON, 1 - EPSILON)
    return -(positive_weight * label * xp.log(gate) + (1 - label) * xp.log(1 - gate)).mean()


def distillation(teacher, student, xp=np):
    """Mean over rows of KL(teacher || student); probabilities [rows, vocab]."""
    return (teacher * (xp.log(xp.clip(teacher, TEACHER_LEAST, 1)) - xp.log(xp.clip(student, TEACHER_LEAST, 1)))).sum(-1).mean()


def reconstruction(gates, sigma):
    """The published term of one set of gates: the plain sum of (1 - m)^2 sigma^2."""
    return ((1 - gates) ** 2 * sigma ** 2).sum()


def reconstruction_share(gates, sigma, xp=np):
    """Its production form, [...]: the share of each span's squared norm that the gates lose.

    The plain sum grows with the keys' norm and the number of spans until it starves every other term (sekv.md 8.2, 17).
    """
    energy = sigma ** 2
    return ((1 - gates) ** 2 * energy).sum(-1) / xp.clip(energy.sum(-1), 1e-12, None)


def budget(expansions, rank_sums, beta=0.1):
    """Expansions (0 or 1, or gates with a straight-through gradient) plus beta times the effective ranks."""
    return expansions.sum() + beta * sum(part.sum() for part in rank_sums)


def straight_through(gate, threshold, temperature):
    """(value, d value / d gate) of the hard gate 1[gate > threshold], whose gradient is that of a sigmoid.

    d value / d threshold is the negative of the second.
    """
    if temperature <= 0:
        raise ValueError("the temperature of the straight-through gate must be positive")
    soft = 1 / (1 + np.exp(-(np.asarray(gate, np.float64) - threshold) / temperature))
    return (np.asarray(gate) > threshold).astype(np.float64), soft * (1 - soft) / temperature
