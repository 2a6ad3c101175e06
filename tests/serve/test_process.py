"""`draftproof serve` as a process: options, signals, exit codes; and the fuzzer that reads the OpenAPI document."""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftproof.serve.memory import GIB, cache_memory, free_in_container
from draftproof.serve.served import Limits, Parsers
from draftproof.serve.stats.metrics import Metrics
from tests.serve.made import CONTEXT, NAME, running, served

Call = Callable[..., tuple[int, str, str]]
LONG = {"prompt": "Once upon a time", "max_tokens": 40, "ignore_eos": True, "stream": True, "temperature": 0}


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        (("--method", "none", "--budget", "5"), "bad-option", "--budget"),
        (("--target", "nowhere/at-all"), "bad-option", "--drafter"),
        (("--tool-call-parser", "elephant"), "bad-option", "elephant"),
        (("--reasoning-parser", "elephant"), "bad-option", "elephant"),
        (("--enable-auto-tool-choice",), "bad-option", "--tool-call-parser"),
        (("--chat-template", "/no/such/file"), "not-found", "/no/such/file"),
        (("--host", "no.such.host.invalid"), "bad-option", "no.such.host.invalid"),
    ],
)
def test_wrong_options_are_told_before_anything_is_loaded(call: Call, words: Any, code: str, told: str) -> None:
    status, _, err = call("serve", *words)
    assert status == 2 and f"[{code}]" in err and told in err


def test_a_taken_port_is_told(call: Call) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, _, err = call("serve", "--port", taken.getsockname()[1])
    assert status == 2 and "[port-in-use]" in err


def test_memory_as_asked_for_or_a_share_of_what_is_free() -> None:
    assert cache_memory("cpu", 2.0, 0.0) == (2 * GIB, 0, "asked for")
    kv, prefix, reason = cache_memory("cpu", None, None)
    assert 2.9 < kv / prefix < 3.1 and "25%" in reason
    whole, none, _ = cache_memory("cpu", None, 0.0)
    assert none == 0 and 0.9 * (kv + prefix) < whole < 1.1 * (kv + prefix)


def group(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text + "\n")


def test_a_containers_limit_counts(tmp_path: Path) -> None:
    """Version 2 by its path and by its root (a namespace), and version 1; a parent's limit holds as well."""
    assert free_in_container("0::/\n", tmp_path) == math.inf
    pod = {"memory__max": str(8 * GIB), "memory__current": str(3 * GIB), "memory__stat": f"anon 5\ninactive_file {GIB}"}
    group(tmp_path / "kube/pod", **pod)
    group(tmp_path / "kube/pod/one", memory__max="max", memory__current="0", memory__stat="anon 0")
    assert free_in_container("0::/kube/pod/one\n", tmp_path) == 6 * GIB
    assert free_in_container("0::/kube/other\n", tmp_path) == math.inf
    group(tmp_path, **pod)
    assert free_in_container("0::/outside/of/this\n", tmp_path) == 6 * GIB
    old = {"memory__limit_in_bytes": str(2 * GIB), "memory__usage_in_bytes": str(GIB), "memory__stat": "cache 0"}
    group(tmp_path / "memory", **old)
    assert free_in_container("4:memory:/docker/abc\n1:cpu:/docker/abc\n", tmp_path) == GIB
    assert free_in_container("4:memory,cpu:/docker/abc\n", tmp_path) == GIB
    assert free_in_container("1:cpu:/\n", tmp_path) == math.inf


def test_the_caches_fit_a_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.serve.memory.free_in_container", lambda *_: 0.5 * GIB)
    kv, prefix, reason = cache_memory("cpu", None, None)
    assert kv + prefix == pytest.approx(0.125 * GIB) and "the container's limit" in reason


@contextmanager
def process(*words: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    argv = [sys.executable, "-m", "draftproof.cli", "serve", "--port", "0", "--budget", "8", "--max-num-seqs", "2"]
    argv += ["--max-model-len", "512", "--kv-memory", "0.5", "--prefix-cache", "0", "--dtype", "float32", *words]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, env=env) as started:
        assert started.stderr
        lines = []
        for line in started.stderr:
            lines.append(line)
            if found := re.search(r"serving smollm2-135m on (http://\S+)", line):
                break
        else:
            pytest.fail("".join(lines))
        try:
            yield started, found[1]
        finally:
            started.kill()


@pytest.mark.serve
def test_the_first_signal_lets_answers_end_and_exits_with_0() -> None:
    with process() as (server, url), httpx.stream("POST", f"{url}/v1/completions", json=LONG, timeout=60) as answer:
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.send_signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]" and '"length"' in rest[-2]
        assert server.wait(30) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")


@pytest.mark.serve
@pytest.mark.parametrize(("words", "second", "code"), [((), True, 143), (("--drain-timeout", "0.2"), False, 0)])
def test_a_second_signal_or_the_end_of_the_drain_ends_at_once(words: tuple[str, ...], second: bool, code: int) -> None:
    long = LONG | {"max_tokens": 480}
    with (
        process(*words) as (server, url),
        httpx.stream("POST", f"{url}/v1/completions", json=long, timeout=60) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: {")
        server.send_signal(signal.SIGTERM)
        time.sleep(0.2)
        begun = time.monotonic()
        if second:
            server.send_signal(signal.SIGTERM)
        else:
            rest = [line for line in lines if line]
            assert '"draining"' in rest[-2]
        assert server.wait(20) == code and time.monotonic() - begun < 5


@pytest.mark.serve
def test_the_fuzzer_finds_no_fault_of_the_server(tmp_path: Path) -> None:
    """schemathesis, by our OpenAPI document: no 5xx, answers as documented, nothing wrong accepted."""
    st = Path(sys.executable).parent / "st"
    if not st.exists():
        pytest.skip("schemathesis is not installed")
    parsers = Parsers("qwen3", "hermes", auto_tools=True)
    what = served(parsers=parsers, limits=Limits(CONTEXT, answer=8, drain=2), metrics=Metrics(NAME, 3))
    checks = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
    checks += ",negative_data_rejection,unsupported_method"
    with running(what) as url:
        argv = [str(st), "run", f"{url}/openapi.json", "--checks", checks, "--max-examples", "25", "--seed", "1"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout[-4000:]
        assert int(re.search(r"(\d+) generated", done.stdout)[1]) > 200  # type: ignore[index]
