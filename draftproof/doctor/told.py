"""What a server tells of its steps, laid along the text it wrote. Positions count from the prompt's first token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftproof.doctor.facts import Answer


@dataclass(frozen=True)
class Sums:
    """What a server's counters say of the whole probe."""

    steps: int
    accepted: int
    per_position: tuple[float, ...] = ()  # steps that accepted at least 1, 2, ... drafts


def first_anchor(answer: Answer) -> int:
    """The first output token comes from the prompt's own forward."""
    return len(answer.prompt_ids)


def last_position(answer: Answer) -> int:
    return len(answer.prompt_ids) + len(answer.output_ids) - 1


def told_steps(answer: Answer) -> list[tuple[int, int]] | None:
    """(anchor, accepted) of every step but the last; None if the engine tells none or they do not fit the text."""
    if answer.per_step is None:
        return None
    at, last, steps = first_anchor(answer), last_position(answer), list[tuple[int, int]]()
    for accepted in answer.per_step:
        if at >= last:
            break
        steps.append((at, accepted))
        at += accepted + 1
    spare = len(answer.per_step) - len(steps)  # one step may have made a stop token that is not shown
    return steps[:-1] if at >= last and spare <= 1 else None


def walked(at: Mapping[int, int], answer: Answer) -> list[int] | None:
    """Accepted drafts of the steps that a hypothesis would take along the text; None if it was not computed."""
    position, last, steps = first_anchor(answer), last_position(answer), list[int]()
    while position < last:
        if position not in at:
            return None
        steps.append(min(at[position], last - position))
        position += at[position] + 1
    return steps


def kind_of(answers: Sequence[Answer]) -> str:
    if any(told_steps(answer) for answer in answers):
        return "steps"
    return "totals" if any(answer.steps is not None for answer in answers) else "rates"


def observed_sums(answers: Sequence[Answer], sums: Sums | None = None) -> Sums:
    """From the answers where they tell, else from the server's counters; zeros if nobody tells."""
    steps = [a for answer in answers for a in answer.per_step or ()]
    if steps:
        reached = tuple(float(sum(a >= i for a in steps)) for i in range(1, max(steps) + 1))
        return Sums(len(steps), sum(steps), reached)
    told = [answer for answer in answers if answer.steps is not None]
    if not told:
        return sums or Sums(0, 0)
    emitted = sum(len(answer.output_ids) - 1 for answer in told)
    total = sum(answer.steps or 0 for answer in told)
    accepted = sum(answer.accepted or 0 for answer in told) if all(a.accepted is not None for a in told) else None
    return Sums(total, emitted - total if accepted is None else accepted, sums.per_position if sums else ())
