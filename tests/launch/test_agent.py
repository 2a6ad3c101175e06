"""The agent on this machine: what it reads, starts, finds again and ends."""

from __future__ import annotations

import base64
import glob
import hashlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import UserError
from draftproof.launch.machine import PYTHON_ARGS, Local
from draftproof.launch.plan import Plan
from tests.launch import WORDS, free_port, in_session, plan_of, until, with_token

ODD = 'it\'s $HOME {a,b} \\ `x` "q" é\n2'


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of the launches, under a path that no shell would leave alone. All are stopped in the end."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / ODD))
    folder = tmp_path / ODD / "draftproof" / "launches"
    yield folder
    for found in folder.glob("*/record.json"):
        Local().call("stop", name=found.parent.name, seconds=1)


def start(plan: Plan, name: str = "one", machine: Local | None = None, **more: Any) -> dict[str, Any]:
    return (machine or Local()).call("start", name=name, plan=plan.as_dict(), version="9.9", **more)


def status(name: str = "one") -> dict[str, Any]:
    return dict(Local().call("status", name=name)["launches"][0])


def serving(name: str = "one") -> dict[str, Any]:
    return Local().call("follow", name=name, offset=0, seconds=20, ready=True)


def fault(call: Any, *words: Any, **more: Any) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*words, **more)
    return caught.value


# ---- facts, read, hash


def test_facts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 143000'\necho '1, NVIDIA H200, 143771, [N/A]'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        facts = Local().call("facts", program="sh", host="127.0.0.1", port=port)
        assert facts["port"] == {"free": False, "errno": "EADDRINUSE", "launch": None}
        assert Local().call("facts", host="0.0.0.0", port=port)["port"]["free"] is False
    assert Local().call("facts", host="127.0.0.1", port=port)["port"] == {"free": True}
    assert Local().call("facts", host="192.0.2.1", port=port)["port"]["errno"] == "EADDRNOTAVAIL"
    assert facts["program"] == shutil.which("sh") and facts["hostname"] == socket.gethostname()
    assert [gpu["free"] for gpu in facts["gpus"]] == [143000 << 20, None] and facts["gpus"][0]["index"] == "0"
    assert Local().call("facts", program="no-such-program")["program"] is None
    assert Local().call("facts", program="./sh", path="/bin")["program"] is None
    assert Local().call("facts", program="sh", path="/nowhere")["program"] is None
    monkeypatch.setenv("PATH", "/nowhere")
    assert Local().call("facts")["gpus"] == []


def test_read_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / ODD
    (folder / ".cache").mkdir(parents=True)
    (folder / "sub").mkdir()
    (folder / ".cache" / "config.json").write_text("no")
    blob = tmp_path / "blob"
    blob.write_text('{"model_type": "qwen3"}')
    (folder / "config.json").symlink_to(blob)
    (folder / "model.safetensors").write_bytes(b"12345")
    (folder / "sub" / "x").write_text("")
    with (folder / "tokenizer.json").open("wb") as file:
        file.truncate((32 << 20) + 1)
    told = Local().call("read", path=str(folder))
    assert told["sizes"] == {"config.json": 23, "model.safetensors": 5, "sub/x": 0, "tokenizer.json": (32 << 20) + 1}
    assert zlib.decompress(base64.b64decode(told["contents"]["config.json"])) == blob.read_bytes()
    assert list(told["contents"]) == ["config.json"] and told["too_large"] == ["tokenizer.json"]
    missing = fault(Local().call, "read", path=str(folder / "none"))
    assert missing.code == "remote-folder" and "none" in missing.message and "does not exist" in missing.message
    assert "is not a folder" in fault(Local().call, "read", path=str(blob)).message


def test_hash_follows_links_and_tells_progress(tmp_path: Path) -> None:
    (tmp_path / "snapshot" / "sub").mkdir(parents=True)
    data = os.urandom(3 << 20)
    (tmp_path / "blob").write_bytes(data)
    (tmp_path / "snapshot" / "model.safetensors").symlink_to(tmp_path / "blob")
    (tmp_path / "snapshot" / "sub" / "empty").write_bytes(b"")
    paths = [str(tmp_path / "snapshot"), str(tmp_path / "blob")]
    hashes = Local().call("hash", paths=paths)["hashes"]
    told = {
        "sha256": hashlib.sha256(data).hexdigest(),
        "size": 3 << 20,
        "mtime_ns": (tmp_path / "blob").stat().st_mtime_ns,
    }
    assert hashes[paths[1]] == {"": told} and hashes[paths[0]]["model.safetensors"] == told
    assert hashes[paths[0]]["sub/empty"]["sha256"] == hashlib.sha256().hexdigest()
    (tmp_path / "snapshot" / "broken").symlink_to(tmp_path / "gone")
    assert fault(Local().call, "hash", paths=paths[:1]).code == "remote-folder"


