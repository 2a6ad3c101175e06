"""`draftproof bench`: the parts asked for, measured in one process, with everything a number needs beside it."""

from __future__ import annotations

import sys
from typing import Any

from draftproof.bench import acceptance, bridge, machine, speed

PARTS = ("speed", "acceptance", "memory", "all")
SPEED_PROMPTS, SPEED_SET, TEMPERATURES = 20, "mtbench", (0.0, 0.7)
SPEED_TOKENS, ACCEPTANCE_TOKENS = 128, 256


def run_bench(
    part: str,
    target: str,
    drafter: str | None,
    against: str | None,
    *,
    mtp: int = 0,
    device: str,
    dtype: str,
    limit: int | None,
    skip: int,
    max_tokens: int | None,
) -> dict[str, Any]:
    from draftproof.engine.pair import load_pair

    load = speed.OtherLoad()
    pair = load_pair(target, drafter, mtp=mtp, dtype=dtype, device=device)
    assert pair.drafter is not None
    drafters = [pair.drafter, *bridge.load_drafters(pair, [against] if against else [])]
    first = drafter or f"mtp, {mtp} a step"
    names = [first, against] if against else [first]
    result: dict[str, Any] = {"drafter": first, "against": against}
    if part in ("memory", "all"):  # first: memory that an allocator kept from other parts would hide the peak
        result["memory"] = bridge.peak_memory(pair, max_tokens or SPEED_TOKENS)
    if part in ("speed", "all"):
        tokens = max_tokens or SPEED_TOKENS
        result["speed"] = {str(t): _speed(pair, t, limit or SPEED_PROMPTS, skip, tokens) for t in TEMPERATURES}
    if part in ("acceptance", "all"):
        cells = acceptance.measure(pair, drafters, limit=limit, max_tokens=max_tokens or ACCEPTANCE_TOKENS)
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
