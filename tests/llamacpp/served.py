"""Real llama-servers: started by `draftproof launch llamacpp`, or bare for the target alone."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from draftproof.doctor.facts import Answer
from draftproof.doctor.facts.probe import probe
from draftproof.models.hub import resolve_drafter, resolve_target

from .conftest import SERVER
from .convert import DRAFTER, TARGET, shipped_drafter, shipped_target

CONTEXT, TOKENS = 1024, 64
# K/V in float32 in both models, as the oracle computes; one thread, as the other tests.
EXACT = ("-t", "1", "-ctkd", "f32", "-ctvd", "f32")
TARGET_ALONE = ("-c", str(CONTEXT), "-np", "1", "-ctk", "f32", "-ctv", "f32", "-t", "1")


class Report(NamedTuple):
    told: dict[str, Any]

    def link(self, name: str) -> dict[str, Any]:
        return next(link for link in self.told["links"] if link["code"] == f"doctor-{name}")

    def verdict(self, name: str) -> str:
        return str(self.link(name)["verdict"])

    @property
    def refuted(self) -> set[str]:
        return {link["code"].removeprefix("doctor-") for link in self.told["links"] if link["verdict"] == "refuted"}


class Served:
    """The command line with state of its own, and the server that it started."""

    def __init__(self, state: Path) -> None:
        self.env = {**os.environ, "XDG_STATE_HOME": str(state), "OMP_NUM_THREADS": "1"}
        self.port = free_port()
        self.running: dict[str, Any] = {}

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def call(self, *words: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "draftproof.cli", *map(str, words)]
        return subprocess.run(command, env=self.env, capture_output=True, text=True, check=False)

    def ask(self, drafter: Path, *words: object) -> list[object]:
        """The shipped pair's configs stand beside the GGUF files, so that the pair is checked first."""
        ask: list[object] = ["launch", "llamacpp", "--executable", SERVER, "--target", shipped_target()]
        ask += ["--drafter", drafter, "--port", self.port, "--max-model-len", CONTEXT, "--max-num-seqs", 1]
        ask += ["--kv-cache-dtype", "f32", "--target-config", resolve_target(TARGET)]
        return [*ask, "--drafter-config", resolve_drafter(DRAFTER), *words]

    def launch(self, drafter: Path | None = None, *words: object, engine: tuple[str, ...] = ()) -> None:
        done = self.call(*self.ask(drafter or shipped_drafter(), "--json", *words), "--", *EXACT, *engine)
        assert done.returncode == 0, done.stderr
        self.running = json.loads(done.stdout)

    def doctor(self, *words: object) -> Report:
        done = self.call("doctor", self.url, "--target", TARGET, "--drafter", DRAFTER, "--json", *words)
        assert done.returncode in (0, 1, 3), done.stderr
        return Report(json.loads(done.stdout))

    def log(self) -> str:
        return str(self.call("launch", "logs", self.running["name"], "--lines", 100000).stdout)

    def stop(self) -> None:
        for one in json.loads(self.call("launch", "status", "--json").stdout):
            self.call("launch", "stop", one["name"])


@contextmanager
def serving(state: Path) -> Iterator[Served]:
    served = Served(state)
    try:
        yield served
    finally:
        served.stop()


@contextmanager
def alone(log: Path) -> Iterator[str]:
    """The URL of the target without a drafter."""
    port = free_port()
    command = [str(SERVER), "-m", str(shipped_target()), "--port", str(port), *TARGET_ALONE]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            _wait(url, process)
            yield url
        finally:
            process.terminate()


def answers_of(url: str, prompts: tuple[str, ...], max_tokens: int = TOKENS) -> tuple[Answer, ...]:
    return probe(url, "any", prompts, max_tokens, engine="llama.cpp")


def free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _wait(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "it ended while it loaded"
        try:
            if httpx.get(url + "/health", timeout=2).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise AssertionError(f"{url} did not become healthy")
