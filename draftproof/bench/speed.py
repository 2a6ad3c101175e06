"""Speed as a ratio: the same prompts answered three ways, interleaved in one run, one prompt after another."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.bench import bridge
from draftproof.bench.workloads import load_workload
from draftproof.engine.acceptance import mean_interval
from draftproof.errors import UserError
from draftproof.train.loops import repeated_4grams

if TYPE_CHECKING:
    from draftproof.engine.pair import Pair

LOOP = 0.5  # a text with more than this share of repeated 4-grams is a loop
METHODS = ("drafted", "none", "transformers")


@dataclass(frozen=True)
class Sample:
    """One prompt answered every way. looped: the plain answer repeats itself; such samples flatter acceptance."""

    prompt: str
    tokens: dict[str, int]
    seconds: dict[str, float]
    steps: int
    looped: bool

    def rate(self, method: str) -> float:
        return self.tokens[method] / self.seconds[method]


def measure(
    pair: Pair,
    *,
    workload: str,
    limit: int,
    temperature: float,
    max_tokens: int,
    report: Callable[[Sample], None],
    skip: int = 0,
) -> list[Sample]:
    """The order of methods rotates from prompt to prompt, so that a drift of the machine meets all of them."""
    prompts = load_workload(workload, skip + limit)[skip:]
    if len(prompts) < limit:
        raise UserError(
            "bad-option", f"{workload} has {len(prompts)} prompts after the first {skip}", "lower --skip or --limit"
        )
    encoded = [bridge.encode(pair, p) for p in prompts]
    run = bridge.runners(pair, temperature, max_tokens, max(map(len, encoded)) + max_tokens)
    for method in METHODS:
        run[method](encoded[0][:32], 0)  # warm-up
    samples = []
    for number, (prompt, ids) in enumerate(zip(prompts, encoded, strict=True)):
        turn = number % len(METHODS)
        done = {m: run[m](ids, number) for m in METHODS[turn:] + METHODS[:turn]}
        samples.append(
            Sample(
                prompt.id,
                {m: len(t.ids) for m, t in done.items()},
                {m: t.seconds for m, t in done.items()},
                done["drafted"].steps,
                repeated_4grams(done["none"].ids) > LOOP,
            )
        )
        report(samples[-1])
    return samples


def ratio(samples: Sequence[Sample], method: str, base: str) -> tuple[float, float, float]:
    """Geometric mean over prompts of tokens/s of `method` over `base`, with a 95 % interval by prompt."""
    logs = [math.log(s.rate(method) / s.rate(base)) for s in samples]
    mean, low, high = mean_interval(logs)
    return math.exp(mean), math.exp(low), math.exp(high)


def summary(samples: Sequence[Sample]) -> dict[str, Any]:
    kept = [s for s in samples if not s.looped]
    if not kept:
        raise UserError("bad-option", f"all {len(samples)} plain answers loop: nothing to compare", "raise --limit")
    steps = sum(s.steps for s in kept)
    return {
        "prompts": len(kept),
        "looped_excluded": len(samples) - len(kept),
        "loop_rule": f"more than {LOOP} of the plain answer's 4-grams occurred before",
        "tokens_per_second": {m: sum(s.tokens[m] for s in kept) / sum(s.seconds[m] for s in kept) for m in METHODS},
        "over_none": ratio(kept, "drafted", "none"),
        "over_transformers": ratio(kept, "drafted", "transformers"),
        "none_over_transformers": ratio(kept, "none", "transformers"),
        "tau": (sum(s.tokens["drafted"] for s in kept) - len(kept)) / steps if steps else math.nan,
        "samples": [asdict(s) for s in samples],
    }


class OtherLoad:
    """Share of the machine's CPU time that other processes took since the object was made."""

    def __init__(self) -> None:
        self._begun = self._read()

    def share(self) -> float:
        busy, total, own = (now - then for now, then in zip(self._read(), self._begun, strict=True))
        return max(0.0, busy - own) / total if total else math.nan

    @staticmethod
    def _read() -> tuple[float, float, float]:
        import os

        try:
            fields = [int(v) for v in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
        except OSError:
            return 0.0, 0.0, 0.0
        ticks = os.sysconf("SC_CLK_TCK")
        idle = fields[3] + fields[4]
        return (sum(fields) - idle) / ticks, sum(fields) / ticks, time.process_time()
