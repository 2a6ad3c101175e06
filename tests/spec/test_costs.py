"""Measured costs: between measurements, and beyond them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import isotonic_regression

from draftproof.spec.costs import Costs, rising

FEW = settings(deadline=None, max_examples=60, derandomize=True, database=None)
STEPS = Costs((0, 7, 8, 15), (100, 300), ((1.0, 2.0, 2.0, 5.0), (2.0, 2.0, 4.0, 5.0)), (0.5, 1.5))


@pytest.mark.parametrize(
    ("context", "seconds", "draft"),
    [
        (0, [1, 2, 2, 5], 0.5),
        (100, [1, 2, 2, 5], 0.5),
        (150, [1.25, 2, 2.5, 5], 0.75),
        (200, [1.5, 2, 3, 5], 1.0),
        (300, [2, 2, 4, 5], 1.5),
        (9999, [2, 2, 4, 5], 1.5),
    ],
)
def test_costs_are_linear_between_contexts_and_constant_beyond(
    context: int, seconds: list[float], draft: float
) -> None:
    """Steps that are real, 2 -> 5 here, stay as they are."""
    assert STEPS.at(context) == pytest.approx(seconds)
    assert STEPS.drafting(context) == pytest.approx(draft)


def check_rising(values: Sequence[float], fit: Callable[[Sequence[float]], list[float]] = rising) -> None:
    assert fit(values) == pytest.approx(isotonic_regression(values).x, abs=1e-9)


@FEW
@given(st.lists(st.floats(0, 100), min_size=1, max_size=12))
def test_costs_never_fall_and_are_the_closest_that_do_not(values: list[float]) -> None:
    check_rising(values)
    seconds = Costs(tuple(range(len(values))), (1,), (tuple(values),), (0.0,)).at(1)
    assert seconds == rising(values) and all(np.diff(seconds) >= -1e-9)


def test_control_rising() -> None:
    """A running maximum and a pooling that looks back once only rise as well or nearly, and are not the closest."""

    def running_max(values: Sequence[float]) -> list[float]:
        return np.maximum.accumulate(values).tolist()

    check_rising([1.0, 2.0, 2.0, 5.0], running_max)
    with pytest.raises(AssertionError):
        check_rising([1.0, 3.0, 2.0, 5.0], running_max)
    check_rising([3.0, 3.0, 0.0])
    with pytest.raises(AssertionError):
        check_rising([3.0, 3.0, 0.0], lambda v: [v[0], (v[1] + v[2]) / 2, (v[1] + v[2]) / 2])
