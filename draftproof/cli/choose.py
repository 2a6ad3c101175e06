"""Commands about the measured budget: calibrate and choose."""

from __future__ import annotations

from typing import Annotated

import typer

from draftproof.cli.app import (
    TARGET,
    BuilderName,
    Device,
    DrafterName,
    Dtype,
    Json,
    NoNoise,
    TargetName,
    app,
    drafting,
)
from draftproof.errors import UserError


@app.command()
def calibrate(
    context: Annotated[
        list[int] | None, typer.Option(min=16, help="tokens of context; may be repeated (default 256)")
    ] = None,
    sampled: Annotated[bool, typer.Option("--sampled", help="rounds at a temperature above 0")] = False,
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    builder: BuilderName = None,
    no_noise_aware: NoNoise = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure what a round of each size costs on this machine, again, and keep it for `--budget auto`."""
    from draftproof.bench.choose_report import print_costs
    from draftproof.engine.calibrate import costs_for
    from draftproof.engine.output import print_json
    from draftproof.engine.pair import load_pair

    asked = drafting(target, drafter, "ddtree", None, builder=builder, no_noise=no_noise_aware)
    pair = load_pair(target, asked.drafter, dtype=dtype, device=device)
    assert pair.drafter is not None
    limit, sizes = pair.target.spec.max_positions, sorted(set(context or [256]))
    if limit is not None and sizes[-1] > limit:
        raise UserError("bad-option", f"--context {sizes[-1]}, the model's context is {limit}", "lower it")
    costs = costs_for(pair.target, pair.drafter, asked.how, context=sizes[-1], sampled=sampled, again=True)
    rows = {}
    for size in sizes:
        seconds = costs.at(size)
        rows[size] = [
            {"nodes": n, "ms": s * 1e3, "ratio": s / seconds[0]} for n, s in zip(costs.nodes, seconds, strict=True)
        ]
    drafts = {size: costs.drafting(size) * 1e3 for size in sizes}
    print_json({"rounds": rows, "draft_ms": drafts}) if as_json else print_costs(rows, drafts)


@app.command()
def choose(
    workload: Annotated[
        str, typer.Option(help="a JSONL file of one's own prompts; or mtbench, humaneval, gsm8k, arena-hard")
    ] = "mtbench",
    prompts: Annotated[int, typer.Option(min=2, help="number of prompts")] = 8,
    max_tokens: Annotated[int, typer.Option(min=2, help="new tokens a prompt")] = 64,
    temperature: Annotated[list[float] | None, typer.Option(help="may be repeated; default 0")] = None,
    way: Annotated[
        list[str] | None,
        typer.Option(help="none, chain, chain:WIDTH, ddtree:NODES, auto, mtp:DRAFTS; may be repeated"),
    ] = None,
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    builder: BuilderName = None,
    no_noise_aware: NoNoise = False,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Measure every way of drafting on one's own prompts, and say which to use and by how much."""
    import sys

    from draftproof.bench import choose as bench
    from draftproof.bench.bridge import encode
    from draftproof.bench.choose_report import print_choice
    from draftproof.bench.machine import provenance
    from draftproof.bench.speed import OtherLoad
    from draftproof.bench.workloads import load_workload
    from draftproof.engine.output import print_json
    from draftproof.engine.pair import load_pair
    from draftproof.engine.request import SamplingParams

    temperatures = [SamplingParams(t).temperature for t in temperature or (0.0,)]
    if no_noise_aware and not any(temperatures):
        raise UserError("bad-option", "--no-noise-aware means nothing at temperature 0", "leave it out")
    asked = [bench.Way.parse(text) for text in way or bench.DEFAULT]
    if len({w.name for w in asked}) < len(asked):
        raise UserError("bad-option", "a --way is named twice", "name each once")
    pairing = drafting(target, drafter, "ddtree", None, builder=builder)
    chosen = load_workload(workload, prompts)
    if len(chosen) < prompts:
        raise UserError("bad-option", f"{workload} has only {len(chosen)} prompts", f"--prompts {len(chosen)}")
    pair = load_pair(target, pairing.drafter, dtype=dtype, device=device)
    if not way and pair.target.spec.mtp_layers:
        asked += [bench.Way.parse(text) for text in bench.DEFAULT_MTP]
    load, chats = OtherLoad(), [(p.id, encode(pair, p)) for p in chosen]
    results = [
        bench.choose(
            pair, asked, chats, t, max_tokens,
            noise_aware=not no_noise_aware, builder=builder or "spine-first",
            report=lambda line: print(line, file=sys.stderr, flush=True),
        )
        for t in temperatures
    ]  # fmt: skip
    where = provenance(f"{pair.device.value} ({pair.device.reason})", f"{pair.dtype.value} ({pair.dtype.reason})")
    if as_json:
        print_json({"results": results, "other_load": load.share(), "provenance": where})
    else:
        print_choice(results, where, load.share())
