"""How much a text repeats itself. Nothing here imports torch."""

from __future__ import annotations

from collections.abc import Sequence


def repeated_4grams(ids: Sequence[int]) -> float:
    """Share of 4-grams that occurred before in the same text: near 0 for prose, near 1 for a loop."""
    grams = [tuple(ids[i : i + 4]) for i in range(len(ids) - 3)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
