"""Read a drafter's safetensors into a DFlash module; every tensor is accounted for by name."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from draftproof.config.drafter import DrafterSpec
from draftproof.errors import UserError
from draftproof.models.checkpoint import check_weights, weight_files
from draftproof.models.dflash import DFlash
from draftproof.models.target import Target

# Names other exporters use for the same tensors.
RENAMES = {"encoder.fc.weight": "fc.weight", "encoder.output_norm_enc.weight": "hidden_norm.weight"}


def load_drafter_weights(model: DFlash, folder: Path, target: Target) -> None:
    """Fill the module; a missing, extra or misshapen tensor, NaN or infinity is an error naming it."""
    tensors = canonical(read_tensors(folder), model.spec)
    _require_borrowed(tensors, target, folder)
    expected = {name: weight.shape for name, weight in model.state_dict().items()}
    missing, extra = sorted(expected.keys() - tensors.keys()), sorted(tensors.keys() - expected.keys())
    if missing or extra:
        parts = [f"missing {', '.join(missing)}"] * bool(missing) + [f"unexpected {', '.join(extra)}"] * bool(extra)
        raise _invalid(folder, "; ".join(parts), "check that config.json and weights belong together")
    for name, tensor in tensors.items():
        if tensor.shape != expected[name]:
            shapes = f"{list(tensor.shape)}, the config asks for {list(expected[name])}"
            raise _invalid(folder, f"{name} has shape {shapes}", "check that config.json and weights belong together")
        if tensor.dtype not in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
            raise _invalid(folder, f"{name} is {tensor.dtype}: quantised weights are not read", "export it in bf16")
        if not torch.isfinite(tensor).all():
            raise _invalid(folder, f"{name} holds NaN or infinity", "the checkpoint is damaged: export it again")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})


def read_tensors(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    check_weights(folder)
    tensors: dict[str, Tensor] = {}
    for file in weight_files(folder):
        tensors.update(load_file(file))
    return tensors


def canonical(tensors: dict[str, Tensor], spec: DrafterSpec) -> dict[str, Tensor]:
    """z-lab names: without `model.`, with q, k and v apart."""
    out: dict[str, Tensor] = {}
    for raw, tensor in tensors.items():
        name = raw.removeprefix("model.")
        name = RENAMES.get(name, name)
        new = _split_qkv(name, tensor, spec) if ".self_attn.qkv_proj." in name else {name: tensor}
        if twice := sorted(out.keys() & new.keys()):
            raise _invalid(Path(spec.path), f"{', '.join(twice)} is there twice, again as {raw}", "export it again")
        out.update(new)
    return out


def _require_borrowed(tensors: dict[str, Tensor], target: Target, folder: Path) -> None:
    """Some exporters repeat the target's embedding and head. They are dropped only if they are the target's."""
    for name, module in (("embed_tokens.weight", target.embedding), ("lm_head.weight", target.head)):
        own = tensors.pop(name, None)
        if own is None:
            continue
        theirs = module.weight.detach().cpu()
        if own.shape != theirs.shape or not torch.equal(own.bfloat16(), theirs.bfloat16()):
            raise UserError(
                "family-not-runnable",
                f"{folder}: {name} {list(own.shape)} is the drafter's own, not a copy of the target's",
                "use the target it was trained with; own or reduced vocabularies are not implemented",
            )


def _split_qkv(name: str, tensor: Tensor, spec: DrafterSpec) -> dict[str, Tensor]:
    sizes = [spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim]
    if tensor.shape[:1] != (sum(sizes),):
        return {name: tensor}  # reported as unexpected, by its own name
    parts = tensor.split(sizes)
    return {name.replace("qkv_proj", f"{p}_proj"): part for p, part in zip("qkv", parts, strict=True)}


def _invalid(folder: Path, what: str, fix: str) -> UserError:
    return UserError("weights-invalid", f"{folder}: {what}", fix)
