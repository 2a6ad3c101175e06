"""What many requests have in memory, behind one contract: plan, write, mask, commit, fork, drop.

Rows of a slot are addressed by flat index modulo the layer's capacity. Committed rows sit at their absolute position;
the rows of the forward in flight ("nodes") sit right behind them, in flat order, and become visible to later forwards
only when `commit` says which of them stay. A full layer's capacity is the whole context. A sliding layer keeps
window - 1 rows plus one chunk, the most that a forward can need. Gated-delta-net layers keep a state instead of rows
(`recurrent.py`). Nothing outside these files and `attention.py` knows this layout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.models import gdn
from draftproof.models.recurrent import Flight, RecurrentStore, StateShape

Slots = slice | Tensor  # a contiguous range of slots is a view; a LongTensor of slot ids gathers a copy
REACH_STEP = 64  # on a GPU the attended length is rounded up to this, so that shapes repeat from step to step


@dataclass(frozen=True)
class LayerShape:
    """Shape of one layer's rows. `window` counts the row itself (a row sees positions > own - window)."""

    kv_heads: int
    head_dim: int
    window: int | None = None


class Cache:
    """Storage for `slots` requests of at most `capacity` rows, written `chunk` rows at a time.

    Per attention layer keys and values [slots, kv_heads, rows, head_dim], per recurrent layer a RecurrentStore; `keys`,
    `values` and `states` are addressed by layer. `lengths` [slots] counts the committed rows, on the device.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape | StateShape],
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
        attended = {layer: shape for layer, shape in enumerate(self.shapes) if isinstance(shape, LayerShape)}
        self.windows = {layer: shape.window for layer, shape in attended.items()}
        self.rows = {layer: self._rows(shape) for layer, shape in attended.items()}
        # Zeros, not empty: a masked row still takes part in 0 * value, and NaN would survive that.
        self.keys = {layer: self._storage(s, self.rows[layer], dtype, device) for layer, s in attended.items()}
        self.values = {layer: self._storage(s, self.rows[layer], dtype, device) for layer, s in attended.items()}
        self.states = {
            layer: RecurrentStore(shape, slots, dtype, device)
            for layer, shape in enumerate(self.shapes)
            if isinstance(shape, StateShape)
        }
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)

    def _rows(self, shape: LayerShape) -> int:
        if shape.window is None:
            return self.capacity
        return min(self.capacity, round_up(shape.window - 1 + self.chunk, REACH_STEP))

    def _storage(self, shape: LayerShape, rows: int, dtype: torch.dtype, device: torch.device | str) -> Tensor:
        return torch.zeros(self.slots, shape.kv_heads, rows, shape.head_dim, dtype=dtype, device=device)

    @property
    def nbytes(self) -> int:
        rows = sum(t.nbytes for t in (*self.keys.values(), *self.values.values()))
        return rows + sum(store.nbytes for store in self.states.values())

    def plan(self, slots: Slots, depth: Tensor, visible: Tensor, reach: int, *, causal: bool = False) -> Plan:
        """Prepare one forward of N nodes a slot.

        depth [R, N] is each node's distance from the root, so its position is lengths + depth; visible [R, N, N] says
        which nodes a node attends to (itself included); reach is a host-side bound on committed rows + N. causal: known
        on the host that each node follows the one before it, which is cheaper for recurrent layers.
        """
        nodes = depth.shape[1]
        if nodes > self.chunk:
            raise AssertionError(f"{nodes} nodes in one forward, the cache was made for {self.chunk}")
        step = REACH_STEP if self.lengths.is_cuda else 1
        reach = min(round_up(reach, step), self.capacity)
        return Plan(self, slots, self.lengths[slots], depth, visible, reach, causal)

    def commit(self, slots: Slots, counts: Tensor, path: Tensor | None = None) -> None:
        """Keep `counts` [R] rows of the last forward: nodes path[:, :count], or the first ones when path is None."""
        if path is not None:
            self._compact(slots, path, counts)
        for store in self.states.values():
            store.commit(slots, counts, path)
        self.lengths[slots] += counts

    def rewind(self, slots: Slots, lengths: Tensor) -> None:
        """Forget the rows behind `lengths` [R] that were committed before: only where every layer keeps them all."""
        kept = not self.states and all(window is None for window in self.windows.values())
        if not kept:
            raise AssertionError(
                "a cache with recurrent or sliding layers cannot go back behind a commit: their older state is gone"
            )
        self.lengths[slots] = lengths

    def fork(self, source: int, slots: Slots) -> None:
        """Let `slots` hold what the slot `source` has committed."""
        for store in (*self.keys.values(), *self.values.values()):
            store[slots] = store[source]
        for state in self.states.values():
            state.fork(source, slots)
        self.lengths[slots] = self.lengths[source]

    def _compact(self, slots: Slots, path: Tensor, counts: Tensor) -> None:
        step = torch.arange(path.shape[1], device=path.device)
        source = torch.where(step < counts[:, None], path, step)  # rows past the count stay where they are
        start, ids = self.lengths[slots][:, None], self._ids(slots)[:, None]
        for layer, rows in self.rows.items():
            src, dst = (start + source) % rows, (start + step) % rows
            for store in (self.keys[layer], self.values[layer]):
                store[ids, :, dst] = store[ids, :, src]  # the right side is read in full before the write

    def drop(self, slots: Slots) -> None:
        """Forget what the slots hold. Rows need no clearing: rows past `lengths` are visible to nobody."""
        for store in self.states.values():
            store.drop(slots)
        self.lengths[slots] = 0

    def _ids(self, slots: Slots) -> Tensor:
        if isinstance(slots, slice):
            return torch.arange(self.slots, device=self.lengths.device)[slots]
        return slots


class Plan:
    """One forward's addresses and masks, shared by all layers of the same window."""

    def __init__(
        self, cache: Cache, slots: Slots, start: Tensor, depth: Tensor, visible: Tensor, reach: int, causal: bool
    ) -> None:
        self.cache, self.slots, self.start, self.visible, self.reach = cache, slots, start, visible, reach
        self.depth, self.seen = depth, None if causal else visible
        self.positions = start[:, None] + depth  # [R, N] absolute positions
        self._flat = start[:, None] + torch.arange(depth.shape[1], device=depth.device)
        self._ids = cache._ids(slots)[:, None]
        self._masks: dict[int | None, Tensor] = {}
        self._folded: dict[tuple[int | None, int], Tensor | None] = {}
        self._ancestors: dict[int, Tensor] = {}
        self.written: set[int] = set()  # layers whose rows of this forward are in the cache

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Put the nodes' rows [R, kv_heads, N, head_dim] into the layer and return all rows to attend to."""
        keys, values, rows = self.cache.keys[layer], self.cache.values[layer], self._flat % self.cache.rows[layer]
        keys[self._ids, :, rows] = key.transpose(1, 2).to(keys.dtype)
        values[self._ids, :, rows] = value.transpose(1, 2).to(values.dtype)
        self.written.add(layer)
        seen = slice(0, self._seen_rows(layer))
        return keys[self.slots, :, seen], values[self.slots, :, seen]

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


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows [R, N, H] at index [R, K] -> [R, K, H]."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[-1]))


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
