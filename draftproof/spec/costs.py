"""What a round costs here, as it was measured: seconds by context and by number of drafted nodes."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Costs:
    """Seconds of a whole round (draft, build, verify, walk, commit) by context and drafted nodes.

    nodes: ascending, 0 (plain decoding, nothing drafted) first. seconds: one row a context, in the order of `nodes`.
    draft: seconds of a draft whose tree is not used, by context. place: what they belong to (machine, pair, options).
    """

    nodes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]
    draft: tuple[float, ...]
    place: str = field(default="", compare=False)

    def at(self, context: int) -> list[float]:
        """Seconds of every option, never falling with the nodes; linear between contexts, constant beyond them."""
        return rising([self._between(context, [row[i] for row in self.seconds]) for i in range(len(self.nodes))])

    def drafting(self, context: int) -> float:
        return self._between(context, self.draft)

    def _between(self, context: int, values: Sequence[float]) -> float:
        right = bisect_left(self.contexts, context)
        if right == 0:
            return values[0]
        if right == len(self.contexts):
            return values[-1]
        low, high = self.contexts[right - 1], self.contexts[right]
        share = (context - low) / (high - low)
        return values[right - 1] * (1 - share) + values[right] * share


def rising(values: Sequence[float]) -> list[float]:
    """The closest rising sequence (isotonic regression by pooling neighbours): noise must not make 9 nodes cheaper than
    8; steps of real kernels stay."""
    pools: list[tuple[float, int]] = []
    for value in values:
        total, count = value, 1
        while pools and pools[-1][0] / pools[-1][1] > total / count:
            total, count = total + pools[-1][0], count + pools[-1][1]
            pools.pop()
        pools.append((total, count))
    return [total / count for total, count in pools for _ in range(count)]
