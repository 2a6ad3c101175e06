"""Keys and values of many requests behind one contract: plan, write, mask, commit, drop.

Rows of a slot are addressed by flat index modulo the layer's capacity. Committed rows sit at their absolute position;
the rows of the forward in flight ("nodes") sit right behind them, in flat order, and become visible to later forwards
only when `commit` says which of them stay. A full layer's capacity is the whole context. A sliding layer keeps
window - 1 rows plus one chunk, the most that a forward can need. Nothing outside this file and `attention.py` knows
this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

Slots = slice | Tensor  # a contiguous range of slots is a view; a LongTensor of slot ids gathers a copy
REACH_STEP = 64  # on a GPU the attended length is rounded up to this, so that shapes repeat from step to step


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's rows. `window` counts the row itself (a row sees positions > own - window)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


class KVCache:
    """Dense K/V storage for `slots` requests of at most `capacity` rows, written `chunk` rows at a time.

    Storage per layer: [slots, kv_heads, rows, head_dim]. `lengths` [slots] counts the committed rows, on the device.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        *,
        slots: int,
        capacity: int,
        chunk: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self.shapes = tuple(shapes)
        self.slots, self.chunk = slots, chunk
        self.capacity = round_up(capacity + chunk, REACH_STEP)  # nodes in flight lie behind the last committed row
        self.rows = tuple(self._rows(shape) for shape in self.shapes)
        # Zeros, not empty: a masked row still takes part in 0 * value, and NaN would survive that.
        self.keys = [self._storage(s, n, dtype, device) for s, n in zip(self.shapes, self.rows, strict=True)]
        self.values = [self._storage(s, n, dtype, device) for s, n in zip(self.shapes, self.rows, strict=True)]
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)

    def _rows(self, shape: LayerShape) -> int:
        if shape.window is None:
            return self.capacity
        return min(self.capacity, round_up(shape.window - 1 + self.chunk, REACH_STEP))

    def _storage(self, shape: LayerShape, rows: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return torch.zeros(self.slots, shape.kv_heads, rows, shape.head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.keys, *self.values))

    def plan(self, slots: Slots, depth: Tensor, visible: Tensor, reach: int) -> Plan:
        """Prepare one forward of N nodes a slot.

        depth [R, N] is each node's distance from the root, so its position is lengths + depth; visible [R, N, N] says
        which nodes a node attends to (itself included); reach is a host-side bound on committed rows + N.
        """
        nodes = depth.shape[1]
        if nodes > self.chunk:
            raise AssertionError(f"{nodes} nodes in one forward, the cache was made for {self.chunk}")
        step = REACH_STEP if self.lengths.is_cuda else 1
        reach = min(round_up(reach, step), self.capacity)
        return Plan(self, slots, self.lengths[slots], depth, visible, reach)

    def commit(self, slots: Slots, counts: Tensor, path: Tensor | None = None) -> None:
        """Keep `counts` [R] rows of the last forward: nodes path[:, :count], or the first ones when path is None."""
        if path is not None:
            self._compact(slots, path, counts)
        self.lengths[slots] += counts

    def _compact(self, slots: Slots, path: Tensor, counts: Tensor) -> None:
        step = torch.arange(path.shape[1], device=path.device)
        source = torch.where(step < counts[:, None], path, step)  # rows past the count stay where they are
        start, ids = self.lengths[slots][:, None], self._ids(slots)[:, None]
        for layer, rows in enumerate(self.rows):
            src, dst = (start + source) % rows, (start + step) % rows
            for store in (self.keys[layer], self.values[layer]):
                store[ids, :, dst] = store[ids, :, src]  # the right side is read in full before the write

    def drop(self, slots: Slots) -> None:
        """Forget what the slots hold. Rows need no clearing: rows past `lengths` are visible to nobody."""
        self.lengths[slots] = 0

    def _ids(self, slots: Slots) -> Tensor:
        if isinstance(slots, slice):
            return torch.arange(self.slots, device=self.lengths.device)[slots]
        return slots


class Plan:
    """One forward's addresses and masks, shared by all layers of the same window."""

    def __init__(self, cache: KVCache, slots: Slots, start: Tensor, depth: Tensor, visible: Tensor, reach: int) -> None:
        self.cache, self.slots, self.start, self.visible, self.reach = cache, slots, start, visible, reach
        self.positions = start[:, None] + depth  # [R, N] absolute positions
        self._flat = start[:, None] + torch.arange(depth.shape[1], device=depth.device)
        self._ids = cache._ids(slots)[:, None]
        self._masks: dict[int | None, Tensor] = {}
        self._folded: dict[tuple[int | None, int], Tensor | None] = {}
        self.written: set[int] = set()  # layers whose rows of this forward are in the cache

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the nodes' rows [R, kv_heads, N, head_dim] into the layer and return all rows to attend to."""
        keys, values, rows = self.cache.keys[layer], self.cache.values[layer], self._flat % self.cache.rows[layer]
        keys[self._ids, :, rows] = key.transpose(1, 2).to(keys.dtype)
        values[self._ids, :, rows] = value.transpose(1, 2).to(values.dtype)
        self.written.add(layer)
        seen = slice(0, self._seen_rows(layer))
        return keys[self.slots, :, seen], values[self.slots, :, seen]

    def mask(self, layer: int) -> Tensor:
        """Who sees whom: bool [R, 1, N, rows returned by write]."""
        window = self.cache.shapes[layer].window
        if window not in self._masks:
            self._masks[window] = self._build_mask(window, self.cache.rows[layer], self._seen_rows(layer))
        return self._masks[window]

    def folded_mask(self, layer: int, groups: int) -> Tensor | None:
        """The mask for queries whose `groups` heads a key head are folded into rows: bool [R, 1, groups * N, rows].

        None when a single node sees every row (read on the CPU alone, where looking costs no sync): kernels without a
        mask are faster.
        """
        key = (self.cache.shapes[layer].window, groups)
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


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
