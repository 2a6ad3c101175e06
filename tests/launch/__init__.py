"""Launches of a stand-in engine (server.py) by the real agent: real processes, real files, a real ssh."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from draftproof.launch.plan import Plan

SERVER = Path(__file__).parent / "server.py"
# What a shell, a template or a JSON loader would touch. The last is a byte that is no UTF-8.
WORDS = (
    '{"method":"dflash","model":"/path with space/it\'s $HOME \\"q\\" {a,b} `x` \\\\ é \\n newline","k":[1,2]}',
    *("", " ", "a b", "it's", '"q"', "$HOME", "$(id)", "`id`", "{a,b}", "{{ x }}", "\\", "\\n", "*", "~", "!", "#x"),
    *(";", "&&", "|", ">x", "%s", "-n", "é", "日本", "line\nbreak", "\ttab", "\r", "\x1b[31m", "\udcff"),
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plan_of(*words: str, env: Mapping[str, str] | None = None, server: str = "", python: str = "", **more: Any) -> Plan:
    """A plan whose engine is server.py with these words."""
    port = more.pop("port", None) or free_port()
    argv = (python or sys.executable, server or str(SERVER), "--port", str(port), *words)
    fields: dict[str, Any] = {"engine": "vllm", "host": "127.0.0.1", "port": port, "checkpoints": (), "env": env or {}}
    return Plan(argv=argv, **(fields | more))


def in_session(number: int) -> list[int]:
    """Living processes of a session, as the kernel tells it."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == number and fields[0] not in (b"Z", b"X"):
            found.append(pid)
    return found


def with_token(token: str) -> list[int]:
    """Living processes that carry a launch's token in their environment, whatever their session."""
    found = []
    for pid in (int(name) for name in os.listdir("/proc") if name.isdigit()):
        try:
            if token.encode() in Path(f"/proc/{pid}/environ").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found


def until(true: Callable[[], Any], seconds: float = 10) -> Any:
    """The first true answer; an AssertionError when none comes in time."""
    deadline = time.monotonic() + seconds
    while not (answer := true()):
        assert time.monotonic() < deadline, "it did not become true in time"
        time.sleep(0.05)
    return answer
