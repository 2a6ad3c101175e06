"""What the rates by position alone suggest: hints from public fault reports, never a verdict."""

from __future__ import annotations

from collections.abc import Sequence

ENOUGH = 100  # drafts from which on a shape means something


def shape(rates: Sequence[float], block_size: int | None = None) -> str:
    """The pattern in words with its reported cause; empty where there is none. `rates[i]` is the share of steps that
    accepted at least i + 1 drafts."""
    if not rates:
        return ""
    first, rest = rates[0], rates[1:]
    if not any(rates):
        return "no draft is ever accepted: a head or weights that are zero or not loaded, or a wrong attention kernel"
    if first < 0.03:
        return "next to nothing is accepted, at every position: drafts read through the wrong head or vocabulary"
    if first < 0.4 and rest and max(rest) < 0.05:
        return (
            "only the first position is ever right: features or rotation are wrong, or the block holds masks alone, "
            "and the first row still learns from the anchor"
        )
    dead = len(rates) - sum(rate > 0 for rate in rates)
    if dead and block_size is not None and len(rates) - dead == block_size - 1:
        return f"flat zero from position {block_size - 1} on: more drafts than the trained block holds"
    return ""


def is_dead(rates: Sequence[float], drafts: float) -> bool:
    """No healthy pair, and no text, gives zero acceptance over that many drafts."""
    return drafts >= ENOUGH and bool(rates) and not any(rates)
