"""One forward's addresses and masks over a cache: where new rows go, and who sees whom."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftproof.models import gdn
from draftproof.models.recurrent import Flight

if TYPE_CHECKING:
    from draftproof.models.cache import Cache

Slots = slice | Tensor  # a contiguous range of slots is a view; a LongTensor of slot ids gathers a copy


class Plan:
    """Shared by all layers of the same window."""

    def __init__(
        self, cache: Cache, slots: Slots, start: Tensor, depth: Tensor, visible: Tensor, reach: int, causal: bool
    ) -> None:
        self.cache, self.slots, self.start, self.visible, self.reach = cache, slots, start, visible, reach
        self.depth, self.seen = depth, None if causal else visible
        self.positions = start[:, None] + depth  # [R, N] absolute positions
        self._flat = start[:, None] + torch.arange(depth.shape[1], device=depth.device)
        self._ids = cache._ids(slots)[:, None]
        self._rows: dict[int, Tensor] = {}
        self._masks: dict[int | None, Tensor] = {}
        self._folded: dict[tuple[int | None, int], Tensor | None] = {}
        self._ancestors: dict[int, Tensor] = {}
        self.written: set[int] = set()  # layers whose rows of this forward are in the cache

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the nodes' rows [R, kv_heads, N, head_dim] into the layer and return all rows to attend to."""
        keys, values, rows = self.cache.keys[layer], self.cache.values[layer], self._places(self.cache.rows[layer])
        keys[self._ids, :, rows] = key.transpose(1, 2).to(keys.dtype)
        values[self._ids, :, rows] = value.transpose(1, 2).to(values.dtype)
        self.written.add(layer)
        seen = slice(0, self._seen_rows(layer))
        return keys[self.slots, :, seen], values[self.slots, :, seen]

    def _places(self, capacity: int) -> Tensor:
        """Where the nodes lie in layers of so many rows: the same for all layers of a kind."""
        if capacity not in self._rows:
            self._rows[capacity] = self._flat % capacity
        return self._rows[capacity]

    def recurrent(self, layer: int) -> tuple[Tensor, Tensor]:
        """The committed state and convolution window of the layer: copies or views that nobody may write to."""
        store = self.cache.states[layer]
        return store.state[self.slots], store.window[self.slots]

    def stage(self, layer: int, flight: Flight) -> None:
        """Leave what the nodes add to a recurrent layer until `commit` says which of them stay."""
        self.cache.states[layer].flight = flight
        self.written.add(layer)

    def ancestors(self, taps: int) -> Tensor | None:
        """Rows that a convolution of `taps` reads for every node (`gdn.ancestor_rows`); None in a causal forward."""
        if self.seen is None:
            return None
        if taps not in self._ancestors:
            self._ancestors[taps] = gdn.ancestor_rows(self.seen, self.depth, taps)
        return self._ancestors[taps]

    def mask(self, layer: int) -> Tensor:
        """Who sees whom: bool [R, 1, N, rows returned by write]."""
        window = self.cache.windows[layer]
        if window not in self._masks:
            self._masks[window] = self._build_mask(window, self.cache.rows[layer], self._seen_rows(layer))
        return self._masks[window]

    def folded_mask(self, layer: int, groups: int) -> Tensor | None:
        """The mask for queries whose `groups` heads a key head are folded into rows: bool [R, 1, groups * N, rows].

        None when a single node sees every row (read on the CPU alone, where looking costs no sync): kernels without a
        mask are faster.
        """
        key = (self.cache.windows[layer], groups)
        if key not in self._folded:
            mask = self.mask(layer)
            unmasked = mask.shape[2] == 1 and mask.device.type == "cpu" and bool(mask.all())
            self._folded[key] = None if unmasked else mask.repeat(1, 1, groups, 1)
        return self._folded[key]

    def _seen_rows(self, layer: int) -> int:
        return min(self.reach, self.cache.rows[layer])

    def _build_mask(self, window: int | None, rows: int, seen: int) -> Tensor:
        nodes = self.visible.shape[1]
        row = torch.arange(seen, device=self.start.device)
        newest = self.start[:, None] + nodes - 1
        flat = newest - (newest - row) % rows  # [R, rows] the newest flat index stored in each row; negative: none
        node = flat - self.start[:, None]
        index = node.clamp(0, nodes - 1)[:, None].expand(-1, nodes, -1)
        mask = torch.where((node < 0)[:, None], (flat >= 0)[:, None], self.visible.gather(2, index))
        if window is not None:
            # A committed row's position is its flat index; a node's is its depth, shared by siblings.
            own = self.positions.gather(1, index[:, 0])
            where = torch.where(node < 0, flat, own)
            mask &= where[:, None] > self.positions[:, :, None] - window
        return mask[:, None]
