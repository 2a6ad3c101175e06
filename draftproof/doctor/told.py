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


def shown_steps(answer: Answer) -> list[int]:
    """Accepted drafts of every step, as far as the text shows them; as told where steps and text do not fit."""
    told = told_steps(answer)
    if told is None or answer.per_step is None:
        return list(answer.per_step or ())
    last, at, steps = last_position(answer), first_anchor(answer), list[int]()
    for accepted in answer.per_step:
        if at < last:
            steps.append(min(accepted, last - at))
        at += accepted + 1
    return steps


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
    """From the answers where they tell, else from the server's counters; zeros if nobody tells. Drafts behind the last
    token that was asked for are not counted: no hypothesis can predict them."""
    steps = [a for answer in answers for a in shown_steps(answer)]
    if steps:
        reached = tuple(float(sum(a >= i for a in steps)) for i in range(1, max(steps) + 1))
        return Sums(len(steps), sum(steps), reached)
    told = [answer for answer in answers if answer.steps is not None]
    if not told:
        return sums or Sums(0, 0)
    total = sum(answer.steps or 0 for answer in told)
    shown = sum(_shown_drafts(answer) for answer in told)
    return Sums(total, shown, sums.per_position if sums else ())


def _shown_drafts(answer: Answer) -> int:
    """Accepted drafts among the tokens behind the first; where the last step was cut, it shows drafts alone."""
    room = len(answer.output_ids) - 1 - (answer.steps or 0)
    return room if answer.accepted is None else min(answer.accepted, room + 1)
