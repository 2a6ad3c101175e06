"""Commands that run models: run, replay, lossless, bench."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import (
    TARGET,
    Budget,
    BuilderName,
    Device,
    DrafterName,
    Drafts,
    Dtype,
    Json,
    Method,
    NoNoise,
    TargetName,
    app,
    drafting,
)
from draftproof.cli.shape import bench_shape
from draftproof.errors import UserError

LOSSLESS_BUDGET = 32  # a measured budget may choose plain decoding, which would prove nothing


@app.command()
def run(
    prompt: Annotated[str | None, typer.Argument(help="the user's words; read from stdin when absent")] = None,
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    method: Method = "dflash",
    drafts: Drafts = None,
    budget: Budget = None,
    builder: BuilderName = None,
    no_noise_aware: NoNoise = False,
    temperature: Annotated[float, typer.Option(help="0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="nucleus, 1 switches it off")] = 1.0,
    top_k: Annotated[int, typer.Option(help="0 switches it off")] = 0,
    min_p: Annotated[float, typer.Option(help="0 switches it off")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="1 switches it off")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="same seed, same text, whatever the drafter")] = None,
    max_tokens: Annotated[int, typer.Option(help="new tokens at most")] = 256,
    stop: Annotated[list[str] | None, typer.Option(help="end the text before this string; may be repeated")] = None,
    raw: Annotated[bool, typer.Option(help="no chat template: continue the prompt as it stands")] = False,
    compare: Annotated[bool, typer.Option(help="answer again without the drafter and compare")] = False,
    stats: Annotated[bool, typer.Option(help="print acceptance and speed (default on a terminal)")] = False,
    show_tree: Annotated[
        int, typer.Option(min=0, help="draw the draft trees of the first N steps, with the accepted path")
    ] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Generate text, losslessly; on a terminal, accepted draft tokens are coloured."""
    from draftproof.engine.request import SamplingParams
    from draftproof.engine.session import Ask, answer

    asked = drafting(target, drafter, method, drafts, budget=budget, builder=builder, no_noise=no_noise_aware)
    if no_noise_aware and not temperature and repetition_penalty == 1:
        raise UserError("bad-option", "--no-noise-aware means nothing at temperature 0", "leave it out")
    if show_tree and method == "none":
        raise UserError("bad-option", "--show-tree with --method none has nothing to draw", "use ddtree, dflash or mtp")
    if compare and method == "none":
        raise UserError("bad-option", "--compare with --method none has nothing to compare", "use dflash or mtp")
    if prompt is None and sys.stdin.isatty():
        raise UserError("prompt-empty", "no prompt was given", 'draftproof run "..." or pipe it into stdin')
    words = sys.stdin.read() if prompt is None else prompt
    sampling = SamplingParams(temperature, top_p, top_k, min_p, repetition_penalty, seed)
    ask = Ask(words, target, asked, sampling, max_tokens, tuple(stop or ()), raw, show_tree)
    answer(ask, device=device, dtype=dtype, compare=compare, stats=stats, as_json=as_json)


