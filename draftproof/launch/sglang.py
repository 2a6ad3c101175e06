"""The plan for `python -m sglang.launch_server`: its count of draft tokens includes the anchor."""

from __future__ import annotations

from typing import Final

from packaging.version import Version

from draftproof.check.check import Check
from draftproof.errors import UserError
from draftproof.launch.ask import Arguments, Ask
from draftproof.launch.plan import Plan

PROGRAM: Final = ("python3", "-m", "sglang.launch_server")
SIZES: Final = {
    "tensor_parallel": "--tp-size",
    "max_model_len": "--context-length",
    "max_num_seqs": "--max-running-requests",
    "max_batched_tokens": "--chunked-prefill-size",
    "kv_dtype": "--kv-cache-dtype",
}
SERVING: Final = {
    "served_name": "--served-model-name",
    "reasoning_parser": "--reasoning-parser",
    "tool_parser": "--tool-call-parser",
    "chat_template": "--chat-template",
    "gpu_share": "--mem-fraction-static",
}
STRATEGY: Final = "--mamba-radix-cache-strategy"


def plan_sglang(ask: Ask, check: Check) -> Plan:
    """UserError flag-conflict when a flag of the user's contradicts what the pair needs."""
    arguments = Arguments(ask)
    arguments.must_not("model", "the model is named by --target")
    arguments.argv += ["--model-path", ask.target]
    arguments.add("host", "--host", ask.bind, "the address to listen on; loopback unless you say otherwise")
    arguments.add("port", "--port", ask.port, "as asked")
    if check.pair.drafter is None:
        _mtp(arguments, ask)
    else:
        _dflash(arguments, ask, check)
    _hybrid(arguments, check)
    arguments.as_asked(SIZES)
    if not ask.options.prefix_caching:
        arguments.switch("prefix_caching", "--disable-radix-cache", "as asked")
    arguments.as_asked(SERVING)
    return Plan(
        engine="sglang",
        argv=(*arguments.argv, *ask.extra),
        env=arguments.env,
        host=ask.bind,
        port=ask.port,
        checkpoints=tuple(name for name in (ask.target, ask.drafter) if name),
        gpu_bytes=check.memory.known_bytes,
        gpus=ask.options.tensor_parallel,
        why=tuple(arguments.why),
    )


def _dflash(arguments: Arguments, ask: Ask, check: Check) -> None:
    drafter = check.pair.drafter
    assert drafter is not None
    block = drafter.block_size
    if ask.options.drafts not in (None, block - 1):
        raise UserError(
            "flag-conflict",
            f"SGLang drafts whole blocks: {ask.options.drafts} drafts do not make the drafter's block of {block}",
            f"leave the number out, or give {block - 1} (SGLang's own count: {block})",
        )
    arguments.must_not("spec_steps", "DFLASH runs one step by itself")
    arguments.must_not("spec_topk", "DFLASH has one candidate a position")
    arguments.add("spec_method", "--speculative-algorithm", "DFLASH", "the drafter is a DFlash drafter")
    arguments.add("spec_model", "--speculative-draft-model-path", ask.drafter, "the drafter")
    if "dflash_block" not in arguments.user:
        why = "the drafter's block, the anchor counted (vLLM would say one less)"
        arguments.add("draft_tokens", "--speculative-num-draft-tokens", block, why)


def _mtp(arguments: Arguments, ask: Ask) -> None:
    drafts = ask.options.drafts or 3
    arguments.must_not("spec_model", "the MTP head is part of the target")
    arguments.add("spec_method", "--speculative-algorithm", "NEXTN", "the target's own MTP head drafts")
    arguments.add("spec_steps", "--speculative-num-steps", drafts, f"{drafts} drafts, one step each")
    arguments.add("spec_topk", "--speculative-eagle-topk", 1, "a chain, no tree")
    arguments.add("draft_tokens", "--speculative-num-draft-tokens", drafts + 1, "the drafts and the anchor")


def _hybrid(arguments: Arguments, check: Check) -> None:
    """Recurrent layers: speculation beside the radix cache needs room for a second state."""
    options = check.deployment.options
    if "linear" not in check.pair.target.layer_kinds or not options.prefix_caching or options.mamba_strategy:
        return
    why = "recurrent target: speculation with the radix cache needs a spare state; the default may be no_buffer"
    arguments.add("mamba_strategy", strategy_flag(check.applied.release), "extra_buffer", why)


def strategy_flag(release: str | None) -> str:
    """The flag was called --mamba-scheduler-strategy before 0.5.14."""
    return STRATEGY if release is None or Version(release) >= RENAMED else "--mamba-scheduler-strategy"


RENAMED: Final = Version("0.5.14")
