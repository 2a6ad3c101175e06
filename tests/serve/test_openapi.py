"""schemathesis makes requests out of the OpenAPI document, right ones and wrong ones, and holds the answers against it.

DRAFTPROOF_FULL=1 makes many more of them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof.serve.served import Limits, Parsers
from draftproof.serve.stats.families import ENGINE
from draftproof.serve.stats.metrics import Metrics
from draftproof.serve.worker import Worker
from tests.serve.made import NAME, running, served

pytestmark = pytest.mark.serve
PROGRAM = Path(sys.executable).with_name("schemathesis")
CHECKS = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")
FULL = os.environ.get("DRAFTPROOF_FULL") == "1"
EXAMPLES = 400 if FULL else 8  # of each operation, beside one for every keyword of the schemas
SECONDS = 3000 if FULL else 500  # on a busy machine


@pytest.fixture
def counted() -> Iterator[tuple[str, Metrics]]:
    """A server that answers at once, in eight tokens, and its metrics."""
    what, metrics = served(parsers=Parsers("qwen3", "hermes", auto_tools=True), limits=Limits(256, 8)), Metrics(NAME, 3)
    spoken: Any = what.worker.engine
    worker = Worker(spoken.engine, queue=what.worker.queue, report=metrics.step)
    with running(replace(what, worker=worker, metrics=metrics)) as url:
        yield url, metrics


def test_the_server_does_what_its_document_says(counted: tuple[str, Metrics], tmp_path: Path) -> None:
    url, metrics = counted
    report = tmp_path / "report.json"
    asked = [
        *(str(PROGRAM), "run", f"{url}/openapi.json", "--checks", ",".join(CHECKS), "--phases", "coverage,fuzzing"),
        *("--max-examples", str(EXAMPLES), "--seed", "0", "--request-timeout", "60", "--continue-on-failure"),
        *("--warnings", "off", "--report", "json", "--report-json-path", str(report), "--no-color"),
    ]
    done = subprocess.run(asked, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    told = json.loads(report.read_text())
    assert told["complete"] and not told["failures"] and not told["errors"]
    assert ended(metrics, "stop") + ended(metrics, "length") > 100, "many were right and were answered"
    assert ended(metrics, "error") == 0


def ended(metrics: Metrics, reason: str) -> float:
    labels = {"model_name": NAME, "engine": ENGINE, "finished_reason": reason}
    return metrics.registry.get_sample_value("vllm:request_success_total", labels) or 0.0
