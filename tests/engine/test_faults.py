"""A fault ends the request it came from and no other; a want of memory ends nobody who could go on with less."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine import engine as engine_module
from draftproof.engine.engine import Engine
from draftproof.engine.faults import short_of_memory
from draftproof.engine.request import Request
from draftproof.engine.slots import SlotTable
from draftproof.models.cache import Cache
from draftproof.models.target import Target
from tests.engine.company import (
    DEPTH,
    Coming,
    Company,
    Outcome,
    Reader,
    alone,
    at_rest,
    engine_for,
    pool,
    run,
    same,
)

pytestmark = pytest.mark.filterwarnings("ignore:a logits processor keeps state")
OTHERS = (0, 8, 5)  # of the pool, beside the one that fails
PAIRS = [("llama", "tree"), ("gemma3", "plain"), ("mtp", "chain")]


class Failing:
    """Raises when the text has reached a length; before it, it changes nothing."""

    stateful = False

    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        if len(ids) >= self.length:
            raise ValueError("planted in a processor")
        return scores


def failing(after: int) -> Request:
    """Request 9 of the pool, which fails once it has so many tokens."""
    request = pool(9)
    return replace(request, processors=[Failing(len(request.prompt_ids) + after)])


def together(engine: Engine, asked: Sequence[Request], plant: Callable[[int], None] = lambda _: None) -> list[Outcome]:
    """All of them in one engine; plant(step) before every step."""
    numbers = [engine.add(request) for request in asked]
    outcomes = {number: Outcome() for number in numbers}
    for step in itertools.count():
        if not engine.busy:
            return list(outcomes.values())
        assert step < 400, "it never ends"
        plant(step)
        for result in engine.step():
            outcomes[result.index].add(result, asked[numbers.index(result.index)].max_tokens)
    raise AssertionError


def exact(outcomes: Sequence[Outcome], kind: str, how: str, numbers: Sequence[int] = OTHERS) -> None:
    for outcome, number in zip(outcomes, numbers, strict=True):
        same(outcome, alone(kind, how, number), fully=DEPTH if how == "tree" else 1)


def reusable(engine: Engine, kind: str, how: str) -> None:
    """Nothing is left, and what comes next is what it would have been."""
    at_rest(engine)
    if isinstance(engine.drafter, Company):
        engine.drafter.told.clear()
    exact(run(engine, [Coming(1), Coming(0, 1)]), kind, how, (1, 0))
    at_rest(engine)


# --- processors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "how", "after"),
    [("llama", "tree", 0), ("llama", "chain", 5), ("gemma3", "plain", 5), ("mtp", "chain", 1)],
)
def test_a_processor_that_fails_ends_its_own_request(kind: str, how: str, after: int) -> None:
    """With drafts it is asked ahead of the text, so it may fail up to a draft's depth early."""
    engine = engine_for(kind, how, slots=4, chunk=20, isolate=True, prefix=10**8 * (after % 2))
    *others, own = together(engine, [*(pool(n) for n in OTHERS), failing(after)])
    exact(others, kind, how)
    assert own.finish == "error" and own.steps[-1].error == "ValueError: planted in a processor"
    assert own.steps[-1].tokens == [] and own.tokens == alone(kind, "plain", 9).tokens[: len(own.tokens)]
    assert max(0, after - DEPTH) <= len(own.tokens) <= after
    reusable(engine, kind, how)


def test_several_that_fail() -> None:
    engine = engine_for("llama", "tree", slots=3, isolate=True)
    outcomes = together(engine, [failing(2), pool(0), failing(0), failing(7), pool(5)])
    assert [o.finish for o in outcomes] == ["error", alone("llama", "plain", 0).finish, "error", "error", "stop"]
    exact([outcomes[1], outcomes[4]], "llama", "tree", (0, 5))
    reusable(engine, "llama", "tree")


@pytest.mark.xfail(
    strict=True, reason="after a fault of another, a stateful processor is asked about the same text again"
)
def test_a_processor_with_state_beside_one_that_fails() -> None:
    engine = engine_for("llama", "plain", slots=2, isolate=True)
    outcome = together(engine, [pool(6), failing(3)])[0]
    assert outcome.tokens == alone("llama", "plain", 6).tokens


def test_without_isolation_a_fault_is_raised() -> None:
    engine = engine_for("llama", "tree", slots=2)
    with pytest.raises(ValueError, match="planted"):
        together(engine, [pool(0), failing(2)])
    engine.reset()
    reusable(engine, "llama", "tree")


# --- forwards, drafts and commits -----------------------------------------------------------------------


