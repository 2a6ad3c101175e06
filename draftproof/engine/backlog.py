"""Committed rows that the drafter has not seen: while it is not asked, their features wait here."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftproof.engine.batch import Drafter
from draftproof.models.cache import Slots

MOST_ROWS = 4096  # rows that may wait; more are taken in at once
JOINED = 256  # one-row rounds that are taken in together: no more than a drafter's forward holds


@dataclass
class Waiting:
    """Features [R, S, F] of committed rows, of which the first counts [R] stay."""

    slots: Slots
    features: list[Tensor]
    counts: Tensor
    reach: int

    @property
    def rows(self) -> int:
        return sum(f.shape[0] * f.shape[1] for f in self.features)

    def continues(self, slots: Slots, features: Tensor) -> bool:
        """One row each behind one-row rounds of the same requests. A request without a token in one round has ended, so
        what counts stands gapless at the front."""
        same = isinstance(slots, slice) and self.slots == slots and len(self.features) < JOINED
        return same and features.shape[1] == 1 and self.features[-1].shape[1] == 1


@dataclass
class Backlog:
    drafter: Drafter
    _waiting: list[Waiting] = field(default_factory=list)

    def hold(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        if self._waiting and self._waiting[-1].continues(slots, features):
            last = self._waiting[-1]
            last.features.append(features)
            last.counts, last.reach = last.counts + counts, reach
        else:
            self._waiting.append(Waiting(slots, [features], counts, reach))
        if sum(w.rows for w in self._waiting) > MOST_ROWS:
            self.take_in()

    def take_in(self) -> None:
        """The drafter's context catches up."""
        for late in self._waiting:
            self.drafter.extend(late.slots, torch.cat(late.features, 1), late.counts, late.reach)
        self._waiting.clear()

    def clear(self) -> None:
        self._waiting.clear()
