"""`draftproof check`: one page for one release, one table for several, JSON for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, Final

from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftproof.check.check import Check, Pair
from draftproof.check.installed import Installed
from draftproof.check.layers import show_causal, show_windows
from draftproof.check.links import LinkVerdict
from draftproof.check.memory import Memory
from draftproof.check.session import CheckResult
from draftproof.config.engines import Link
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.report import finding_text, plain

SCHEMA: Final = "draftproof.check/1"
STYLES: Final = {Verdict.PROVED: "green", Verdict.REFUTED: "bold red", Verdict.CANNOT_TELL: "yellow"}
CLOSING: Final = {
    0: "every required link is proved",
    1: "refuted: it does not run as the drafter demands",
    3: "nothing is refuted, but required links cannot be told",
}


def report_dict(result: CheckResult) -> dict[str, Any]:
    """JSON-ready. `schema` changes when a key changes its meaning or goes away."""
    pair = result.pair
    return {
        "schema": SCHEMA,
        "drafter": None if pair.drafter is None else pair.drafter.path,
        "target": pair.target.path,
        "published": None if pair.published is None else pair.published.title,
        "differences": list(_differences(pair)),
        "findings": [finding.as_dict() for finding in pair.findings],
        "engines": [_check_dict(check) for check in result.checks],
        "installed": [_installed_dict(one) for one in result.installed],
        "exit_code": result.exit_code,
    }


def render(result: CheckResult, console: Console) -> None:
    """Findings about the configs, then a page for one release or a table for several."""
    pair, checks = result.pair, result.checks
    console.print(Text(f"drafter {plain(pair.drafter.path) if pair.drafter else 'the MTP head of the target'}", "bold"))
    console.print(Text(f"target  {plain(pair.target.path)}", style="bold"))
    for finding in pair.findings:
        console.print(finding_text(finding))
    for one in result.installed:
        console.print(_installation(one))
        for finding in one.findings:
            console.print(finding_text(finding))
    if len(checks) == 1:
        _page(checks[0], console)
    elif checks:
        _comparison(checks, console)
    console.print(Text(f"exit code {result.exit_code}: {CLOSING[result.exit_code]}", style="bold"))


def _installation(one: Installed) -> Text:
    loads = sum(state == "" for state in one.compiled.values())
    parts = [f"{one.engine} {one.version} in {one.location or one.python}"]
    parts += [f"commit {one.commit}"] if one.commit else []
    parts += [f"{loads} of {len(one.compiled)} compiled parts loaded"] if one.compiled else []
    parts += [f"torch {one.torch}"] if one.torch else []
    return Text(f"\ninstalled: {plain(', '.join(parts))}", style="bold")


def _installed_dict(one: Installed) -> dict[str, Any]:
    return {**vars(one), "findings": [finding.as_dict() for finding in one.findings]}


def title(check: Check) -> str:
    return f"{check.deployment.engine.name} {check.deployment.release or '(release not known)'}"


def _page(check: Check, console: Console) -> None:
    console.print(Text(f"\n{title(check)}", style="bold"))
    table = Table("link", "verdict", "the drafter demands", "this release runs", box=None, pad_edge=False)
    for link in check.links:
        runs = link.runs if check.applied.starts else "-"
        table.add_row(link.link.value, Text(link.verdict.value, STYLES[link.verdict]), plain(link.demands), plain(runs))
    console.print(table)
    if check.layers and check.applied.starts:
        console.print(_layers(check))
    console.print(_memory(check.memory))
    for finding in check.findings:
        console.print(finding_text(finding))


def _layers(check: Check) -> Table:
    table = Table("draft layer", "window: demanded", "runs", "in the block: demanded", "runs", box=None, pad_edge=False)
    for view in check.layers:
        table.add_row(
            str(view.layer),
            show_windows([view.window]),
            show_windows([view.runs_window]),
            show_causal([view.causal]),
            show_causal([view.runs_causal]),
        )
    return table


def _memory(memory: Memory) -> Table:
    table = Table("memory on each GPU", "GiB", "how", box=None, pad_edge=False)
    for part in memory.parts:
        table.add_row(
            part.name, "-" if part.bytes is None else f"{part.bytes / 2**30:.2f}", Text(part.how, style="dim")
        )
    return table


def _comparison(checks: Sequence[Check], console: Console) -> None:
    """Which release can run this? One row a release, then each finding once with the releases it holds for."""
    several = len({check.deployment.engine.name for check in checks}) > 1
    heads = ("release", "starts", "runner", "taps", "windows", "causal", "cache", "verdict", "config differs in")
    table = Table(*heads, box=None, pad_edge=False)
    for check in checks:
        told = {link.link: link for link in check.links}
        starts = check.applied.starts
        table.add_row(
            title(check) if several else check.deployment.release,
            Text("yes") if starts else Text("no", "bold red"),
            (check.applied.runner or "-").upper() if starts else "-",
            *(_cell(told.get(link), starts, check) for link in (Link.TAPS, Link.WINDOWS, Link.CAUSALITY)),
            _cache(check) if starts else "-",
            Text(*_verdict(check)),
            ", ".join(_differences(check.pair)) or "-",
        )
    console.print(table)
    seen: dict[str, Finding] = {}
    for check in checks:
        for finding in check.findings:
            if finding.severity is not Severity.NOTE:
                seen.setdefault(finding.code, finding)
    for code, finding in seen.items():
        where = [title(check) for check in checks if any(f.code == code for f in check.findings)]
        text = finding_text(finding)
        text.append("\n    releases: ", style="dim")
        text.append(", ".join(where))
        console.print(text)


def _cell(link: LinkVerdict | None, starts: bool, check: Check) -> Text:
    if link is None or not starts:
        return Text("-")
    text = {Verdict.PROVED: "proved", Verdict.CANNOT_TELL: "open"}.get(link.verdict)
    return Text(text or _wrong(link.link, check), style=STYLES[link.verdict])


def _wrong(link: Link, check: Check) -> str:
    """What runs instead, in two words."""
    shift = check.applied.effect("tap_shift")
    if link is Link.TAPS and shift:
        return f"{abs(shift)} {'early' if shift < 0 else 'late'}"
    if link is Link.WINDOWS and check.applied.effect("window") == "none":
        return "ignored"
    if link is Link.CAUSALITY and (causal := check.applied.effect("causal")):
        return str(causal)
    return "config" if link in _config_faults(check) else "wrong"


def _config_faults(check: Check) -> set[Link]:
    return {v.link for v in check.links if v.verdict is Verdict.REFUTED and "published-difference" in v.codes}


def _cache(check: Check) -> str:
    rules = [r for r in check.applied.rules if r.link is Link.CACHE and r.severity is not Severity.NOTE]
    return "drops" if any("drop" in rule.code for rule in rules) else "below" if rules else "kept"


def _verdict(check: Check) -> tuple[str, str]:
    if check.exit_code == 0:
        return "proved", "green"
    if not check.applied.starts and check.applied.verified:
        return "refused", STYLES[Verdict.REFUTED]
    wanted = Verdict.REFUTED if check.exit_code == 1 else Verdict.CANNOT_TELL
    return wanted.value, STYLES[wanted]


def _differences(pair: Pair) -> tuple[str, ...]:
    """Config keys that differ from the published drafter's, errors only."""
    found = [f for f in pair.findings if f.code == "published-difference" and f.severity is Severity.ERROR]
    return tuple(finding.message.split(" ")[0] for finding in found)


def _check_dict(check: Check) -> dict[str, Any]:
    return {
        "engine": check.deployment.engine.name,
        "release": check.deployment.release,
        "rules_of": check.applied.release,
        "verified": check.applied.verified,
        "starts": check.applied.starts,
        "runner": check.applied.runner,
        "links": [asdict(link) for link in check.links],
        "layers": [asdict(view) for view in check.layers],
        "memory": check.memory.as_dict(),
        "findings": [finding.as_dict() for finding in check.findings],
        "exit_code": check.exit_code,
    }
