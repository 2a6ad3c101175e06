"""One measurement by guidellm, which lives in an environment of its own (`make guidellm-kit`)."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PROGRAM = Path(os.environ.get("DRAFTPROOF_GUIDELLM", Path.home() / "venvs" / "guidellm")) / "bin" / "guidellm"
LONGEST = 900.0  # seconds of one measurement


@dataclass(frozen=True)
class Load:
    """prompts: one request each, in this order; streams: requests under way at once; model: its name there."""

    url: str
    model: str
    prompts: Sequence[str]
    streams: int
    max_tokens: int


@dataclass(frozen=True)
class Told:
    """tokens: of all complete answers; seconds: from the first request's start to the last one's end; first: seconds
    to the first token of each; texts: prompt -> answer; prompt_tokens: as the server counts; errors: what failed."""

    tokens: int
    seconds: float
    first: list[float]
    texts: dict[str, str]
    prompt_tokens: int
    errors: list[str]


def measure(load: Load, folder: Path) -> Told:
    """RuntimeError when guidellm itself fails."""
    data, config, report = folder / "prompts.jsonl", folder / "config.json", folder / "report.json"
    data.write_text("".join(json.dumps({"messages": user(prompt)}) + "\n" for prompt in load.prompts))
    config.write_text(json.dumps({"spec": spec(load, data, report)}))
    report.unlink(missing_ok=True)
    asked = [str(PROGRAM), "run", "-c", str(config), "--disable-console"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "GUIDELLM__MAX_WORKER_PROCESSES": "1"}
    done = subprocess.run(asked, env=env, capture_output=True, text=True, check=False, timeout=LONGEST)
    if done.returncode or not report.is_file():
        raise RuntimeError(f"guidellm ended with {done.returncode}: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return read(json.loads(report.read_text())["benchmarks"][0]["requests"], len(load.prompts))


def user(prompt: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}]


def spec(load: Load, data: Path, report: Path) -> dict[str, Any]:
    backend = {
        "kind": "openai_http",
        "target": load.url,
        "model": load.model,
        "max_tokens": load.max_tokens,
        "http2": False,
        "extras": {"body": {"temperature": 0}},
    }
    return {
        "backend": backend,
        "data": [{"kind": "json_file", "path": str(data)}],
        "profile": {"kind": "concurrent", "streams": [load.streams]},
        "constraints": [{"kind": "max_requests", "count": len(load.prompts)}],
        "outputs": [{"kind": "json", "path": str(report)}],
    }


def read(requests: dict[str, list[dict[str, Any]] | None], asked: int) -> Told:
    done, lost = requests["successful"] or [], [*(requests["errored"] or []), *(requests["incomplete"] or [])]
    begun = min((one["request_start_time"] for one in done), default=0.0)
    ended = max((one["request_end_time"] for one in done), default=0.0)
    errors = [str(one["info"].get("error") or "not complete")[:300] for one in lost]
    errors += ["guidellm tells nothing of it"] * (asked - len(done) - len(lost))
    return Told(
        tokens=sum(one["output_tokens"] for one in done),
        seconds=ended - begun,
        first=[one["time_to_first_token_ms"] / 1000 for one in done],
        texts={prompt_of(one): one["output"] for one in done},
        prompt_tokens=sum(one["prompt_tokens"] for one in done),
        errors=errors,
    )


def prompt_of(one: dict[str, Any]) -> str:
    return str(json.loads(one["request_args"])["body"]["messages"][-1]["content"])