# ---- start


def test_argv_environment_and_files_arrive_byte_for_byte(state: Path, tmp_path: Path) -> None:
    env = {"ODD": WORDS[0], "EMPTY": "", "BYTE": "\udcff", "HOME_OF_IT": "{state}/home"}
    files = {"{state}/t/chat.jinja": "{{ 'é' }}\n".encode(), "{state}/raw": b"\xff\x00"}
    weights = tmp_path / "weights"
    weights.write_bytes(b"w")
    plan = plan_of("--dump", "{state}/dump", *WORDS, env=env, files=files, checkpoints=(str(weights),))
    told = start(plan)
    dump = json.loads(until(lambda: (state / "one" / "dump").exists() and (state / "one" / "dump").read_text()))
    folder = os.fsencode(state / "one")
    sent = [os.fsencode(word).replace(b"{state}", folder) for word in plan.argv[1:]]
    assert [bytes.fromhex(word) for word in dump["argv"]] == sent
    environ = {bytes.fromhex(key): bytes.fromhex(value) for key, value in dump["environ"].items()}
    assert {name: environ[name.encode()] for name in env} == {
        name: os.fsencode(value).replace(b"{state}", folder) for name, value in env.items()
    }
    assert environ[b"PATH"] == os.environb[b"PATH"] and dump["cwd"] == str(state / "one")
    assert (state / "one" / "t" / "chat.jinja").read_text() == "{{ 'é' }}\n"
    assert (state / "one" / "raw").read_bytes() == b"\xff\x00"
    assert (state / "one").stat().st_mode & 0o777 == 0o700 and told["folder"] == str(state / "one")
    record = json.loads((state / "one" / "record.json").read_text())
    assert record["hashes"][str(weights)][""]["sha256"] == hashlib.sha256(b"w").hexdigest()
    assert record["plan"]["argv"] == list(plan.argv) and record["pid"] == record["pgid"] == told["pid"]
    assert record["version"] == "9.9" and record["hostname"] == socket.gethostname()


def test_what_cannot_be_executed_is_said_at_once(state: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    plain.write_text("x")
    orphan = tmp_path / "orphan"
    orphan.write_text("#!/no/such/interpreter\n")
    orphan.chmod(0o755)
    for program, word in (
        ("no-such-program", "No such file"),
        (str(plain), "Permission denied"),
        (str(orphan), "No such file"),
        ("./relative", "relative"),
        (str(tmp_path), "Permission denied"),
        ("nul\0byte", "null byte"),
    ):
        plan = Plan("vllm", (program,), {}, "127.0.0.1", 1, ())
        error = fault(start, plan)
        assert error.code == "launch-failed" and word in error.message, error.message
        assert fault(status).code == "launch-unknown"


def test_names_and_unknown_launches(state: Path) -> None:
    for name in ("../x", "", "-x", "a/b", ".hidden", "x" * 65):
        assert fault(start, plan_of(), name).code == "bad-option"
    for verb in ("status", "log", "stop"):
        assert fault(Local().call, verb, name="none").code == "launch-unknown"
    assert Local().call("status") == {"launches": []}


# ---- the life of a launch


def test_life(state: Path) -> None:
    plan = plan_of("--delay", "3", "--child", "--session-child")
    pid = start(plan)["pid"]
    seen = status()
    assert seen["state"] == "starting" and isinstance(seen["health"], str)
    again = fault(start, plan)
    assert again.code == "launch-exists" and str(pid) in again.message
    assert Local().call("facts", host="127.0.0.1", port=plan.port)["port"]["launch"] == "one"
    ready = serving()
    assert (ready["state"], ready["health"], ready["timed_out"], ready["pid"]) == ("running", 200, False, pid)
    token = json.loads((state / "one" / "record.json").read_text())["token"]
    assert len(in_session(pid)) == 2 and len(with_token(token)) == 3
    ended = Local().call("stop", name="one", seconds=10)
    assert (ended["state"], ended["signal"], ended["ran"], ended["stopped"]) == ("killed", 15, True, True)
    assert not in_session(pid) and not with_token(token)
    again_stopped = Local().call("stop", name="one")
    assert again_stopped["ran"] is False and again_stopped["state"] == "killed"
    log = base64.b64decode(Local().call("log", name="one")["data"])
    assert log.startswith(b"Loading safetensors checkpoint shards:   0%")
    last = Local().call("log", name="one", lines=1)
    assert base64.b64decode(last["data"]).count(b"\n") == 1 and last["offset"] == last["size"] == len(log)
    tail = Local().call("log", name="one", offset=len(log) - 4)
    assert base64.b64decode(tail["data"]) == log[-4:]
    start(plan)
    assert (state / "one" / "log.previous").read_bytes() == log and status()["stopped"] is False


def test_two_launches_do_not_touch_each_other(state: Path) -> None:
    first, second = start(plan_of("--child"), "first"), start(plan_of("--child"), "second")
    serving("second")
    assert [one["name"] for one in Local().call("status")["launches"]] == ["first", "second"]
    Local().call("stop", name="first", seconds=10)
    assert not in_session(first["pid"]) and len(in_session(second["pid"])) == 2
    assert status("second")["state"] == "running"


def test_a_crash_is_told_and_its_children_are_ended(state: Path) -> None:
    pid = start(plan_of("--child", "--session-child", "--crash", "ValueError: no"))["pid"]
    told = Local().call("follow", name="one", offset=0, seconds=20, ready=True)
    assert (told["state"], told["returncode"], told["timed_out"]) == ("exited", 3, False)
    token = json.loads((state / "one" / "record.json").read_text())["token"]
    until(lambda: not in_session(pid) and not with_token(token))
    assert start(plan_of())["pid"] != pid


def test_a_stubborn_engine_is_killed(state: Path) -> None:
    pid = start(plan_of("--stubborn", "--child"))["pid"]
    serving()
    begun = time.monotonic()
    ended = Local().call("stop", name="one", seconds=0.5)
    assert ended["signal"] == 9 and not in_session(pid) and time.monotonic() - begun < 5


def test_without_its_supervisor_an_engine_is_still_found_and_stopped(state: Path) -> None:
    pid = start(plan_of("--child"))["pid"]
    serving()
    os.kill(json.loads((state / "one" / "record.json").read_text())["supervisor_pid"], signal.SIGKILL)
    assert status()["state"] == "running"
    assert Local().call("stop", name="one", seconds=10)["state"] == "killed" and not in_session(pid)


def test_a_process_that_died_with_its_supervisor_is_lost(state: Path) -> None:
    pid = start(plan_of())["pid"]
    serving()
    record = json.loads((state / "one" / "record.json").read_text())
    os.kill(record["supervisor_pid"], signal.SIGKILL)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not in_session(pid))
    assert status()["state"] == "lost" and Local().call("stop", name="one")["ran"] is False
    (state / "one" / "record.json").write_text(json.dumps(record | {"hostname": "another"}))
    assert status()["state"] == "elsewhere"


