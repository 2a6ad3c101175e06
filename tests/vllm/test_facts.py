"""The doctor's facts from outside, on one real server started by `draftproof launch`."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from draftproof.doctor.facts import Answer, Counters
from draftproof.doctor.facts.files import file_facts
from draftproof.doctor.facts.log import read_log
from draftproof.doctor.facts.metrics import difference, fetch_counters
from draftproof.doctor.facts.probe import probe, probe_ids, read_prompts
from draftproof.doctor.facts.process import find_record, process_facts
from draftproof.doctor.facts.server import identify
from draftproof.errors import UserError
from draftproof.launch.machine import Local

from .conftest import COMMON, RUNNER, VENV
from .pair import ALWAYS, BLOCK, make_pair

pytestmark = pytest.mark.vllm
ENGINE = ("--", "--enforce-eager", "--dtype", "float32", "--per-request-spec-decode-metrics", "detailed")


class Running(NamedTuple):
    url: str
    port: int
    folder: Path
    target: Path
    drafter: Path


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    base = tmp_path_factory.mktemp("facts")
    target, drafter = make_pair(base, "full")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    state = str(base / "state")
    env = {**os.environ, **COMMON, **RUNNER["v1"], "VLLM_LOG_STATS_INTERVAL": "1", "XDG_STATE_HOME": state}

    def call(*words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftproof.cli", "launch", *map(str, words)]
        return subprocess.run(command, env=env, capture_output=True, text=True, check=False)

    ask = ["vllm", "--target", target, "--drafter", drafter, "--venv", VENV, "--runner", "v1", "--port", port, "--json"]
    ask += ["--max-model-len", 512, "--max-num-seqs", 4, "--served-model-name", "tiny"]
    started = call(*ask, "--accept", "vllm-cpu-context-keys", *ENGINE, "--enable-prompt-tokens-details")
    assert started.returncode == 0, started.stderr
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", state)
        yield Running(f"http://127.0.0.1:{port}", port, Path(json.loads(started.stdout)["folder"]), target, drafter)
    assert call("stop", f"vllm-{port}").returncode == 0


def counters(running: Running) -> Counters:
    found, why = fetch_counters(running.url, engine="vllm")
    assert found is not None, why
    return found


def total(answers: tuple[Answer, ...], name: str) -> int:
    return sum(getattr(answer, name) for answer in answers)


def test_who_answers(running: Running) -> None:
    server = identify(running.url + "/v1/")
    assert (server.engine, server.release, server.models, server.health) == ("vllm", "0.32.0", ("tiny",), 200)
    assert server.cards[0]["root"] == str(running.target) and server.details is None, "no development mode"


def test_counters_agree_with_the_answers(running: Running) -> None:
    said: list[str] = []
    begun, before = time.monotonic(), counters(running)
    chat = probe(running.url, "tiny", read_prompts()[:5], 24, say=said.append, engine="vllm")
    exact = probe_ids(running.url, "tiny", [[5, 9, 10], [7] * 200, [7] * 200], 40, engine="vllm")
    facts = difference(before, counters(running), 8, time.monotonic() - begun)
    answers = chat + exact
    assert facts.delta is not None and facts.foreign == 0 and len(said) == 5
    assert (facts.delta.requests, facts.delta.drafts) == (8, total(answers, "steps"))
    assert facts.delta.accepted == total(answers, "accepted") > 0
    assert facts.delta.draft_tokens == total(answers, "drafted") == (BLOCK - 1) * total(answers, "steps")
    steps = [count for answer in answers for count in answer.per_step or ()]
    by_position = tuple(float(sum(count > place for count in steps)) for place in range(BLOCK - 1))
    assert facts.delta.per_position == by_position
    assert exact[1].prompt_ids == (7,) * 200 and set(exact[1].output_ids) == {ALWAYS}
    assert exact[1].cached_tokens == 0 and exact[2].cached_tokens == facts.delta.cache_hits == 128
    assert all(answer.prompt_ids and len(answer.output_ids) == 24 and answer.finish == "length" for answer in chat)


def test_foreign_requests_are_noticed(running: Running) -> None:
    before = counters(running)
    probe_ids(running.url, "tiny", [[5], [6]], 4, engine="vllm")
    assert difference(before, counters(running), 1).foreign == 1


def test_what_the_server_refuses(running: Running) -> None:
    for model, prompt in (("other", [5]), ("tiny", [5] * 600)):
        with pytest.raises(UserError) as caught:
            probe_ids(running.url, model, [prompt], 4, engine="vllm")
        assert caught.value.code == "server-unfit" and len(caught.value.message) < 500


def test_the_log(running: Running) -> None:
    probe_ids(running.url, "tiny", [[5, 9, 10]], 30, engine="vllm")
    time.sleep(2.5)  # one interval of the log and a bit
    facts = read_log((running.folder / "log").read_text(encoding="utf-8"))
    assert (facts.release, facts.runner, facts.method) == ("0.32.0", "v1", "dflash")
    assert facts.speculative is not None and facts.speculative["model"] == str(running.drafter)
    assert facts.speculative["num_speculative_tokens"] == BLOCK - 1
    assert facts.aux_layers == (1, 3, 5) and facts.architecture == "DFlashDraftModel" and not facts.truncated
    assert facts.lines and all(line.problems == () for line in facts.lines), facts.lines
    assert facts.lines[-1].mean_length == BLOCK


def test_the_process_and_its_record(running: Running) -> None:
    record = find_record(Local(), running.port)
    assert record is not None and "token" not in record
    facts, why = process_facts(Local(), running.port, record)
    assert facts is not None, why
    assert facts.pid == record["pid"] and facts.sent_argv is not None
    assert facts.argv[-len(facts.sent_argv) + 1 :] == facts.sent_argv[1:]
    assert facts.env["VLLM_USE_V2_MODEL_RUNNER"] == "0" == (facts.sent_env or {})["VLLM_USE_V2_MODEL_RUNNER"]
    assert -0.01 < facts.started - record["time"] < 5, "within a clock tick of it, or later"
    pids = read_log((running.folder / "log").read_text(encoding="utf-8")).pids
    assert facts.pid in pids, "the log is this run's"
    unknown, _ = process_facts(Local(), running.port)
    assert unknown is not None and unknown.pid == facts.pid and unknown.sent_argv is None


def test_files_changed_after_the_start(running: Running) -> None:
    record: dict[str, Any] = find_record(Local(), running.port) or {}
    facts = file_facts(Local(), record, drafter=str(running.drafter))
    assert facts.recorded is not None and facts.now.keys() == facts.recorded.keys() and facts.unreadable == {}
    assert all(facts.now[path].sha256 == was.sha256 for path, was in facts.recorded.items())
    assert facts.started is not None and all(0 < (now.ctime or 0) < facts.started for now in facts.now.values())
    assert facts.drafter_tensors and "fc.weight" in facts.drafter_tensors
    config = running.drafter / "config.json"
    config.write_text(config.read_text() + "\n")
    later = file_facts(Local(), record)
    changed = [path for path, was in (later.recorded or {}).items() if later.now[path].sha256 != was.sha256]
    assert changed == [str(config)] and later.now[str(config)].mtime > facts.started
