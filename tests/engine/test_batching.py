"""Requests come and go between steps: each gets what it gets alone, whoever shares the engine, and in its turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.engine.engine import Engine
from draftproof.engine.inflight import InFlight
from draftproof.engine.request import Request, SamplingParams, StepResult
from draftproof.engine.slots import SlotTable
from draftproof.errors import UserError
from draftproof.models.cache import Cache
from draftproof.models.mtp import Lane
from draftproof.models.recurrent import RecurrentStore
from tests.engine.company import (
    CONTEXT,
    DEPTH,
    POOL,
    Coming,
    Company,
    Outcome,
    Reader,
    Small,
    alone,
    at_rest,
    cache_bytes,
    engine_for,
    owner,
    pool,
    run,
    same,
    same_drafts,
    same_logprobs,
    words,
)

pytestmark = pytest.mark.filterwarnings("ignore:a logits processor keeps state")
PAIRS = [("llama", "tree"), ("qwen2", "chain"), ("gemma3", "tree"), ("mtp", "tree")]


# --- the same text and the same acceptance as alone -----------------------------------------------------


@st.composite
def schedules(draw: st.DrawFn) -> tuple[dict[str, Any], list[Coming]]:
    """An engine's settings, memory as a multiple of what one request of the whole context takes; and who comes."""
    sizes = {
        "slots": draw(st.sampled_from([3, 1, 2, 4])),
        "chunk": draw(st.sampled_from([7, 3, 20, 12])),
        "prefill_rows": draw(st.sampled_from([3, None, 9])),
        "memory": draw(st.sampled_from([1.3, None, 1.0, 1.6, 2.2])),
        "prefix": draw(st.sampled_from([0, 40_000, 10**8])),
    }
    one = st.builds(
        Coming, st.integers(0, POOL - 1), st.integers(0, 9), st.one_of(st.none(), st.none(), st.integers(0, 12))
    )
    return sizes, draw(st.lists(one, min_size=3, max_size=6))


def check(kind: str, how: str, sizes: dict[str, Any], coming: Sequence[Coming]) -> Engine:
    """Every request of the schedule against itself alone; memory in bounds after every step; nothing left behind."""
    with Small():
        memory = sizes["memory"] and int(sizes["memory"] * whole(kind, how, sizes["chunk"]))
        engine = engine_for(kind, how, **(sizes | {"memory": memory}))

        def bounded(engine: Engine) -> None:
            assert memory is None or cache_bytes(engine) <= memory

        outcomes = run(engine, coming, bounded)
    for one, outcome in zip(coming, outcomes, strict=True):
        compare(kind, how, one, outcome)
    if isinstance(engine.drafter, Company):
        assert any(o.accepted() for o in outcomes) <= same_drafts(engine, kind, how)
    at_rest(engine)
    return engine


def whole(kind: str, how: str, chunk: int) -> int:
    """Bytes that one request of the whole context takes."""
    return engine_for(kind, how, chunk=chunk).table.bytes_for(1, CONTEXT)


def compare(kind: str, how: str, one: Coming, outcome: Outcome) -> None:
    """A tree near its text's end may go as deep as the longest text beside it, so those last steps are left out."""
    wanted = alone(kind, "plain", one.number)
    if one.life is None or outcome.finish:
        assert outcome.tokens == wanted.tokens and outcome.finish == wanted.finish
        same_logprobs(outcome.logprobs, wanted.logprobs)
        if how != "plain":
            same(outcome, alone(kind, how, one.number), fully=DEPTH if how == "tree" else 1)
    else:
        assert outcome.tokens == wanted.tokens[: len(outcome.tokens)]


@pytest.mark.parametrize(("kind", "how"), PAIRS)
def test_everybody_gets_what_they_get_alone(kind: str, how: str) -> None:
    """Texts, log-probabilities, finish reasons and accepted counts, for every kind of target, drafter and setting."""

    @settings(deadline=None, max_examples=3, derandomize=True, database=None)
    @given(schedules())
    def checked(schedule: tuple[dict[str, Any], list[Coming]]) -> None:
        check(kind, how, *schedule)

    checked()


