"""Which way of drafting is fastest here, on one's own prompts: every way answers every prompt, interleaved, in one run.

The seed of a prompt is the same for all ways, so all write the same text (up to rounding) and only time differs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from draftproof.bench import bridge
from draftproof.engine.acceptance import mean_interval
from draftproof.errors import UserError
from draftproof.spec.budget import MOST_NODES

if TYPE_CHECKING:
    from draftproof.bench.bridge import Timed
    from draftproof.engine.pair import Pair

PLAIN, CHAIN, AUTO = "none", "chain", "auto"
DEFAULT = (PLAIN, "chain:2", "chain:3", CHAIN, "ddtree:8", "ddtree:16", "ddtree:32", "ddtree:64", AUTO)
DEFAULT_MTP = ("mtp:1", "mtp:2", "mtp:3")
HELP = "none, chain, chain:WIDTH, ddtree:NODES, auto or mtp:DRAFTS"


@dataclass(frozen=True)
class Way:
    """One way to decode: kind none, chain, ddtree, auto or mtp, and its number (0: none given)."""

    name: str
    kind: str
    number: int = 0

    @classmethod
    def parse(cls, text: str) -> Way:
        kind, _, number = text.partition(":")
        counted = number.isascii() and number.isdecimal() and len(number) < 4 and kind in ("chain", "ddtree", "mtp")
        if not (text in (PLAIN, CHAIN, AUTO) or (counted and 1 <= int(number) <= MOST_NODES)):
            raise UserError("bad-option", f"--way {text[:20]!r} is not known", f"use {HELP}")
        return cls(text if not number else f"{kind}:{int(number)}", kind, int(number or 0))


def choose(
    pair: Pair,
    ways: Sequence[Way],
    prompts: Sequence[tuple[str, list[int]]],
    temperature: float,
    max_tokens: int,
    *,
    noise_aware: bool,
    builder: str,
    report: Callable[[str], None],
) -> dict[str, Any]:
    """One table at one temperature. The order of ways rotates from prompt to prompt."""
    context = max(len(ids) for _, ids in prompts) + max_tokens
    run = {w.name: bridge.way_runner(pair, w, temperature, max_tokens, context, noise_aware, builder) for w in ways}
    for answer in run.values():
        answer(prompts[0][1][:32], 0)  # warm-up
    names = [w.name for w in ways]
    done: dict[str, list[Timed]] = {name: [] for name in names}
    for number, (prompt, ids) in enumerate(prompts):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            done[name].append(run[name](ids, number))
        rates = "  ".join(f"{name} {len(done[name][-1].ids) / done[name][-1].seconds:.1f}" for name in names)
        report(f"T {temperature:g}  {prompt}: {rates} tokens/s")
    return summary(done, temperature)


def summary(done: dict[str, list[Timed]], temperature: float) -> dict[str, Any]:
    """Per way: tau, nodes a step, tokens/s, and the ratio to plain decoding by prompt (geometric mean, 95 %)."""
    first = next(iter(done))
    rows = {name: _row(runs, done.get(PLAIN), done[first]) for name, runs in done.items()}
    fastest = max(rows, key=lambda name: rows[name]["tokens_per_second"])
    result = {"temperature": temperature, "prompts": len(done[first]), "ways": rows, "fastest": fastest}
    rivals = [name for name in (PLAIN, CHAIN) if name in done]
    if AUTO in done and rivals:
        better = max(rivals, key=lambda name: rows[name]["tokens_per_second"])
        result["auto"] = {"against": better, **_ratio(done[AUTO], done[better])}
        if CHAIN in done:
            result["auto_over_chain"] = _ratio(done[AUTO], done[CHAIN])
    return result


def _row(runs: Sequence[Timed], plain: Sequence[Timed] | None, first: Sequence[Timed]) -> dict[str, Any]:
    steps, tokens = sum(r.steps for r in runs), sum(len(r.ids) for r in runs)
    return {
        "tau": (tokens - len(runs)) / steps if steps else math.nan,
        "nodes": sum(r.nodes for r in runs) / steps if steps else math.nan,
        "tokens_per_second": tokens / sum(r.seconds for r in runs),
        "over_none": _ratio(runs, plain) if plain else None,
        "other_texts": sum(a.ids != b.ids for a, b in zip(runs, first, strict=True)),
    }


def _ratio(runs: Sequence[Timed], base: Sequence[Timed]) -> dict[str, Any]:
    """tokens/s of `runs` over `base`, prompt by prompt."""
    pairs = zip(runs, base, strict=True)
    logs = [math.log((len(a.ids) / a.seconds) / (len(b.ids) / b.seconds)) for a, b in pairs]
    mean, low, high = mean_interval(logs)
    return {"mean": math.exp(mean), "interval": [math.exp(low), math.exp(high)], "median": math.exp(median(logs))}


def advice(result: dict[str, Any]) -> str:
    """One sentence: what to use, and whether the numbers can tell."""
    name = result["fastest"]
    over = result["ways"][name]["over_none"]
    if over is None:
        return f"T {result['temperature']:g}: {name} is the fastest of these"
    if name == PLAIN:
        return f"T {result['temperature']:g}: decode plainly (--method none): no way of drafting is faster here"
    low, high = over["interval"]
    sure = "" if low > 1 else ", but the interval holds 1: more --prompts would tell"
    return f"T {result['temperature']:g}: use {name}: {over['mean']:.2f} x plain ({low:.2f}-{high:.2f}){sure}"
