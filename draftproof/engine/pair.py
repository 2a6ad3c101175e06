"""A target and, maybe, a drafter by name: checked against each other, then loaded. Automatic choices carry reasons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from draftproof.config.drafter import read_drafter
from draftproof.config.pair import check_pair, require_pair
from draftproof.config.target import TargetSpec, read_target
from draftproof.errors import UserError
from draftproof.models.checkpoint import check_weights
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.hub import resolve_drafter, resolve_target
from draftproof.models.mtp import MTPDrafter
from draftproof.models.mtp_weights import require_head
from draftproof.models.target import Target

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass(frozen=True)
class Choice:
    """A value and why it was chosen."""

    value: str
    reason: str


@dataclass(frozen=True)
class Pair:
    name: str  # of the target, as it was asked for
    target: Target
    drafter: DFlashDrafter | MTPDrafter | None
    tokenizer: Any
    device: Choice
    dtype: Choice

    @property
    def stop_ids(self) -> tuple[int, ...]:
        return turn_ends(self.target, self.tokenizer)


def load_pair(
    target: str,
    drafter: str | None,
    *,
    mtp: int = 0,
    dtype: str = "auto",
    device: str = "auto",
    plain: bool = False,
) -> Pair:
    """Resolve names, check the pair before any weight is read, then load. Errors are UserError.

    mtp: drafts a step by the target's own multi-token-prediction head; then there is no other drafter.
    plain: weights as they are on disk, for whoever trains or changes them; else as the device multiplies them fastest.
    """
    if drafter and mtp:
        raise AssertionError("a drafter and the target's own head")
    where = choose_device(device)
    kind = choose_dtype(dtype, where.value)
    target_folder = resolve_target(target)
    drafter_folder = resolve_drafter(drafter) if drafter else None
    if drafter_folder:
        check_drafter(drafter_folder, read_target(target_folder), target_folder)
    if mtp:
        require_head(read_target(target_folder))
    loaded = Target.load(target_folder, dtype=DTYPES[kind.value], device=where.value)
    drafting: DFlashDrafter | MTPDrafter | None = None
    if drafter_folder:
        drafting = DFlashDrafter.load(drafter_folder, loaded)
    elif mtp:
        drafting = MTPDrafter.load(target_folder, loaded, mtp)
    if not plain:
        loaded.prepack()
        if drafting:
            drafting.prepack()
    return Pair(target, loaded, drafting, load_tokenizer(target_folder), where, kind)


def check_drafter(folder: Path, target: TargetSpec, target_folder: Path) -> None:
    spec = read_drafter(folder)
    require_pair(check_pair(spec, target, target_path=target_folder))
    spec.require_runnable()
    check_weights(folder)


def turn_ends(target: Target, tokenizer: Any) -> tuple[int, ...]:
    """Every token that ends a turn: the tokenizer's end token and those of generation_config.json."""
    listed = target.model.generation_config.eos_token_id
    several = listed if isinstance(listed, list) else [listed]
    return tuple(sorted({*several, tokenizer.eos_token_id} - {None}))


def load_tokenizer(folder: Any) -> Any:
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # a damaged tokenizer.json fails in the tokenizers library in many ways
        raise UserError(
            "not-a-model", f"{folder}: no usable tokenizer ({error})", "add the target's own tokenizer.json"
        ) from None


def choose_device(asked: str) -> Choice:
    if asked == "auto":
        if torch.cuda.is_available():
            return Choice("cuda", f"auto: {torch.cuda.get_device_name()} is there")
        return Choice("cpu", "auto: no CUDA device")
    kind = asked.split(":")[0]
    if kind not in ("cpu", "cuda"):
        raise UserError("bad-option", f"device {asked!r} is not known", "use auto, cpu, cuda or cuda:N")
    try:
        torch.empty(1, device=asked)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            "device-unavailable", f"{asked}: {str(error).splitlines()[0]}", "use --device cpu or auto"
        ) from None
    if kind == "cuda":
        torch.cuda.set_device(asked)  # streams and memory statistics follow the current device
    return Choice(asked, "asked for")


def choose_dtype(asked: str, device: str) -> Choice:
    if asked in DTYPES:
        return Choice(asked, "asked for")
    if asked != "auto":
        raise UserError("bad-option", f"dtype {asked!r} is not known", f"use auto, {', '.join(DTYPES)}")
    if device != "cpu":
        if torch.cuda.is_bf16_supported(including_emulation=False):
            return Choice("bfloat16", "auto: this GPU multiplies bfloat16 natively")
        return Choice("float16", "auto: this GPU has no bfloat16 arithmetic")
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return Choice("bfloat16", "auto: this CPU multiplies bfloat16 natively")
    return Choice("float32", "auto: this CPU has no bfloat16 arithmetic, several rows at once would be slow")
