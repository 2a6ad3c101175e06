"""The training loop: capture, forward, loss, step; it stops at a time or a step count and resumes where it stopped."""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.fetch import write_atomically
from draftproof.models.dflash import DFlash
from draftproof.models.target import Target
from draftproof.train.capture import capture, label_rows
from draftproof.train.data import Example, TrainBatch, batches
from draftproof.train.forward import block_rows
from draftproof.train.loss import BlockLabels, BlockStats, block_loss
from draftproof.train.recipe import Optimiser, Recipe


@dataclass
class Run:
    """A run in progress. `step` of `total`; `log` holds one dict per report."""

    model: DFlash
    optimisers: list[torch.optim.Optimizer]
    recipe: Recipe
    total: int
    step: int = 0
    log: list[dict[str, Any]] = field(default_factory=list)


def start(model: DFlash, recipe: Recipe, total: int) -> Run:
    initialise(model, recipe.seed)
    return Run(model, make_optimisers(model, recipe.optimiser), recipe, total)


def train(
    run: Run,
    target: Target,
    examples: Sequence[Example],
    *,
    until: int | None = None,
    seconds: float = math.inf,
    report: Callable[[dict[str, Any]], None] = lambda _: None,
    every: int = 50,
    save: Callable[[], None] = lambda: None,
    save_every: float = 120.0,
) -> None:
    """Advance `run` to step `until` (default: its end) or for `seconds`, whichever comes first.

    `save` is called every `save_every` seconds and at the end, also when an interrupt or an error ends it, but never
    with a step half done: a resumed run must give the same weights.
    """
    o, block = run.recipe.optimiser, run.model.spec.block_size
    stream = batches(
        examples, sequences=o.sequences, anchors=o.anchors, block=block, seed=run.recipe.seed, start=run.step
    )
    begun, meter = time.monotonic(), Meter()
    saved, whole = begun, True
    run.model.train()
    try:
        while run.step < (until or run.total) and time.monotonic() - begun < seconds:
            set_rate(run)
            loss, stats = batch_loss(run.model, target, next(stream), run.recipe)
            loss.backward()
            nn.utils.clip_grad_norm_(run.model.parameters(), o.clip)
            whole = False
            for optimiser in run.optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
            run.step += 1
            whole = True
            meter.add(loss.detach(), stats)
            if run.step % every == 0 or run.step == run.total:
                run.log.append({"step": run.step, "seconds": round(time.monotonic() - begun, 1), **meter.read()})
                report(run.log[-1])
                meter = Meter()
            if time.monotonic() - saved >= save_every:
                save()
                saved = time.monotonic()
    finally:
        if whole:
            save()


def batch_loss(model: DFlash, target: Target, batch: TrainBatch, recipe: Recipe) -> tuple[Tensor, BlockStats]:
    """The loss of one batch of sequences and what it says about acceptance."""
    device = target.device
    tokens, anchors = batch.tokens.to(device), batch.anchors.to(device)
    known = capture(target, tokens, model.spec.taps)
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=target.dtype == torch.bfloat16):
        rows = block_rows(model, target, tokens, known.features, anchors).flatten(0, 1)
    block = model.spec.block_size
    where = (anchors[:, :, None] + torch.arange(1, block, device=device)).clamp(max=tokens.shape[1] - 1)
    labels = BlockLabels(
        tokens.gather(1, where.flatten(1)).view(-1, block - 1),
        batch.labelled.to(device).flatten(0, 1),
        label_rows(known.final, anchors, block).flatten(0, 1),
    )
    return block_loss(rows.to(target.dtype), labels, target.head.weight, recipe.loss)


class Meter:
    """Sums on the device between two reports. expected = 1 + sum of prefix rates: tau at random anchors."""

    def __init__(self) -> None:
        self.loss: list[Tensor] = []
        self.stats: list[BlockStats] = []

    def add(self, loss: Tensor, stats: BlockStats) -> None:
        self.loss.append(loss)
        self.stats.append(stats)

    def read(self) -> dict[str, Any]:
        blocks = torch.stack([s.blocks for s in self.stats]).sum()
        rates = (torch.stack([s.prefix for s in self.stats]).sum(0) / blocks).tolist()
        return {
            "loss": round(float(torch.stack(self.loss).mean()), 4),
            "expected": round(1 + sum(rates), 4),
            "prefix": [round(r, 4) for r in rates],
        }


def initialise(model: DFlash, seed: int) -> None:
    """Normal(0, 0.02) weights, output projections scaled by depth, so that the stream starts near the embedding."""
    draw = torch.Generator().manual_seed(seed)
    shrink = (2 * model.spec.num_layers) ** -0.5
    for name, weight in model.named_parameters():
        if weight.ndim < 2:
            continue
        scale = 0.02 * (shrink if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0)
        weight.data.copy_(torch.randn(weight.shape, generator=draw) * scale)


def make_optimisers(model: nn.Module, o: Optimiser) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim != 2]
    fused = matrices[0].is_cuda
    groups = [{"params": vectors, "weight_decay": 0.0}]
    if o.name == "muon":
        muon = torch.optim.Muon(
            matrices, lr=o.lr, weight_decay=o.weight_decay, momentum=0.95, adjust_lr_fn="match_rms_adamw"
        )
        return [muon, torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), fused=fused)]
    groups.append({"params": matrices, "weight_decay": o.weight_decay})
    return [torch.optim.AdamW(groups, lr=o.lr, betas=(0.9, 0.95), fused=fused)]


def set_rate(run: Run) -> None:
    """Linear warm-up, then cosine to zero at the run's end."""
    warm = max(1, round(run.recipe.optimiser.warmup * run.total))
    if run.step < warm:
        factor = (run.step + 1) / warm
    else:
        factor = 0.5 * (1 + math.cos(math.pi * (run.step - warm) / max(1, run.total - warm)))
    for optimiser in run.optimisers:
        for group in optimiser.param_groups:
            group["lr"] = run.recipe.optimiser.lr * factor


def save_run(run: Run, path: Path) -> None:
    state = {
        "model": run.model.state_dict(),
        "optimisers": [o.state_dict() for o in run.optimisers],
        "step": run.step,
        "total": run.total,
        "log": run.log,
    }
    buffer = io.BytesIO()  # torch.save to a file hides the system's error behind one of its own
    torch.save(state, buffer)
    write_atomically(path, iter([buffer.getvalue()]))


def resume(run: Run, path: Path) -> None:
    """Continue a run saved by `save_run` (our own file: tensors and plain values only)."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    run.model.load_state_dict(state["model"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.step, run.total, run.log = state["step"], state["total"], state["log"]
