"""What `draftproof launch` prints: plans, running launches, and the way of a start."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from draftproof.config.report import plain
from draftproof.launch.flow import Prepared
from draftproof.launch.forms import render
from draftproof.launch.machine import Machine
from draftproof.launch.start import Launch, launch, status, stop


def show_plan(prepared: Prepared, form: str | None, image: str | None, as_json: bool) -> None:
    """The plan in one form on stdout, or, for --dry-run, each argument with its reason."""
    if form:
        sys.stdout.write(render(prepared.plan, form, image=image))
    elif as_json:
        sys.stdout.write(render(prepared.plan, "argv"))
    else:
        Console().print(_reasons(prepared))


def run_plan(prepared: Prepared, machine: Machine, name: str, wait: float, as_json: bool) -> None:
    """Start it and wait until it serves; what happens on the way goes to stderr."""

    def say(text: str) -> None:
        print(plain(text), file=sys.stderr, flush=True)

    for reason in prepared.plan.why:
        say(f"{reason.what} {reason.value}".rstrip() + f": {reason.why}")
    if prepared.accepted:
        say(f"started although refuted, as you accepted: {' '.join(prepared.accepted)}")
    running = launch(machine, prepared.plan, name, wait, say)
    if as_json:
        print(json.dumps(asdict(running)))
    else:
        print(f"http://{running.host}:{running.port}/v1 on {running.machine}; draftproof launch stop {name}")


def show_status(machine: Machine, name: str | None, as_json: bool) -> None:
    found = status(machine, name)
    if as_json:
        print(json.dumps([asdict(one) for one in found], indent=2))
    elif found:
        Console().print(_launches(found))
    else:
        print(f"no launches on {machine}")


def stop_launch(machine: Machine, name: str, seconds: float) -> None:
    ended = stop(machine, name, seconds)
    print(f"{name} on {machine}: {ended.ended}")


def _reasons(prepared: Prepared) -> Table:
    table = Table("argument", "value", "why", box=None, pad_edge=False)
    for reason in prepared.plan.why:
        table.add_row(reason.what, plain(reason.value), reason.why)
    return table


def _launches(found: Sequence[Launch]) -> Table:
    table = Table("name", "engine", "state", "pid", "address", "since", "log", box=None, pad_edge=False)
    for one in found:
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(one.since))
        state = one.state if one.state in ("starting", "running") else f"{one.state}: {one.ended}"
        table.add_row(one.name, one.engine, state, str(one.pid), f"{one.host}:{one.port}", since, plain(one.log))
    return table
