"""Live acceptance from counters alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from draftproof.doctor.facts import Counters
from draftproof.doctor.watch import LEARN, Reading, learned_band, tick, watch
from tests.doctor.made import counters


def test_one_interval() -> None:
    reading = tick(counters(100), counters(300), 10.0)
    assert reading.state == "drafting" and reading.drafts == 200
    assert reading.tau == pytest.approx(3.48) and reading.per_position[0] == pytest.approx(0.8)
    assert reading.drafted_per_second == pytest.approx(300) and reading.accepted_per_second == pytest.approx(49.6)
    assert reading.cache_hit_rate == pytest.approx(0.5)
    assert reading.line().startswith("tau 3.48, 200 drafts, by position 0.80")


@pytest.mark.parametrize(
    ("before", "after", "state"),
    [
        (counters(100), counters(100), "idle"),
        (counters(100), counters(20), "reset"),
        (counters(100), counters(900, created=counters(0).created + 5), "reset"),
        (None, counters(1), "no answer"),
        (counters(1), None, "no answer"),
        (replace(counters(1), drafts=None), replace(counters(2), drafts=None), "no counters"),
    ],
)
def test_intervals_without_acceptance(before: Counters | None, after: Counters | None, state: str) -> None:
    reading = tick(before, after, 1.0)
    assert reading.state == reading.line() == state and reading.tau is None


def test_counters_that_appear_later_count_from_zero() -> None:
    assert tick(replace(counters(0), per_position=()), counters(100), 1.0).per_position[0] == pytest.approx(0.8)


def test_sglang_tells_its_own_mean() -> None:
    gauges = {"sglang:spec_accept_length": 4.2}
    bare = {"accepted": None, "draft_tokens": None, "per_position": (), "gauges": gauges}
    reading = tick(counters(10, **bare), counters(90, **bare), 2.0)
    assert reading.tau == 4.2 and reading.drafted_per_second is None and "tau 4.20" in reading.line()


def run(series: list[Counters | None], band: tuple[float, float] | None) -> list[Reading]:
    told: Iterator[Counters | None] = iter(series)
    now, readings = [0.0], list[Reading]()

    def sleep(seconds: float) -> None:
        now[0] += seconds

    watch(lambda: next(told), 5.0, band, readings.append, len(series) - 1, sleep=sleep, clock=lambda: now[0])
    return readings


def growing(*accepted: float) -> list[Counters | None]:
    """A server that makes 100 drafts an interval, with this many accepted a draft."""
    total, series = 0.0, [counters(0, accepted=0.0)]
    for number, rate in enumerate(accepted, 1):
        total += 100 * rate
        series.append(counters(100 * number, accepted=total))
    return list(series)


def test_an_alert_outside_the_given_band() -> None:
    readings = run(growing(2.0, 0.5, 4.0), (2.5, 3.5))
    assert [reading.alert is not None for reading in readings] == [False, True, True]
    assert readings[1].alert == "tau 1.50 is below 2.50 to 3.50" and "above" in readings[2].line()
    assert {reading.band for reading in readings} == {(2.5, 3.5)}


def test_the_band_is_learned_from_the_first_intervals() -> None:
    readings = run(growing(*[2.0] * LEARN, 2.1, 1.0), None)
    assert all(reading.band is None for reading in readings[:LEARN])
    assert readings[LEARN].band == pytest.approx((2.8, 3.2)) and readings[LEARN].alert is None
    assert readings[-1].alert is not None


def test_few_drafts_neither_teach_nor_alarm() -> None:
    series = [counters(n, accepted=0.0) for n in range(0, 100, 10)]
    assert all(reading.band is None and reading.alert is None for reading in run(list(series), None))
    assert run([counters(0, accepted=0.0), counters(10, accepted=0.0)], (2.0, 3.0))[0].alert is None
    assert learned_band([2.0] * (LEARN - 1)) is None


def test_a_silent_server_is_bridged() -> None:
    readings = run([counters(0), None, counters(100)], None)
    assert [reading.state for reading in readings] == ["no answer", "drafting"]
    assert readings[1].seconds == 10.0 and readings[1].drafted_per_second == pytest.approx(150)


def test_after_a_restart_it_goes_on() -> None:
    readings = run([counters(500), counters(10), counters(110)], (2.0, 4.0))
    assert [reading.state for reading in readings] == ["reset", "drafting"]
