"""`draftproof check` from names to a result: read both configs, settle the releases, judge each."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.check.check import Check, Pair, check, read_pair
from draftproof.check.deployment import parse_engine
from draftproof.check.installed import Installed, installed_binary, read_installed
from draftproof.check.links import open_links
from draftproof.check.merge import merge_options
from draftproof.config.drafter import read_drafter
from draftproof.config.finding import Severity
from draftproof.config.target import read_target
from draftproof.errors import UserError

GIB = 2**30
PROGRAMS = {"llama.cpp": "llama-server", "ik_llama.cpp": "llama-server"}


@dataclass(frozen=True)
class CheckAsk:
    """Folders (or config files) with their options; `named` by field of Options, None where not given; `extra` are
    an engine's own flags. `engines` as written: name or name==release; empty: the pair alone."""

    drafter: Path | None
    target: Path
    engines: tuple[str, ...]
    named: Mapping[str, Any]
    extra: tuple[str, ...] = ()
    venv: Path | None = None
    gpu_gib: float | None = None
    target_gib: float | None = None


@dataclass(frozen=True)
class CheckResult:
    pair: Pair
    checks: tuple[Check, ...]
    installed: tuple[Installed, ...]

    @property
    def exit_code(self) -> int:
        """The worst of all: something refuted (1), else something open (3), else 0."""
        codes = {result.exit_code for result in self.checks} or {self.pair_exit_code}
        if any(f.severity is Severity.ERROR for one in self.installed for f in one.findings):
            codes.add(1)
        return next(code for code in (1, 3, 0) if code in codes)

    @property
    def pair_exit_code(self) -> int:
        if any(finding.severity is Severity.ERROR for finding in self.pair.findings):
            return 1
        return 3 if open_links(self.pair.findings, self.pair.published) else 0


def run_check(ask: CheckAsk) -> CheckResult:
    """UserError for what cannot be read, an engine that is not known, or options that contradict each other."""
    pair = read_pair(None if ask.drafter is None else read_drafter(ask.drafter), read_target(ask.target))
    _refuse_idle(ask)
    checks, installations = [], []
    for text in ask.engines:
        engine, release = parse_engine(text)
        named = dict(ask.named)
        if release is None:
            found = find_installed(engine.name, ask.venv)
            installations.append(found)
            release = found.require_version()
            named["platform"] = named.get("platform") or found.platform
        options = merge_options(engine.name, named, ask.extra, {})
        size = None if ask.gpu_gib is None else round(ask.gpu_gib * GIB)
        weights = None if ask.target_gib is None else round(ask.target_gib * GIB)
        checks.append(check(pair, engine, release, options, gpu_bytes=size, target_bytes=weights))
    return CheckResult(pair, tuple(checks), tuple(installations))


def find_installed(engine: str, venv: Path | None) -> Installed:
    """What the environment `venv` (default: the one draftproof runs in) really holds."""
    if engine in PROGRAMS:
        return installed_binary(str(venv / "bin" / PROGRAMS[engine]) if venv else PROGRAMS[engine], engine)
    return read_installed(engine, str(venv / "bin" / "python") if venv else sys.executable)


def _refuse_idle(ask: CheckAsk) -> None:
    """Options that would change nothing."""
    given = {key: value for key, value in ask.named.items() if value is not None and key != "method"}
    if not ask.engines and (given or ask.extra or ask.gpu_gib or ask.target_gib or ask.venv):
        raise UserError("bad-option", "options of an engine were given, but no engine", "add --engine vllm==0.33, say")
    if ask.extra and len({parse_engine(text)[0].name for text in ask.engines}) > 1:
        raise UserError("bad-option", "flags after -- belong to one engine", "check one engine at a time with them")
    if ask.venv and all(parse_engine(text)[1] for text in ask.engines):
        raise UserError("bad-option", "--venv means nothing when every release is named", "leave it out")
