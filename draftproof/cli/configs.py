"""Commands that read configs only: inspect, check, explain."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from draftproof.cli.app import Json, app, table_console
from draftproof.cli.options import (
    Drafts,
    EngineMethod,
    KvDtype,
    MaxBatchedTokens,
    MaxModelLen,
    MaxNumSeqs,
    NoPrefixCaching,
    PipelineParallel,
    PlatformName,
    Runner,
    TensorParallel,
    Venv,
)
from draftproof.errors import UserError


@app.command()
def inspect(
    drafter: Annotated[str | None, typer.Argument(help="drafter: embedded name, folder, config.json or hub id")] = None,
    target: Annotated[str | None, typer.Option("--target", help="check the pair, too")] = None,
    method: Annotated[str, typer.Option(help="dflash, or mtp: the target drafts with its own head")] = "dflash",
    as_json: Json = False,
) -> None:
    """What a drafter's config demands, where each value comes from, and what is wrong with it. Needs no weights."""
    import json

    from rich.console import Console

    from draftproof.config.report import inspect as inspect_configs
    from draftproof.config.report import inspect_mtp, render
    from draftproof.models.checkpoint import check_weights
    from draftproof.models.hub import resolve_drafter, resolve_target

    if method not in ("dflash", "mtp"):
        raise UserError("bad-option", f"method {method!r} is not known", "use dflash or mtp")
    if method == "mtp":
        if drafter or not target:
            raise UserError("bad-option", "--method mtp looks at a target alone", "give --target, and no drafter")
        folder = resolve_target(target)
        inspection = inspect_mtp(folder, check_weights(folder) if any(folder.glob("*.safetensors")) else None)
    elif drafter is None:
        raise UserError("bad-option", "no drafter was named", "draftproof inspect DRAFTER [--target T]")
    else:
        where = drafter if Path(drafter).is_file() else resolve_drafter(drafter)
        inspection = inspect_configs(where, resolve_target(target) if target else None)
    if as_json:
        print(json.dumps(inspection.as_dict(), indent=2))
    else:
        render(inspection, Console())
    raise typer.Exit(inspection.exit_code)


@app.command(context_settings={"allow_extra_args": True})
def check(
    context: typer.Context,
    drafter: Annotated[str | None, typer.Argument(help="drafter: embedded name, folder, config.json or hub id")] = None,
    target: Annotated[str, typer.Option("--target", help="target: embedded name, folder, config.json or hub id")] = "",
    engine: Annotated[list[str] | None, typer.Option(help="vllm==0.33, vllm (the installed one); may repeat")] = None,
    method: EngineMethod = None,
    num_speculative_tokens: Drafts = None,
    tensor_parallel_size: TensorParallel = None,
    pipeline_parallel_size: PipelineParallel = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = None,
    max_num_batched_tokens: MaxBatchedTokens = None,
    kv_cache_dtype: KvDtype = None,
    no_prefix_caching: NoPrefixCaching = False,
    runner: Runner = None,
    platform: PlatformName = None,
    gpu_memory: Annotated[float | None, typer.Option(min=0.1, help="GiB of one GPU, to compare the estimate")] = None,
    target_weights: Annotated[float | None, typer.Option(min=0, help="GiB of all target weights, if not here")] = None,
    venv: Venv = None,
    as_json: Json = False,
) -> None:
    """Will this pair run as it was trained, on this engine release? Engine flags may follow after --.

    Exit code 0: every required link is proved. 1: some link is refuted. 3: none is refuted, but a required one cannot
    be told. 2: could not run."""
    from draftproof.check.report import render, report_dict
    from draftproof.check.session import CheckAsk, run_check
    from draftproof.engine.output import print_json
    from draftproof.models.hub import resolve_config

    if not target:
        raise UserError("bad-option", "no target was named", "add --target FOLDER, a hub id or smollm2-135m")
    if (drafter is None) != (method == "mtp"):
        fix = "leave the drafter out with --method mtp" if drafter else "name a drafter, or add --method mtp"
        raise UserError("bad-option", "--method mtp drafts with the target itself; dflash needs a drafter", fix)
    named = {
        "method": method, "drafts": num_speculative_tokens, "tensor_parallel": tensor_parallel_size,
        "pipeline_parallel": pipeline_parallel_size, "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
        "max_batched_tokens": max_num_batched_tokens, "kv_dtype": kv_cache_dtype, "runner": runner,
        "platform": platform, "prefix_caching": False if no_prefix_caching else None,
    }  # fmt: skip
    ask = CheckAsk(
        drafter=None if drafter is None else resolve_config(drafter),
        target=resolve_config(target),
        engines=tuple(engine or ()),
        named=named,
        extra=tuple(context.args),
        venv=venv,
        gpu_gib=gpu_memory,
        target_gib=target_weights,
    )
    result = run_check(ask)
    if as_json:
        print_json(report_dict(result))
    else:
        render(result, table_console())
    raise typer.Exit(result.exit_code)


@app.command()
def explain(
    code: Annotated[str, typer.Argument(help="the code between the brackets of a finding or of an error message")],
    as_json: Json = False,
) -> None:
    """What a code means, why it matters and how to mend it."""
    import json

    from draftproof.config.explain import explain as look_up
    from draftproof.config.explain import render_explained

    explained = look_up(code)
    print(json.dumps(explained.as_dict(), indent=2) if as_json else render_explained(explained))
