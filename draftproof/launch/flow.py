"""From an Ask to a Plan: check first, refuse what is refuted, then fill the engine's arguments."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftproof.check.check import Check, Pair, check
from draftproof.config.engines import engines
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.errors import UserError
from draftproof.launch.ask import Ask
from draftproof.launch.llamacpp import plan_llamacpp
from draftproof.launch.plan import Plan
from draftproof.launch.sglang import plan_sglang
from draftproof.launch.vllm import plan_vllm

PLANNERS = {"vllm": plan_vllm, "sglang": plan_sglang}


@dataclass(frozen=True)
class Prepared:
    """`check` is None for GGUF checkpoints launched without their Hugging Face configs. `accepted` are the codes
    of refuted findings that the user took."""

    plan: Plan
    check: Check | None
    accepted: tuple[str, ...] = ()


def prepare(ask: Ask, pair: Pair, release: str | None, accept: Sequence[str] = ()) -> Prepared:
    """The plan of a pair that the check does not refute. UserError launch-refuted, flag-conflict, bad-option."""
    result = check(pair, engines()[ask.engine], release, ask.options)
    refuse_refuted(result, accept)
    if ask.engine in PLANNERS:
        return Prepared(PLANNERS[ask.engine](ask, result), result, tuple(accept))
    block = pair.drafter.block_size if pair.drafter else None
    return Prepared(plan_llamacpp(ask, block), result, tuple(accept))


def refuse_refuted(result: Check, accept: Sequence[str]) -> None:
    """Starting what cannot run as trained wastes GPU hours; each refuted finding must be accepted by its code."""
    faults = _faults(result)
    known = list(dict.fromkeys(finding.code for finding in faults))
    if unknown := [code for code in accept if code not in known]:
        raise UserError(
            "bad-option",
            f"--accept {' '.join(unknown)}: no such finding here",
            f"findings that can be accepted: {', '.join(known) or 'none, nothing is refuted'}",
        )
    left = [finding for finding in faults if finding.code not in accept]
    if left:
        fixes = " ".join(dict.fromkeys(f"{f.fix.rstrip('.')}." for f in left if f.fix))
        codes = " ".join(dict.fromkeys(f"--accept {finding.code}" for finding in left))
        raise UserError(
            "launch-refuted",
            "this deployment does not run as the drafter was trained:\n    " + "\n    ".join(map(_line, left)),
            f"{fixes} To start it all the same: {codes}",
        )


def _line(finding: Finding) -> str:
    values = f" (expected {finding.expected}, seen {finding.seen})" if finding.seen else ""
    return f"[{finding.code}] {finding.message}{values}"


def _faults(result: Check) -> list[Finding]:
    engine = [f for f in result.findings if f.severity is Severity.ERROR and f.verdict is Verdict.REFUTED]
    return [f for f in result.pair.findings if f.severity is Severity.ERROR] + engine


def with_file(plan: Plan, name: str, path: Path) -> Plan:
    """The plan with a local file sent along into the launch's own folder as `name`."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(
            "not-found", f"{path} cannot be read: {error.strerror}", "name a file on this machine"
        ) from error
    return Plan(**(vars(plan) | {"files": {**plan.files, f"{{state}}/{name}": data}}))