CROWD = [Coming(9), Coming(3), Coming(4), Coming(5, 1), Coming(8, 2), Coming(1, 3, 9)]
TIGHT = {"slots": 4, "chunk": 12, "prefill_rows": 20, "memory": 1.5, "prefix": 0}


@pytest.mark.parametrize(("kind", "how"), [*PAIRS, ("llama", "plain"), ("qwen3_5", "dflash")])
def test_a_crowd_that_does_not_fit(kind: str, how: str) -> None:
    """Requests lose their slots and come back, in every kind of cache."""
    assert check(kind, how, TIGHT, CROWD).state.preemptions > 0


def skipped(*_: object, **__: object) -> None: ...


def emptied(self: Cache, slots: int, capacity: int, honest: Callable[..., None] = Cache.resize) -> None:
    self.drop(slice(0, self.slots))
    honest(self, slots, capacity)


def a_token_less(one: InFlight) -> int:
    return len(one.ids) - 2 * (one.emitted > 0)


FAULTS: dict[str, tuple[str, type, str, Any]] = {
    "rows stay when a slot is moved": ("llama", Cache, "fork", skipped),
    "a state stays when a slot is moved": ("qwen3_5", RecurrentStore, "fork", skipped),
    "a row that waits stays when a slot is moved": ("mtp", Lane, "fork", lambda s, a, b, r: s.cache.fork(a, b, r)),
    "a drafter's context stays when a slot is moved": ("llama", Reader, "fork", skipped),
    "a slot keeps the state of who was there": ("qwen3_5", RecurrentStore, "drop", skipped),
    "slots have holes": ("llama", SlotTable, "order", skipped),
    "a resumed text has a token less": ("llama", InFlight, "goal", property(a_token_less)),
    "caches grow without their rows": ("llama", Cache, "resize", emptied),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owning, name, planted = FAULTS[fault]
    how = "chain" if kind == "mtp" else "plain" if owning in (Cache, RecurrentStore, InFlight) else "tree"
    monkeypatch.setattr(owning, name, planted)
    with pytest.raises((AssertionError, IndexError)):
        check(kind, how, TIGHT if owning is InFlight else TIGHT | {"memory": 3.0}, CROWD)


def test_a_text_that_goes_on_beside_an_unfinished_prompt() -> None:
    """It came back into a slot behind a prompt's, and is ready before it: those that decode have no hole between."""
    engine = engine_for("llama", "tree", slots=2, chunk=3, prefill_rows=3)
    numbers = {engine.add(pool(n)): n for n in (11, 5)}
    given = {number: Outcome() for number in numbers}

    def steps(going_on: Callable[[], bool]) -> None:
        while going_on():
            for result in engine.step():
                given[result.index].add(result, pool(numbers[result.index]).max_tokens)

    late = engine.waiting[1]
    steps(lambda: late.emitted < 3)
    assert engine.table.taken[0] is late
    engine._preempt([late], keep=False)
    steps(lambda: late.rows < late.goal)
    prompt = engine.table.taken[-1]
    assert late.decoding and prompt.rows < prompt.goal and (late.slot, prompt.slot) == (0, 1)
    steps(lambda: engine.busy)
    for number, outcome in given.items():
        same(outcome, alone("llama", "tree", numbers[number]), fully=DEPTH)


def test_a_text_of_which_every_row_was_kept_goes_on_at_once() -> None:
    """Only its last token, which has no row yet, is left to run: there is no stretch of its prompt."""
    engine = engine_for("llama", "chain", prefix=10**8)
    engine.add(pool(0))
    outcome = Outcome()
    while engine.busy:
        for result in engine.step():
            outcome.add(result, 12)
        if len(outcome.steps) == 2 and engine.state.preemptions == 0:
            engine._preempt(engine.table.taken, keep=True)
    assert engine.state.preemptions == 1 and engine.state.prompt_tokens == len(pool(0).prompt_ids)
    same(outcome, alone("llama", "chain", 0))


def test_rows_that_no_drafter_asked_for_go_with_their_request() -> None:
    """A request without drafts leaves its features waiting; nobody who comes later has them in its way."""
    engine = engine_for("llama", "chain", slots=2)
    same(run(engine, [Coming(7)], lambda _: None)[0], alone("llama", "chain", 7))
    at_rest(engine)


@pytest.mark.parametrize("stream", [1, 4])
def test_choices_of_one_prompt_differ_by_their_number_alone(stream: int) -> None:
    """In one engine of 4 slots or one after another: the same texts."""
    asked = [Request(words(1, 9), 8, SamplingParams(temperature=1.2, seed=5, choice=c)) for c in range(4)]
    engine = Engine(owner("gemma3"), None, slots=stream, context=40)
    texts: list[list[int]] = [[], [], [], []]
    for result in engine.generate(asked):
        texts[result.index] += result.tokens
    assert len({tuple(t) for t in texts}) == 4
    assert texts[2] == [t for r in Engine(owner("gemma3"), None, context=40).generate(asked[2:3]) for t in r.tokens]


def test_a_refused_request_leaves_nothing_behind() -> None:
    engine = Engine(owner("llama"), None, context=20)
    with pytest.raises(UserError, match="the context holds 20"):
        list(engine.generate([Request([5, 6], 4), Request([5, 6], 40)]))
    at_rest(engine)
    assert [r.index for r in engine.generate([Request([5, 6], 2)])] == [0, 0]


# --- fairness -------------------------------------------------------------------------------------------


def told(engine: Engine, steps: int, each: Callable[[int], object] = lambda _: None) -> dict[int, list[int]]:
    """Steps in which each request was told something; `each` may add some before."""
    seen: dict[int, list[int]] = {}
    for step in range(steps):
        each(step)
        for result in engine.step():
            seen.setdefault(result.index, []).append(step)
    return seen


def small(count: int, prefill_rows: int | None = 5, slots: int = 4) -> Engine:
    return Engine(owner("llama"), None, slots=slots, context=CONTEXT, chunk=count, prefill_rows=prefill_rows)


def test_a_long_prompt_delays_a_short_one_by_one_stretch() -> None:
    engine = small(5)
    long = engine.add(Request(words(1, 100), 3))
    told(engine, 2)
    short = engine.add(Request(words(2, 5), 3))
    seen = told(engine, 25)
    assert seen[short][0] <= 1 and seen[long][0] >= 17


def test_a_stream_of_short_prompts_does_not_hold_up_a_long_one() -> None:
    engine = small(5)
    long = engine.add(Request(words(1, 100), 3))
    seen = told(engine, 90, lambda step: engine.add(Request(words(step, 5), 1)))
    assert seen[long][0] <= 84  # every fourth stretch is its own


def test_decoding_goes_on_beside_a_prompt() -> None:
    """One token a step, whatever prompts are run meanwhile."""
    engine = small(5)
    first = engine.add(Request(words(3, 4), 18))
    seen = told(engine, 22, lambda step: step == 3 and engine.add(Request(words(1, 100), 3)))
    assert seen[first] == [0, *range(1, 18)]


def test_first_come_first_served() -> None:
    engine = small(7, prefill_rows=None, slots=2)
    numbers = [engine.add(Request(words(n, 6), 2 + n % 3)) for n in range(9)]
    first: list[int] = []
    while engine.busy:
        first += [r.index for r in engine.step() if r.prefill]
    assert first == numbers


def test_a_long_answer_does_not_hold_up_the_queue() -> None:
    engine = small(20, prefill_rows=None, slots=2)
    long = engine.add(Request(words(1, 5), 60))
    short = [engine.add(Request(words(n, 5), 4)) for n in range(8)]
    seen = told(engine, 70)
    assert max(seen[number][-1] for number in short) < 40 < seen[long][-1]


def test_waiting_is_told_with_the_first_token() -> None:
    engine = small(20, prefill_rows=None, slots=1)
    results: list[StepResult] = [r for r in engine.generate([Request(words(n, 5), 4) for n in range(2)]) if r.prefill]
    assert 0 <= results[0].waited < results[1].waited


def test_nobody_is_told_anything_behind_a_cancel() -> None:
    engine = engine_for("llama", "tree", slots=2)
    running, waiting = engine.add(pool(0)), [engine.add(pool(n)) for n in (4, 9)]
    engine.step()
    for number in (running, *waiting, 99):
        engine.cancel(number)
    at_rest(engine)
    assert engine.step() == []
    same(run(engine, [Coming(0)])[0], alone("llama", "tree", 0), fully=DEPTH)
    assert isinstance(engine.drafter, Company)