@pytest.mark.parametrize("changed", ["start", "boot"])
def test_a_recycled_pid_is_never_signalled(state: Path, changed: str) -> None:
    """Another process has the recorded number, a session of its own, and another start time or boot."""
    start(plan_of())
    path = state / "one" / "record.json"
    record = json.loads(path.read_text())
    os.kill(record["supervisor_pid"], signal.SIGKILL)  # else it would be asked how the engine ended
    other = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        begun = int(Path(f"/proc/{other.pid}/stat").read_bytes().rpartition(b")")[2].split()[19])
        tampered = {"start": {"start": begun - 1}, "boot": {"start": begun, "boot": "another-boot"}}[changed]
        path.write_text(json.dumps(record | {"pid": other.pid, "pgid": other.pid, "token": "none"} | tampered))
        assert status()["state"] == "lost"
        assert Local().call("stop", name="one", seconds=0.2)["ran"] is False
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
        path.write_text(json.dumps(record))
    assert status()["state"] in ("starting", "running")


def test_the_engine_survives_a_killed_caller(state: Path) -> None:
    """`follow` is cut off with SIGKILL; nobody is left who knows of the engine but its folder."""
    pid = start(plan_of())["pid"]
    code = "from draftproof.launch.machine import Local; Local().call('follow', name='one', offset=0)"
    caller = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    time.sleep(0.5)
    os.killpg(caller.pid, signal.SIGKILL)
    caller.wait()
    assert serving()["pid"] == pid


def test_runs_on_the_oldest_python(state: Path) -> None:
    places = [*glob.glob(os.path.expanduser("~/.pyenv/versions/3.8.*/bin/python3")), "/usr/bin/python3.8"]
    old = next(filter(os.path.exists, places), "")
    if not old:
        pytest.skip("no Python 3.8 on this machine")

    class Old(Local):
        def command(self) -> list[str]:
            return [old, *PYTHON_ARGS]

    assert Old().call("facts", host="127.0.0.1", port=free_port())["python"].startswith("3.8.")
    pid = start(plan_of("--child", "--session-child"), machine=Old())["pid"]
    assert Old().call("follow", name="one", offset=0, seconds=20, ready=True)["health"] == 200
    assert Old().call("stop", name="one", seconds=5)["state"] == "killed" and not in_session(pid)
