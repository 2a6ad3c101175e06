"""Acceptance as counts, rates and an interval. Nothing here imports torch.

tau = emitted / steps, where a step emits its accepted drafts and one token of the target's own. The per-position rate
at i is the share of steps that accepted at least i + 1 drafts. The interval treats texts as the independent units
(ratio estimator with clusters), because steps of one text are alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass
class TextAcceptance:
    """Accepted drafts of every step along one text."""

    accepted: list[int] = field(default_factory=list)

    @property
    def steps(self) -> int:
        return len(self.accepted)

    @property
    def emitted(self) -> int:
        return sum(self.accepted) + self.steps


@dataclass(frozen=True)
class Acceptance:
    """Over all texts: depth is the number of drafts a step proposes."""

    texts: Sequence[TextAcceptance]
    depth: int

    @property
    def steps(self) -> int:
        return sum(t.steps for t in self.texts)

    @property
    def emitted(self) -> int:
        return sum(t.emitted for t in self.texts)

    @property
    def tau(self) -> float:
        return self.emitted / self.steps if self.steps else math.nan

    @property
    def reached(self) -> list[int]:
        """Steps that accepted at least 1, 2, ... depth drafts."""
        return [sum(a >= i for a in self._all()) for i in range(1, self.depth + 1)]

    @property
    def per_position(self) -> list[float]:
        return [n / self.steps if self.steps else math.nan for n in self.reached]

    def interval(self) -> tuple[float, float]:
        """95 % interval of tau; (nan, nan) below two texts."""
        n = len(self.texts)
        if n < 2 or not self.steps:
            return math.nan, math.nan
        tau = self.tau
        spread = sum((t.emitted - tau * t.steps) ** 2 for t in self.texts)
        half = student_t(n - 1) * math.sqrt(n / (n - 1) * spread) / self.steps
        return tau - half, tau + half

    def as_dict(self) -> dict[str, Any]:
        low, high = self.interval()
        return {
            "tau": self.tau,
            "tau_95": None if math.isnan(low) else [low, high],
            "steps": self.steps,
            "emitted": self.emitted,
            "accepted": self.emitted - self.steps,
            "per_position": self.per_position,
            "reached": self.reached,
            "texts": len(self.texts),
        }

    def _all(self) -> Iterable[int]:
        return (a for t in self.texts for a in t.accepted)


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean and 95 % t-interval of independent values (nan bounds below two)."""
    n = len(values)
    mean = sum(values) / n if n else math.nan
    if n < 2:
        return mean, math.nan, math.nan
    half = student_t(n - 1) * math.sqrt(sum((v - mean) ** 2 for v in values) / (n - 1) / n)
    return mean, mean - half, mean + half


def student_t(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, by the Cornish-Fisher expansion (within 1 % from 3 degrees up)."""
    if freedom == 1:
        return 12.706
    if freedom == 2:
        return 4.303
    z = 1.959964
    g1 = (z**3 + z) / 4
    g2 = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    g3 = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + g1 / freedom + g2 / freedom**2 + g3 / freedom**3
