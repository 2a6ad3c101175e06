"""Checkpoints on disk now, beside what they were when `launch` started the server."""

from __future__ import annotations

import posixpath
from collections.abc import Iterable, Mapping
from typing import Any

from draftproof.doctor.facts import FileFacts, FileState
from draftproof.errors import UserError
from draftproof.launch.machine import Machine, Progress


def file_facts(
    machine: Machine,
    record: Mapping[str, Any] | None,
    folders: Iterable[str] = (),
    *,
    drafter: str | None = None,
    digests: bool = True,
    started: float | None = None,
    loaded: float | None = None,
    progress: Progress | None = None,
) -> FileFacts:
    """Every file of `folders` and of what `record` (a launch's record.json) hashed. Without `digests` sizes and times
    only. `drafter` is the folder whose tensors are named. `started` is the process's start (ProcessFacts.started), by
    default when the record was written, a moment before; `loaded` a moment by which it had read them. What cannot be
    read is told in `unreadable`. A server of GGUF files reads no folder: one that is named beside them lends its
    config, and is none of the server's checkpoints."""
    hashes = record["hashes"] if record else {}
    if any(name.endswith(".gguf") for name in hashes):
        folders = ()
    now: dict[str, FileState] = {}
    unreadable: dict[str, str] = {}
    for folder in dict.fromkeys([*folders, *hashes]):
        try:
            told = machine.call("hash", paths=[folder], digests=digests, ctimes=True, progress=progress)
        except UserError as error:
            if error.code not in ("remote-folder", "disk-full"):
                raise
            unreadable[folder] = error.message
        else:
            now |= _states(told["hashes"])
    if started is None and record:
        started = record["time"]
    tensors = _tensors(machine, drafter, unreadable) if drafter else None
    return FileFacts(now, _states(hashes) if record else None, started, unreadable, tensors, loaded)


def _tensors(machine: Machine, folder: str, unreadable: dict[str, str]) -> tuple[str, ...] | None:
    """None where there are no safetensors, or where one cannot be read."""
    try:
        return tuple(machine.call("tensors", path=folder)["tensors"]) or None
    except UserError as error:
        unreadable.setdefault(folder, error.message)
        return None


def _states(hashes: Mapping[str, Mapping[str, Any]]) -> dict[str, FileState]:
    found = {}
    for folder, entries in hashes.items():
        for name, entry in entries.items():
            ctime = entry["ctime_ns"] / 1e9 if "ctime_ns" in entry else None
            path = posixpath.join(folder, name) if name else folder
            found[path] = FileState(path, entry["size"], entry["mtime_ns"] / 1e9, entry["sha256"], ctime)
    return found
