"""Acceptance of a running server from its counters alone, interval by interval."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from draftproof.doctor.facts import Counters

State = Literal["drafting", "idle", "reset", "no answer", "no counters"]
Band = tuple[float, float]

ENOUGH: Final = 50  # drafts in an interval that make its tau worth an alert
LEARN: Final = 5  # intervals with enough drafts that teach the band
MARGIN: Final = 0.1  # of tau - 1, on both sides of what was learned
SGLANG_TAU: Final = "sglang:spec_accept_length"  # its own mean; it has no counter of accepted drafts
ALWAYS_UP: Final = ("drafts", "draft_tokens", "accepted", "cache_queries", "cache_hits")


@dataclass(frozen=True)
class Reading:
    """One interval. Rates a second; `band` is the expected one, None while it is being learned; `alert` says that tau
    left it."""

    state: State
    seconds: float
    drafts: float = 0.0
    tau: float | None = None
    per_position: tuple[float, ...] = ()
    drafted_per_second: float | None = None
    accepted_per_second: float | None = None
    cache_hit_rate: float | None = None
    band: Band | None = None
    alert: str | None = None

    def line(self) -> str:
        """One line for a terminal."""
        if self.tau is None or self.state != "drafting":
            return self.state if self.alert is None else f"{self.state}: {self.alert}"
        rates = " ".join(f"{rate:.2f}" for rate in self.per_position)
        parts = [f"tau {self.tau:.2f}", f"{self.drafts:.0f} drafts", f"by position {rates}" if rates else ""]
        parts += [f"{self.drafted_per_second:.0f} drafted/s"] if self.drafted_per_second is not None else []
        parts += [f"cache {self.cache_hit_rate:.0%}"] if self.cache_hit_rate is not None else []
        parts += [f"ALERT {self.alert}"] if self.alert else []
        return ", ".join(part for part in parts if part)


def tick(before: Counters | None, after: Counters | None, seconds: float) -> Reading:
    """What happened between two looks at the counters."""
    if before is None or after is None:
        return Reading("no answer", seconds)
    if after.drafts is None or before.drafts is None:
        return Reading("no counters", seconds)
    if was_reset(before, after):
        return Reading("reset", seconds)
    drafts = after.drafts - before.drafts
    queries, hits = _grown(before.cache_queries, after.cache_queries), _grown(before.cache_hits, after.cache_hits)
    cached = hits / queries if queries and hits is not None else None
    if not drafts:
        return Reading("idle", seconds, cache_hit_rate=cached)
    accepted, drafted = _grown(before.accepted, after.accepted), _grown(before.draft_tokens, after.draft_tokens)
    old = [*before.per_position, *[0.0] * (len(after.per_position) - len(before.per_position))]
    return Reading(
        "drafting",
        seconds,
        drafts,
        after.gauges.get(SGLANG_TAU) if accepted is None else 1 + accepted / drafts,
        tuple((b - a) / drafts for a, b in zip(old, after.per_position, strict=False)),
        None if drafted is None or seconds <= 0 else drafted / seconds,
        None if accepted is None or seconds <= 0 else accepted / seconds,
        cached,
    )


def was_reset(before: Counters, after: Counters) -> bool:
    """The server restarted: counters begin anew or went down."""
    if before.created is not None and after.created is not None and after.created > before.created:
        return True
    grown = (_grown(getattr(before, name), getattr(after, name)) for name in ALWAYS_UP)
    return any(step is not None and step < 0 for step in grown)


def _grown(before: float | None, after: float | None) -> float | None:
    return None if before is None or after is None else after - before


def learned_band(taus: Sequence[float]) -> Band | None:
    """From the first LEARN intervals with enough drafts; None before that."""
    if len(taus) < LEARN:
        return None
    low, high = min(taus[:LEARN]), max(taus[:LEARN])
    return 1 + (low - 1) * (1 - MARGIN), 1 + (high - 1) * (1 + MARGIN)


def judged(reading: Reading, band: Band | None) -> Reading:
    """With the band, and an alert when tau of enough drafts is outside it."""
    tau = reading.tau
    if band is None or tau is None or reading.drafts < ENOUGH or band[0] <= tau <= band[1]:
        return replace(reading, band=band)
    way = "below" if tau < band[0] else "above"
    return replace(reading, band=band, alert=f"tau {tau:.2f} is {way} {band[0]:.2f} to {band[1]:.2f}")


def watch(
    fetch: Callable[[], Counters | None],
    every: float,
    expected_band: Band | None,
    emit: Callable[[Reading], None],
    ticks: int | None = None,
    *,
    sleep: Callable[[float], None] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Emit a Reading every `every` seconds, `ticks` times (None: until interrupted). `fetch` gives None when the server
    does not answer. Without `expected_band` the first intervals teach it; a restart of the server does not."""
    before, since, taus = fetch(), clock(), list[float]()
    while ticks is None or ticks > 0:
        sleep(every)
        after, now = fetch(), clock()
        reading = tick(before, after, now - since)
        band = expected_band or learned_band(taus)
        if band is None and reading.tau is not None and reading.drafts >= ENOUGH:
            taus.append(reading.tau)
        emit(judged(reading, band))
        if after is not None:
            before, since = after, now
        ticks = None if ticks is None else ticks - 1
