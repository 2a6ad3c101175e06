"""`draftproof bench`: the parts asked for, measured in one process, with everything a number needs beside it."""

from __future__ import annotations

import sys
from typing import Any

from draftproof.bench import acceptance, machine, speed

PARTS = ("speed", "acceptance", "memory", "all")
SPEED_PROMPTS, SPEED_SET, TEMPERATURES = 20, "mtbench", (0.0, 0.7)
SPEED_TOKENS, ACCEPTANCE_TOKENS = 128, 256


def run_bench(
    part: str,
    target: str,
    drafter: str,
    against: str | None,
    *,
    device: str,
    dtype: str,
    limit: int | None,
    skip: int,
    max_tokens: int | None,
) -> dict[str, Any]:
    from draftproof.engine.pair import load_pair

    load = speed.OtherLoad()
    pair = load_pair(target, drafter, dtype=dtype, device=device)
    result: dict[str, Any] = {
        "drafter": drafter,
        "against": against,
        "max_tokens": max_tokens or [SPEED_TOKENS, ACCEPTANCE_TOKENS],
    }
    if part in ("speed", "all"):
        result["speed"] = {
            str(t): _speed(pair, t, limit or SPEED_PROMPTS, skip, max_tokens or SPEED_TOKENS) for t in TEMPERATURES
        }
    if part in ("memory", "all"):
        result["memory"] = _memory(pair, max_tokens or SPEED_TOKENS)
    if part in ("acceptance", "all"):
        names = [drafter] + ([against] if against else [])
        cells = acceptance.measure(pair, names, limit=limit, max_tokens=max_tokens or ACCEPTANCE_TOKENS)
        result["acceptance"] = acceptance.as_dict(cells, names)
    result["other_load"] = load.share()
    result["provenance"] = machine.provenance(
        f"{pair.device.value} ({pair.device.reason})", f"{pair.dtype.value} ({pair.dtype.reason})"
    )
    return result


def _speed(pair: Any, temperature: float, limit: int, skip: int, max_tokens: int) -> dict[str, Any]:
    def progress(sample: speed.Sample) -> None:
        rates = "  ".join(f"{m} {sample.rate(m):.1f}" for m in speed.METHODS)
        print(f"T {temperature}  {sample.prompt}: {rates} tokens/s", file=sys.stderr, flush=True)

    samples = speed.measure(
        pair,
        workload=SPEED_SET,
        limit=limit,
        skip=skip,
        temperature=temperature,
        max_tokens=max_tokens,
        report=progress,
    )
    return speed.summary(samples)


def _memory(pair: Any, max_tokens: int) -> dict[str, Any]:
    """Peak while decoding, over weights plus caches."""
    from draftproof.bench import bridge

    return bridge.peak_memory(pair, max_tokens)