class Planted:
    """A method that fails when `when` says so of the call's number and its arguments."""

    def __init__(self, honest: Callable[..., Any], when: Callable[..., bool], error: Exception) -> None:
        self.honest, self.when, self.error, self.calls = honest, when, error, itertools.count()

    def method(self) -> Callable[..., Any]:
        def call(own: Any, *given: Any, **named: Any) -> Any:
            if self.when(next(self.calls), *given, **named):
                raise self.error
            return self.honest(own, *given, **named)

        return call


def plant(
    monkeypatch: pytest.MonkeyPatch, owning: type, name: str, when: Callable[..., bool], error: Exception | None = None
) -> None:
    honest = getattr(owning, name)
    monkeypatch.setattr(owning, name, Planted(honest, when, error or RuntimeError("planted")).method())


def short() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")


@pytest.mark.parametrize(("kind", "how"), PAIRS)
def test_a_forward_that_fails_for_one_number_of_requests(kind: str, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_for(kind, how, slots=3, isolate=True)
    wanted = [alone(kind, how, n) for n in OTHERS]
    plant(monkeypatch, Target, "forward", lambda _, tokens, *a, **k: len(tokens) == 3)
    outcomes = together(engine, [pool(n) for n in OTHERS])
    monkeypatch.undo()
    assert [o.tokens for o in outcomes] == [o.tokens for o in wanted]
    exact(outcomes, kind, how)
    reusable(engine, kind, how)


PLACES: dict[str, tuple[type, str]] = {
    "a draft": (Company, "draft"),
    "the drafter's context": (Company, "extend"),
    "the reader's context": (Reader, "extend"),
    "a commit": (Cache, "commit"),
    "a forward": (Target, "forward"),
}


@pytest.mark.parametrize("error", [RuntimeError("planted"), short()], ids=["a fault", "no memory"])
@pytest.mark.parametrize("place", PLACES)
def test_one_fault_anywhere_changes_no_text(place: str, error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever was half done: the texts are run again and go on."""
    owning, name = PLACES[place]
    for at in (1, 6):
        engine = engine_for("mtp", "chain", slots=3, chunk=20, isolate=True, prefix=10**8)
        with monkeypatch.context() as patch:
            plant(patch, owning, name, lambda call, *a, at=at, **k: call == at, error)
            outcomes = together(engine, [pool(n) for n in (0, 8, 1)])
        exact(outcomes, "mtp", "chain", (0, 8, 1))
        at_rest(engine)


def test_a_request_that_fails_alone_too_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A text of one length cannot be run, whoever is there."""
    engine = engine_for("llama", "plain", slots=2, isolate=True)
    long = len(pool(11).prompt_ids)
    plant(monkeypatch, Target, "forward", lambda _, tokens, plan, **k: bool((plan.positions == long + 4).any()))
    outcomes = together(engine, [pool(0), pool(11), pool(8)])
    exact([outcomes[0], outcomes[2]], "llama", "plain", (0, 8))
    assert outcomes[1].finish == "error" and outcomes[1].steps[-1].error == "RuntimeError: planted"
    assert outcomes[1].tokens == alone("llama", "plain", 11).tokens[:5]


# --- memory ---------------------------------------------------------------------------------------------


def test_what_counts_as_a_want_of_memory() -> None:
    assert short_of_memory(short()) and short_of_memory(MemoryError())
    assert short_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried"))
    assert not short_of_memory(RuntimeError("shapes do not fit")) and not short_of_memory(ValueError("out of memory"))


@pytest.mark.parametrize("kind", ["llama", "mtp"])
def test_memory_that_is_always_short(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for ever: each is told, and later ones are served again."""
    engine = engine_for(kind, "tree", slots=3, isolate=True, prefix=10**8)
    with monkeypatch.context() as patch:
        plant(patch, Target, "forward", lambda call, *a, **k: call > 4, short())
        outcomes = together(engine, [pool(n) for n in (0, 8, 4)])
    assert {o.finish for o in outcomes} == {"error"}
    assert {o.steps[-1].error for o in outcomes} == {"out of memory"}
    reusable(engine, kind, "tree")


@pytest.mark.parametrize("kind", ["llama", "mtp"])
def test_memory_that_is_short_for_more_than_two(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All end well, and two at once is what goes on to be tried, with a look at three now and then."""
    how = "chain"
    numbers = [0, 8, 4, 9, 1, 3]
    [alone(kind, how, n) for n in numbers]
    engine, widths = engine_for(kind, how, slots=4, isolate=True), []

    def many(_: int, tokens: Tensor, *a: Any, **k: Any) -> bool:
        widths.append(len(tokens))
        return len(tokens) > 2

    plant(monkeypatch, Target, "forward", many, short())
    outcomes = together(engine, [pool(n) for n in numbers])
    monkeypatch.undo()
    exact(outcomes, kind, how, numbers)
    assert sum(width > 2 for width in widths) <= 2 and 2 in widths
    at_rest(engine)


def test_more_are_tried_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "RECOVER", 4)
    engine = engine_for("llama", "plain", slots=3, isolate=True)
    with monkeypatch.context() as patch:
        plant(patch, Target, "forward", lambda call, tokens, *a, **k: len(tokens) == 3, short())
        together(engine, [pool(n) for n in OTHERS])
    assert engine.most <= 3
    engine.most = 1
    for _ in range(40):
        engine.step()
    assert engine.most == 3


@pytest.mark.parametrize("kind", ["llama", "mtp"])
def test_no_token_is_lost_for_a_copy_that_finds_no_memory(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The prefix cache gets its copy after tokens were chosen: without memory for it, it is emptied and that is all."""
    for at in (0, 5):
        engine = engine_for(kind, "chain", slots=2, chunk=4, isolate=True, prefix=10**8)
        with monkeypatch.context() as patch:
            plant(patch, Cache, "save", lambda call, *a, at=at, **k: call >= at, short())
            outcomes = together(engine, [pool(0), pool(8)])
        exact(outcomes, kind, "chain", (0, 8))
        reusable(engine, kind, "chain")


def test_caches_that_cannot_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = 4 * engine_for("llama", "plain").table.bytes_for(1, 128)
    monkeypatch.setattr("draftproof.engine.slots.FIRST_ROWS", 16)
    engine = engine_for("llama", "plain", slots=2, memory=memory, isolate=True)
    plant(monkeypatch, Cache, "resize", lambda call, *a: call == 1, short())
    exact(together(engine, [pool(0), pool(8)]), "llama", "plain", (0, 8))


@pytest.mark.parametrize("always", [False, True])
@pytest.mark.parametrize("method", ["swap", "fork"])
def test_moves_between_slots_that_find_no_memory(method: str, always: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """One cache moved, the other did not; whoever ended before keeps the tokens of that step. Without any memory for
    moves one request at a time is what is left."""
    numbers, caught = (1, 8, 0, 4, 9), []

    def fails(call: int, *_: Any) -> bool:
        caught.append(call)
        return always or call == 1  # of target and drafter: the second has it

    engine = engine_for("mtp", "chain", slots=3, chunk=4, prefill_rows=8, isolate=True)
    with monkeypatch.context() as patch:
        plant(patch, Cache, method, fails, short())
        outcomes = together(engine, [pool(n) for n in numbers])
    assert len(caught) > (not always), "nobody was moved"
    exact(outcomes, "mtp", "chain", numbers)
    reusable(engine, "mtp", "chain")


def test_a_fault_behind_the_step_ends_its_request_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(done: Any, requests: Sequence[Any], **named: Any) -> Any:
        if not named and any(one.number == 2 for one in requests):
            raise RuntimeError("planted behind the step")
        return honest(done, requests, **named)

    honest = engine_module.emit
    monkeypatch.setattr(engine_module, "emit", fails)
    engine = engine_for("llama", "tree", slots=3, isolate=True)
    first, failed, last = together(engine, [pool(n) for n in OTHERS])
    exact([first, last], "llama", "tree", (OTHERS[0], OTHERS[2]))
    assert failed.finish == "error" and failed.tokens == alone("llama", "tree", OTHERS[1]).tokens[:1]


@pytest.mark.parametrize(("name", "calls"), [("save", (0, 6, 20)), ("state", (2, 4))])
def test_a_fault_of_the_prefix_cache_costs_no_token(
    name: str, calls: Sequence[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for at in calls:
        engine = engine_for("mtp", "chain", slots=3, chunk=20, isolate=True, prefix=10**8)
        with monkeypatch.context() as patch:
            plant(patch, Cache, name, lambda call, *a, at=at, **k: call == at)
            outcomes = together(engine, [pool(n) for n in (0, 8, 1)])
        exact(outcomes, "mtp", "chain", (0, 8, 1))
        at_rest(engine)
    assert "the prefix cache failed" in caplog.text


def test_moves_that_always_fail_and_a_prompt_that_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever is let in while it is read would have to change places with it, and cost it all that was read."""
    monkeypatch.setattr(engine_module, "RECOVER", 4)
    engine = engine_for("llama", "plain", slots=2, chunk=4, prefill_rows=4, isolate=True)
    plant(monkeypatch, Cache, "swap", lambda *_: True, short())
    engine.most = 1
    numbers = (11, 5, 0, 7)
    exact(together(engine, [pool(n) for n in numbers]), "llama", "plain", numbers)


def scarce(monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
    """So many tensors are made in every change of the caches' size, and no more."""
    honest, resize = torch.Tensor.new_zeros, SlotTable._resized
    left = [10**9]

    def made(own: Tensor, *size: Any, **more: Any) -> Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise short()
        return honest(own, *size, **more)

    def resized(own: SlotTable, slots: int, rows: int) -> bool:
        left[0] = calls
        try:
            return resize(own, slots, rows)
        finally:
            left[0] = 10**9

    monkeypatch.setattr(torch.Tensor, "new_zeros", made)
    monkeypatch.setattr(SlotTable, "_resized", resized)


@pytest.mark.parametrize("kind", ["llama", "mtp", "qwen3_5"])
def test_a_resize_that_ends_halfway(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From many short requests to a long one and back: some layers are smaller by then, or larger."""
    monkeypatch.setattr("draftproof.engine.slots.FIRST_ROWS", 8)
    monkeypatch.setattr("draftproof.models.cache.REACH_STEP", 8)
    monkeypatch.setattr(engine_module, "HEADROOM", 4)
    how = "plain" if kind == "qwen3_5" else "chain"
    brief = [replace(pool(n), max_tokens=6) for n in (0, 7, 5, 6)]
    [alone(kind, how, n) for n in (0, 8, 5, 1, 11)]
    memory = int(1.3 * engine_for(kind, how).table.bytes_for(1, 128))
    for calls in range(0, 40, 3):
        engine = engine_for(kind, how, slots=4, chunk=20, memory=memory, isolate=True)
        together(engine, brief)
        with monkeypatch.context() as patch:
            scarce(patch, calls)
            (long,) = together(engine, [pool(11)])
            assert long.finish != "error" or long.steps[-1].error == "out of memory"
            together(engine, brief)
        exact(together(engine, [pool(n) for n in (0, 8, 5, 1)]), kind, how, (0, 8, 5, 1))
        at_rest(engine)


def growing(monkeypatch: pytest.MonkeyPatch, prefix: int = 0) -> Engine:
    monkeypatch.setattr("draftproof.engine.slots.FIRST_ROWS", 16)
    memory = 4 * engine_for("llama", "plain").table.bytes_for(1, 128)
    return engine_for("llama", "plain", slots=2, memory=memory, prefix=prefix, isolate=True)


def test_what_earlier_requests_left_makes_room_for_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = growing(monkeypatch, 10**8)
    together(engine, [replace(pool(0), max_tokens=2)])
    assert engine.keeper and engine.keeper.prefix.nbytes
    rows, prefix = engine.table.rows, engine.keeper.prefix
    plant(monkeypatch, Cache, "resize", lambda *_: prefix.nbytes > 0, short())
    exact(together(engine, [pool(8), pool(0)]), "llama", "plain", (8, 0))
    assert engine.table.rows > rows


@pytest.mark.parametrize("prefix", [0, 10**8])
def test_a_request_for_which_the_caches_never_grow_ends(prefix: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its prompt finds no room or its answer; a shorter one is served."""
    engine = growing(monkeypatch, prefix)
    short_one = replace(pool(0), max_tokens=2)
    wanted = together(engine, [short_one])[0]
    limit = engine.table.rows
    with monkeypatch.context() as patch:
        plant(patch, Cache, "resize", lambda _, slots, rows: rows > limit, short())
        outcomes = together(engine, [pool(0), short_one, pool(8)])
    told = [(o.finish, o.steps[-1].error) for o in outcomes]
    assert told == [("error", "out of memory"), (wanted.finish, None), ("error", "out of memory")]
    assert outcomes[1].tokens == wanted.tokens and outcomes[2].tokens == []
    assert outcomes[0].tokens == alone("llama", "plain", 0).tokens[: len(outcomes[0].tokens)] != []
    reusable(engine, "llama", "plain")


def test_those_beside_a_fault_run_side_by_side_again(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, widths = engine_for("llama", "plain", slots=3, isolate=True), []

    def once(call: int, tokens: Tensor, *a: Any, **k: Any) -> bool:
        widths.append(len(tokens))
        return call == 5

    plant(monkeypatch, Target, "forward", once)
    together(engine, [pool(n) for n in OTHERS])
    assert 3 in widths[6:]
