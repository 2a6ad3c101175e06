"""From a Plan to a serving engine: look before starting, start it detached, wait until it answers, or say why not.

    launch = preflight -> start -> wait_healthy

The engine outlives this process and the connection; `status`, `logs` and `stop` find it again by its name.
"""

from __future__ import annotations

import base64
import codecs
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from draftproof import __version__
from draftproof.errors import UserError
from draftproof.launch.failures import explain_log, plain
from draftproof.launch.machine import Machine
from draftproof.launch.plan import Plan

Say = Callable[[str], None]

LOADING = re.compile(
    r"Loading |Starting to load|loading model|load_tensors|torch\.compile|Capturing|KV cache size|[Gg]raph capturing"
    r"|Using V[12] Model Runner|Available KV cache|warming up|Application startup|fired up|server is listening"
)
SAY_EVERY = 2.0  # seconds between lines about progress
QUIET = 30.0  # seconds without a line until one says that it still starts
RECONNECT = 5  # times a lost connection is taken up again while the engine loads


@dataclass(frozen=True)
class Launch:
    """A launch as it was last seen. `state`: starting, running, exited, killed, lost, elsewhere."""

    name: str
    machine: str
    engine: str
    state: str
    pid: int
    host: str
    port: int
    since: float
    folder: str
    log: str
    log_size: int
    health: int | str | None
    stopped: bool
    returncode: int | None = None
    signal: int | None = None

    @property
    def ended(self) -> str:
        """How the engine ended, in words."""
        if self.returncode is not None:
            return f"exit code {self.returncode}"
        return f"signal {self.signal}" if self.signal is not None else self.state


def launch(machine: Machine, plan: Plan, name: str, timeout: float, say: Say) -> Launch:
    """Start `plan` as `name` and return when it serves. UserError launch-failed with the log line that matters."""
    for remark in preflight(machine, plan):
        say(remark)
    started = start(machine, plan, name, say)
    say(f"{plan.engine} started on {machine}: pid {started.pid}, log {started.log}")
    ready = wait_healthy(machine, name, timeout, say)
    say(f"{name} serves on {ready.host}:{ready.port}")
    return ready


def preflight(machine: Machine, plan: Plan) -> tuple[str, ...]:
    """What would make the start fail in minutes is found in a second. Returns what could not be checked, and why.
    UserError launch-failed (no such program), port-in-use, gpu-memory."""
    facts = machine.call("facts", program=plan.argv[0], path=plan.env.get("PATH"), host=plan.host, port=plan.port)
    if facts["program"] is None:
        raise UserError(
            "launch-failed",
            f"no program {plan.argv[0]} on {machine} (PATH={facts['path']})",
            "install it there, or give its full path: a connection without a terminal often has a shorter PATH",
        )
    _need_port(machine, plan, facts["port"])
    return _need_memory(machine, plan, facts)


def _need_port(machine: Machine, plan: Plan, port: dict[str, Any]) -> None:
    if port["free"]:
        return
    if port["errno"] == "EADDRINUSE":
        by = f"by the launch {port['launch']}" if port["launch"] else "by another process"
        way = f"stop {port['launch']}" if port["launch"] else f"see who holds it: ss -ltnp 'sport = :{plan.port}'"
        raise UserError("port-in-use", f"port {plan.port} on {machine} is taken {by}", f"choose another port, or {way}")
    message = f"{machine} cannot serve on {plan.host}:{plan.port}: {port['errno']}"
    raise UserError("bad-option", message, "give an address of that machine (or 0.0.0.0) and a port above 1023")


def _need_memory(machine: Machine, plan: Plan, facts: dict[str, Any]) -> tuple[str, ...]:
    """The GPUs this launch will see are the first `plan.gpus` of CUDA_VISIBLE_DEVICES, by default of all."""
    if plan.gpu_bytes is None:
        return ("GPU memory not checked: the plan does not tell how much is needed",)
    if not facts["gpus"]:
        return (f"GPU memory not checked: no nvidia-smi on {machine}",)
    visible = plan.env.get("CUDA_VISIBLE_DEVICES", facts["visible"])
    order = visible.split(",") if visible is not None else [gpu["index"] for gpu in facts["gpus"]]
    by_index = {gpu["index"]: gpu for gpu in facts["gpus"]}
    chosen = [by_index.get(index.strip()) for index in order[: plan.gpus]]
    if len(chosen) < plan.gpus:
        message = f"{plan.gpus} GPUs are needed on {machine}, {len(chosen)} are visible"
        raise UserError("gpu-memory", message, "use fewer GPUs, or check CUDA_VISIBLE_DEVICES")
    for gpu in chosen:
        if gpu is None or gpu["free"] is None:
            return (f"GPU memory not checked: nvidia-smi does not tell it for CUDA_VISIBLE_DEVICES={visible}",)
        if gpu["free"] < plan.gpu_bytes:
            raise UserError(
                "gpu-memory",
                f"GPU {gpu['index']} ({gpu['name']}) on {machine} has {_gib(gpu['free'])} free of {_gib(gpu['total'])},"
                f" {_gib(plan.gpu_bytes)} are needed",
                "end what uses it (nvidia-smi lists it), choose other GPUs, or a shorter context",
            )
    return ()


