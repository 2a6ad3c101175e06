"""One value for each option, from our own command line, an engine's flags and its environment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, Final

from draftproof.check.flags import option_fields
from draftproof.check.options import Options
from draftproof.errors import UserError

OPTION_NAMES: Final = {
    "method": "--method", "drafts": "--num-speculative-tokens", "platform": "--platform", "runner": "--runner",
    "tensor_parallel": "--tensor-parallel-size", "pipeline_parallel": "--pipeline-parallel-size",
    "max_model_len": "--max-model-len", "max_num_seqs": "--max-num-seqs",
    "max_batched_tokens": "--max-num-batched-tokens", "kv_dtype": "--kv-cache-dtype",
    "prefix_caching": "--no-prefix-caching",
    "gpu_share": "--gpu-memory-utilization",
}  # fmt: skip


OPTIONS: Final = frozenset(f.name for f in fields(Options))


def merge_options(engine: str, named: Mapping[str, Any], extra: Sequence[str], env: Mapping[str, str]) -> Options:
    """Options from our own command line, from the engine's flags and from its runner variable. One thing said twice
    with two values is refused by name."""
    theirs = {k: v for k, v in option_fields(engine, extra).items() if k in OPTIONS and v is not None}
    if engine == "vllm" and "VLLM_USE_V2_MODEL_RUNNER" in env:
        theirs["runner"] = _runner(env["VLLM_USE_V2_MODEL_RUNNER"])
    ours = {key: value for key, value in named.items() if value is not None}
    for key in ours.keys() & theirs.keys():
        if ours[key] != theirs[key]:
            raise conflict(OPTION_NAMES.get(key, key), ours[key], "the engine's own flags", theirs[key])
    merged = theirs | ours
    if merged.get("method", "dflash") not in ("dflash", "mtp"):
        raise UserError(
            "bad-option", f"method {merged['method']!r} is not checked or launched here", "use dflash or mtp"
        )
    for key in ("drafts", "draft_tensor_parallel"):
        if not isinstance(merged.get(key, 1), int) or merged.get(key, 1) < 1:
            raise UserError("bad-option", f"{OPTION_NAMES.get(key, key)} is {merged[key]!r}", "give a number above 0")
    return Options(**merged)


def _runner(text: str) -> str:
    if text not in ("0", "1"):
        raise UserError("bad-option", f"VLLM_USE_V2_MODEL_RUNNER is {text!r}", "set it to 0 (V1) or 1 (V2)")
    return "v2" if text == "1" else "v1"


def conflict(what: str, ours: object, whose: str, theirs: object) -> UserError:
    return UserError(
        "flag-conflict",
        f"{what} is {ours} here and {theirs} in {whose}",
        "say it once, or give both the same value",
    )
