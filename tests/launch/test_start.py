"""The flow on this machine: look, start, wait, explain a failure, stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.errors import UserError
from draftproof.launch.machine import Local
from draftproof.launch.plan import Plan
from draftproof.launch.start import launch, logs, preflight, start, status, stop, wait_healthy
from tests.launch import in_session, plan_of, until

HERE = Local()


@pytest.fixture(autouse=True)
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    yield tmp_path / "state"
    for one in status(HERE):
        stop(HERE, one.name, seconds=1)


@pytest.fixture
def said() -> list[str]:
    return []


def fault(plan: Plan, said: list[str], timeout: float = 20) -> UserError:
    with pytest.raises(UserError) as caught:
        launch(HERE, plan, "one", timeout, said.append)
    return caught.value


def test_launch_until_it_serves(said: list[str], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    plan = plan_of("--delay", "1", checkpoints=(str(tmp_path / "config.json"),))
    ready = launch(HERE, plan, "one", 20, said.append)
    assert (ready.state, ready.health, ready.port, ready.ended) == ("running", 200, plan.port, "running")
    assert said[0] == "GPU memory not checked: the plan does not tell how much is needed"
    assert said[-1] == f"one serves on 127.0.0.1:{plan.port}" and str(ready.pid) in said[1]
    assert any(line.startswith("Loading safetensors checkpoint shards:") for line in said[2:-1])
    text: list[str] = []
    logs(HERE, "one", text.append)
    assert "Loading safetensors checkpoint shards: 100% Completed" in "".join(text)
    assert wait_healthy(HERE, "one", 5, said.append).pid == ready.pid
    assert stop(HERE, "one").ended == "signal 15" and stop(HERE, "one").stopped


def test_a_crash_is_explained(said: list[str]) -> None:
    line = "ValueError: Model Runner V2 requires Triton."
    error = fault(plan_of("--child", "--crash", f"Traceback:\n{line}"), said)
    assert error.code == "launch-failed" and "exit code 3" in error.message
    assert f"log line: {line}\n" in error.message and "cause: VLLM_USE_V2_MODEL_RUNNER=1" in error.message
    assert error.message.endswith("launches/one/log") and "Install Triton" in error.fix
    unknown = fault(plan_of("--crash", "WeirdError: something new"), said)
    assert "log line: WeirdError: something new" in unknown.message and "cause" not in unknown.message


def test_too_slow_is_stopped(said: list[str]) -> None:
    error = fault(plan_of("--delay", "60", "--child"), said, timeout=1)
    assert error.code == "launch-failed" and "did not answer within 1 s and was stopped" in error.message
    seen = status(HERE, "one")[0]
    assert seen.state == "killed" and seen.stopped and not in_session(seen.pid)


def test_what_is_found_before_the_start(said: list[str]) -> None:
    missing = fault(replace(plan_of(), argv=("no-such-engine", "serve")), said)
    assert missing.code == "launch-failed" and "no-such-engine" in missing.message and "PATH=" in missing.message
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        busy = fault(plan_of(port=port), said)
    assert busy.code == "port-in-use" and str(port) in busy.message and "ss -ltnp" in busy.fix
    assert fault(replace(plan_of(), host="192.0.2.1"), said).code == "bad-option"
    assert status(HERE) == []
    loading = plan_of("--delay", "30")
    start(HERE, loading, "loading", said.append)
    ours = fault(plan_of(port=loading.port), said)
    assert ours.code == "port-in-use" and "by the launch loading" in ours.message and "stop loading" in ours.fix


def test_gpu_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    plan = replace(plan_of(), gpu_bytes=30 << 30, gpus=1)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    if not Path("/usr/bin/nvidia-smi").exists():
        assert "no nvidia-smi" in preflight(HERE, plan)[0]
    smi = tmp_path / "nvidia-smi"
    smi.write_text("#!/bin/sh\necho '0, NVIDIA H200, 143771, 1000'\necho '1, NVIDIA H200, 143771, 143000'\n")
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    with pytest.raises(UserError) as caught:
        preflight(HERE, plan)
    assert caught.value.code == "gpu-memory" and "GPU 0 (NVIDIA H200)" in caught.value.message
    assert "1.0 GiB free of 140.4 GiB, 30.0 GiB are needed" in caught.value.message
    assert preflight(HERE, replace(plan, env={"CUDA_VISIBLE_DEVICES": "1,0"})) == ()
    assert "does not tell" in preflight(HERE, replace(plan, env={"CUDA_VISIBLE_DEVICES": "GPU-8f3a"}))[0]
    with pytest.raises(UserError, match="3 GPUs are needed"):
        preflight(HERE, replace(plan, gpus=3))


def test_follow_the_log_until_the_end(said: list[str]) -> None:
    launch(HERE, plan_of("--exit-after", "1.5"), "one", 20, said.append)
    text: list[str] = []
    logs(HERE, "one", text.append, lines=1, follow=True)
    assert "".join(text).endswith("the end\n") and status(HERE, "one")[0].ended == "exit code 4"


# A test run in the background inherits ignored signals; a terminal's user does not.
SIGNALS = """
import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
"""
WAIT = (
    SIGNALS
    + """
import sys
from draftproof.launch.machine import Local
from draftproof.launch.start import wait_healthy
try:
    wait_healthy(Local(), "one", 60, lambda line: print(line, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP])
def test_ctrl_c_stops_the_engine_and_a_lost_terminal_does_not(number: int, said: list[str]) -> None:
    begun = start(HERE, plan_of("--delay", "30", "--child"), "one", said.append)
    waiting = subprocess.Popen([sys.executable, "-c", WAIT], stdout=subprocess.PIPE, start_new_session=True)
    assert waiting.stdout is not None
    assert b"Loading" in waiting.stdout.readline()
    os.killpg(waiting.pid, number)  # as a terminal does: to the whole group
    if number == signal.SIGINT:
        assert b"stopping one" in waiting.stdout.read()
        assert waiting.wait() == 130
        assert not in_session(begun.pid) and status(HERE, "one")[0].stopped
    else:
        assert waiting.wait() == -signal.SIGHUP
        time.sleep(1)
        assert len(in_session(begun.pid)) == 2 and status(HERE, "one")[0].state == "starting"
    waiting.stdout.close()


START = (
    SIGNALS
    + """
import sys
from draftproof.launch.machine import Local
from draftproof.launch.start import start
from tests.launch import plan_of
try:
    print("go", flush=True)
    start(Local(), plan_of("--delay", "30"), "one", print)
    print("started", flush=True)
except KeyboardInterrupt:
    sys.exit(130)
"""
)


@pytest.mark.parametrize("delay", [0.05, 0.15, 0.3])
def test_ctrl_c_during_the_start_leaves_nothing(delay: float) -> None:
    root = Path(__file__).parents[2]
    starting = subprocess.Popen([sys.executable, "-c", START], stdout=subprocess.PIPE, cwd=root)
    assert starting.stdout is not None and starting.stdout.readline() == b"go\n"
    time.sleep(delay)
    starting.send_signal(signal.SIGINT)
    told, code = starting.stdout.read(), starting.wait()
    starting.stdout.close()
    if b"started" not in told:
        assert code == 130
        until(lambda: all(one.state == "killed" for one in status(HERE)))
