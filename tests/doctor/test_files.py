"""Checkpoint files now and as recorded, and the process that listens on a port, through the real agent."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.doctor.facts.files import file_facts
from draftproof.doctor.facts.process import choose, find_record, process_facts
from draftproof.launch.machine import Local

from .servers import closed_port


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    folder = tmp_path / "a checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    header = json.dumps(
        {"__metadata__": {}, "fc.weight": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}
    ).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return folder


def recorded(folder: Path) -> dict[str, object]:
    hashes = Local().call("hash", paths=[str(folder)])["hashes"]
    return {"hashes": hashes, "time": 1000.0}


def test_files_beside_their_record(checkpoint: Path) -> None:
    facts = file_facts(Local(), recorded(checkpoint), drafter=str(checkpoint))
    config = str(checkpoint / "config.json")
    assert facts.recorded is not None and facts.started == 1000.0 and facts.unreadable == {}
    assert facts.now[config].sha256 == facts.recorded[config].sha256 and facts.now.keys() == facts.recorded.keys()
    assert facts.drafter_tensors == ("fc.weight",)


def test_a_changed_file_is_visible_even_with_its_old_time(checkpoint: Path) -> None:
    record, config = recorded(checkpoint), checkpoint / "config.json"
    old = config.stat()
    config.write_text("[]")
    os.utime(config, ns=(old.st_atime_ns, old.st_mtime_ns))
    facts = file_facts(Local(), record)
    now, was = facts.now[str(config)], (facts.recorded or {})[str(config)]
    assert (now.size, now.mtime) == (was.size, was.mtime) and now.sha256 != was.sha256
    assert now.ctime is not None and now.ctime >= now.mtime


def test_a_link_that_points_elsewhere_is_a_change(checkpoint: Path, tmp_path: Path) -> None:
    link = tmp_path / "current"
    link.symlink_to(checkpoint)
    before = file_facts(Local(), None, [str(link)], digests=False).now[str(link / "config.json")]
    other = tmp_path / "other"
    checkpoint.rename(other)
    link.unlink()
    link.symlink_to(other)
    after = file_facts(Local(), None, [str(link)], digests=False).now[str(link / "config.json")]
    assert after.mtime == before.mtime and (after.ctime or 0) > (before.ctime or 0)


def test_without_a_record_or_hashes(checkpoint: Path) -> None:
    facts = file_facts(Local(), None, [str(checkpoint), "/no/such"], digests=False, started=5.0)
    assert facts.recorded is None and facts.started == 5.0 and len(facts.now) == 2
    assert all(state.sha256 is None and state.size for state in facts.now.values())
    assert "does not exist" in facts.unreadable["/no/such"]


def test_a_server_of_gguf_files_reads_no_folder(checkpoint: Path, tmp_path: Path) -> None:
    file = tmp_path / "D.gguf"
    file.write_bytes(b"GGUF")
    facts = file_facts(Local(), recorded(file), [str(checkpoint)])
    assert facts.recorded is not None and facts.now.keys() == facts.recorded.keys() == {str(file)}


def test_the_process_on_a_port(tmp_path: Path) -> None:
    """A child holds the socket, as an engine's API workers do; its parent was told to serve."""
    port = closed_port()
    child = (
        "import socket, time; s = socket.create_server(('127.0.0.1', PORT)); print('up', flush=True); time.sleep(60)"
    )
    parent = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[-1]])"
    words = [
        sys.executable,
        "-c",
        parent,
        "serve",
        "--api-key",
        "sk-secret",
        "--hf-token=hf",
        child.replace("PORT", str(port)),
    ]
    env = {**os.environ, "VLLM_X": "1", "HF_TOKEN": "hf", "VLLM_API_KEY": "sk", "EDITOR_X": "vi"}
    with subprocess.Popen(words, env=env, stdout=subprocess.PIPE, text=True, start_new_session=True) as running:
        assert running.stdout is not None and running.stdout.readline() == "up\n"
        try:
            facts, why = process_facts(Local(), port)
            record = {"pid": running.pid, "argv": words, "env": {"EDITOR_X": "vi", "HF_TOKEN": "hf"}}
            beside, _ = process_facts(Local(), port, record)
        finally:
            os.killpg(running.pid, 9)
    assert facts is not None and why == "" and facts.pid == running.pid and facts.sent_argv is None
    assert facts.argv[3:7] == ("serve", "--api-key", "***", "--hf-token=***")
    assert facts.env["VLLM_X"] == "1" and not {"HF_TOKEN", "VLLM_API_KEY", "EDITOR_X"} & facts.env.keys()
    assert abs(facts.started - Path(f"/proc/{os.getpid()}").stat().st_mtime) < 3600
    assert beside is not None and beside.sent_argv == beside.argv and beside.sent_env == {"EDITOR_X": "vi"}
    assert beside.env["EDITOR_X"] == "vi"


def test_nobody_on_a_port() -> None:
    facts, why = process_facts(Local(), closed_port())
    assert facts is None and "no process" in why
    assert find_record(Local(), 1) is None


def test_this_process_is_found_by_its_socket() -> None:
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as listener:
        facts, _ = process_facts(Local(), listener.getsockname()[1])
    assert facts is not None and facts.pid == os.getpid()


def test_which_of_several_processes() -> None:
    worker = {"pid": 3, "argv": ["VLLM::APIServer_0"]}
    server = {"pid": 2, "argv": ["python", "vllm", "serve", "m"]}
    shell = {"pid": 1, "argv": ["bash", "-c", "vllm serve m"]}
    assert choose([[worker, server, shell]], None) is server
    assert choose([[worker, server, shell]], 1) is shell
    assert choose([[worker, shell]], None) is worker
    assert choose([[{"pid": 5, "argv": ["/opt/llama-server", "-m", "x"]}, server]], None)["pid"] == 5
