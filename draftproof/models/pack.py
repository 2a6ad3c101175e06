"""The shipped form of a drafter: int8 rows with one float32 scale each, about half of bf16, and back.

`pack` reads a z-lab folder and writes `drafter.safetensors`, `drafter.json` (its config.json and the fields
of its model card) and `README.md`; `unpack` writes a plain bf16 z-lab folder that any engine can load.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save

from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.models.checkpoint import weight_files

SCALE = ".scale"
CLIPS = tuple(0.85 + 0.01 * step for step in range(16))  # 0.85 .. 1.00 of the row's largest value


def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[rows, columns] -> int8 of that shape and float32 scales [rows].

    A row's scale is clip * max|row| / 127 with the clip of CLIPS that leaves the least squared error.
    """
    rows = weight.float()
    peak = rows.abs().amax(dim=1, keepdim=True)
    peak = torch.where(peak == 0, torch.ones_like(peak), peak)
    best = torch.full_like(peak, torch.inf)
    kept, scales = torch.zeros_like(rows), peak / 127
    for clip in CLIPS:
        scale = peak * clip / 127
        quantised = (rows / scale).round().clamp(-127, 127)
        error = (quantised * scale - rows).square().sum(dim=1, keepdim=True)
        better = error < best
        best = torch.where(better, error, best)
        scales = torch.where(better, scale, scales)
        kept = torch.where(better, quantised, kept)
    return kept.to(torch.int8), scales.squeeze(1)


def pack(folder: Path, dest: Path, card: dict[str, Any] | None = None) -> Path:
    """A z-lab folder -> the package files in `dest`. `card`: model card fields for `drafter.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in load_file(path).items():
            tensors.update(_packed(name, tensor))
    _write(dest / "drafter.safetensors", save(tensors, metadata={"format": "pt"}))
    _write(dest / "drafter.json", _json({"config": config, "card": card or {}}))
    _copy(folder / "README.md", dest / "README.md")
    return dest


def unpack(source: Path, folder: Path) -> None:
    """The package files in `source` -> config.json, model.safetensors (bf16) and README.md in `folder`."""
    packed = load_file(source / "drafter.safetensors")
    config = json.loads((source / "drafter.json").read_text(encoding="utf-8"))["config"]
    tensors = {name: _unpacked(name, packed) for name in sorted(packed) if not _is_scale(name, packed)}
    _write(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write(folder / "config.json", _json(config))
    _copy(source / "README.md", folder / "README.md")


def _packed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UserError("weights-invalid", f"{name} holds NaN or infinity", "train or export the drafter again")
    if tensor.dim() != 2 or not tensor.is_floating_point():
        return {name: tensor}
    quantised, scales = quantise_rows(tensor)
    return {name: quantised, name + SCALE: scales}


def _is_scale(name: str, packed: dict[str, torch.Tensor]) -> bool:
    owner = packed.get(name.removesuffix(SCALE))
    return name.endswith(SCALE) and owner is not None and owner.dtype == torch.int8


def _unpacked(name: str, packed: dict[str, torch.Tensor]) -> torch.Tensor:
    tensor, scales = packed[name], packed.get(name + SCALE)
    if tensor.dtype == torch.int8 and scales is not None:
        tensor = tensor.float() * scales.float().unsqueeze(1)
    return tensor.to(torch.bfloat16) if tensor.is_floating_point() else tensor


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()


def _write(path: Path, content: bytes) -> None:
    write_atomically(path, iter([content]))


def _copy(source: Path, dest: Path) -> None:
    if source.is_file():
        _write(dest, source.read_bytes())
