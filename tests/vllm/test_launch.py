"""`draftproof launch vllm` on the real engine: started, healthy, one completion, stopped, nothing left; a start that
fails, explained by its log line."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from .conftest import COMMON, RUNNER, VENV
from .pair import BLOCK, make_pair

pytestmark = pytest.mark.vllm
KNOWN = (
    "--accept",
    "vllm-cpu-context-keys",
)  # docs/vllm_cpu_context_keys.md: nothing to lose with equal k_norm weights
FAST = (*KNOWN, "--", "--enforce-eager", "--dtype", "float32")


@pytest.fixture
def draftproof(tmp_path: Path):
    """The command line with state of its own; what it started is stopped at the end."""
    env = {**os.environ, **COMMON, "XDG_STATE_HOME": str(tmp_path / "state")}

    def call(*words: object, runner: str = "v2") -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftproof.cli", *map(str, words)]
        return subprocess.run(command, env={**env, **RUNNER[runner]}, capture_output=True, text=True, check=False)

    yield call
    for one in json.loads(call("launch", "status", "--json").stdout):
        call("launch", "stop", one["name"])


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def session(pid: int) -> list[int]:
    """Processes of the engine's own session."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == pid:
            found.append(int(stat.parent.name))
    return found


def test_the_tiny_pair_from_start_to_stop(draftproof, port: int, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path / 'a pair\'s "folder"')
    ask = ["launch", "vllm", "--target", target, "--drafter", drafter, "--venv", VENV, "--runner", "v2"]
    ask += ["--max-model-len", 512, "--max-num-seqs", 4, "--port", port, "--served-model-name", "tiny", "--json"]
    started = draftproof(*ask, *FAST)
    assert started.returncode == 0, started.stderr
    running: dict[str, Any] = json.loads(started.stdout)
    assert running["state"] == "running" and session(running["pid"])
    told = ("Loading", "Model Runner", "KV cache size", "Application startup complete")
    assert any(words in started.stderr for words in told), "progress is shown, the newest line now and then"
    assert f"K = {BLOCK - 1}" in started.stderr, "and the reasons"

    body = {"model": "tiny", "prompt": "w5 w9", "max_tokens": 16, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 16
    metrics = httpx.get(f"http://127.0.0.1:{port}/metrics", timeout=10).text
    accepted = [line for line in metrics.splitlines() if line.startswith("vllm:spec_decode_num_accepted_tokens_total")]
    assert accepted and float(accepted[0].split()[-1]) > 0

    record = json.loads((Path(running["folder"]) / "record.json").read_text())
    assert record["argv"][record["argv"].index("--speculative-config") + 1].startswith('{"method":"dflash"')
    files = record["hashes"][str(drafter)]
    assert files.keys() == {"config.json", "model.safetensors"} and all(len(f["sha256"]) == 64 for f in files.values())

    again = draftproof(*ask, *FAST)
    assert again.returncode == 2 and "[port-in-use]" in again.stderr
    log = draftproof("launch", "logs", running["name"], "--lines", 400)
    assert "vLLM API server version" in log.stdout or "Application startup" in log.stdout
    stopped = draftproof("launch", "stop", running["name"])
    assert stopped.returncode == 0, stopped.stderr
    assert not session(running["pid"])
    assert json.loads(draftproof("launch", "status", "--json").stdout)[0]["state"] in ("exited", "killed")


def test_a_start_that_fails_names_the_line_and_the_cause(draftproof, port: int, tmp_path: Path) -> None:
    """The mixed drafter on V1: refused by the check; taken all the same, vLLM's own refusal is found and explained."""
    target, drafter = make_pair(tmp_path)
    ask = ["launch", "vllm", "--target", target, "--drafter", drafter, "--venv", VENV, "--runner", "v1"]
    ask += ["--max-model-len", 512, "--port", port]
    refused = draftproof(*ask, *FAST, runner="v1")
    assert refused.returncode == 2 and "[launch-refuted]" in refused.stderr and "vllm-mixed-v1" in refused.stderr
    failed = draftproof(*ask, "--accept", "vllm-mixed-v1", *FAST, runner="v1")
    assert failed.returncode == 2 and "[launch-failed]" in failed.stderr, failed.stderr
    assert "mixed sliding/full dflash drafts" in failed.stderr and "cause:" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_the_installed_release_is_read_from_its_environment(draftproof, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path)
    done = draftproof("check", drafter, "--target", target, "--engine", "vllm", "--venv", VENV, "--json")
    result = json.loads(done.stdout)
    assert result["installed"][0]["version"] == "0.32.0" and result["engines"][0]["release"] == "0.32.0"
    assert any(state == "" for state in result["installed"][0]["compiled"].values()), "a compiled part loads"
    assert result["engines"][0]["runner"] == "v1", "a CPU build without Triton takes V1"
    assert done.returncode == 1 and "vllm-mixed-v1" in done.stdout
