"""Does this release know the method, and does the right runner run it? From the dated data on engines."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from draftproof.check.check import Check, check
from draftproof.check.rules import Runner
from draftproof.config.engines import Link
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.doctor import own
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.deployed import deployment, engine_data
from draftproof.doctor.evidence import lack, seen_inside
from draftproof.doctor.facts import Facts

CODE = "doctor-release"
TITLE = "the release runs this method as trained"
EXPLAINS = (
    "doctor-config", "doctor-taps", "doctor-windows", "doctor-causality", "doctor-rope", "doctor-heads",
    "doctor-block", "doctor-acceptance", "doctor-cache", "doctor-output", "doctor-speed",
)  # fmt: skip
NEEDS = ("process", "pair")
PROVES = "engines.toml covers the release, holds everything about method and runner for it, and no rule speaks against."
REFUTES = "A rule of engines.toml that holds for this release and these options is an error (attention backends aside)."


def required(facts: Facts) -> bool:
    """There are no dated rules on our own engine."""
    return not own.is_own(facts)


def judge(facts: Facts) -> Finding:
    described = deployment(facts)
    if described is None:
        return _lack(facts)
    engine, pair = described.engine, facts.pair
    assert pair is not None
    options = replace(described.options, runner=runner_seen(facts) or described.options.runner)
    result = check(pair, engine, facts.release, options)
    where = f"engines.toml, {engine.name} as of {engine.as_of}"
    if facts.release is None or not result.applied.verified:
        message = f"release {facts.release or 'not known'} is outside the releases that the data covers"
        return cannot_tell(CODE, message, where, f"use a release inside {engine.known or 'a dated range'}, or measure")
    return _judged(result, facts, where)


def runner_seen(facts: Facts) -> Runner | None:
    """The runner that really runs, from inside or from the log."""
    inside = seen_inside(facts)
    runner = (inside.runner if inside else None) or (facts.log.runner if facts.log else None)
    return cast(Runner, runner.lower()) if runner and runner.lower() in ("v1", "v2") else None


def _judged(result: Check, facts: Facts, where: str) -> Finding:
    wrong = [rule for rule in result.applied.rules if rule.severity is Severity.ERROR and rule.link is not Link.BACKEND]
    if not result.applied.starts and facts.probe is not None:
        codes = ", ".join(rule.code for rule in wrong)
        message = f"by {codes} this release refuses the pair, yet the server answers: is it this release?"
        return cannot_tell(CODE, message, where, "compare the release that the log names with the one installed")
    if wrong:
        rule = wrong[0]
        more = f" (and {', '.join(other.code for other in wrong[1:])})" if wrong[1:] else ""
        message = f"[{rule.code}] {rule.does} {rule.consequence}{more}"
        return refuted(CODE, message, "as trained", f"{rule.link.value} not as trained", where, rule.fix)
    open_links = (Link.METHOD,) if runner_seen(facts) == result.applied.runner else (Link.METHOD, Link.RUNNER)
    asked = {v.link: v for v in result.links if v.link in open_links}  # a runner that was seen to run is no doubt
    doubts = [code for v in asked.values() if v.verdict is not Verdict.PROVED for code in (v.codes or (v.link.value,))]
    if doubts:
        message = f"the data leaves open for this release: {', '.join(doubts)}"
        return cannot_tell(CODE, message, where, "draftproof explain CODE tells what to look at")
    runner = (result.applied.runner or "its one runner").upper() if result.applied.runner else "its one runner"
    seen = f"{facts.engine} {facts.release}, {runner}"
    return proved(CODE, "method and runner are known and right in this release" + _known(result), "no rule against",
                  seen, where)  # fmt: skip


def _known(result: Check) -> str:
    """Faults of the attention backend show in acceptance, or nowhere: there they are judged."""
    codes = backend_faults(result)
    return f"; known of its attention backend: {', '.join(codes)}, see acceptance" if codes else ""


def backend_faults(result: Check) -> list[str]:
    rules = result.applied.rules
    return [rule.code for rule in rules if rule.severity is Severity.ERROR and rule.link is Link.BACKEND]


def _lack(facts: Facts) -> Finding:
    if engine_data(facts) is None:
        name = facts.engine or "this engine"
        return cannot_tell(CODE, f"there is no dated data on {name}", "engines.toml", "compare acceptance instead")
    if facts.pair is None:
        return lack(CODE, facts, "pair")
    if facts.process is None:
        return lack(CODE, facts, "process")
    return cannot_tell(CODE, "the server's arguments contradict each other", "process: arguments", "see doctor-argv")
