"""`draftproof doctor` and `draftproof watch` on a real `draftproof serve` of the embedded pair."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftproof.doctor.facts.log import read_log
from draftproof.models.hub import resolve_drafter, resolve_target

pytestmark = pytest.mark.serve
START, ANSWER = 180.0, 600.0  # seconds, on a busy machine
TARGET, DRAFTER = "smollm2-135m", "smollm2-135m-dflash"
PROBE = ("--prompts", "4", "--max-tokens", "48")
OPEN = {"argv", "release", "windows", "causality", "rope", "heads", "output", "speed"}


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "draftproof.cli", *map(str, words)]


def environment(state: Path) -> dict[str, str]:
    own = {name: value for name, value in os.environ.items() if name != "DRAFTPROOF_API_KEY"}
    return {**own, "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1"}


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


class Served:
    def __init__(self, url: str, log: Path, state: Path) -> None:
        self.url, self.log, self.state = url, log, state

    def call(self, name: str, *words: object) -> subprocess.CompletedProcess[str]:
        asked = command(name, self.url, *words)
        return subprocess.run(
            asked, env=environment(self.state), capture_output=True, text=True, check=False, timeout=ANSWER
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The embedded pair, which lies there before the server starts."""
    resolve_target(TARGET), resolve_drafter(DRAFTER)
    with serving(tmp_path_factory.mktemp("served")) as one:
        yield one


@contextmanager
def serving(folder: Path, *options: object) -> Iterator[Served]:
    port, log = free_port(), folder / "serve.log"
    words = command("serve", "--port", port, "--budget", "chain", "--max-num-seqs", 2, "--log-stats-interval", 2)
    words += map(str, options)
    with log.open("w") as out, subprocess.Popen(words, env=environment(folder), stdout=out, stderr=out) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            wait(url, process, log)
            yield Served(url, log, folder)
        finally:
            process.terminate()
            process.wait(60)


def wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + START
    while time.monotonic() < until:
        assert process.poll() is None, log.read_text()
        try:
            if httpx.get(url + "/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.2)
    raise AssertionError(f"{url} did not become healthy: {log.read_text()}")


def ask(url: str, tokens: int) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": tokens, "temperature": 0}
    answer = httpx.post(url + "/v1/chat/completions", json=body | {"spec_decode_metrics": "detailed"}, timeout=ANSWER)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_doctor_proves_every_required_link(served: Served) -> None:
    done = served.call("doctor", *PROBE, "--log", served.log, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    verdicts = {link["code"].removeprefix("doctor-"): link["verdict"] for link in told["links"]}
    assert {name for name, verdict in verdicts.items() if verdict != "proved"} == OPEN
    assert told["engine"] == "draftproof" and told["exit_code"] == 0
    acceptance = told["acceptance"]
    assert acceptance["kind"] == "steps" and acceptance["observed_steps"] > 50 and "healthy" in acceptance["leaders"]
    assert acceptance["observed"] == acceptance["expected"], "the same steps, one by one"


def test_watch_sees_what_a_request_accepts(served: Served) -> None:
    words = command("watch", served.url, "--every", 2, "--json")
    with subprocess.Popen(words, env=environment(served.state), stdout=subprocess.PIPE, text=True) as watching:
        assert watching.stdout is not None
        assert json.loads(watching.stdout.readline())["state"] == "idle"
        told = ask(served.url, 24)["metrics"]["speculative_decoding"]
        seen = [json.loads(watching.stdout.readline())]
        while seen[-1]["state"] == "drafting" or len(seen) == 1:
            seen.append(json.loads(watching.stdout.readline()))
        watching.send_signal(signal.SIGINT)
        assert watching.wait(60) == 0
    drafting = [one for one in seen if one["state"] == "drafting"]
    assert drafting and sum(one["drafts"] for one in drafting) == told["num_spec_steps"]
    accepted = sum(one["drafts"] * (one["tau"] - 1) for one in drafting)
    assert accepted == pytest.approx(told["num_accepted_draft_tokens"])


def test_the_log_agrees_with_itself(served: Served) -> None:
    ask(served.url, 24)
    time.sleep(3)
    facts = read_log(served.log.read_text())
    assert facts.lines and not facts.truncated and all(line.problems == () for line in facts.lines)


def test_a_server_that_runs_another_drafter_than_it_should(tmp_path: Path) -> None:
    """Every feature comes one layer too early: the config that it read says so, and so do its steps."""
    planted = shutil.copytree(resolve_drafter(DRAFTER), tmp_path / "planted")
    config = json.loads((planted / "config.json").read_text())
    config["dflash_config"]["target_layer_ids"] = [tap - 1 for tap in config["dflash_config"]["target_layer_ids"]]
    (planted / "config.json").write_text(json.dumps(config))
    with serving(tmp_path, "--drafter", planted) as wrong:
        done = wrong.call("doctor", *PROBE, "--drafter", DRAFTER, "--json")
    assert done.returncode == 1, done.stdout + done.stderr
    links = {link["code"].removeprefix("doctor-"): link for link in json.loads(done.stdout)["links"]}
    assert links["taps"]["verdict"] == "refuted" and "1 layer too early" in links["taps"]["message"]
    assert links["acceptance"]["verdict"] == "refuted" and links["acceptance"]["explained_by"] == links["taps"]["title"]
    assert "taps-minus-1" in links["acceptance"]["message"]
