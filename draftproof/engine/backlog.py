"""Committed rows that the drafter has not seen: while it is not asked, their features wait here, by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from draftproof.engine.batch import Drafter
from draftproof.models.cache import Slots

MOST_ROWS = 4096  # rows that may wait; more are taken in at once


@dataclass
class Backlog:
    """chunk: the most rows a request that one `extend` of the drafter brings."""

    drafter: Drafter
    chunk: int = 256
    _waiting: dict[int, list[Tensor]] = field(default_factory=dict)  # slot -> features [rows, F], in order
    _rows: int = 0
    _reach: int = 0

    def hold(self, slots: slice, features: Tensor, reach: int) -> None:
        """Features [R, S, F] of rows that were all committed; reach: a bound on committed rows, these included."""
        for row, slot in enumerate(range(slots.start, slots.stop)):
            self._waiting.setdefault(slot, []).append(features[row])
        self._rows += features.shape[0] * features.shape[1]
        self._reach = max(self._reach, reach)
        if self._rows > MOST_ROWS:
            self.take_in()

    def take_in(self, slots: Sequence[int] | None = None) -> None:
        """The drafter's context catches up, in these slots or in all."""
        late = {s: torch.cat(self._waiting.pop(s)) for s in sorted(self._waiting) if slots is None or s in slots}
        self._rows -= sum(len(rows) for rows in late.values())
        for begin in range(0, max(map(len, late.values()), default=0), self.chunk):
            self._extend({s: rows[begin : begin + self.chunk] for s, rows in late.items() if len(rows) > begin})

    def _extend(self, late: dict[int, Tensor]) -> None:
        widest = max(map(len, late.values()))
        features = torch.stack([pad(rows, (0, 0, 0, widest - len(rows))) for rows in late.values()])
        counts = torch.tensor([len(rows) for rows in late.values()], device=features.device)
        self.drafter.extend(together(list(late), features.device), features, counts, self._reach + widest)

    def drop(self, slot: int) -> None:
        self._rows -= sum(map(len, self._waiting.pop(slot, [])))

    def swap(self, one: int, other: int) -> None:
        kept = {s: self._waiting.pop(s) for s in (one, other) if s in self._waiting}
        self._waiting |= {one + other - s: rows for s, rows in kept.items()}

    def clear(self) -> None:
        self._waiting.clear()
        self._rows = self._reach = 0


def together(slots: list[int], device: torch.device) -> Slots:
    """Ascending slots as a range where they are one."""
    if slots == list(range(slots[0], slots[-1] + 1)):
        return slice(slots[0], slots[-1] + 1)
    return torch.tensor(slots, device=device)
