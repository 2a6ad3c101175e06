"""Slots and memory: what caches hold survives every move, they stay within their bytes, and nobody is sent round."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, SamplingParams
from draftproof.errors import UserError
from draftproof.models import cache as cache_module
from draftproof.models.cache import Cache
from draftproof.models.mtp import Lane
from draftproof.models.recurrent import RecurrentStore
from draftproof.models.target import causal_plan
from tests.engine.company import (
    CONTEXT,
    Coming,
    Reader,
    Small,
    at_rest,
    cache_bytes,
    engine_for,
    only,
    owner,
    pool,
    real_drafter,
    run,
    words,
)

pytestmark = pytest.mark.filterwarnings("ignore:a logits processor keeps state")
KINDS = ("llama", "gemma3", "qwen3_5", "mtp")
LENGTHS = (70, 3, 41)  # rows of three slots: rings of window 8 and chunk 7 have gone round
CHUNK = 7


# --- what a slot holds ----------------------------------------------------------------------------------


def filled(kind: str) -> list[Any]:
    """The stores of target and real drafter with three texts in them."""
    target, drafter = owner(kind), real_drafter(kind)
    cache = target.new_cache(slots=3, capacity=80, chunk=CHUNK)
    drafter.allocate(slots=3, capacity=80, chunk=CHUNK)
    for slot, length in enumerate(LENGTHS):
        text, own = words(slot, length), slice(slot, slot + 1)
        for begin in range(0, length, CHUNK):
            tokens = torch.tensor([text[begin : begin + CHUNK]])
            count = torch.tensor([tokens.shape[1]])
            out = target.forward(tokens, causal_plan(cache, own, tokens.shape[1], 80), taps=drafter.taps, rows=1)
            cache.commit(own, count)
            drafter.extend(own, out.features, count, 80)
    return [cache, *drafter.stores]


def held(store: Any, slot: int) -> list[Tensor]:
    """All that a later forward may see of the slot: rows within the window, states, lengths, what waits."""
    cache: Cache = store.cache if isinstance(store, Lane) else store
    length, seen = int(cache.lengths[slot]), []
    for layer, rows in cache.rows.items():
        window = cache.windows[layer]
        flat = torch.arange(0 if window is None else max(0, length - window + 1), length) % rows
        seen += [cache.keys[layer][slot][:, flat], cache.values[layer][slot][:, flat]]
    seen += [t[slot].clone() for s in cache.states.values() for t in (s.state, s.window)]
    waits = [store.pending[slot].clone(), store.held[slot].clone()] if isinstance(store, Lane) else []
    return [*seen, torch.tensor(length), *waits]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_moves_and_sizes_change_nothing(kind: str) -> None:
    """Any exchanges, and any sizes that the longest text fits in: wider, narrower than a ring, more and fewer slots."""
    moves = st.one_of(
        st.tuples(st.just("swap"), st.integers(0, 2), st.integers(0, 2)),
        st.tuples(st.just("fork"), st.integers(0, 2), st.just(3)),
        st.tuples(st.just("resize"), st.integers(3, 6), st.integers(70, 200)),
    )

    @settings(deadline=None, max_examples=8, derandomize=True, database=None)
    @given(st.lists(moves, min_size=1, max_size=6))
    def checked(moves: list[tuple[str, int, int]]) -> None:
        stores = filled(kind)
        wanted = [[held(store, slot) for slot in range(3)] for store in stores]
        where = [0, 1, 2]
        for move, a, b in moves:
            for store in stores:
                if move == "resize":
                    store.resize(a, b)
                elif move == "fork":  # away and back
                    store.resize(4, 80)
                    store.fork(a, slice(3, 4), LENGTHS[where[a]])
                    store.drop(slice(a, a + 1))
                    store.fork(3, slice(a, a + 1), LENGTHS[where[a]])
                else:
                    store.swap(a, b, max(LENGTHS[where[a]], LENGTHS[where[b]]))
            if move == "swap":
                where[a], where[b] = where[b], where[a]
        for store, before in zip(stores, wanted, strict=True):
            assert all(equal(held(store, slot), before[text]) for slot, text in enumerate(where))

    with patch.object(cache_module, "REACH_STEP", 8):
        checked()


def test_a_short_text_survives_a_capacity_below_its_ring() -> None:
    with patch.object(cache_module, "REACH_STEP", 8):
        stores = filled("gemma3")
        before = [held(store, 1) for store in stores]
        for store in stores:
            store.swap(0, 1, 70)
            store.resize(1, 4)
        rings = [rows for layer, rows in stores[0].rows.items() if stores[0].windows[layer]]
        assert set(rings) == {16} and all(equal(held(s, 0), b) for s, b in zip(stores, before, strict=True))
        for store in stores:
            store.resize(4, 90)
        assert all(equal(held(s, 0), b) for s, b in zip(stores, before, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_rows_and_state_are_put_back(kind: str) -> None:
    """In parts of a chunk, as the engine saves them, into another slot."""
    stores = filled(kind)
    for store in stores:
        before = held(store, 0)
        length = LENGTHS[0]
        cache: Cache = store.cache if isinstance(store, Lane) else store
        ring = min([rows for layer, rows in cache.rows.items() if cache.windows[layer]], default=length)
        begin = max(0, length - ring)
        saved, state = (
            [(at, store.save(0, at, min(length, at + CHUNK))) for at in range(begin, length, CHUNK)],
            store.state(0),
        )
        store.drop(slice(2, 3))
        for at, rows in saved:
            store.load(2, at, rows)
        store.restore(2, length, state)
        again = held(store, 2)
        if begin == 0:
            assert equal(again, before)
        else:  # full layers lack what stood before, which was not saved here
            layers = list(cache.windows.values())
            assert all(equal(again[2 * i : 2 * i + 2], before[2 * i : 2 * i + 2]) for i, w in enumerate(layers) if w)


def cleared(self: RecurrentStore, slots: int, honest: Callable[..., None] = RecurrentStore.resize) -> None:
    self.drop(slice(0, len(self.state)))
    honest(self, slots)


FAULTS: dict[str, tuple[str, type, str, Callable[..., Any]]] = {
    "rows are not moved": ("llama", Cache, "swap", lambda *a: None),
    "too few rows are moved": ("llama", Cache, "swap", lambda s, a, b, r, o=Cache.swap: o(s, a, b, r - 1)),
    "a state is not moved": ("qwen3_5", RecurrentStore, "swap", lambda *a: None),
    "states are cleared": ("qwen3_5", RecurrentStore, "resize", cleared),
    "what waits is not moved": ("mtp", Lane, "swap", lambda s, a, b, r: s.cache.swap(a, b, r)),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_move_that_loses_something(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owning, name, planted = FAULTS[fault]
    stores = filled(kind)
    before = [held(store, 0) for store in stores]
    monkeypatch.setattr(owning, name, planted)
    for store in stores:
        store.swap(0, 1, 70)
        store.resize(4, 100)
    assert not all(equal(held(store, 1), b) for store, b in zip(stores, before, strict=True))


# --- bytes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_caches_stay_within_their_memory(kind: str) -> None:
    """Whatever is asked for: a yes has room for it, a no could not have."""

    @settings(deadline=None, max_examples=25, derandomize=True, database=None)
    @given(
        st.floats(1.0, 4.0),
        st.lists(st.tuples(st.integers(1, 5), st.integers(1, CONTEXT + 1)), min_size=1, max_size=6),
    )
    def checked(times: float, asked: list[tuple[int, int]]) -> None:
        memory = int(times * engine_for(kind, "dflash").table.bytes_for(1, CONTEXT))
        table = (engine := engine_for(kind, "dflash", slots=4, memory=memory)).table
        for requests, rows in asked:
            if table.fit(requests, rows):
                assert len(table.at) >= requests and table.rows >= rows
                assert all(store.bytes_a_slot(table.rows) for store in table.stores)
            else:
                least = table.bytes_for(requests, min(CONTEXT, -(-rows // 64) * 64))
                assert requests > 4 or rows > CONTEXT or least > memory
            assert cache_bytes(engine) == table.nbytes <= memory

    checked()


def test_control_a_table_that_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Lane, "bytes_a_slot", lambda self, capacity: 0)
    table = (engine := engine_for("mtp", "dflash", slots=4, memory=10**6)).table
    assert table.fit(4, 60) and cache_bytes(engine) != table.nbytes


@pytest.mark.parametrize("kind", KINDS)
def test_one_request_of_the_whole_context_always_fits(kind: str) -> None:
    asked = Request(words(1, CONTEXT - 6), 6, SamplingParams(temperature=1.0, seed=1))
    wanted = only(Engine(owner(kind), None, context=CONTEXT), asked).tokens
    memory = engine_for(kind, "dflash").table.bytes_for(1, CONTEXT)
    engine = engine_for(kind, "dflash", slots=3, memory=memory)
    numbers = [engine.add(pool(0)), engine.add(asked), engine.add(pool(8))]
    given: dict[int, list[int]] = {number: [] for number in numbers}
    while engine.busy:
        for result in engine.step():
            given[result.index] += result.tokens
        assert cache_bytes(engine) <= memory
    assert given[numbers[1]] == wanted and all(given.values())
    with pytest.raises(UserError, match="one request of 128 tokens takes"):
        engine_for(kind, "dflash", slots=3, memory=memory - 1)


def test_memory_is_not_taken_before_it_is_needed() -> None:
    table = engine_for("llama", "plain", slots=64, memory=10**12).table
    assert table.nbytes == table.bytes_for(1, 1) < table.bytes_for(64, CONTEXT) / 64
    assert engine_for("llama", "plain", slots=2).table.nbytes == table.bytes_for(2, CONTEXT)


# --- who sits where -------------------------------------------------------------------------------------


def tidy(engine: Engine) -> None:
    """Those that decode sit in front without a hole, and every cache holds as many rows as the table thinks."""
    table = engine.table
    for slot, one in enumerate(table.at):
        assert one is None or (one.slot == slot and int(engine.cache.lengths[slot]) == one.rows)
    assert [one.slot for one in table.decoding] == list(range(len(table.decoding)))
    assert all(one.slot == -1 for one in engine.waiting)
    assert len({id(one) for one in (*table.taken, *engine.waiting)}) == len(table.taken) + len(engine.waiting)
    readers = [store for store in table.stores if isinstance(store, Reader)]
    late = {slot: sum(map(len, rows)) for slot, rows in backlog(engine).items()}
    for reader in readers:
        for one in table.taken:
            begun = [*reader.read[one.slot], *one.ids[one.rows - late.get(one.slot, 0) : one.rows]]
            assert begun == one.ids[: one.rows]


def backlog(engine: Engine) -> dict[int, list[Tensor]]:
    return engine.proposer.backlog._waiting if engine.proposer else {}


def rows_of(times: float, kind: str, how: str) -> int:
    return int(times * engine_for(kind, how, chunk=12).table.bytes_for(1, CONTEXT))


LINE = [Coming(n, step) for step, n in enumerate((9, 3, 4, 7, 1, 9, 3, 8, 4))]


@pytest.mark.parametrize(("kind", "how", "prefix"), [("llama", "tree", 10**8), ("gemma3", "chain", 0)])
def test_a_line_that_just_does_not_fit_is_not_sent_round(kind: str, how: str, prefix: int) -> None:
    """Who has to leave comes back only when there is room to stay: none is sent round."""
    with Small():
        sizes = {"slots": 4, "chunk": 12, "memory": rows_of(1.5, kind, how), "prefix": prefix}
        engine = engine_for(kind, how, **sizes)
        outcomes = run(engine, LINE, tidy)
    at_rest(engine)
    state, once = engine.state, sum(len(pool(c.number).prompt_ids) for c in LINE)
    assert all(o.finish for o in outcomes)
    assert 0 < state.preemptions <= len(LINE)
    assert state.prompt_tokens <= 2 * once


def test_a_slot_is_free_as_soon_as_its_request_ends() -> None:
    engine = engine_for("llama", "tree", slots=2)
    first, second, third = (engine.add(pool(n)) for n in (10, 0, 5))
    results = engine.step()
    assert [r.index for r in results if r.finish] == [first]
    assert [one.number for one in engine.table.taken] == [second]
    engine.step()
    assert [one.number for one in engine.table.taken] == [second, third]


def test_usage_and_counts_are_told() -> None:
    engine = engine_for("llama", "plain", slots=2)
    numbers = [engine.add(pool(n)) for n in (4, 0, 7)]
    assert (engine.state.running, engine.state.waiting, engine.state.usage) == (0, 3, 0)
    engine.step()
    assert (engine.state.running, engine.state.waiting) == (2, 1) and 0 < engine.state.usage <= 1
    assert engine.state.prompt_tokens == len(pool(4).prompt_ids) + len(pool(0).prompt_ids)
    for number in numbers:
        engine.cancel(number)
    at_rest(engine)
