"""A Plan: everything needed to start an engine, as data. Argument lists are never joined except for display."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Reason:
    """Why an argument, a variable or a file is in the plan. `what` is the flag or variable name."""

    what: str
    value: str
    why: str


@dataclass(frozen=True)
class Plan:
    """`argv[0]` is the program, looked up on the machine that runs it. `env` is added to that machine's
    environment. `files` maps an absolute path on that machine to its bytes; `{state}` at the beginning of such a
    path, and in any argv or env value, stands for the launch's own folder. `health` is the URL path that answers
    200 when the engine serves. `checkpoints` are the folders or files whose hashes are recorded at the start.
    `gpu_bytes` is the memory needed on each GPU, None when it cannot be told."""

    engine: str
    argv: tuple[str, ...]
    env: Mapping[str, str]
    host: str
    port: int
    checkpoints: tuple[str, ...]
    files: Mapping[str, bytes] = field(default_factory=dict)
    health: str = "/health"
    gpu_bytes: int | None = None
    gpus: int = 1
    why: tuple[Reason, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready; file contents as text when they are UTF-8, else hex."""
        return {
            "schema": "draftproof.plan/1",
            "engine": self.engine,
            "argv": list(self.argv),
            "env": dict(self.env),
            "host": self.host,
            "port": self.port,
            "health": self.health,
            "checkpoints": list(self.checkpoints),
            "files": {path: _text(data) for path, data in self.files.items()},
            "gpu_bytes": self.gpu_bytes,
            "gpus": self.gpus,
            "why": [vars(reason) for reason in self.why],
        }


def _text(data: bytes) -> dict[str, str]:
    try:
        return {"text": data.decode()}
    except UnicodeDecodeError:
        return {"hex": data.hex()}
