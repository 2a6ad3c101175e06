"""Commands about a running server: doctor, watch."""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

if TYPE_CHECKING:
    from draftproof.launch.machine import Machine

from draftproof.cli.app import Device, Json, app, table_console
from draftproof.cli.launch import Host, SshOption
from draftproof.errors import UserError

Url = Annotated[str, typer.Argument(help="http://host:port of the server")]
ApiKey = Annotated[str | None, typer.Option(envvar="DRAFTPROOF_API_KEY", help="key the server asks for")]


@app.command()
def doctor(
    url: Url,
    drafter: Annotated[
        str | None, typer.Option(help="checkpoint on the server's machine (default: as it says)")
    ] = None,
    target: Annotated[str | None, typer.Option(help="the same for the target")] = None,
    host: Host = None,
    ssh_option: SshOption = None,
    api_key: ApiKey = None,
    log: Annotated[Path | None, typer.Option(help="the server's log, if draftproof did not launch it")] = None,
    baseline: Annotated[str | None, typer.Option(help="URL of a server of the same target without drafter")] = None,
    prompts: Annotated[int, typer.Option(min=1, max=16, help="probe prompts to send")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="tokens of each answer")] = 64,
    texts: Annotated[
        Path | None, typer.Option(help="JSON with prompt_ids to send instead of the fixed prompts")
    ] = None,
    oracle: Annotated[bool, typer.Option("--oracle/--no-oracle", help="run the pair here on the server's text")] = True,
    profile: Annotated[
        Path | None, typer.Option(help="stored by `draftproof profile`, in place of the weights")
    ] = None,
    bisect: Annotated[bool, typer.Option("--bisect", help="compare tensors, stage by stage")] = False,
    html: Annotated[Path | None, typer.Option(help="write the report as one HTML page, too")] = None,
    hashes: Annotated[bool, typer.Option("--hashes/--no-hashes", help="hash the checkpoint files")] = True,
    device: Device = "auto",
    as_json: Json = False,
) -> None:
    """Does the running engine do what the drafter's config demands? Link by link: proved, refuted, cannot tell.

    Exit code 0: every required link is proved. 1: some link is refuted. 3: none is refuted, but a required one cannot
    be told. 2: could not run."""
    from draftproof.doctor.as_json import report_dict
    from draftproof.doctor.consulting import bisection_of, oracle_of
    from draftproof.doctor.page import render_page
    from draftproof.doctor.report import render
    from draftproof.doctor.session import DoctorAsk, examine
    from draftproof.engine.output import print_json
    from draftproof.fetch import write_atomically
    from draftproof.models.hub import resolve_config

    if profile and not oracle:
        raise UserError("bad-option", "--profile is for the oracle", "leave --no-oracle out")
    ask = DoctorAsk(
        url, _machine(host, ssh_option, url), target, drafter, api_key, log, baseline, prompts, max_tokens,
        _prompt_ids(texts) if texts else (), hashes,
    )  # fmt: skip

    def say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    judge = oracle_of(profile, device, say) if oracle else None
    diagnosis = examine(ask, resolve_config, judge, say, bisection_of(device) if bisect else None)
    if html:
        write_atomically(html, iter([render_page(diagnosis).encode()]))
    if as_json:
        print_json(report_dict(diagnosis))
    else:
        render(diagnosis, table_console())
    raise typer.Exit(diagnosis.exit_code)


@app.command()
def watch(
    url: Url,
    every: Annotated[float, typer.Option(min=0.2, help="seconds between readings")] = 10.0,
    expect: Annotated[str | None, typer.Option(help="LOW:HIGH band of tau (default: learned from the start)")] = None,
    ticks: Annotated[int | None, typer.Option(min=1, help="readings to take (default: until interrupted)")] = None,
    api_key: ApiKey = None,
    as_json: Json = False,
) -> None:
    """Live acceptance from the server's counters, with an alert when it leaves its band. Exit code 1: it did."""
    import json
    from dataclasses import asdict

    from draftproof.doctor.facts.metrics import fetch_counters
    from draftproof.doctor.facts.server import identify
    from draftproof.doctor.watch import Reading
    from draftproof.doctor.watch import watch as follow

    server = identify(url, api_key)
    first, reason = fetch_counters(server.url, api_key, server.engine)
    if first is None:
        raise UserError("server-unfit", f"{server.url} shows no counters: {reason}", "switch its metrics on")
    alerts = 0

    def emit(reading: Reading) -> None:
        nonlocal alerts
        alerts += reading.alert is not None
        print(json.dumps(asdict(reading)) if as_json else reading.line(), flush=True)

    with suppress(KeyboardInterrupt):
        follow(lambda: fetch_counters(server.url, api_key, server.engine)[0], every, _band(expect), emit, ticks)
    raise typer.Exit(int(alerts > 0))


def _machine(host: str | None, ssh_option: list[str] | None, url: str) -> Machine | None:
    """Where the server runs: the named host, this machine for a loopback address, else out of reach."""
    from draftproof.cli.launch import machine_of
    from draftproof.doctor.facts.http import base_url

    if host is not None or ssh_option:
        return machine_of(host, ssh_option)
    name = urlsplit(base_url(url)).hostname or ""
    return machine_of(None, None) if name in ("localhost", "::1") or name.startswith("127.") else None


def _prompt_ids(path: Path) -> list[list[int]]:
    from draftproof.doctor.texts import read_prompt_ids

    return read_prompt_ids(path)


def _band(text: str | None) -> tuple[float, float] | None:
    if text is None:
        return None
    try:
        low, high = (float(part) for part in text.split(":"))
    except ValueError:
        low, high = 1.0, 0.0
    if not 1 <= low <= high:
        raise UserError("bad-option", f"--expect {text!r} is no band of tau", "write --expect 2.5:3.1, say")
    return low, high
