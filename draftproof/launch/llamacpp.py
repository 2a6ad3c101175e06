"""The plan for `llama-server`, mainline or ik_llama.cpp. Checkpoints are GGUF files, whose header says the block."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from draftproof.check.merge import conflict
from draftproof.errors import UserError
from draftproof.launch.ask import Arguments, Ask
from draftproof.launch.plan import Plan

PROGRAM: Final = ("llama-server",)
BLOCK_KEYS: Final = ("dflash.block_size", "dflash-draft.block_size")
VERBOSITY: Final = {"-lv", "--verbosity", "--log-verbosity", "-v", "--verbose", "--log-verbose", "--log-disable"}


def plan_llamacpp(ask: Ask, block_size: int | None) -> Plan:
    """`ask.engine` tells the fork; `block_size` is the drafter's, None for MTP. UserError flag-conflict."""
    fork = ask.engine == "ik_llama.cpp"
    arguments = Arguments(ask)
    arguments.must_not("model", "the model is named by --target")
    arguments.argv += ["-m", ask.target]
    arguments.add("host", "--host", ask.bind, "the address to listen on; loopback unless you say otherwise")
    arguments.add("port", "--port", ask.port, "as asked")
    if block_size is None:
        _mtp(arguments, ask, fork)
    else:
        _dflash(arguments, ask, block_size, fork)
    _sizes(arguments, ask)
    if not fork:
        _evidence(arguments, ask)
    return Plan(
        engine=ask.engine,
        argv=(*arguments.argv, *ask.extra),
        env=arguments.env,
        host=ask.bind,
        port=ask.port,
        checkpoints=tuple(name for name in (ask.target, ask.drafter) if name),
        why=tuple(arguments.why),
    )


def read_block_size(path: Path) -> int:
    """The block size in a GGUF drafter's header. UserError not-found, not-a-model, block-size-missing."""
    if not path.is_file():
        raise UserError("not-found", f"there is no file {path}", "name the drafter's GGUF file")
    from gguf import GGUFReader  # pulls numpy in; a missing package is reported by the command line

    try:
        reader = GGUFReader(path)
    except (ValueError, OSError, IndexError) as error:
        raise UserError(
            "not-a-model", f"{path} is no GGUF file: {error}", "convert the drafter to GGUF first"
        ) from error
    for key in BLOCK_KEYS:
        if (entry := reader.get_field(key)) is not None:
            return int(entry.contents())
    raise UserError(
        "block-size-missing",
        f"{path} names no block size ({BLOCK_KEYS[0]})",
        "convert it again with a converter that writes DFlash metadata, with the target's folder at hand",
    )


def _dflash(arguments: Arguments, ask: Ask, block_size: int, fork: bool) -> None:
    drafts = ask.options.drafts or block_size - 1
    if drafts > block_size - 1:
        raise conflict("--num-speculative-tokens", drafts, "the drafter's block, less its anchor", block_size - 1)
    why = f"{drafts} drafts a pass: the block of {block_size} counts the anchor"
    if fork:
        arguments.add("spec_model", "--model-draft", ask.drafter, "the drafter")
        arguments.add("spec_method", "--spec-type", f"dflash:n_max={drafts}", why)
        return
    arguments.add("spec_model", "-md", ask.drafter, "the drafter")
    arguments.add("spec_method", "--spec-type", "draft-dflash", "the drafter is a DFlash drafter")
    arguments.add("drafts", "--spec-draft-n-max", drafts, why)


def _mtp(arguments: Arguments, ask: Ask, fork: bool) -> None:
    drafts = ask.options.drafts or 1
    why = "the target's own MTP head drafts"
    if fork:
        arguments.add("spec_method", "--spec-type", f"mtp:n_max={drafts},p_min=0.0", why)
        return
    arguments.add("spec_method", "--spec-type", "draft-mtp", why)
    arguments.add("drafts", "--spec-draft-n-max", drafts, f"{drafts} drafts a pass")


def _evidence(arguments: Arguments, ask: Ask) -> None:
    """What doctor and watch read, and llama-server keeps to itself by default. Level 4 adds some 300 lines at the start
    (taps and windows as loaded) and a dozen a request, without the prompts."""
    if "--metrics" not in ask.extra:
        arguments.switch("metrics", "--metrics", "so that doctor and watch can read its counters")
    if not VERBOSITY & set(ask.extra):
        arguments.add("verbosity", "-lv", 4, "so that the log tells the drafter's taps and acceptance by position")


def _sizes(arguments: Arguments, ask: Ask) -> None:
    options = ask.options
    if options.max_model_len:
        arguments.add("max_model_len", "-c", options.max_model_len, "as asked")
    if options.max_num_seqs:
        arguments.add("max_num_seqs", "-np", options.max_num_seqs, "as asked")
    if options.max_batched_tokens:
        arguments.add("max_batched_tokens", "-b", options.max_batched_tokens, "as asked")
    if options.kv_dtype != "auto":
        arguments.add("kv_dtype", "-ctk", options.kv_dtype, "as asked")
        if "-ctv" not in ask.extra and "--cache-type-v" not in ask.extra:
            arguments.argv += ["-ctv", options.kv_dtype]
    if ask.served_name:
        arguments.add("served_name", "--alias", ask.served_name, "as asked")
    if ask.chat_template:
        arguments.add("chat_template", "--chat-template-file", ask.chat_template, "as asked")
    refused = {
        "--tensor-parallel-size": options.tensor_parallel > 1,
        "--pipeline-parallel-size": options.pipeline_parallel > 1,
        "--reasoning-parser": ask.reasoning_parser is not None,
        "--tool-call-parser": ask.tool_parser is not None,
        "--gpu-memory-utilization": ask.options.gpu_share is not None,
        "--runner": options.runner is not None,
    }
    for flag, given in refused.items():
        if given:
            raise UserError(
                "bad-option", f"{flag} means nothing for llama-server", "leave it out, or pass its own flags after --"
            )
