"""Training by the clock: the learning rate follows the share of the seconds that is spent, resumed runs included.

Everything is float32 with TF32 products on a GPU. Autocast would hand the delta rule's triangular solve two dtypes, and
a model of this size is bound by the number of kernels, not by their arithmetic.
"""

from __future__ import annotations

import io
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.train.loop import make_optimisers
from draftproof.train.recipe import Optimiser
from draftproof.train.toy.loss import evaluate, held_rows, losses
from draftproof.train.toy.shape import ToyModel

SECOND = 0.5  # weight of the second draft's loss beside the first's
CLIP = 1.0
WARMUP = 0.02  # share of the seconds


@dataclass
class ToyRun:
    """`seconds` spent in training so far; `log` holds one dict per report."""

    model: ToyModel
    optimisers: list[torch.optim.Optimizer]
    lr: float
    seed: int
    step: int = 0
    seconds: float = 0.0
    log: list[dict[str, Any]] = field(default_factory=list)


def begin(model: ToyModel, lr: float, seed: int) -> ToyRun:
    """Muon for the matrices, AdamW for the rest; the embedding is a table, not a map, so AdamW has it."""
    decoder = model.lm.model
    optimiser = Optimiser(name="muon", lr=lr, weight_decay=0.1)
    optimisers = make_optimisers(nn.ModuleList([decoder.layers, decoder.norm, model.mtp]), optimiser)
    table = torch.optim.AdamW([model.embedding], lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    return ToyRun(model, [*optimisers, table], lr, seed)


def train(
    run: ToyRun,
    stream: dict[str, Tensor],
    *,
    budget: float,
    sequences: int,
    length: int,
    report: Callable[[dict[str, Any]], None],
    save: Callable[[], None],
    report_every: float = 15.0,
    save_every: float = 60.0,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Go on until `run.seconds` reaches `budget`; reports and saves by the clock, and at the end."""
    device = run.model.embedding.device
    if device.type == "cuda":
        allow_tf32(run.model.lm.model.rotary_emb)
    tokens, held = stream["train"].to(device), held_rows(stream["held"], length).to(device)
    parts = [run.model.trunk(), list(run.model.mtp.parameters())]
    sums, since, last, saved = torch.zeros(3, device=device), 0, clock(), clock()
    spent, reported = run.seconds, clock()
    run.model.train()
    while run.seconds < budget:
        set_rate(run, budget)
        rows = pick_rows(len(stream["train"]), stream["starts"], sequences, length, run.seed, run.step)
        found = losses(run.model, tokens[rows.to(device)].long())
        (found[0] + found[1] + SECOND * found[2]).backward()
        for part in parts:
            nn.utils.clip_grad_norm_(part, CLIP)
        for optimiser in run.optimisers:
            optimiser.step()
            optimiser.zero_grad(set_to_none=True)
        run.step, since, sums = run.step + 1, since + 1, sums + found.detach()
        now = clock()
        run.seconds, last = run.seconds + now - last, now
        if now - reported >= report_every or run.seconds >= budget:
            means = (sums / since).tolist()
            if not all(map(math.isfinite, means)):
                raise UserError("weights-invalid", f"losses at step {run.step}: {means}", "start again with less --lr")
            rate = since * sequences * length / max(run.seconds - spent, 1e-9)
            run.log.append(entry(run, means, rate, evaluate(run.model, held)))
            report(run.log[-1])
            sums, since, spent, reported = torch.zeros_like(sums), 0, run.seconds, clock()
        if now - saved >= save_every:
            save()
            saved = clock()
    save()


def allow_tf32(rotary: nn.Module) -> None:
    """TF32 for all products but those of positions and frequencies (a matrix product in transformers 5.17), where its
    ten bits would turn the angles of late positions by a tenth."""

    def precision(name: str) -> Callable[..., None]:
        return lambda *_: torch.set_float32_matmul_precision(name)

    rotary.register_forward_pre_hook(precision("highest"))
    rotary.register_forward_hook(precision("high"))
    torch.set_float32_matmul_precision("high")


def entry(run: ToyRun, means: list[float], rate: float, held: dict[str, Any]) -> dict[str, Any]:
    mean = [round(x, 4) for x in means]
    return {"step": run.step, "seconds": round(run.seconds, 1), "tokens_per_s": round(rate), "loss": mean, **held}


def pick_rows(size: int, starts: Tensor, sequences: int, length: int, seed: int, step: int) -> Tensor:
    """Indices [sequences, length] into a stream of `size` ids: rows of every other kind begin where a document does, as
    texts that are served do. The choice follows seed and step alone, so a run can resume."""
    draw = torch.Generator().manual_seed(seed * 1_000_003 + step)
    anywhere = torch.randint(0, size - length + 1, (sequences,), generator=draw)
    whole = starts[torch.randint(0, len(starts), (sequences,), generator=draw)].clamp(max=size - length)
    begins = torch.where(torch.arange(sequences) % 2 == 0, whole, anywhere)
    return begins[:, None] + torch.arange(length)


def set_rate(run: ToyRun, budget: float) -> None:
    """Linear warm-up by the clock, then cosine to zero at the budget."""
    share = min(run.seconds / budget, 1.0)
    factor = (share + 1e-3) / (WARMUP + 1e-3) if share < WARMUP else 0.5 * (1 + math.cos(math.pi * share))
    for optimiser in run.optimisers:
        for group in optimiser.param_groups:
            group["lr"] = run.lr * factor


def save_run(run: ToyRun, path: Path) -> None:
    state = {
        "model": run.model.state_dict(),
        "optimisers": [o.state_dict() for o in run.optimisers],
        "step": run.step,
        "seconds": run.seconds,
        "log": run.log,
    }
    buffer = io.BytesIO()
    torch.save(state, buffer)
    write_atomically(path, iter([buffer.getvalue()]))


def resume(run: ToyRun, path: Path) -> None:
    """Continue a run saved by `save_run` (our own file: tensors and plain values only)."""
    state = torch.load(path, map_location="cpu", weights_only=True)
    run.model.load_state_dict(state["model"])
    for optimiser, saved in zip(run.optimisers, state["optimisers"], strict=True):
        optimiser.load_state_dict(saved)
    run.step, run.seconds, run.log = state["step"], state["seconds"], state["log"]
