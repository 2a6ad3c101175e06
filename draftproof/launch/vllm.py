"""The plan for `vllm serve`: speculative config, runner, batch floor and parsers, each with its reason."""

from __future__ import annotations

import json
from typing import Any, Final

from draftproof.check.check import Check
from draftproof.check.flags import VLLM
from draftproof.check.merge import conflict
from draftproof.config.engines import covers
from draftproof.launch.arguments import without_flags
from draftproof.launch.ask import Arguments, Ask
from draftproof.launch.plan import Plan

PROGRAM: Final = ("vllm",)
BATCH: Final = 8192  # vLLM warns below it with speculation
DROPS: Final = ("vllm-block-drop", "vllm-block-drop-hybrid")  # the last cached block is dropped on every hit
SIZES: Final = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "kv_dtype": "--kv-cache-dtype",
}
KEEPS: Final = ">=0.30"  # releases with an option that keeps it


def plan_vllm(ask: Ask, check: Check) -> Plan:
    """UserError flag-conflict when a flag or variable of the user's contradicts what the pair needs."""
    arguments = Arguments(ask)
    arguments.must_not("model", "the model is named by --target")
    arguments.argv += ["serve", ask.target]
    arguments.add("host", "--host", ask.bind, "the address to listen on; loopback unless you say otherwise")
    arguments.add("port", "--port", ask.port, "as asked")
    _speculative(arguments, ask, check)
    _runner(arguments, check)
    _sizes(arguments, ask, check)
    _serving(arguments, ask)
    extra = without_flags(VLLM, "speculative", ask.extra)
    return Plan(
        engine="vllm",
        argv=(*arguments.argv, *extra),
        env=arguments.env,
        host=ask.bind,
        port=ask.port,
        checkpoints=tuple(name for name in (ask.target, ask.drafter) if name),
        gpu_bytes=check.memory.known_bytes,
        gpus=ask.options.tensor_parallel * ask.options.pipeline_parallel,
        why=tuple(arguments.why),
    )


def _speculative(arguments: Arguments, ask: Ask, check: Check) -> None:
    for alias in ("spec_method", "spec_model", "spec_tokens"):
        arguments.must_not(alias, "vLLM refuses an alias beside --speculative-config, which this plan passes")
    wanted, why = _wanted(ask, check)
    _, theirs = arguments.user.pop("speculative", ("", {}))
    for key, value in wanted.items():
        if theirs.get(key, value) != value:
            raise conflict(f"{key} in --speculative-config", value, "your --speculative-config", theirs[key])
    value = json.dumps(wanted | theirs, ensure_ascii=False, separators=(",", ":"))
    arguments.add("speculative", "--speculative-config", value, why)


def _wanted(ask: Ask, check: Check) -> tuple[dict[str, Any], str]:
    drafter, drafts = check.pair.drafter, ask.options.drafts
    if drafter is None:
        why = f"the target's own MTP head drafts; {drafts or 1} tokens a pass"
        return {"method": "mtp", "num_speculative_tokens": drafts or 1}, why
    count = drafts or drafter.block_size - 1
    why = f"K = {count}: the drafter's block of {drafter.block_size} counts the anchor; vLLM has no default for it"
    wanted: dict[str, Any] = {"method": "dflash", "model": ask.drafter, "num_speculative_tokens": count}
    if any(rule.code in DROPS for rule in check.applied.rules) and _keeps(check):
        wanted["disable_eagle_block_drop"] = True
        why += "; disable_eagle_block_drop: DFlash does not need the cached block this release would drop"
    return wanted, why


def _keeps(check: Check) -> bool:
    return check.applied.release is not None and covers(KEEPS, check.applied.release)


def _runner(arguments: Arguments, check: Check) -> None:
    """State the runner where the drafter needs one; elsewhere the release's own choice stands."""
    drafter, runner = check.pair.drafter, check.applied.runner
    mixed = drafter is not None and len({layer.sliding for layer in drafter.layers}) == 2
    if check.deployment.options.runner:
        value = "1" if check.deployment.options.runner == "v2" else "0"
        arguments.variable("VLLM_USE_V2_MODEL_RUNNER", value, "the runner you asked for")
    elif runner == "v2" and drafter is not None and (mixed or drafter.family == "dflash2"):
        why = "sliding and full draft layers run side by side on the V2 runner only" if mixed else "DFlash2 needs V2"
        arguments.variable("VLLM_USE_V2_MODEL_RUNNER", "1", f"{why}; stated, so that no fallback can change it")


def _sizes(arguments: Arguments, ask: Ask, check: Check) -> None:
    options = ask.options
    arguments.as_asked(SIZES)
    if not options.prefix_caching:
        arguments.switch("prefix_caching", "--no-enable-prefix-caching", "as asked")
    rows = 1 + (options.drafts or (check.pair.drafter.block_size - 1 if check.pair.drafter else 1))
    floor = rows * (options.max_num_seqs or 1)
    if options.max_batched_tokens is None:
        why = f"each of the {options.max_num_seqs or 'running'} requests verifies {rows} rows a step; "
        why += f"vLLM warns below {BATCH}"
        arguments.add("max_batched_tokens", "--max-num-batched-tokens", max(BATCH, floor), why)
    elif options.max_batched_tokens < max(floor, rows + 1):
        raise conflict(
            "--max-num-batched-tokens",
            f"at least {max(floor, rows + 1)} ({rows} rows for each of {options.max_num_seqs or 1} requests)",
            "your flags",
            options.max_batched_tokens,
        )
    else:
        arguments.add("max_batched_tokens", "--max-num-batched-tokens", options.max_batched_tokens, "as asked")


def _serving(arguments: Arguments, ask: Ask) -> None:
    arguments.as_asked(
        {
            "served_name": "--served-model-name",
            "reasoning_parser": "--reasoning-parser",
            "tool_parser": "--tool-call-parser",
        }
    )
    if ask.tool_parser or "tool_parser" in arguments.user:
        arguments.switch("auto_tools", "--enable-auto-tool-choice", "vLLM ignores a tool parser without it")
    arguments.as_asked({"chat_template": "--chat-template", "gpu_share": "--gpu-memory-utilization"})
