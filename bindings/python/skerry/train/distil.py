# SPDX-License-Identifier: MIT
"""Joint training of all layers: the student's next-token distributions against the teacher's, at mined positions.

`refine` goes on from a fitted production router: every row fetches a share of the candidates, gradients come straight through.
`train_paper` trains the published form (W, tau, rank gates) with the four losses in their production corrections:

    distillation + lambda_zoom zoom + lambda_recon reconstruction_share + lambda_budget(step) budget

where the student is causal, the reconstruction term is a share of each span's norm, and the budget term counts the straight-through
gates, so that tau gets a gradient from it; it is a mean over gates, as the other terms are.
"""

import dataclasses
import pathlib

import numpy as np
import torch

from . import losses, schedule
from .problem import cluster
from .routers import cut
from .gates import BestFetch, Factors, Threshold
from .segments import SLOTS, Layout
from .student import Memory, Student


@dataclasses.dataclass
class Settings:
    steps: int = 150
    peak: float = 1e-3
    lengths: tuple = (1024, 2048)
    rows: int = 24  # positions per step, of one prompt
    shares: tuple = (0.03, 0.06, 0.12)
    sharpness: float = 0.3
    checkpoint: int = 50
    seed: int = 0
    # The published form only (sekv.md 1.4).
    summary_dim: int = 32
    rank_max: int = 16
    zoom: float = 1.0
    reconstruction: float = 0.5
    budget: float = 0.1
    beta: float = 0.1
    rho: float = 0.9
    weight_decay: float = 0.01


class Run:
    """Optimiser, random numbers, step and history, saved together so that a run goes on as if it had never stopped."""

    def __init__(self, path, module, settings, size=None):
        self.path, self.module, self.settings = pathlib.Path(path), module, settings
        groups = [{"params": [p], "size": size(name, p) if size else 1.0} for name, p in module.named_parameters()]
        self.optimiser = torch.optim.AdamW(groups, lr=settings.peak, weight_decay=settings.weight_decay)
        self.rng, self.step, self.history = np.random.default_rng(settings.seed), 0, []
        if self.path.exists():
            state = torch.load(self.path, weights_only=False)
            if state["settings"] != dataclasses.asdict(settings):
                raise ValueError("%s belongs to other settings: %s" % (self.path, state["settings"]))
            module.load_state_dict(state["module"])
            self.optimiser.load_state_dict(state["optimiser"])
            self.rng, self.step, self.history = state["rng"], state["step"], state["history"]

    def save(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        torch.save({"settings": dataclasses.asdict(self.settings), "module": self.module.state_dict(), "step": self.step,
                    "optimiser": self.optimiser.state_dict(), "rng": self.rng, "history": self.history}, part)
        part.replace(self.path)

    def draw(self, capture, layout):
        """(index, Memory) of a prompt and rows of it below the curriculum's length."""
        stages = schedule.curriculum(self.settings.steps, self.settings.lengths)
        below = stages[schedule.stage(self.step, stages)][1]
        while True:
            index = int(self.rng.integers(len(capture)))
            arrays = capture.read(index)
            positions = np.array(arrays["positions"])
            positions = positions[(positions < below) & (layout.candidates(positions) > 0)]
            if len(positions):
                chosen = np.sort(self.rng.permutation(positions)[:self.settings.rows])
                return index, Memory(layout, arrays, chosen)

    def update(self, loss, parts, clip=1.0):
        self.optimiser.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), clip)
        for group in self.optimiser.param_groups:
            group["lr"] = schedule.learning_rate(self.step, self.settings.steps, self.settings.peak) * group["size"]
        self.optimiser.step()
        self.history.append(tuple(float(part) for part in parts))
        self.step += 1
        if self.step % self.settings.checkpoint == 0 or self.step == self.settings.steps:
            self.save()

    def left(self, stop):
        return self.step < (self.settings.steps if stop is None else min(stop, self.settings.steps))


def divergence(student, memory, gate):
    with torch.no_grad():
        teacher = student(memory).softmax(-1)
    return losses.distillation(teacher, student(memory, gate).softmax(-1), xp=torch)


def clusters(capture, index, layout, tensors, slots):
    """Per layer (means, ln n) of one prompt, by the key projections of `tensors`."""
    found = []
    for layer, W_key in enumerate(tensors["W_key"]):
        positions, _, keys, _ = capture.layer(index, layer)
        means = cluster(cut(layout, keys, positions), W_key, slots)
        found.append(tuple(torch.from_numpy(part) for part in means))
    return found


