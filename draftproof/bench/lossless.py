"""Is the output the target's own? The same prompts with and without the drafter, and by transformers' own generate.

A divergence is a tie when the two tokens' logits at the first differing position lie closer than TIE allows for the
dtype: kernels for one row and for several rows round differently. Anything else is a bug.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from draftproof.bench import bridge

if TYPE_CHECKING:
    from draftproof.engine.pair import Pair
    from draftproof.engine.propose import Speculation

TIE = {"float64": 1e-9, "float32": 1e-4, "bfloat16": 0.25, "float16": 0.05}


@dataclass(frozen=True)
class Comparison:
    """One prompt, two ways. `at` is the first differing token (0-based), None when identical."""

    prompt: str
    temperature: float
    ways: str
    tokens: int
    at: int | None = None
    gap: float | None = None
    verdict: str = "identical"


def compare(
    pair: Pair,
    prompts: Sequence[tuple[str, list[int]]],
    temperatures: Sequence[float],
    max_tokens: int,
    seed: int,
    how: Speculation | None = None,
) -> list[Comparison]:
    """transformers draws its noise another way, so it is compared at temperature 0 only."""
    context = max(len(ids) for _, ids in prompts) + max_tokens
    results = []
    for temperature in temperatures:
        run = bridge.runners(pair, temperature, max_tokens, context, how)
        for name, ids in prompts:
            plain = run["none"](ids, seed).ids
            others = {"with drafter / without": run["drafted"](ids, seed).ids}
            if temperature == 0:
                others["without / transformers generate"] = run["transformers"](ids, seed).ids
            for ways, other in others.items():
                results.append(_judge(pair, name, ids, temperature, seed, ways, other, plain))
    return results


def _judge(
    pair: Pair, name: str, ids: list[int], temperature: float, seed: int, ways: str, one: list[int], two: list[int]
) -> Comparison:
    if one == two:
        return Comparison(name, temperature, ways, len(one))
    at = next((i for i, (a, b) in enumerate(zip(one, two, strict=False)) if a != b), min(len(one), len(two)))
    if at >= min(len(one), len(two)):  # one text is the beginning of the other: no kernel rounds like that
        return Comparison(name, temperature, ways, len(two), at, None, "bug")
    gap = bridge.score_gap(pair, ids + two[:at], one[at], two[at], temperature, seed)
    return Comparison(name, temperature, ways, len(two), at, gap, "tie" if gap < TIE[pair.dtype.value] else "bug")


def summary(results: Sequence[Comparison], dtype: str) -> dict[str, Any]:
    return {
        "compared": len(results),
        "identical": sum(r.verdict == "identical" for r in results),
        "ties": [asdict(r) for r in results if r.verdict == "tie"],
        "bugs": [asdict(r) for r in results if r.verdict == "bug"],
        "tie_rule": f"{dtype}: scores of the two tokens closer than {TIE[dtype]}",
    }
