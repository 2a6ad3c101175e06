"""What many requests have in memory, behind one contract: plan, write, mask, commit; fork, swap, drop; save and load.

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

from draftproof.models.plan import Plan, Slots
from draftproof.models.recurrent import RecurrentStore, StateShape

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
        self.capacity = self._capacity(capacity)
        attended = {layer: shape for layer, shape in enumerate(self.shapes) if isinstance(shape, LayerShape)}
        self.windows = {layer: shape.window for layer, shape in attended.items()}
        self.rows = {layer: self._rows(shape, self.capacity) for layer, shape in attended.items()}
        # Zeros, not empty: a masked row still takes part in 0 * value, and NaN would survive that.
        self.keys = {layer: self._storage(s, self.rows[layer], dtype, device) for layer, s in attended.items()}
        self.values = {layer: self._storage(s, self.rows[layer], dtype, device) for layer, s in attended.items()}
        self.states = {
            layer: RecurrentStore(shape, slots, dtype, device)
            for layer, shape in enumerate(self.shapes)
            if isinstance(shape, StateShape)
        }
        self.lengths = torch.zeros(slots, dtype=torch.long, device=device)

    def _rows(self, shape: LayerShape, capacity: int) -> int:
        if shape.window is None:
            return capacity
        return min(capacity, round_up(shape.window - 1 + self.chunk, REACH_STEP))

    def _capacity(self, rows: int) -> int:
        """Nodes in flight lie behind the last committed row."""
        return round_up(rows + self.chunk, REACH_STEP)

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

    def swap(self, one: int, other: int, reach: int) -> None:
        """Exchange two slots, of which none holds more than `reach` rows."""
        for layer, rows in self.rows.items():
            held = slice(0, min(reach, rows))
            for store in (self.keys[layer], self.values[layer]):
                kept = store[one, :, held].clone()
                store[one, :, held] = store[other, :, held]
                store[other, :, held] = kept
        for state in self.states.values():
            state.swap(one, other)
        self.lengths[[one, other]] = self.lengths[[other, one]]

    @property
    def stateful(self) -> bool:
        """Some layer keeps a state, so a text can be taken up again only where its state was saved."""
        return bool(self.states)

    def save(self, slot: int, begin: int, end: int) -> list[Tensor]:
        """Copies of the committed rows [begin, end) of every layer, keys then values [kv_heads, rows, head_dim]. A
        sliding layer must still hold them."""
        return [
            store[slot][:, self._held(layer, begin, end)].clone()
            for layer in self.rows
            for store in self._stores(layer)
        ]

    def load(self, slot: int, begin: int, saved: Sequence[Tensor]) -> None:
        """Put saved rows back at [begin, ...); they count when `restore` says so."""
        pieces = iter(saved)
        for layer, rows in self.rows.items():
            for store in self._stores(layer):
                piece = next(pieces)
                skipped = max(0, piece.shape[1] - rows)  # a sliding layer has no room for more than its last ones
                held = self._held(layer, begin + skipped, begin + piece.shape[1])
                store[slot][:, held] = piece[:, skipped:]

    def state(self, slot: int) -> list[Tensor]:
        """What recurrent layers hold now, behind the last committed row."""
        return [t[slot].clone() for store in self.states.values() for t in (store.state, store.window)]

    def restore(self, slot: int, length: int, state: Sequence[Tensor]) -> None:
        """The slot holds `length` rows, all of them loaded, and this state."""
        pieces = iter(state)
        for store in self.states.values():
            store.state[slot], store.window[slot] = next(pieces), next(pieces)
        self.lengths[slot] = length

    def resize(self, slots: int, capacity: int) -> None:
        """Room for `slots` requests of `capacity` rows; what lies beyond either is lost. Layer by layer, so that at
        most one of them is in memory twice; where that runs out, what was there before still is."""
        wanted, kept = self._capacity(capacity), min(slots, self.slots)
        self.capacity, self.slots = min(self.capacity, wanted), kept
        for layer, old in list(self.rows.items()):
            shape = self.shapes[layer]
            assert isinstance(shape, LayerShape)
            rows, made = self._rows(shape, wanted), []
            for before in self._stores(layer):
                store = before.new_zeros(slots, shape.kv_heads, rows, shape.head_dim)
                both = min(old, rows)
                store[:kept, :, :both] = before[:kept, :, :both]
                made.append(store)
            self.keys[layer], self.values[layer] = made
            self.rows[layer] = rows
        for state in self.states.values():
            state.resize(slots)
        lengths = self.lengths.new_zeros(slots)
        lengths[:kept] = self.lengths[:kept]
        self.lengths, self.slots, self.capacity = lengths, slots, wanted

    def bytes_a_slot(self, capacity: int) -> int:
        """Memory of one request with room for `capacity` rows."""
        total = sum(store.nbytes for store in self.states.values()) // self.slots
        for layer in self.rows:
            shape = self.shapes[layer]
            assert isinstance(shape, LayerShape)
            rows = self._rows(shape, self._capacity(capacity))
            total += 2 * rows * shape.kv_heads * shape.head_dim * self.keys[layer].element_size()
        return total

    def _held(self, layer: int, begin: int, end: int) -> slice | Tensor:
        """Where the rows [begin, end) of a text lie in the layer."""
        rows = self.rows[layer]
        if begin // rows == max(begin, end - 1) // rows:
            return slice(begin % rows, begin % rows + end - begin)
        return torch.arange(begin, end, device=self.lengths.device) % rows

    def _stores(self, layer: int) -> tuple[Tensor, Tensor]:
        return self.keys[layer], self.values[layer]

    def rewind(self, slots: Slots, lengths: Tensor) -> None:
        """Forget the rows behind `lengths` [R] that were committed before: only where every layer keeps them all."""
        kept = not self.states and all(window is None for window in self.windows.values())
        if not kept:
            raise AssertionError(
                "a cache with recurrent or sliding layers cannot go back behind a commit: their older state is gone"
            )
        self.lengths[slots] = lengths

    def fork(self, source: int, slots: Slots, reach: int | None = None) -> None:
        """Let `slots` hold what the slot `source` has committed: no more than `reach` rows."""
        for layer, rows in self.rows.items():
            held = slice(0, rows if reach is None else min(reach, rows))
            for store in self._stores(layer):
                store[slots, :, held] = store[source, :, held]
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


def take_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows [R, N, H] at index [R, K] -> [R, K, H]."""
    return rows.gather(1, index[:, :, None].expand(-1, -1, rows.shape[-1]))


def round_up(value: int, step: int) -> int:
    return -(-value // step) * step