def refine(model, capture, tensors, settings, path, slots=SLOTS, layout=Layout(), bar=None, stop=None):
    """Fitted tensors -> refined ones. Clusters are those of the tensors that it starts from while it runs."""
    student = Student(model)
    gate = BestFetch(tensors, settings.sharpness)
    run = Run(path, gate, settings, size=lambda name, p: float(p.detach().square().mean().sqrt()) or 1.0)
    kept = {}
    while run.left(stop):
        index, memory = run.draw(capture, layout)
        if index not in kept:
            kept[index] = clusters(capture, index, layout, tensors, slots)
        share = float(run.rng.choice(settings.shares))
        loss = divergence(student, memory, gate.on(memory, kept[index], share))
        run.update(loss, [loss.detach()])
        if bar:
            bar.step("KL %.4f" % run.history[-1])
    run.save()
    return gate.tensors(), run.history


def paper_losses(student, memory, gate, record, settings, step, target):
    """(total, its four parts). target [L, P, H, M]: coverage labels of the teacher's masses."""
    distilled = divergence(student, memory, gate)
    # The teacher's pass calls no gate, so the record has one entry per layer.
    inside = memory.allowed[:, None].expand_as(record[0][0])
    zoom = torch.stack([losses.zoom_bce(alpha[inside], label[inside], xp=torch)
                        for (alpha, _, _, _), label in zip(record, target)]).mean()
    lost = torch.stack([losses.reconstruction_share(gates, sigma, xp=torch).mean()
                        for _, _, gates, one in record for sigma in (one.key_sigma, one.value_sigma)]).mean()
    spent = torch.stack([losses.budget(opened[inside] / inside.sum(), [gates / gates.numel()], settings.beta)
                         for _, opened, gates, _ in record]).mean()
    weight = schedule.budget_weight(step, settings.steps, settings.budget)
    return distilled + settings.zoom * zoom + settings.reconstruction * lost + weight * spent, (distilled, zoom, lost, spent)


def coverage(memory, layer, queries, rho):
    """Labels [P, H, M] of one layer from captured queries [P, H, d] at the memory's positions."""
    keys, _ = memory.rows(layer)
    share = queries.shape[1] // keys.shape[0]
    logits = torch.einsum("phd,htd->pht", queries, keys.repeat_interleave(share, 0)) * queries.shape[2] ** -0.5
    seen = torch.arange(memory.end)[None, :] <= memory.positions[:, None]
    weights = logits.masked_fill(~seen[:, None], -torch.inf).softmax(-1)[..., memory.inside]
    mass = weights.unflatten(-1, (memory.segments, memory.layout.length)).sum(-1) * memory.allowed[:, None]
    return torch.from_numpy(losses.coverage_labels(mass.numpy(), rho)).float()


def train_paper(model, capture, settings, path, start=None, summaries=False, layout=Layout(), bar=None, stop=None):
    """The published form, on segments of the layout as spans -> (tensors under the names of sekv.md 6.6, history)."""
    c = model.config
    student = Student(model)
    gate = Threshold(c.layers, c.heads, c.head_dim, settings.summary_dim, settings.rank_max,
                     generator=torch.Generator().manual_seed(settings.seed), start=start)
    run = Run(path, gate, settings)
    while run.left(stop):
        index, memory = run.draw(capture, layout)
        arrays = memory.arrays
        at = np.searchsorted(arrays["positions"], memory.positions.numpy())
        target, factors = [], []
        for layer in range(c.layers):
            keys, values = memory.rows(layer)
            factors.append(Factors.of(memory, keys, values, settings.rank_max))
            queries = torch.from_numpy(np.asarray(arrays["queries"][layer][at], np.float32))
            target.append(coverage(memory, layer, queries, settings.rho))
        total, parts = paper_losses(student, memory, *gate.on(memory, factors, summaries), settings, run.step, target)
        run.update(total, [total.detach()] + [part.detach() for part in parts])
        if bar:
            bar.step("total %.3f  KL %.3f  zoom %.3f  lost %.3f  budget %.3f" % run.history[-1])
    run.save()
    return gate.tensors(), run.history