@app.command()
def replay(
    texts: Annotated[Path, typer.Option(help="JSON with prompt_ids and continuation_ids")],
    drafter: DrafterName = None,
    method: Method = "dflash",
    drafts: Drafts = None,
    target: TargetName = TARGET,
    max_tokens: Annotated[int | None, typer.Option(help="only the first tokens of each continuation")] = None,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Acceptance of a pair along given texts, without sampling: what acceptance the pair should have."""
    from draftproof.bench.report import print_acceptance
    from draftproof.engine.output import print_json
    from draftproof.engine.pair import load_pair
    from draftproof.engine.replay import load_texts
    from draftproof.engine.replay import replay as walk

    if max_tokens is not None and max_tokens < 2:
        raise UserError("bad-option", f"max_tokens is {max_tokens}", "give at least 2: an anchor and a token to draft")
    if method not in ("dflash", "mtp"):
        raise UserError(
            "bad-option", f"--method {method} is not what replay walks", "use dflash or mtp: one path a step"
        )
    asked = drafting(target, drafter, method, drafts)
    loaded = load_texts(texts, max_tokens)
    pair = load_pair(target, asked.drafter, mtp=asked.mtp, dtype=dtype, device=device)
    assert pair.drafter is not None
    result = walk(pair.target, pair.drafter, loaded)
    if as_json:
        print_json(result.as_dict())
    else:
        print_acceptance(result)


@app.command()
def lossless(
    prompts: Annotated[int, typer.Option(min=1, help="number of prompts")] = 20,
    max_tokens: Annotated[int, typer.Option(min=1, help="new tokens a prompt")] = 128,
    workload: Annotated[str, typer.Option(help="mtbench, humaneval, gsm8k, arena-hard or a JSONL file")] = "mtbench",
    temperature: Annotated[list[float] | None, typer.Option(help="may be repeated; default 0, 0.7 and 1")] = None,
    seed: int = 0,
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    method: Method = "dflash",
    drafts: Drafts = None,
    budget: Budget = None,
    builder: BuilderName = None,
    no_noise_aware: NoNoise = False,
    device: Device = "auto",
    dtype: Dtype = "float32",
    as_json: Json = False,
) -> None:
    """Is the output the target's own? With drafter, without, and by transformers' own generate. Exit code 1: no."""
    from draftproof.bench import lossless as judge
    from draftproof.bench.bridge import encode
    from draftproof.bench.machine import provenance
    from draftproof.bench.report import print_lossless
    from draftproof.bench.workloads import load_workload
    from draftproof.engine.output import print_json
    from draftproof.engine.pair import load_pair
    from draftproof.engine.request import SamplingParams

    temperatures = [SamplingParams(t).temperature for t in temperature or (0.0, 0.7, 1.0)]
    if no_noise_aware and not any(temperatures):
        raise UserError("bad-option", "--no-noise-aware means nothing at temperature 0", "leave it out")
    asked = drafting(
        target, drafter, method, drafts,
        budget=budget, builder=builder, no_noise=no_noise_aware, default_budget=str(LOSSLESS_BUDGET),
    )  # fmt: skip
    chosen = load_workload(workload, prompts)
    if len(chosen) < prompts:
        raise UserError("bad-option", f"{workload} has only {len(chosen)} prompts", f"--prompts {len(chosen)}")
    pair = load_pair(target, asked.drafter, mtp=asked.mtp, dtype=dtype, device=device)
    chats = [(p.id, encode(pair, p)) for p in chosen]
    results = judge.compare(pair, chats, temperatures, max_tokens, seed, asked.how)
    if as_json:
        print_json(
            judge.summary(results, pair.dtype.value) | {"provenance": provenance(pair.device.value, pair.dtype.value)}
        )
    else:
        print_lossless(results)
    raise typer.Exit(int(any(r.verdict == "bug" for r in results)))


@app.command()
def bench(
    part: Annotated[str, typer.Option(help="speed, acceptance, memory or all")] = "all",
    limit: Annotated[int | None, typer.Option(min=2, help="prompts per set (default: all; speed: 20)")] = None,
    skip: Annotated[int, typer.Option(min=0, help="speed: leave out the first prompts")] = 0,
    max_tokens: Annotated[
        int | None, typer.Option(min=2, help="new tokens a prompt (default: 128, acceptance 256)")
    ] = None,
    against: Annotated[str | None, typer.Option(help="acceptance: a second drafter, paired by prompt")] = None,
    shape: Annotated[
        str | None,
        typer.Option(help="a pair of published size with random weights instead: qwen3.6-27b, qwen3-8b or a folder"),
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=16, help="shape: tokens in the cache; may be repeated")
    ] = None,
    assume_tau: Annotated[list[float] | None, typer.Option(help="shape: tokens a round; may be repeated")] = None,
    target: TargetName = TARGET,
    drafter: DrafterName = None,
    method: Method = "dflash",
    drafts: Drafts = None,
    device: Device = "auto",
    dtype: Dtype = "auto",
    as_json: Json = False,
) -> None:
    """Speed against plain decoding and transformers, acceptance on public prompt sets, peak memory."""
    if shape:
        given = [part != "all", limit, skip, max_tokens, against, target != TARGET, drafter, method != "dflash", drafts]
        if any(given):
            raise UserError(
                "bad-option", "--shape builds its own pair", "combine it with --context and --assume-tau only"
            )
        bench_shape(shape, context, assume_tau, device, dtype, as_json)
        return
    if context or assume_tau:
        raise UserError("bad-option", "--context and --assume-tau belong to --shape", "leave them out, or add --shape")
    from draftproof.bench.report import print_bench
    from draftproof.bench.suite import PARTS, run_bench
    from draftproof.engine.output import print_json

    if part not in PARTS:
        raise UserError("bad-option", f"part {part!r} is not known", f"use one of {', '.join(PARTS)}")
    unused = [("--skip", skip, "speed"), ("--against", against, "acceptance")]
    for option, value, needs in unused:
        if value and part not in (needs, "all"):
            raise UserError("bad-option", f"{option} means nothing for --part {part}", f"use --part {needs}")
    if limit and part == "memory":
        raise UserError("bad-option", "--limit means nothing for --part memory", "leave it out")
    if method == "ddtree":
        raise UserError("bad-option", "bench measures chains", "use draftproof choose: it measures trees beside them")
    asked = drafting(target, drafter, method, drafts)
    if method == "none":
        raise UserError("bad-option", "bench measures plain decoding beside a drafter", "use --method dflash or mtp")
    result = run_bench(
        part,
        target,
        asked.drafter,
        against,
        mtp=asked.mtp,
        device=device,
        dtype=dtype,
        limit=limit,
        skip=skip,
        max_tokens=max_tokens,
    )
    if as_json:
        print_json(result)
    else:
        print_bench(result)
