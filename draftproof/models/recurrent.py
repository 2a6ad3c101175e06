"""Recurrent state and convolution window of gated-delta-net layers: the part of the cache that rolls forward only.

The committed state of a slot is never written by a forward. A forward leaves what its rows would add ("flight");
`commit` adds the rows that were accepted, so rolling back costs nothing and no row keeps a state of its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.models import gdn


@dataclass(frozen=True)
class StateShape:
    """One layer: `heads` states of key_dim x value_dim, and the last `kernel` - 1 of `channels` columns."""

    heads: int
    key_dim: int
    value_dim: int
    channels: int
    kernel: int


class Written(Protocol):
    """What the rows of a forward write: `gdn.Written`, or a kernel's form of it."""

    def added_to(self, state: Tensor, counts: Tensor | None = None, path: Tensor | None = None) -> Tensor: ...


@dataclass(frozen=True)
class Flight:
    """What the rows of one forward add: `written` to the state, columns [R, N, channels] to the window."""

    written: Written
    columns: Tensor


class RecurrentStore:
    """state [slots, heads, key_dim, value_dim], float32 at least; window [slots, kernel - 1, channels]."""

    def __init__(self, shape: StateShape, slots: int, dtype: torch.dtype, device: torch.device | str) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.state = torch.zeros(slots, shape.heads, shape.key_dim, shape.value_dim, dtype=wide, device=device)
        self.window = torch.zeros(slots, shape.kernel - 1, shape.channels, dtype=dtype, device=device)
        self.flight: Flight | None = None

    @property
    def nbytes(self) -> int:
        return self.state.nbytes + self.window.nbytes

    def commit(self, slots: slice | Tensor, counts: Tensor, path: Tensor | None) -> None:
        if self.flight is None:
            raise AssertionError("nothing to commit: the rows of the last forward were committed before, or dropped")
        flight, self.flight = self.flight, None
        self.state[slots] = flight.written.added_to(self.state[slots], counts, path)
        self.window[slots] = gdn.last_columns(flight.columns, self.window[slots], counts, path)

    def drop(self, slots: slice | Tensor) -> None:
        self.state[slots] = 0
        self.window[slots] = 0

    def fork(self, source: int, slots: slice | Tensor) -> None:
        self.state[slots] = self.state[source]
        self.window[slots] = self.window[source]

    def swap(self, one: int, other: int) -> None:
        for store in (self.state, self.window):
            store[[one, other]] = store[[other, one]]

    def resize(self, slots: int) -> None:
        kept = min(slots, len(self.state), len(self.window))  # they differ where the last call found no memory
        for name in ("state", "window"):
            before = getattr(self, name)
            store = before.new_zeros(slots, *before.shape[1:])
            store[:kept] = before[:kept]
            setattr(self, name, store)
