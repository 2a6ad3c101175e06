"""An engine's own command-line flags, read for what changes how a drafter runs.

Only flags that the rules or the launch plan care about are known here; all others pass through untouched.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftproof.errors import UserError

Parse = Callable[[str, str], Any]


@dataclass(frozen=True)
class Flag:
    """`field` of Options (or a name of the launch's own, such as port); `value` of a switch that takes none."""

    field: str
    parse: Parse | None = None
    value: Any = None


def integer(flag: str, text: str) -> int:
    """Whole numbers, also as vLLM writes them: 32k is 32000, 32K is 32768."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM]?)", text.strip())
    scale = {"": 1, "k": 1000, "K": 1024, "m": 10**6, "M": 2**20}
    if not found or (float(found[1]) * scale[found[2]]) % 1 or float(found[1]) <= 0:
        raise UserError("bad-option", f"{flag} is {text!r}, not a whole number above 0", f"write {flag} 8192, say")
    return int(float(found[1]) * scale[found[2]])


def share(flag: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UserError("bad-option", f"{flag} is {text!r}, not a share above 0 and up to 1", f"write {flag} 0.9, say")
    return value


def word(flag: str, text: str) -> str:
    return text


def present(flag: str, text: str) -> bool:
    return True


def json_object(flag: str, text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        quoted = (
            " It begins with a quote character that a shell or a wrapper left inside." if text[:1] in "'\"\\" else ""
        )
        raise UserError(
            "bad-option",
            f"{flag} is not JSON ({error.msg} at character {error.pos + 1}): {text[:80]}.{quoted}",
            f"pass one argument of plain JSON, such as {flag} '{{\"num_speculative_tokens\": 15}}'",
        ) from error
    if not isinstance(value, dict):
        raise UserError("bad-option", f"{flag} holds {text[:80]}, not a JSON object", "write {...}")
    return {str(key).replace("-", "_"): entry for key, entry in value.items()}


def read_flags(known: Mapping[str, Flag], arguments: Sequence[str]) -> dict[str, tuple[str, Any]]:
    """field -> (flag as written, value) for the known flags among an engine's arguments; the last one wins, as in
    argparse. UserError bad-option for a malformed value or a flag without one."""
    found: dict[str, tuple[str, Any]] = {}
    rest = list(arguments)
    while rest:
        name, separator, inline = rest.pop(0).partition("=")
        flag = known.get(name) or known.get(name.replace("_", "-"))
        if flag is None:
            continue
        if flag.parse is None:
            found[flag.field] = (name, flag.value)
            continue
        if not separator and (not rest or (rest[0].startswith("--") and len(rest[0]) > 2)):
            raise UserError("bad-option", f"{name} has no value", f"write {name} VALUE")
        found[flag.field] = (name, flag.parse(name, inline if separator else rest.pop(0)))
    return found


VLLM: Final[Mapping[str, Flag]] = {
    **dict.fromkeys(("--tensor-parallel-size", "-tp"), Flag("tensor_parallel", integer)),
    **dict.fromkeys(("--pipeline-parallel-size", "-pp"), Flag("pipeline_parallel", integer)),
    "--max-model-len": Flag("max_model_len", integer),
    "--max-num-seqs": Flag("max_num_seqs", integer),
    "--max-num-batched-tokens": Flag("max_batched_tokens", integer),
    "--kv-cache-dtype": Flag("kv_dtype", word),
    "--attention-backend": Flag("attention_backend", word),
    "--enable-prefix-caching": Flag("prefix_caching", value=True),
    "--no-enable-prefix-caching": Flag("prefix_caching", value=False),
    "--disable-hybrid-kv-cache-manager": Flag("hybrid_manager", value=False),
    "--no-disable-hybrid-kv-cache-manager": Flag("hybrid_manager", value=True),
    "--kv-transfer-config": Flag("kv_connector", present),
    "--load-format": Flag("load_format", word),
    **dict.fromkeys(("--speculative-config", "-sc"), Flag("speculative", json_object)),
    "--spec-method": Flag("spec_method", word),
    "--spec-model": Flag("spec_model", word),
    "--spec-tokens": Flag("spec_tokens", integer),
    "--port": Flag("port", integer),
    "--host": Flag("host", word),
    "--model": Flag("model", word),
    "--served-model-name": Flag("served_name", word),
    "--reasoning-parser": Flag("reasoning_parser", word),
    "--tool-call-parser": Flag("tool_parser", word),
    "--enable-auto-tool-choice": Flag("auto_tools", value=True),
    "--chat-template": Flag("chat_template", word),
    "--gpu-memory-utilization": Flag("gpu_share", share),
}
# Keys of vLLM's speculative config that Options know; the others pass through.
VLLM_SPECULATIVE: Final[Mapping[str, str]] = {
    "method": "method",
    "num_speculative_tokens": "drafts",
    "draft_tensor_parallel_size": "draft_tensor_parallel",
    "attention_backend": "draft_attention_backend",
    "kv_cache_dtype": "draft_kv_dtype",
    "rejection_sample_method": "rejection",
    "disable_eagle_block_drop": "block_drop_disabled",
}
SGLANG: Final[Mapping[str, Flag]] = {
    **dict.fromkeys(("--tp-size", "--tp", "--tensor-parallel-size"), Flag("tensor_parallel", integer)),
    **dict.fromkeys(("--pp-size", "--pp", "--pipeline-parallel-size"), Flag("pipeline_parallel", integer)),
    "--context-length": Flag("max_model_len", integer),
    "--max-running-requests": Flag("max_num_seqs", integer),
    "--chunked-prefill-size": Flag("max_batched_tokens", integer),
    "--kv-cache-dtype": Flag("kv_dtype", word),
    "--attention-backend": Flag("attention_backend", word),
    "--speculative-draft-attention-backend": Flag("draft_attention_backend", word),
    "--disable-radix-cache": Flag("prefix_caching", value=False),
    **dict.fromkeys(("--mamba-radix-cache-strategy", "--mamba-scheduler-strategy"), Flag("mamba_strategy", word)),
    "--disaggregation-mode": Flag("disaggregated", lambda flag, text: text != "null"),
    "--load-format": Flag("load_format", word),
    "--device": Flag("platform", word),
    "--speculative-algorithm": Flag("spec_method", word),
    "--speculative-draft-model-path": Flag("spec_model", word),
    "--speculative-num-draft-tokens": Flag("draft_tokens", integer),
    "--speculative-dflash-block-size": Flag("dflash_block", integer),
    "--speculative-num-steps": Flag("spec_steps", integer),
    "--speculative-eagle-topk": Flag("spec_topk", integer),
    "--port": Flag("port", integer),
    "--host": Flag("host", word),
    **dict.fromkeys(("--model-path", "--model"), Flag("model", word)),
    "--served-model-name": Flag("served_name", word),
    "--reasoning-parser": Flag("reasoning_parser", word),
    "--tool-call-parser": Flag("tool_parser", word),
    "--chat-template": Flag("chat_template", word),
    "--mem-fraction-static": Flag("gpu_share", share),
}
LLAMACPP: Final[Mapping[str, Flag]] = {
    **dict.fromkeys(("-c", "--ctx-size"), Flag("max_model_len", integer)),
    **dict.fromkeys(("-np", "--parallel"), Flag("max_num_seqs", integer)),
    **dict.fromkeys(("-b", "--batch-size"), Flag("max_batched_tokens", integer)),
    **dict.fromkeys(("-ctk", "--cache-type-k"), Flag("kv_dtype", word)),
    **dict.fromkeys(("-ctkd", "--cache-type-k-draft", "--spec-draft-type-k"), Flag("draft_kv_dtype", word)),
    **dict.fromkeys(("-sm", "--split-mode"), Flag("split_mode", word)),
    "--spec-type": Flag("spec_method", word),
    **dict.fromkeys(("-md", "--model-draft", "--spec-draft-model"), Flag("spec_model", word)),
    **dict.fromkeys(("--spec-draft-n-max", "--draft-max", "--draft-n", "--draft"), Flag("drafts", integer)),
    "--port": Flag("port", integer),
    "--host": Flag("host", word),
    **dict.fromkeys(("-m", "--model"), Flag("model", word)),
    **dict.fromkeys(("-a", "--alias"), Flag("served_name", word)),
    "--chat-template-file": Flag("chat_template", word),
}
# `draftproof serve`, which is not launched by draftproof but examined like the others.
OWN: Final[Mapping[str, Flag]] = {
    "--target": Flag("model", word),
    "--drafter": Flag("spec_model", word),
    "--method": Flag("spec_method", word),
    "--budget": Flag("budget", word),
    **dict.fromkeys(("-k", "--num-speculative-tokens"), Flag("drafts", integer)),
    "--max-model-len": Flag("max_model_len", integer),
    "--max-num-seqs": Flag("max_num_seqs", integer),
    "--max-num-batched-tokens": Flag("max_batched_tokens", integer),
    "--prefix-cache": Flag("prefix_caching", lambda flag, text: text.strip("0.") != ""),
    "--port": Flag("port", integer),
}
FLAGS: Final[Mapping[str, Mapping[str, Flag]]] = {
    "vllm": VLLM,
    "sglang": SGLANG,
    "llama.cpp": LLAMACPP,
    "ik_llama.cpp": LLAMACPP,
    "draftproof": OWN,
}


def option_fields(engine: str, arguments: Sequence[str]) -> dict[str, Any]:
    """Options that an engine's arguments set, by field name."""
    found = {field: value for field, (_, value) in read_flags(FLAGS[engine], arguments).items()}
    speculative = found.pop("speculative", None) or {}
    found |= {field: speculative[key] for key, field in VLLM_SPECULATIVE.items() if key in speculative}
    found.setdefault("drafts", found.get("spec_tokens"))
    if (count := found.get("draft_tokens") or found.get("dflash_block")) is not None:
        found["drafts"] = count - 1  # SGLang counts the anchor
    if "method" not in found and "spec_method" in found:
        found["method"] = method(found["spec_method"])
    return found


def method(name: str) -> str:
    """An engine's word for a method, in ours."""
    lowered = name.lower()
    if "dflash" in lowered or lowered == "ddtree":  # trees of a DFlash drafter
        return "dflash"
    return "mtp" if "mtp" in lowered or lowered in ("nextn", "eagle") else lowered
