"""A checkpoint's name as the engine shall see it, and a folder here that holds its configs."""

from __future__ import annotations

import base64
import posixpath
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from draftproof.errors import UserError
from draftproof.launch.machine import Local, Machine

Resolve = Callable[[str], Path]


@dataclass(frozen=True)
class Checkpoint:
    """`engine_name` goes on the engine's command line; `configs` is a local folder, a copy for another machine's."""

    engine_name: str
    configs: Path


def locate(machine: Machine, name: str, scratch: Path, resolve: Resolve) -> Checkpoint:
    """A path on the machine of the engine, or a hub id. `resolve` turns a name into a local folder with configs
    (`models/hub.py`); `scratch` takes copies of another machine's. UserError not-found, not-a-model, remote-folder."""
    if isinstance(machine, Local):
        folder = resolve(name)
        folder = folder if folder.is_dir() else folder.parent
        is_hub_id = not Path(name).expanduser().exists() and "/" in name
        return Checkpoint(name if is_hub_id else str(folder.absolute()), folder)
    if posixpath.isabs(name):
        return Checkpoint(name, _copy(machine, name, scratch))
    if name.count("/") == 1 and not name.startswith((".", "~")):
        return Checkpoint(name, resolve(name))
    raise UserError("not-found", f"{name!r} is no place on {machine}", "give an absolute path there, or a hub id")


def _copy(machine: Machine, path: str, scratch: Path) -> Path:
    """The small files that describe the checkpoint, under a folder of the same name; weights stay where they are."""
    answer = machine.call("read", path=path)
    if "config.json" not in answer["contents"]:
        raise UserError(
            "not-a-model", f"{path} on {machine} holds no config.json", "name the folder of a Hugging Face checkpoint"
        )
    folder = scratch / (posixpath.basename(posixpath.normpath(path)) or "checkpoint")
    for name, data in answer["contents"].items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(zlib.decompress(base64.b64decode(data)))
    return folder
