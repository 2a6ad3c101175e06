"""Weights that are safe to load: safetensors alone, whole, inside their folder; read without torch."""

from __future__ import annotations

import json
import struct
from math import prod
from pathlib import Path, PurePosixPath
from typing import Any

from draftproof.errors import UserError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")

DTYPE_BITS = {
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}
HEADER_LIMIT = 100_000_000  # the limit of the safetensors library

Tensors = dict[str, tuple[str, tuple[int, ...]]]


def check_weights(folder: Path) -> Tensors:
    """Every tensor of the checkpoint's safetensors as name -> (dtype, shape), read from the headers only.

    Errors: weights-missing; weights-unsafe (only pickles, or a path that leaves the folder);
    weights-truncated (a header that is no header, or bytes that are not there). Each names the file.
    """
    loaded = weight_files(folder)
    others = set(folder.glob("*.safetensors")) - set(loaded)
    for path in sorted(others):  # not loaded by transformers, but some reader may take every file it sees
        _require_inside(folder, path)
        _header(path)
    tensors: Tensors = {}
    for path in loaded:
        tensors.update(_header(path))
    return tensors


def weight_files(folder: Path) -> list[Path]:
    """The files to load: those of the index, else model.safetensors, else every *.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in _index_names(index)]
    elif (folder / "model.safetensors").exists():
        files = [folder / "model.safetensors"]
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        _refuse_without_safetensors(folder)
    for path in files:
        _require_inside(folder, path)
    return files


def _refuse_without_safetensors(folder: Path) -> None:
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLES)
    if pickles:
        raise UserError(
            "weights-unsafe",
            f"{folder} holds only pickled weights ({', '.join(pickles[:3])}); loading a pickle can run code",
            "convert them to safetensors, or take a revision that has safetensors",
        )
    raise UserError("weights-missing", f"{folder} holds no *.safetensors", "name a folder with weights")


def _index_names(index: Path) -> list[str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        names = sorted(set(weight_map.values()))
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise UserError("bad-json", f"{index} holds no weight_map of names: {error}", "fetch the file again") from error
    for name in names:
        plain = isinstance(name, str) and PurePosixPath(name).name == name and not set(name) & set("\\:")
        if not plain or not name.endswith(".safetensors"):
            raise UserError(
                "weights-unsafe",
                f"{index} names {name!r}, which is not a plain *.safetensors name inside the folder",
                "do not use this checkpoint",
            )
    return names


def _require_inside(folder: Path, path: Path) -> None:
    if not path.exists():
        raise UserError("weights-missing", f"{path} is not there", "fetch the checkpoint again")
    real, home = path.resolve(), folder.resolve()
    allowed = [home]
    if folder.absolute().parent.name == "snapshots":  # the hub's cache: a snapshot links to ../../blobs/HASH
        allowed.append(folder.absolute().parent.parent.resolve() / "blobs")
    if real.parent not in allowed:
        raise UserError(
            "weights-unsafe",
            f"{path} is a link that leaves the folder, to {real}",
            "copy the file into the folder",
        )


def _header(path: Path) -> Tensors:
    size = path.stat().st_size
    with path.open("rb") as file:
        first = file.read(8)
        length = struct.unpack("<Q", first)[0] if len(first) == 8 else 0
        if not 2 <= length <= min(HEADER_LIMIT, size - 8):
            raise _truncated(path, f"it has {size} bytes and no valid header")
        raw = file.read(length)
    try:
        header = json.loads(raw)
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        tensors = {name: _tensor(path, name, entry, size - 8 - length) for name, entry in entries.items()}
        _require_packed(path, [entry["data_offsets"] for entry in entries.values()], size - 8 - length)
        return tensors
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _truncated(path, f"its header cannot be read ({error})") from error


def _tensor(path: Path, name: str, entry: dict[str, Any], data: int) -> tuple[str, tuple[int, ...]]:
    dtype, shape, (start, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
    if any(type(value) is not int or value < 0 for value in (*shape, start, end)):
        raise _truncated(path, f"the header's numbers for {name} are impossible")
    if dtype not in DTYPE_BITS or (end - start) * 8 != prod(shape) * DTYPE_BITS[dtype]:
        raise _truncated(path, f"{name} is said to be {dtype} {list(shape)} in {end - start} bytes, which cannot be")
    if end > data:
        raise _truncated(path, f"{name} ends at byte {end} of {data}")
    return dtype, shape


def _require_packed(path: Path, spans: list[list[int]], data: int) -> None:
    """Tensors lie end to end and fill the file, as the library demands: nothing hides between or behind them."""
    at = 0
    for start, end in sorted(spans):
        if start != at:
            raise _truncated(path, f"a tensor begins at byte {start}, the one before it ends at {at}")
        at = end
    if at != data:
        raise _truncated(path, f"{data - at} bytes lie behind the last tensor")


def _truncated(path: Path, why: str) -> UserError:
    return UserError("weights-truncated", f"{path} is cut short or damaged: {why}", "fetch the file again")
