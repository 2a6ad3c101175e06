"""Acceptance as the server itself tells it, from the best source there is: its answers, its counters, its log."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from draftproof.doctor.facts import Answer, Counters, Facts


@dataclass(frozen=True)
class Observed:
    """tau = 1 + accepted / steps. `rates` may be empty where only sums are known."""

    where: str
    steps: float
    tau: float
    rates: tuple[float, ...]


def observed(facts: Facts) -> Observed | None:
    """Answers before counters before log lines: the first is ours alone, the last is everybody's."""
    if facts.probe is not None and (told := of_answers(facts.probe.answers)) is not None:
        return told
    if facts.metrics is not None and (told := of_counters(facts.metrics.delta)) is not None:
        return told
    lines = facts.log.lines if facts.log else ()
    if lines and lines[-1].per_position:
        line = lines[-1]
        drafts = (line.drafted or 0) / len(line.per_position)
        if line.accepted and line.mean_length > 1:  # llama.cpp prints no positions beyond the last that was reached
            drafts = line.accepted / (line.mean_length - 1)
        return Observed("log: the last metrics line", drafts, line.mean_length, line.per_position)
    return None


def of_answers(answers: Iterable[Answer]) -> Observed | None:
    """Over all answers that tell their steps; None if none does."""
    told = [one for one in answers if one.steps and one.accepted is not None]
    steps = sum(one.steps or 0 for one in told)
    if not steps:
        return None
    each = [one.per_step for one in told]
    known = [count for counts in each if counts for count in counts]
    rates = rates_of(known) if all(counts is not None for counts in each) else ()
    tau = 1 + sum(one.accepted or 0 for one in told) / steps
    if not rates and tau == 1:
        rates = (0.0,)  # nothing accepted in sum is nothing accepted anywhere
    return Observed("probe: the server's own word for each request", steps, tau, rates)


def of_counters(delta: Counters | None) -> Observed | None:
    if delta is None or not delta.drafts or delta.accepted is None:
        return None
    rates = tuple(count / delta.drafts for count in delta.per_position)
    return Observed("metrics: counters of the probe", delta.drafts, 1 + delta.accepted / delta.drafts, rates)


def rates_of(accepted: Sequence[int]) -> tuple[float, ...]:
    """Rates by position from accepted drafts a step."""
    if not accepted:
        return ()
    return tuple(sum(a >= i for a in accepted) / len(accepted) for i in range(1, max(1, *accepted) + 1))
