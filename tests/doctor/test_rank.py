"""Ranking on made-up tables: the right fault first, ties together, health and `none` where they belong."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftproof.doctor.facts import Answer
from draftproof.doctor.rank import HEALTHY, NONE, Prediction, hopeless, rank, silent_names
from draftproof.doctor.told import Sums, kind_of, last_position, observed_sums, shown_steps, told_steps, walked

DEPTH, PROMPT, LENGTH = 7, 5, 60
Table = tuple[dict[int, int], ...]


def table(seed: int, rate: float = 0.7, texts: int = 10) -> Table:
    """Accepted drafts at every anchor, each draft right with the same chance."""
    draw = random.Random(seed)

    def one(position: int) -> int:
        run = 0
        while run < min(DEPTH, PROMPT + LENGTH - 1 - position) and draw.random() < rate:
            run += 1
        return run

    return tuple({p: one(p) for p in range(PROMPT, PROMPT + LENGTH - 1)} for _ in range(texts))


def near(base: Table, share: float, seed: int = 9) -> Table:
    """The same but for a share of the anchors."""
    draw = random.Random(seed)
    return tuple({p: (a + 1) % 4 if draw.random() < share else a for p, a in at.items()} for at in base)


def served(at: Mapping[int, int], *, totals: bool = False, finish: str = "length") -> Answer:
    blank = Answer((1,) * PROMPT, (2,) * LENGTH, "", finish, 0.0)
    steps = walked(at, blank)
    assert steps is not None
    told = None if totals else tuple(steps)
    return Answer(blank.prompt_ids, blank.output_ids, "", finish, 0.0, steps=len(steps), per_step=told)


def answers(base: Table, totals: bool = False) -> list[Answer]:
    return [served(at, totals=totals) for at in base]


FAULTS = {HEALTHY: table(1), "one": table(2, 0.5), "two": table(3, 0.66), "three": table(4, 0.1)}


def predictions(more: Mapping[str, Table] | None = None) -> list[Prediction]:
    return [Prediction(name, DEPTH, at) for name, at in {**FAULTS, **(more or {})}.items()]


@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize("name", FAULTS)
def test_the_true_one_leads_alone(name: str, totals: bool) -> None:
    found = rank(answers(FAULTS[name], totals), predictions())
    assert found.kind == ("totals" if totals else "steps")
    assert found.leaders == (name,) and found.fits[0].name == name and found.fits[0].misses == 0
    assert len(found.fits) == len(FAULTS) and found.fits[-1].misses > 0


@pytest.mark.parametrize("totals", [False, True])
def test_what_predicts_nearly_the_same_is_named_together(totals: bool) -> None:
    twin = near(FAULTS["one"], 0.01)
    found = rank(answers(FAULTS["one"], totals), predictions({"twin": twin}))
    assert set(found.leaders) == {"one", "twin"}


def test_health_goes_first_among_equals() -> None:
    """A fault that predicts as well as health does not displace it, even with a miss less."""
    found = rank(answers(near(FAULTS[HEALTHY], 0.01)), predictions({"twin": near(FAULTS[HEALTHY], 0.01)}))
    assert found.leaders == (HEALTHY, "twin") and [f.name for f in found.fits[:2]] == [HEALTHY, "twin"]
    assert found.fits[0].misses > found.fits[1].misses == 0


def test_silent_faults_are_not_ranked() -> None:
    found = rank(answers(FAULTS["one"]), predictions({"same": FAULTS[HEALTHY]}))
    assert found.silent == ("same",) and "same" not in [f.name for f in found.fits]
    assert silent_names([Prediction("alone", DEPTH, FAULTS["one"])]) == ()


@pytest.mark.parametrize("totals", [False, True])
def test_rounding_noise_is_still_the_same_hypothesis(totals: bool) -> None:
    for seed in range(10):
        found = rank(answers(near(FAULTS["one"], 0.025, seed), totals), predictions())
        assert found.leaders == ("one",)


@pytest.mark.parametrize("totals", [False, True])
@pytest.mark.parametrize("rate", [0.3, 0.66, 0.7, 0.8])
def test_an_unknown_fault_is_none(rate: float, totals: bool) -> None:
    assert rank(answers(table(77, rate), totals), predictions()).leaders == (NONE,)


def test_a_fifth_of_the_steps_off_is_none_and_more_text_does_not_change_that() -> None:
    assert rank(answers(near(FAULTS["one"], 0.2)), predictions()).leaders == (NONE,)


def test_dead_drafters_are_not_one_another() -> None:
    """They agree on nearly every step, and still none explains a server that accepts a little."""
    dead, server = table(5, 0.0), table(6, 0.05)
    assert rank(answers(server), predictions({"dead": dead})).leaders == (NONE,)
    assert rank(answers(dead), predictions({"dead": dead})).leaders == ("dead",)


def test_the_last_step_may_be_cut() -> None:
    at = FAULTS["one"]
    cut = []
    for answer in answers(at):
        assert answer.per_step
        cut.append(Answer(answer.prompt_ids, answer.output_ids, "", "length", 0.0, per_step=(*answer.per_step[:-1], 7)))
    found = rank(cut, predictions())
    assert found.leaders == ("one",) and found.fits[0].misses == 0
    assert found.fits[0].compared == sum(len(a.per_step or ()) - 1 for a in cut)


def test_a_stop_token_that_is_not_shown_may_cost_a_step() -> None:
    base = [served(at, totals=True, finish="stop") for at in FAULTS["one"]]
    more = [Answer(a.prompt_ids, a.output_ids, "", a.finish, 0.0, steps=(a.steps or 0) + 1) for a in base]
    assert rank(more, predictions()).fits[0].misses == 0
    length = [Answer(a.prompt_ids, a.output_ids, "", "length", 0.0, steps=a.steps) for a in more]
    assert rank(length, predictions()).fits[0].misses == len(length)  # control
    told = served(FAULTS["one"][0])
    shown = Answer(told.prompt_ids, told.output_ids, "", "stop", 0.0, per_step=(*(told.per_step or ()), 0))
    assert told_steps(shown) == told_steps(told)


def test_steps_that_do_not_cover_the_text_are_not_used() -> None:
    told = served(FAULTS["one"][0])
    assert told.per_step
    for wrong in (told.per_step[:-2], (*told.per_step, 0, 0)):
        odd = Answer(told.prompt_ids, told.output_ids, "", "length", 0.0, steps=len(wrong), per_step=wrong)
        assert told_steps(odd) is None and kind_of([odd]) == "totals"
    assert kind_of([Answer((1,), (2, 3), "", None, 0.0)]) == "rates"


def sums_of(base: Table, positions: bool = True) -> Sums:
    steps = [a for answer in answers(base) for a in answer.per_step or ()]
    reached = tuple(float(sum(a >= i for a in steps)) for i in range(1, DEPTH + 1))
    return Sums(len(steps), sum(steps), reached if positions else ())


def untold(base: Table) -> list[Answer]:
    return [Answer(a.prompt_ids, a.output_ids, "", a.finish, 0.0) for a in answers(base)]


def test_sums_alone_rank_by_rates() -> None:
    found = rank(untold(FAULTS["one"]), predictions(), sums_of(FAULTS["one"]))
    assert found.kind == "rates" and found.leaders == ("one",)
    assert rank(untold(FAULTS["one"]), predictions(), sums_of(table(77, 0.6))).leaders == (NONE,)
    assert rank(untold(FAULTS["one"]), predictions(), sums_of(FAULTS["one"], False)).leaders == ("one",)


def test_without_numbers_nobody_leads() -> None:
    found = rank(untold(FAULTS["one"]), predictions())
    assert found.kind == "rates" and found.leaders == () and found.fits == ()


def test_a_random_hypothesis_leads_by_rates_and_only_if_nothing_else_does() -> None:
    drawn, again = table(50, 0.6, 40), table(51, 0.6, 40)
    listed = [Prediction(name, DEPTH, table(i, 0.7, 40)) for i, name in enumerate([HEALTHY, "one"])]
    listed.append(Prediction("sampled", DEPTH, again, random=True))
    near_enough = Sums(*(lambda s: (s.steps, s.accepted, s.per_position))(sums_of(again)))
    assert rank(answers(drawn), listed).leaders in (("sampled",), (NONE,))
    assert rank(untold(drawn), listed, near_enough).leaders == ("sampled",)
    assert rank(answers(table(0, 0.7, 40)), listed).leaders == (HEALTHY,)


def test_hopeless_ones_are_dropped_early_and_the_true_one_never() -> None:
    for name in FAULTS:
        first = [Prediction(n, DEPTH, (*at[:3], *({},) * 7)) for n, at in FAULTS.items()]
        assert hopeless(answers(FAULTS[name]), first) == set(FAULTS) - {name}
    one = [Prediction(n, DEPTH, (*at[:1], *({},) * 9)) for n, at in FAULTS.items()]
    assert "one" not in hopeless(answers(FAULTS["one"]), one)


def test_drafts_behind_a_cut_answer_are_not_observed() -> None:
    """An engine counts what it accepted, the answer ends where it was told to: 5 tokens behind the first, 2 steps."""
    cut = Answer((1, 2), (3, 4, 5, 6, 7, 8), "", "length", 0.0, per_step=(2, 5), steps=2, accepted=7)
    assert shown_steps(cut) == [2, 2] and observed_sums([cut]) == Sums(2, 4, (2.0, 2.0))
    assert observed_sums([replace(cut, per_step=None)]) == Sums(2, 4)
    odd = replace(cut, per_step=(9, 9, 9))
    assert shown_steps(odd) == [9, 9, 9]  # they do not fit the text, so nothing is cut


def test_observed_sums() -> None:
    told = answers(FAULTS["one"])
    steps = [a for answer in told for a in answer.per_step or ()]
    assert observed_sums(told) == Sums(len(steps), sum(steps), sums_of(FAULTS["one"]).per_position[: max(steps)])
    totals = answers(FAULTS["one"], totals=True)
    assert observed_sums(totals).steps == len(steps)
    assert observed_sums(totals).accepted == sum(len(a.output_ids) - 1 for a in totals) - len(steps)
    assert observed_sums([], Sums(3, 4)) == Sums(3, 4)


@given(st.lists(st.integers(0, DEPTH), min_size=1, max_size=30), st.integers(0, 3))
def test_any_walk_is_read_back(accepted: Sequence[int], cut: int) -> None:
    """Steps laid along a text give the same steps, whatever the end of the text cuts off the last one."""
    length = 1 + sum(a + 1 for a in accepted) - min(cut, accepted[-1])
    told = Answer((1,) * PROMPT, (2,) * length, "", "length", 0.0, per_step=tuple(accepted))
    steps = told_steps(told)
    assert steps is not None and [a for _, a in steps] == list(accepted[:-1])
    at = dict(zip([p for p, _ in steps], accepted, strict=False))
    last_anchor = PROMPT + sum(a + 1 for a in accepted[:-1])
    at[last_anchor] = accepted[-1]
    seen = walked(at, told)
    assert seen is not None and len(seen) == len(accepted) and seen[-1] <= last_position(told) - last_anchor


@given(st.integers(0, 10**6), st.floats(0.0, 0.9), st.booleans())
def test_a_server_is_never_told_apart_from_its_own_table(seed: int, rate: float, totals: bool) -> None:
    base = table(seed, rate, 4)
    listed = [Prediction(HEALTHY, DEPTH, table(1, 0.7, 4)), Prediction("own", DEPTH, base)]
    found = rank(answers(base, totals), listed)
    assert "own" in found.leaders or found.silent == ("own",)
    assert next(f for f in found.fits if f.name in ("own", *[HEALTHY] * bool(found.silent))).misses == 0
