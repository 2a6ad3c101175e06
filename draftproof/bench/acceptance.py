"""Acceptance of one or two drafters along the target's own answers to public prompt sets, paired by prompt."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftproof.bench import bridge
from draftproof.bench.workloads import load_workload
from draftproof.engine.acceptance import Acceptance

if TYPE_CHECKING:
    from draftproof.engine.batch import Drafter
    from draftproof.engine.pair import Pair

SETS = (("mtbench", 80), ("humaneval", 80), ("gsm8k", 100))
TEMPERATURES = (0.0, 0.7)
RESAMPLES = 4000


@dataclass(frozen=True)
class Cell:
    """One prompt set at one temperature: acceptance of each drafter along the same texts."""

    workload: str
    temperature: float
    tokens: int
    runs: Sequence[Acceptance]


def measure(
    pair: Pair, drafters: Sequence[Drafter], *, limit: int | None, max_tokens: int, seed: int = 0
) -> list[Cell]:
    """The drafter proposes its best tokens, so the text does not depend on it: write once, replay for each."""
    cells = []
    for name, size in SETS:
        prompts = [bridge.encode(pair, p) for p in load_workload(name, min(size, limit or size))]
        for temperature in TEMPERATURES:
            texts = bridge.write_texts(pair, prompts, temperature, max_tokens, seed)
            texts = [t for t in texts if len(t.continuation_ids) > 1]
            runs = bridge.replay_texts(pair, drafters, texts)
            cells.append(Cell(name, temperature, sum(len(t.continuation_ids) for t in texts), runs))
    return cells


def gain(cells: Sequence[Cell], seed: int = 0) -> tuple[float, float, float]:
    """Mean over cells of (tau of the first drafter / tau of the second - 1), with a 95 % bootstrap interval.

    Prompts are drawn anew within each cell, the two drafters together: the comparison is paired by prompt.
    """
    draw = random.Random(seed)
    point = sum(_ratio(c, range(len(c.runs[0].texts))) for c in cells) / len(cells)
    means = sorted(
        sum(_ratio(c, draw.choices(range(len(c.runs[0].texts)), k=len(c.runs[0].texts))) for c in cells) / len(cells)
        for _ in range(RESAMPLES)
    )
    return point, means[int(0.025 * RESAMPLES)], means[int(0.975 * RESAMPLES)]


def _ratio(cell: Cell, chosen: Sequence[int]) -> float:
    first, second = (
        sum(run.texts[i].emitted for i in chosen) / sum(run.texts[i].steps for i in chosen) for run in cell.runs[:2]
    )
    return first / second - 1


def as_dict(cells: Sequence[Cell], drafters: Sequence[str]) -> dict[str, Any]:
    out: dict[str, Any] = {
        "drafters": list(drafters),
        "cells": [
            {
                "workload": c.workload,
                "temperature": c.temperature,
                "tokens": c.tokens,
                "runs": [run.as_dict() for run in c.runs],
            }
            for c in cells
        ],
        "mean_tau": [sum(c.runs[i].tau for c in cells) / len(cells) for i in range(len(drafters))],
    }
    if len(drafters) > 1:
        out["gain"], *out["gain_95"] = gain(cells)
    return out
