"""The process that serves on a port of a machine: its real arguments and environment, beside what `launch` sent."""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping
from pathlib import PurePosixPath
from typing import Any

from draftproof.doctor.facts import ProcessFacts
from draftproof.launch.machine import Machine

SERVES = ("serve", "launch_server", "sglang.launch_server", "vllm.entrypoints.openai.api_server")
PROGRAMS = ("llama-server",)
# Of a server's environment only what can change how an engine runs is looked at, and nothing that may be a secret.
RELEVANT = re.compile(
    r"(VLLM|SGLANG|SGL|LLAMA|GGML|CUDA|NVIDIA|HIP|ROCR|ROCM|TORCH|PYTORCH|TORCHINDUCTOR|TRITON|FLASHINFER|OMP|MKL|NCCL|HF"
    r"|TRANSFORMERS|PYTHON|LD|DRAFTPROOF)_.*|PYTHONPATH|PYTHONHASHSEED|PATH|VIRTUAL_ENV|CUDA_HOME"
)
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD|DRAFTPROOF_LAUNCH")
SECRET_FLAG = re.compile(r"--(?:[a-z]+-)*(?:api-?key|hf-?token|password)")
HIDDEN = "***"


def find_record(machine: Machine, port: int) -> dict[str, Any] | None:
    """The launch record (record.json) of the living launch that shall serve on `port` of that machine."""
    record: dict[str, Any] | None = _listener(machine, port)["record"]
    return record


def process_facts(
    machine: Machine, port: int, record: Mapping[str, Any] | None = None
) -> tuple[ProcessFacts | None, str]:
    """The API server that listens on `port`, or None and the reason. `record` is its launch record, where it has one.
    Values that may be secrets are replaced by *** or left out."""
    told = _listener(machine, port)
    if not told["chains"]:
        if told["others"]:
            return None, f"a process of another user (or of a container) listens on port {port} of {machine}"
        return None, f"no process on {machine} listens on port {port}"
    own = record["pid"] if record else None
    found = choose(told["chains"], own)
    ours = record if record and found["pid"] == own else None
    facts = ProcessFacts(
        pid=found["pid"],
        argv=_argv(found["argv"]),
        env=_environment(found["env"], ours["env"] if ours else ()),
        started=found["started"],
        sent_argv=_argv(ours["argv"]) if ours else None,
        sent_env=_environment(ours["env"], ours["env"]) if ours else None,
    )
    return facts, ""


def choose(chains: list[list[dict[str, Any]]], own: int | None) -> dict[str, Any]:
    """Of the listening processes and their ancestors: the recorded one, else the nearest that was told to serve (an
    engine's own child processes rename themselves), else the listening one."""
    everyone = [process for chain in chains for process in chain]
    for process in everyone:
        if process["pid"] == own:
            return process
    return next((process for process in everyone if _serves(process["argv"])), everyone[0])


def _serves(argv: list[str]) -> bool:
    return any(word in SERVES for word in argv) or any(PurePosixPath(word).name in PROGRAMS for word in argv[:1])


def _listener(machine: Machine, port: int) -> dict[str, Any]:
    told = machine.call("listener", port=port)
    if told["record"]:
        told["record"].pop("token", None)
    return told


def _argv(words: Iterable[str]) -> tuple[str, ...]:
    """Without the values of flags that hold secrets."""
    shown: list[str] = []
    hide = False
    for word in words:
        flag, equals, _ = word.partition("=")
        secret = SECRET_FLAG.fullmatch(flag.replace("_", "-")) is not None
        if hide and not word.startswith("--"):
            shown.append(HIDDEN)
            continue
        shown.append(f"{flag}={HIDDEN}" if secret and equals else word)
        hide = secret and not equals
    return tuple(shown)


def _environment(env: Mapping[str, str], sent: Container[str]) -> dict[str, str]:
    """What was sent is always relevant."""
    relevant = {name: value for name, value in sorted(env.items()) if RELEVANT.fullmatch(name) or name in sent}
    return {name: value for name, value in relevant.items() if not SECRET.search(name)}
