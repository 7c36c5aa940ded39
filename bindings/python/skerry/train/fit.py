# SPDX-License-Identifier: MIT
"""Fitting a production router, layer by layer: queries and keys are the frozen teacher's, so layers do not depend on each other."""

import dataclasses
import json
import pathlib

import numpy as np
import torch

from . import losses, schedule
from .problem import cluster, load, principal
from .routers import coded_rows
from .segments import SLOTS, Layout


# Log mass of what is no candidate: gone in f32, and without the NaN that the gradient of -inf has.
HIDDEN = -1e9


@dataclasses.dataclass
class Settings:
    rank: int = 32
    shared: bool = False  # one query projection per KV head, not one per query head
    slots: int = SLOTS
    steps: int = 300  # per layer
    peak: float = 6e-2  # learning rate
    lengths: tuple = (512, 1024, 4096)  # curriculum: queries at positions below
    shares: tuple = (0.03, 0.06, 0.12)  # of the candidates that are fetched
    sharpness: float = 0.3  # temperature of the soft choice, in nats of the estimated mass
    mass: float = 0.5  # weight of the divergence between true and estimated masses
    rank_loss: str = "listwise"  # or "recall" or "bce"
    effect: float = 0.5  # share of the output effect in what a choice should catch; the rest is mass
    rho: float = 0.9  # coverage of the labels under "bce"
    prompts: int = 2  # per step
    rows: int = 96  # queries of each, drawn anew
    recluster: int = 100  # steps between searches for clusters
    checkpoint: int = 200  # steps between checkpoints within a layer
    seed: int = 0


