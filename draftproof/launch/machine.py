"""The machine an engine runs on: this one, or another over the system's own `ssh`, so that a user's keys and config
hold. Nothing a user chose passes through the remote shell: the command is `python3 -I -S -X utf8 -`, which bash,
dash, zsh and fish read alike, and the program and its request travel over stdin (draftproof/launch/agent.py).
"""

from __future__ import annotations

import base64
import json
import secrets
import shlex
import subprocess
import sys
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from typing import IO, Any

from draftproof.errors import UserError

# No file of the working folder, of PYTHONPATH or of site-packages is imported. UTF-8 whatever the locale there.
PYTHON_ARGS = ("-I", "-S", "-X", "utf8", "-")
MISSING = (126, 127)  # what shells answer when a command is not there or not executable

Progress = Callable[[dict[str, Any]], None]


class Machine(ABC):
    """Where a launch lives. `str(machine)` is its name for messages."""

    @abstractmethod
    def command(self) -> list[str]:
        """What reads a Python program from stdin on that machine."""

    @abstractmethod
    def silence(self, code: int, stderr: str) -> UserError:
        """Why a call ended with this exit code and without an answer."""

    def call(self, verb: str, *, progress: Progress | None = None, **payload: Any) -> dict[str, Any]:
        """One verb of the agent. `progress` gets what it tells before its answer. UserError for what can be mended
        there, RuntimeError for a defect of the agent."""
        marker = f"draftproof-{secrets.token_hex(16)}:"
        with tempfile.TemporaryFile() as program, tempfile.TemporaryFile() as errors:
            program.write(_program({"marker": marker, "verb": verb, "payload": payload}))
            program.seek(0)
            answer, code = self._run(program, errors, marker, progress)
            errors.seek(0)
            if answer is None:
                raise self.silence(code, errors.read().decode(errors="replace"))
        if "error" in answer:
            error = answer["error"]
            if not error["code"]:
                raise RuntimeError(f"the agent failed on {self}:\n{error['message']}")
            raise UserError(error["code"], error["message"], error["fix"])
        return dict(answer["result"])

    def _run(
        self, program: IO[bytes], errors: IO[bytes], marker: str, progress: Progress | None
    ) -> tuple[dict[str, Any] | None, int]:
        """Files instead of pipes on two of three sides, so nothing can block. In its own session, so that a Ctrl-C
        here does not tear the connection while the engine is being started or stopped."""
        try:
            running = subprocess.Popen(
                self.command(), stdin=program, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
            )
        except OSError as error:
            raise UserError(
                "host-unfit", f"{self.command()[0]} cannot be run here: {error.strerror}", "install it (OpenSSH client)"
            ) from error
        answer = None
        try:
            assert running.stdout is not None
            for line in running.stdout:
                _, found, text = line.partition(marker.encode())
                if not found:  # what rc files and banners print
                    continue
                told = json.loads(text)
                if "progress" not in told:
                    answer = told
                elif progress is not None:
                    progress(told["progress"])
            return answer, running.wait()
        finally:
            if running.poll() is None:
                running.kill()
                running.wait()
            if running.stdout is not None:
                running.stdout.close()


@dataclass(frozen=True)
class Local(Machine):
    """This machine, through the same agent, with the interpreter that runs draftproof."""

    def __str__(self) -> str:
        return "this machine"

    def command(self) -> list[str]:
        return [sys.executable, *PYTHON_ARGS]

    def silence(self, code: int, stderr: str) -> UserError:
        message = f"{sys.executable} gave no answer (exit code {code}): {_tail(stderr)}"
        return UserError("host-unfit", message, "check this Python installation")


@dataclass(frozen=True)
class Remote(Machine):
    """`host` as ssh takes it: user@machine, or a name of ~/.ssh/config. `ssh_options` are words of ssh's own command
    line, such as ("-p", "2222", "-i", "key")."""

    host: str
    ssh_options: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not self.host or self.host.startswith("-") or any(c.isspace() or not c.isprintable() for c in self.host):
            raise UserError("bad-option", f"{self.host!r} is no host name for ssh", "give user@machine")

    def __str__(self) -> str:
        return self.host

    def command(self) -> list[str]:
        return [
            *("ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"),
            *self.ssh_options,
            *("-o", "ServerAliveInterval=15"),  # a dead network ends a wait after 45 seconds
            *("--", self.host, " ".join(("python3", *PYTHON_ARGS))),
        ]

    def by_hand(self) -> str:
        """The command that shows whether the connection works."""
        return shlex.join(["ssh", *self.ssh_options, self.host, "true"])

    def silence(self, code: int, stderr: str) -> UserError:
        said = _tail(stderr)
        if code == 255:
            return UserError(
                "host-unreachable", f"{self.host}: {said or 'ssh ended without a word'}", self._way(stderr)
            )
        if code in MISSING:
            return UserError("host-unfit", f"{self.host} has no python3 ({said})", "install Python 3.8 or newer there")
        message = f"python3 on {self.host} gave no answer (exit code {code}): {said}"
        return UserError("host-unfit", message, f"python3 there must be 3.8 or newer: see {self.by_hand()}")

    def _way(self, stderr: str) -> str:
        if "Host key verification failed" in stderr:
            return f"run `{self.by_hand()}` once and compare the machine's key"
        if "Permission denied" in stderr:
            return f"a key must open it without a question: `ssh-add` or `ssh-copy-id`, then `{self.by_hand()}`"
        return f"see what `{self.by_hand()}` says"


def _program(request: dict[str, Any]) -> bytes:
    """The agent, then the one call. A program that is cut short anywhere does not parse, so it does nothing."""
    source = (files("draftproof.launch") / "agent.py").read_text(encoding="utf-8")
    encoded = base64.b64encode(json.dumps(request).encode()).decode()
    return f'{source}\n\nmain("{encoded}")\n'.encode()


def _tail(stderr: str) -> str:
    """The last lines that say something, without ssh's banner frames."""
    lines = [line.strip() for line in stderr.splitlines() if line.strip(" \t\r@*#-=")]
    return "; ".join(lines[-3:])
