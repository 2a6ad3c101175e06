"""The shipped form of a model: int8 rows with one float32 scale each, about half of bf16, and back.

`pack` reads a checkpoint folder and writes `weights.safetensors`, `model.json` (its config.json and the fields of its
model card) and its other files as they are; `unpack` writes a plain bf16 folder that any engine can load. Packing that
folder again gives the same numbers: a row that has been rounded before is recognised.
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
WEIGHTS, MODEL = "weights.safetensors", "model.json"
# A drafter has none of them but its README; a target has all. The order decides the name in the cache.
AS_THEY_ARE = ("generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
README = "README.md"
CLIPS = tuple(0.85 + 0.01 * step for step in range(16))  # 0.85 .. 1.00 of the row's largest value

GUESSES = tuple(1 + step / 4096 for step in sorted(range(-16, 17), key=abs))  # 1 first, to 1 +- 2^-8


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


def rounded_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """bf16 [rows, columns] -> int8, scales [rows] and bool [rows]: where int8 * scale, rounded to bf16, is the row.

    `quantise_rows` leaves a 127 in every row, so the scale is largest value / 127 to within bf16's half step, 2^-8.
    A guess of GUESSES is near enough to know every int8; then the scales that give the row exactly are an interval.
    """
    rows = weight.double()
    kept, scales = torch.zeros_like(rows, dtype=torch.int8), torch.ones(len(rows))
    found = (rows == 0).all(dim=1)
    # half the distance to the next number of bf16 (eight significant bits); below a power of two they lie denser
    mantissa, exponent = torch.frexp(rows.abs())
    above = torch.exp2(exponent.double() - 9)
    below = torch.where(mantissa == 0.5, above / 2, above)
    for guess in GUESSES:
        left = (~found).nonzero()[:, 0]
        size = rows[left].abs()
        numbers = (size / (size.amax(dim=1, keepdim=True) * guess / 127)).round().clamp_max(127)
        low = ((size - below[left]) / numbers).nan_to_num(0, posinf=0, neginf=0).amax(dim=1)
        high = torch.where(numbers == 0, torch.inf, (size + above[left]) / numbers).amin(dim=1)
        middle = ((low + high) / 2).float()
        signed = numbers * rows[left].sign()
        exact = ((signed.float() * middle[:, None]).to(torch.bfloat16) == weight[left]).all(dim=1)
        where = left[exact]
        kept[where], scales[where], found[where] = signed[exact].to(torch.int8), middle[exact], True
    return kept, scales, found


def pack(folder: Path, dest: Path, card: dict[str, Any] | None = None) -> Path:
    """A checkpoint folder -> the package files in `dest`. `card`: model card fields for `model.json`."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    tensors: dict[str, torch.Tensor] = {}
    for path in weight_files(folder):
        for name, tensor in load_file(path).items():
            tensors.update(_packed(name, tensor))
    _write(dest / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    _write(dest / MODEL, _json({"config": config, "card": card or {}}))
    for name in (*AS_THEY_ARE, README):
        _copy(folder / name, dest / name)
    return dest


def unpack(source: Path, folder: Path) -> None:
    """The package files in `source` -> config.json, model.safetensors (bf16) and the other files in `folder`."""
    packed = load_file(source / WEIGHTS)
    config = json.loads((source / MODEL).read_text(encoding="utf-8"))["config"]
    tensors = {name: _unpacked(name, packed) for name in sorted(packed) if not _is_scale(name, packed)}
    _write(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    _write(folder / "config.json", _json(config))
    for name in (*AS_THEY_ARE, README):
        _copy(source / name, folder / name)


def _packed(name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    if tensor.is_floating_point() and not tensor.isfinite().all():
        raise UserError("weights-invalid", f"{name} holds NaN or infinity", "train or export the model again")
    if tensor.dim() != 2 or not tensor.is_floating_point():
        return {name: tensor}
    quantised, scales = quantise_rows(tensor)
    if tensor.dtype == torch.bfloat16:
        before, its_scales, same = rounded_rows(tensor)
        quantised = torch.where(same[:, None], before, quantised)
        scales = torch.where(same, its_scales, scales)
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