class LayerRouter(torch.nn.Module):
    def __init__(self, W, W_key, heads):
        """W [H, r, d], or [G, r, d] where the query heads of a KV head share it; W_key [G, r, d]."""
        super().__init__()
        self.W, self.W_key = torch.nn.Parameter(torch.tensor(W)), torch.nn.Parameter(torch.tensor(W_key))
        self.bias = torch.nn.Parameter(torch.zeros(heads))

    def forward(self, queries, means, log_counts):
        """queries [P, H, d], means [G, M, slots, d], log_counts [G, M, slots] -> estimated log masses [P, H, M]."""
        groups, rank = self.W_key.shape[:2]
        rows, heads, _ = queries.shape
        W = self.W if len(self.W) == heads else self.W.repeat_interleave(heads // groups, 0)
        projected = torch.einsum("phd,hrd->hpr", queries, W) * rank ** -0.5
        z = torch.einsum("gmcd,grd->gmcr", means, self.W_key)
        # Codes forward, as the device will hold them; the gradient passes them by.
        coded = np.stack([coded_rows(rows) for rows in z.detach().numpy()])
        z = z + (torch.from_numpy(coded) - z).detach()
        projected = projected.reshape(groups, heads // groups * rows, rank)
        logits = torch.bmm(projected, z.reshape(groups, -1, rank).transpose(1, 2)).reshape(heads, rows, *z.shape[1:3])
        logits = logits + log_counts.repeat_interleave(heads // groups, 0)[:, None]
        return torch.logsumexp(logits, -1).transpose(0, 1) + self.bias[:, None]


def mass_divergence(estimate, log_mass, lse_exact):
    """Mean KL per head from the true distribution over (device tokens, segment, segment, ...) to the estimated one."""
    full = lambda x: torch.cat([lse_exact[..., None], x], -1).log_softmax(-1)
    true, guess = full(log_mass), full(estimate)
    return (true.exp() * (true.clamp_min(-50) - guess.clamp_min(-50))).sum(-1).mean()


def log_scores(estimate, lse_exact, groups):
    """[P, H, M] -> ln of the probabilities summed over a KV head's query heads, [P, G, M]."""
    total = torch.logaddexp(lse_exact, estimate.logsumexp(-1))
    rows, heads, segments = estimate.shape
    return (estimate - total[..., None]).reshape(rows, groups, heads // groups, segments).logsumexp(2)


def missed(scores, worth, take, sharpness):
    """Mean share of `worth` [P, G, M] outside a soft choice of the `take` [P] best by scores [P, G, M].

    A segment is in with the sigmoid of its distance, in nats, from the middle of the last score in and the first one out.
    """
    ordered = scores.detach().sort(-1, descending=True).values
    at = take[:, None, None].expand(-1, scores.shape[1], 1)
    edge = 0.5 * (ordered.gather(-1, at - 1) + ordered.gather(-1, at.clamp_max(scores.shape[2] - 1)).clamp_min(-50))
    chosen = torch.sigmoid((scores - edge) / sharpness)
    return 1 - (worth * chosen).sum(-1).mean()


def prompt_loss(router, settings, prompt, clusters, share):
    """(loss, its parts) of one prompt's rows; `prompt` as batch() makes it."""
    queries, log_mass, lse_exact, worth, allowed = prompt
    groups = router.W_key.shape[0]
    estimate = router(queries, *clusters).masked_fill(~allowed[:, None], HIDDEN)
    mass = mass_divergence(estimate, log_mass, lse_exact)
    scores = log_scores(estimate, lse_exact, groups)
    worth = (1 - settings.effect) * worth[0] + settings.effect * worth[1]
    candidates = allowed.sum(-1)
    if settings.rank_loss == "bce":
        labels = torch.tensor(losses.coverage_labels(worth.numpy(), settings.rho), dtype=torch.float32)
        # The gate says whether a segment deserves more than an even share of the group's mass on segments.
        even = scores - scores.logsumexp(-1, keepdim=True) + candidates.log()[:, None, None]
        inside = allowed[:, None].expand_as(even)
        choice = losses.zoom_bce(torch.sigmoid(even[inside]), labels[inside], xp=torch)
    elif settings.rank_loss == "listwise":
        choice = (worth * (worth.clamp_min(1e-20).log() - scores.log_softmax(-1).clamp_min(-50))).sum(-1).mean()
    else:
        take = (share * candidates).round().long().clamp_min(1)
        choice = missed(scores, worth, take, settings.sharpness)
    return choice + settings.mass * mass, (float(choice.detach()), float(mass.detach()))


def batch(prompt, below):
    """The rows of a Prompt at positions below `below` as tensors, or None if there is none."""
    rows = np.flatnonzero(prompt.positions < below)
    if not len(rows):
        return None
    segments = int(np.flatnonzero(prompt.allowed[rows].any(0))[-1]) + 1
    take = lambda x: torch.from_numpy(np.ascontiguousarray(x))
    return (take(prompt.queries[rows]), take(np.maximum(prompt.log_mass[rows][..., :segments], HIDDEN)), take(prompt.lse_exact[rows]),
            take(prompt.worth[:, rows][..., :segments]), take(prompt.allowed[rows][:, :segments]))


def some(tensors, rows):
    """Those rows of what batch() returns."""
    queries, log_mass, lse_exact, worth, allowed = tensors
    return queries[rows], log_mass[rows], lse_exact[rows], worth[:, rows], allowed[rows]


def clusters_of(prompts, router, settings):
    W_key = router.W_key.detach().numpy()
    return [tuple(torch.from_numpy(part) for part in cluster(prompt.keys, W_key, settings.slots)) for prompt in prompts]


class Checkpoint:
    """Finished layers, and the layer in work with its optimiser, random numbers and step. Written whole, then renamed."""

    def __init__(self, path, settings):
        self.path, self.settings = pathlib.Path(path), dataclasses.asdict(settings)
        self.state = {"settings": self.settings, "done": {}, "work": None, "history": {}}
        if self.path.exists():
            self.state = torch.load(self.path, weights_only=False)
            if json.dumps(self.state["settings"]) != json.dumps(self.settings):
                raise ValueError("%s belongs to other settings: %s" % (self.path, self.state["settings"]))

    def save(self):
        self.path.parent.mkdir(parents=True, exist_ok=True)
        part = self.path.with_suffix(".part")
        torch.save(self.state, part)
        part.replace(self.path)


def begin(layer, prompts, settings):
    """Work on a layer at step 0, as a checkpoint keeps it."""
    router = LayerRouter(*principal(prompts, settings.rank, settings.shared), prompts[0].queries.shape[1])
    # Adam moves every number by about the rate, so a tensor's rate is in units of its own size at the start.
    sizes = [float(p.detach().square().mean().sqrt()) or 1.0 for p in router.parameters()]
    return {"layer": layer, "step": 0, "router": router.state_dict(), "optimiser": None, "sizes": sizes,
            "rng": np.random.default_rng([settings.seed, layer]), "clusters": None, "history": []}


def fit_layer(layer, prompts, settings, checkpoint, bar=None, stop=None):
    """Fits one layer, from the checkpoint on if it stopped in this layer. Comes back early, with None, after `stop` steps."""
    work = checkpoint.state["work"]
    if not work or work["layer"] != layer:
        work = begin(layer, prompts, settings)
    rng, clusters, history = work["rng"], work["clusters"], work["history"]
    router = LayerRouter(*(work["router"][name].numpy() for name in ("W", "W_key")), len(work["router"]["bias"]))
    router.load_state_dict(work["router"])
    optimiser = torch.optim.Adam([{"params": [p]} for p in router.parameters()])
    if work["optimiser"]:
        optimiser.load_state_dict(work["optimiser"])
    stages = schedule.curriculum(settings.steps, settings.lengths)
    batches, batches_stage = None, None

    def keep(step):
        checkpoint.state["work"] = {
            "layer": layer, "step": step, "router": {k: v.clone() for k, v in router.state_dict().items()},
            "optimiser": optimiser.state_dict(), "sizes": work["sizes"], "rng": rng, "clusters": clusters, "history": history}
        checkpoint.save()

    for step in range(work["step"], settings.steps):
        if clusters is None or step % settings.recluster == 0:
            clusters = clusters_of(prompts, router, settings)
        now = schedule.stage(step, stages)
        if batches_stage != now:
            batches = [batch(prompt, stages[now][1]) for prompt in prompts]
            batches_stage = now
            usable = [index for index, one in enumerate(batches) if one is not None]
        rate = schedule.learning_rate(step, settings.steps, settings.peak)
        for group, size in zip(optimiser.param_groups, work["sizes"]):
            group["lr"] = rate * size
        optimiser.zero_grad()
        parts = []
        for index in rng.choice(usable, min(settings.prompts, len(usable)), replace=False):
            share = float(rng.choice(settings.shares))
            rows = np.sort(rng.permutation(len(batches[index][0]))[:settings.rows])
            means, counts = (part[:, :batches[index][1].shape[-1]] for part in clusters[index])
            loss, values = prompt_loss(router, settings, some(batches[index], rows), (means, counts), share)
            (loss / settings.prompts).backward()
            parts.append(values)
        optimiser.step()
        history.append(tuple(np.mean(parts, 0)))
        if bar:
            bar.step("layer %d  choice %.3f  mass %.3f" % ((layer,) + history[-1]))
        if stop is not None and step + 1 == stop:
            keep(step + 1)
            return None
        if (step + 1) % settings.checkpoint == 0 and step + 1 < settings.steps:
            keep(step + 1)
    done = {name: p.detach().clone() for name, p in router.named_parameters()}
    checkpoint.state["done"][layer] = done
    checkpoint.state["history"][layer] = history
    checkpoint.state["work"] = None
    checkpoint.save()
    return done


def fit(capture, layers, settings, path, layout=Layout(), bar=None):
    """All layers; returns {"W", "W_key", "bias"} stacked over layers."""
    checkpoint = Checkpoint(path, settings)
    for layer in layers:
        if layer not in checkpoint.state["done"]:
            fit_layer(layer, load(capture, layout, layer), settings, checkpoint, bar)
        elif bar:
            bar.step("layer %d is done" % layer, settings.steps)
    return {name: np.stack([checkpoint.state["done"][layer][name].numpy() for layer in layers]) for name in ("W", "W_key", "bias")}
