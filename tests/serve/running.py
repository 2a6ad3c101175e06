"""Servers as processes of their own: started on a free port with a log file, asked over HTTP, stopped by SIGTERM."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.launch import free_port

START, STOP = 240.0, 60.0  # seconds, on a busy machine
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Running:
    """A server that is up: its address, what it wrote, its process."""

    url: str
    log: Path
    process: subprocess.Popen[bytes]

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    @property
    def pid(self) -> int:
        return self.process.pid

    def rss(self) -> int:
        """Resident bytes of the process, now."""
        lines = Path(f"/proc/{self.pid}/status").read_text().split("\n")
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmRSS"))

    def cpu(self) -> float:
        """Seconds of CPU that the process took so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def metrics(self, **labels: str) -> dict[str, float]:
        """The samples of /metrics with these labels by name, summed over all other labels."""
        page, found = httpx.get(f"{self.url}/metrics", timeout=60).text, dict[str, float]()
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                if labels.items() <= sample.labels.items():
                    found[sample.name] = found.get(sample.name, 0.0) + sample.value
        return found

    def idle(self) -> bool:
        """Nothing runs, nothing waits."""
        now = self.metrics()
        return now["vllm:num_requests_running"] == 0 == now["vllm:num_requests_waiting"]


@contextmanager
def program(
    argv: Sequence[str], port: int, log: Path, *, env: Mapping[str, str] | None = None, start: float = START
) -> Iterator[Running]:
    """A server that argv starts on the port, once its /health is 200; AssertionError with its log when it does not
    come up. It is stopped by SIGTERM, and killed if that does not end it."""
    with log.open("w") as out, subprocess.Popen(argv, env=env, stdout=out, stderr=subprocess.STDOUT) as process:
        made = Running(f"http://127.0.0.1:{port}", log, process)
        try:
            _wait(made, start)
            yield made
        finally:
            stop(process)


def stop(process: subprocess.Popen[bytes]) -> int:
    """The exit code."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()


@contextmanager
def serving(log: Path, *options: object, env: Mapping[str, str] | None = None) -> Iterator[Running]:
    """`draftproof serve` with these options and one thread. It must end with exit code 0."""
    port = free_port()
    argv = [sys.executable, "-m", "draftproof.cli", "serve", "--port", str(port), *map(str, options)]
    own = {name: value for name, value in os.environ.items() if name != "DRAFTPROOF_API_KEY"}
    with program(argv, port, log, env={"OMP_NUM_THREADS": "1", **own, **(env or {})}) as made:
        yield made
    assert made.process.returncode == 0, log.read_text()


def _wait(made: Running, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not healthy(made.url):
        assert made.process.poll() is None and time.monotonic() < until, made.log.read_text()
        time.sleep(0.2)


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=10).status_code == 200
    except httpx.TransportError:
        return False