def start(machine: Machine, plan: Plan, name: str, say: Say) -> Launch:
    """Hash the checkpoints and start the engine detached. UserError launch-exists, launch-failed, remote-folder."""

    def hashed(told: dict[str, Any]) -> None:
        say(f"hashing checkpoints: {_gib(told['hashed'])} of {_gib(told['of'])}")

    hashes = machine.call("hash", paths=list(plan.checkpoints), progress=hashed)["hashes"] if plan.checkpoints else {}
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(machine.call, "start", name=name, plan=plan.as_dict(), version=__version__, hashes=hashes)
        try:
            return _launch(machine, call.result())
        except KeyboardInterrupt:  # the call is let to its end, so that nothing starts after the stop
            if call.exception() is None:
                stop(machine, name)
            raise


def wait_healthy(machine: Machine, name: str, timeout: float, say: Say) -> Launch:
    """Return when the engine answers 200 and still is the process that was started. Ctrl-C stops the engine; a lost
    terminal leaves it running. UserError launch-failed when it ends, or when the time is up (then it is stopped)."""
    progress = _Progress(say)
    try:
        seen, timed_out = _follow_until_ready(machine, name, time.monotonic() + timeout, progress)
    except KeyboardInterrupt:
        say(f"stopping {name}")
        stop(machine, name)
        raise
    if seen.state in ("starting", "running") and not timed_out:
        return seen
    if timed_out:
        stop(machine, name)
    raise _failure(machine, seen, f"did not answer within {timeout:.0f} s and was stopped" if timed_out else "")


def _follow_until_ready(machine: Machine, name: str, deadline: float, progress: _Progress) -> tuple[Launch, bool]:
    """One connection that is told of new log lines; it is taken up again when it breaks."""
    for attempt in range(RECONNECT + 1):
        seconds = max(0.0, deadline - time.monotonic())
        try:
            told = machine.call(
                "follow", name=name, offset=progress.offset, seconds=seconds, ready=True, progress=progress
            )
            return _launch(machine, told), told["timed_out"] and told["health"] != 200
        except UserError as error:
            if error.code != "host-unreachable" or attempt == RECONNECT or time.monotonic() > deadline:
                raise
            time.sleep(2)
    raise AssertionError("the loop returns or raises")


def _failure(machine: Machine, seen: Launch, what: str) -> UserError:
    data = machine.call("log", name=seen.name, lines=1_000_000)["data"]  # at most its last MiB
    told = explain_log(base64.b64decode(data).decode(errors="replace"))
    parts = [f"{seen.name} on {machine} {what or f'ended before it served: {seen.ended}'}"]
    if told:
        parts.append(f"  log line: {told.line}")
    if told and told.cause:
        parts.append(f"  cause: {told.cause}")
    parts.append(f"  log: {seen.log}")
    return UserError("launch-failed", "\n".join(parts), told.fix if told and told.fix else "read the log")


class _Progress:
    """Says the newest loading line, at most one in SAY_EVERY seconds, and now and then that it still starts."""

    def __init__(self, say: Say) -> None:
        self.say = say
        self.offset = 0
        self.begun = self.told = time.monotonic()
        self.last = self.newest = ""
        self.decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def __call__(self, told: dict[str, Any]) -> None:
        self.offset = told["offset"]
        text = self.decode(base64.b64decode(told.get("log", "")))
        lines = [plain(line) for line in re.split(r"[\r\n]+", text) if LOADING.search(line)]
        self.newest = lines[-1] if lines else self.newest
        now = time.monotonic()
        if self.newest != self.last and (not self.last or now - self.told >= SAY_EVERY):
            self.last, self.told = self.newest, now
            self.say(self.newest)
        elif now - self.told >= QUIET:
            self.told = now
            self.say(f"still starting after {now - self.begun:.0f} s")


def status(machine: Machine, name: str | None = None) -> list[Launch]:
    """All launches of that machine, or the named one. UserError launch-unknown."""
    return [_launch(machine, told) for told in machine.call("status", name=name)["launches"]]


def stop(machine: Machine, name: str, seconds: float = 30) -> Launch:
    """SIGTERM, after `seconds` SIGKILL, until no process of the launch is left. Stopping twice is no error."""
    return _launch(machine, machine.call("stop", name=name, seconds=seconds))


def logs(machine: Machine, name: str, write: Callable[[str], None], lines: int = 200, follow: bool = False) -> None:
    """The last lines of the log; with `follow` what comes after them too, until the engine ends."""
    decode = codecs.getincrementaldecoder("utf-8")("replace").decode
    told = machine.call("log", name=name, lines=lines)
    write(decode(base64.b64decode(told["data"])))

    def more(part: dict[str, Any]) -> None:
        if "log" in part:
            write(decode(base64.b64decode(part["log"])))

    if follow:
        machine.call("follow", name=name, offset=told["offset"], progress=more)


def _launch(machine: Machine, told: dict[str, Any]) -> Launch:
    known = {key: told[key] for key in Launch.__dataclass_fields__ if key in told}
    return Launch(machine=str(machine), **known)


def _gib(size: int) -> str:
    return f"{size / (1 << 30):.1f} GiB"
