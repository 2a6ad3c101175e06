"""Between the slots and the prefix cache: what a request finds there, and what it leaves."""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.engine.batch import Store
from draftproof.engine.faults import short_of_memory
from draftproof.engine.inflight import InFlight
from draftproof.engine.prefix import PrefixCache
from draftproof.engine.propose import Proposer
from draftproof.engine.slots import SlotTable

LAST_STRETCH = 16  # a state is kept this many tokens before a prompt's end, where the next turn may begin to differ


class Keeper:
    """limit: bytes. chunk: prompt rows of one forward."""

    def __init__(self, limit: int, table: SlotTable, proposer: Proposer | None, chunk: int) -> None:
        self.table, self.proposer, self.chunk = table, proposer, chunk
        self.prefix = PrefixCache(limit, stateful=any(store.stateful for store in self._stores))
        # Rows of an answer are kept so often; later, a round's nodes could lie over them in a window's ring.
        self.answer_rows = min(chunk // 2, table.cache.chunk + 1 - (proposer.rows if proposer else 1))
        near, far = table.bytes_for(1, 1024), table.bytes_for(1, 2048)
        state = sum(t.nbytes for store in self._stores for t in store.state(0))
        # A state is kept after as many rows as take the memory of one.
        self.state_rows = max(chunk, 1024 * state // max(1, far - near))

    @property
    def _stores(self) -> Sequence[Store]:
        return self.table.stores

    def take_up(self, one: InFlight) -> int:
        """Rows that an earlier request left for this one, which sits in its slot with nothing run: how many."""
        hit = self.prefix.match(one.ids[: one.goal + (one.emitted > 0)])
        for begin, rows in hit.stretches:
            for store, saved in zip(self._stores, rows, strict=True):
                store.load(one.slot, begin, saved)
        if hit.length:
            for store, state in zip(self._stores, hit.state or [[] for _ in self._stores], strict=True):
                store.restore(one.slot, hit.length, state)
        one.rows = one.kept = one.stated = hit.length
        return hit.length

    def end_of_stretch(self, one: InFlight, end: int) -> int:
        """Where a stretch of a prompt shall end, that would end at `end`."""
        pause = one.goal - LAST_STRETCH
        return pause if self.prefix.stateful and one.rows < pause < end else end

    def read(self, one: InFlight) -> None:
        """A stretch of its prompt was run."""
        self.keep(one, state=one.rows == one.goal - LAST_STRETCH or one.rows - one.stated >= self.state_rows)

    def wrote(self, one: InFlight) -> None:
        """Its answer goes on."""
        if one.rows - one.kept >= self.answer_rows:
            self.keep(one, state=False)

    def keep(self, one: InFlight, *, state: bool = True) -> None:
        """Copy what is not there yet of this request's committed rows, and the state behind them."""
        state = state and self.prefix.stateful and one.stated < one.rows
        if one.rows <= one.kept and not state:
            return
        try:
            if self.proposer:
                self.proposer.catch_up(one.slot)
            states, rows = None, [store.save(one.slot, one.kept, one.rows) for store in self._stores]
            if state:
                states, one.stated = [store.state(one.slot) for store in self._stores], one.rows
            self.prefix.add(one.ids[: one.rows], one.kept, rows, states)
        except Exception as error:
            if not short_of_memory(error):
                raise
            self.prefix.clear()  # copies are no need: tokens that were chosen already must not be lost for them
        one.kept = one.rows
