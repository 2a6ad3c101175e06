"""How a call reaches a machine and what its failures are called. Connections that succeed: test_ssh.py."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from draftproof.errors import UserError
from draftproof.launch.machine import PYTHON_ARGS, Local, Machine, Remote, _program
from tests.launch import free_port


@dataclass(frozen=True)
class Wrapped(Local):
    """This machine behind a shell command, as a login shell stands before the agent."""

    script: str

    def command(self) -> list[str]:
        return ["/bin/sh", "-c", self.script, sys.executable, *PYTHON_ARGS]


def test_noise_around_the_answer_does_no_harm() -> None:
    noise = 'echo hello; echo \'{"result": 1}\'; printf \'no newline\'; echo problem >&2; "$0" "$@"; echo bye'
    assert Wrapped(noise).call("facts")["user"]


def test_a_silent_interpreter_is_unfit() -> None:
    with pytest.raises(UserError) as caught:
        Wrapped("echo nothing; echo 'no such thing' >&2; exit 3").call("facts")
    assert caught.value.code == "host-unfit" and "exit code 3" in caught.value.message
    assert "no such thing" in caught.value.message


def test_a_defect_of_the_agent_is_no_user_error() -> None:
    with pytest.raises(RuntimeError, match="TypeError"):
        Local().call("facts", nonsense=1)


def test_a_program_that_is_cut_short_does_nothing() -> None:
    """A connection may break while the request is sent; python runs what it got."""
    program = _program({"marker": "m:", "verb": "facts", "payload": {}})
    last = program.rstrip().rfind(b"\n")
    for cut in (last - 2000, last, last + 1, last + 6, last + 40, len(program.rstrip()) - 1):
        done = subprocess.run([sys.executable, *PYTHON_ARGS], input=program[:cut], capture_output=True, check=False)
        assert b"m:" not in done.stdout
    done = subprocess.run([sys.executable, *PYTHON_ARGS], input=program, capture_output=True, check=True)
    assert done.stdout.startswith(b"m:")


@pytest.mark.parametrize("host", ["", "-oProxyCommand=id", "a b", "a\nb", "a\0b"])
def test_host_names_that_ssh_would_read_as_something_else(host: str) -> None:
    with pytest.raises(UserError) as caught:
        Remote(host)
    assert caught.value.code == "bad-option"


def test_the_command_line_of_ssh() -> None:
    command = Remote("me@there", ("-p", "22")).command()
    assert command[:6] == ["ssh", "-T", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10"]
    assert command[6:8] == ["-p", "22"] and command[-3:] == ["--", "me@there", "python3 -I -S -X utf8 -"]


def test_no_ssh_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError) as caught:
        Remote("there").call("facts")
    assert caught.value.code == "host-unfit" and "ssh cannot be run here" in caught.value.message


@pytest.mark.skipif(shutil.which("ssh") is None, reason="no ssh client")
def test_a_closed_port() -> None:
    machine: Machine = Remote("127.0.0.1", ("-F", "/dev/null", "-p", str(free_port())))
    with pytest.raises(UserError) as caught:
        machine.call("facts")
    assert caught.value.code == "host-unreachable" and "Connection refused" in caught.value.message
    assert "ssh -F /dev/null -p" in caught.value.fix and caught.value.fix.endswith("says")


def test_a_call_leaves_no_process_behind(tmp_path: Path) -> None:
    """An exception in the caller ends the agent."""
    pids = tmp_path / "pid"

    def stop(told: object) -> None:
        raise KeyboardInterrupt

    (tmp_path / "big").write_bytes(b"")
    os.truncate(tmp_path / "big", 8 << 30)
    with pytest.raises(KeyboardInterrupt):
        Wrapped(f'echo $$ > {pids}; exec "$0" "$@"').call("hash", paths=[str(tmp_path / "big")], progress=stop)
    assert not Path(f"/proc/{pids.read_text().strip()}").exists()
