"""Who sits in which slot of the caches, and how large the caches are.

Requests that decode sit in slots 0, 1, ... without a hole, so that a step sees views and copies nothing; those whose
prompt is still being run sit behind them. The caches begin small and grow as texts do, within `memory`: with longer
texts fewer requests fit.
"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.batch import Store
from draftproof.engine.faults import short_of_memory
from draftproof.engine.inflight import InFlight
from draftproof.engine.propose import Proposer
from draftproof.models.cache import Cache

FIRST_SLOTS, FIRST_ROWS = 4, 512  # that caches grow to at first


class SlotTable:
    """most: slots at most. context: rows of a request at most. memory: bytes of all stores; None: room for all is
    made at once."""

    def __init__(self, cache: Cache, proposer: Proposer | None, most: int, context: int, memory: int | None) -> None:
        self.cache, self.proposer, self.most, self.context, self.memory = cache, proposer, most, context, memory
        self.rows = context if memory is None else 1
        self.at: list[InFlight | None] = [None] * cache.slots
        self.starved = False  # the machine's memory was short when room was last asked for
        self._bytes: dict[int, int] = {}  # of a slot, by rows: asked for every request after every step

    @property
    def stores(self) -> Sequence[Store]:
        return [self.cache, *(self.proposer.drafter.stores if self.proposer else ())]

    @property
    def taken(self) -> list[InFlight]:
        return [one for one in self.at if one is not None]

    @property
    def decoding(self) -> list[InFlight]:
        """In the order of their slots, which begin at 0."""
        return [one for one in self.taken if one.decoding]

    def bytes_for(self, slots: int, rows: int) -> int:
        if rows not in self._bytes:
            self._bytes[rows] = sum(store.bytes_a_slot(rows) for store in self.stores)
        return slots * self._bytes[rows]

    @property
    def nbytes(self) -> int:
        return self.bytes_for(len(self.at), self.rows)

    def fit(self, requests: int, rows: int) -> bool:
        """Make room for so many requests of so many committed rows each. False: there is none within `memory`, or the
        machine has none (`starved`). An error for want of memory: as in `order`."""
        self.starved = False
        if requests > self.most or rows > self.context:
            return False
        if requests <= len(self.at) and rows <= self.rows:
            return True
        longer = self.rows if rows <= self.rows else min(self.context, max(rows, 2 * self.rows, FIRST_ROWS))
        wider = (
            len(self.at) if requests <= len(self.at) else min(self.most, max(requests, 2 * len(self.at), FIRST_SLOTS))
        )
        exact = min(self.context, -(-rows // 64) * 64)
        for slots, length in ((wider, longer), (requests, longer), (requests, exact)):
            if (self.memory is None or self.bytes_for(slots, length) <= self.memory) and self._resized(slots, length):
                return True
        return False

    def enter(self, one: InFlight) -> None:
        """Into the first free slot; the caches forget what was there."""
        one.slot = self.at.index(None)
        self.at[one.slot] = one
        own = slice(one.slot, one.slot + 1)
        self.cache.drop(own)
        if self.proposer:
            self.proposer.drop(own)

    def leave(self, leaving: Sequence[InFlight]) -> None:
        """Holes stay where they sat: `order` is next."""
        for one in leaving:
            if self.proposer:
                self.proposer.backlog.drop(one.slot)
            self.at[one.slot], one.slot = None, -1

    def order(self) -> None:
        """Those that decode come first, without a hole; nobody moves who need not. A move that fails for want of memory
        may leave the stores with different requests in a slot: then nobody's rows may be used any more."""
        first = len(self.decoding)
        late = [one.slot for one in self.decoding if one.slot >= first]
        for slot in range(first):
            occupant = self.at[slot]
            if occupant is None or not occupant.decoding:
                self._move(late.pop(), slot)

    def _close_up(self) -> None:
        """Nobody sits behind an empty slot."""
        self.order()
        while (taken := self.taken) and taken[-1].slot >= len(taken):
            self._move(taken[-1].slot, self.at.index(None))

    def _move(self, source: int, slot: int) -> None:
        """Into a slot that is empty, or in exchange with who sits there."""
        one, other = self.at[source], self.at[slot]
        assert one is not None
        reach = max(one.rows, other.rows if other else 0)
        for store in self.stores:
            if other is None:
                store.fork(source, slice(slot, slot + 1), reach)
            else:
                store.swap(source, slot, reach)
        if self.proposer:
            self.proposer.backlog.swap(source, slot)
        self.at[slot], self.at[source], one.slot = one, other, slot
        if other is not None:
            other.slot = source

    def _resized(self, slots: int, rows: int) -> bool:
        self._close_up()
        try:
            for store in self.stores:
                store.resize(slots, rows)
        except Exception as error:
            if not short_of_memory(error):
                raise
            self.starved = True
            self.at, self.rows = self.at[:slots], min(self.rows, rows)  # what was resized already may be smaller now
            return False
        self.at = (self.at + [None] * slots)[:slots]
        self.rows = rows
        return True
