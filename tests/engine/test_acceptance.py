"""Acceptance statistics against a case counted by hand and against scipy's quantile."""

from __future__ import annotations

import math
import random

import pytest
from scipy import stats

from draftproof.engine.acceptance import Acceptance, TextAcceptance, mean_interval, student_t

# Two texts, 3 drafts a step: 2 + 0 + 3 accepted in 3 steps, 1 accepted in 2 steps.
BY_HAND = Acceptance([TextAcceptance([2, 0, 3]), TextAcceptance([1, 0])], 3)


def test_counts_by_hand() -> None:
    assert (BY_HAND.steps, BY_HAND.emitted) == (5, 11)
    assert BY_HAND.tau == 11 / 5
    assert BY_HAND.reached == [3, 2, 1]
    assert BY_HAND.per_position == [0.6, 0.4, 0.2]
    assert BY_HAND.tau == 1 + sum(BY_HAND.per_position)


def test_interval_by_hand() -> None:
    """Residuals 8 - 2.2 * 3 = 1.4 and 3 - 2.2 * 2 = -1.4; half = t * sqrt(2 / 1 * 3.92) / 5."""
    low, high = BY_HAND.interval()
    half = 12.706 * math.sqrt(2 * 2 * 1.4**2) / 5
    assert (low, high) == pytest.approx((2.2 - half, 2.2 + half))


def test_as_dict_is_the_same_numbers() -> None:
    data = BY_HAND.as_dict()
    assert data["tau_95"] == list(BY_HAND.interval())
    assert (data["tau"], data["steps"], data["emitted"], data["accepted"], data["texts"]) == (2.2, 5, 11, 6, 2)
    assert (data["per_position"], data["reached"]) == ([0.6, 0.4, 0.2], [3, 2, 1])


def test_nothing_to_count() -> None:
    empty = Acceptance([], 3)
    assert math.isnan(empty.tau) and all(map(math.isnan, empty.per_position)) and empty.steps == 0
    assert all(map(math.isnan, empty.interval()))
    single = Acceptance([TextAcceptance([1, 2])], 3)
    assert all(map(math.isnan, single.interval())) and single.as_dict()["tau_95"] is None


@pytest.mark.parametrize("freedom", [1, 2, 3, 4, 5, 7, 10, 31, 100, 1000])
def test_quantile(freedom: int) -> None:
    assert student_t(freedom) == pytest.approx(stats.t.ppf(0.975, freedom), rel=0.01)


def test_mean_interval_is_scipys() -> None:
    values = [1.0, 4.0, 2.5, 3.0, 7.0, 0.5]
    mean, low, high = mean_interval(values)
    theirs = stats.t.interval(0.95, 5, loc=mean, scale=stats.sem(values))
    assert mean == 3.0 and (low, high) == pytest.approx(theirs, rel=0.01)
    assert math.isnan(mean_interval([2.0])[1]) and math.isnan(mean_interval([])[0])


def covered(scale: float) -> float:
    """How often the interval (stretched by `scale`) holds the true tau, for texts of unequal ease and length."""
    draw, hits, trials = random.Random(1), 0, 400

    def text() -> TextAcceptance:
        ease = draw.choice([0.2, 0.6, 0.9])
        return TextAcceptance([sum(1 for _ in range(3) if draw.random() < ease) for _ in range(draw.randint(5, 40))])

    true = Acceptance([text() for _ in range(20_000)], 3).tau
    for _ in range(trials):
        seen = Acceptance([text() for _ in range(24)], 3)
        low, high = seen.interval()
        hits += seen.tau - scale * (seen.tau - low) < true < seen.tau + scale * (high - seen.tau)
    return hits / trials


def test_interval_covers_the_truth_at_its_rate() -> None:
    assert 0.90 < covered(1.0) < 0.98
    assert covered(0.5) < 0.80  # control: an interval half as wide is seen to be too narrow
