"""Will this pair run on this engine release as it was trained? Link by link: proved, refuted, or cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from draftproof.check.deployment import Deployment
from draftproof.check.layers import LayerView, layer_views
from draftproof.check.links import LinkVerdict, engine_count, judge_links
from draftproof.check.memory import UTILISATION, Memory, estimate, memory_findings
from draftproof.check.options import Options
from draftproof.check.rules import Applied, apply_rules
from draftproof.config.drafter import DrafterSpec
from draftproof.config.engines import Engine, Rule
from draftproof.config.finding import Finding, Severity, Verdict, error, note, warning
from draftproof.config.mtp import check_mtp
from draftproof.config.pair import check_pair
from draftproof.config.published import Match, compare_published, find_matches
from draftproof.config.target import TargetSpec


@dataclass(frozen=True)
class Pair:
    """Both specs with every finding about their configs, and the nearest published drafter."""

    drafter: DrafterSpec | None
    target: TargetSpec
    findings: tuple[Finding, ...]
    published: Match | None


@dataclass(frozen=True)
class Check:
    """One deployment judged. `findings` are about the engine; those about the configs stand in `pair`."""

    deployment: Deployment
    pair: Pair
    applied: Applied
    layers: tuple[LayerView, ...]
    links: tuple[LinkVerdict, ...]
    memory: Memory
    findings: tuple[Finding, ...]

    @property
    def exit_code(self) -> int:
        """1: something is refuted. 3: nothing is, but a required link is open. 0: every required link is proved."""
        faults = [f for f in self.pair.findings if f.severity is Severity.ERROR]
        faults += [f for f in self.findings if f.severity is Severity.ERROR and f.verdict is Verdict.REFUTED]
        if faults or any(v.verdict is Verdict.REFUTED for v in self.links):
            return 1
        return 3 if any(v.required and v.verdict is Verdict.CANNOT_TELL for v in self.links) else 0


def read_pair(drafter: DrafterSpec | None, target: TargetSpec) -> Pair:
    """Every finding about the configs, errors first. Without a drafter the target's own MTP head drafts."""
    if drafter is None:
        return Pair(None, target, (*target.findings, *check_mtp(target)), None)
    findings = [*drafter.findings, *target.findings]
    findings += check_pair(drafter, target, target_path=Path(target.path))
    findings += compare_published(drafter, target)
    ranked = sorted(findings, key=lambda finding: list(Severity).index(finding.severity))
    matches = find_matches(drafter, target)
    return Pair(drafter, target, tuple(ranked), matches[0] if matches else None)


def check(
    pair: Pair,
    engine: Engine,
    release: str | None,
    options: Options,
    *,
    gpu_bytes: int | None = None,
    target_bytes: int | None = None,
) -> Check:
    """Judge the pair on one engine release with these options; nothing is run and no weight is read."""
    deployment = Deployment(engine, release, pair.drafter, pair.target, options)
    applied = apply_rules(deployment)
    layers = layer_views(deployment, applied)
    own = [*_release(deployment, applied), *_count(deployment)]
    links = judge_links(deployment, applied, layers, [*pair.findings, *own], pair.published)
    memory = estimate(
        deployment, target_bytes=target_bytes, gpu_bytes=gpu_bytes, utilisation=options.gpu_share or UTILISATION
    )
    findings = [*own, *(_finding(rule, applied) for rule in applied.rules), *memory_findings(memory)]
    findings += _unproved(links, deployment, applied)
    ranked = sorted(findings, key=lambda finding: list(Severity).index(finding.severity))
    return Check(deployment, pair, applied, layers, links, memory, tuple(ranked))


def _release(deployment: Deployment, applied: Applied) -> Iterator[Finding]:
    engine = deployment.engine
    if deployment.release is None:
        yield warning(
            "release-undated",
            f"no release of {engine.name} is known here, so no rule that depends on the release was applied",
            f"{engine.name}=={engine.newest}, say",
            "absent",
            "--engine",
            f"name the release: --engine {engine.name}==RELEASE",
        )
    elif not applied.verified:
        yield warning(
            "release-unknown",
            f"{engine.name} {deployment.release} is outside the releases the rules were written for; those of "
            f"{applied.release} were applied, unverified",
            engine.known or "no dated range",
            deployment.release,
            f"engines.toml, {engine.as_of}",
            "check the release notes for DFlash changes, or use a release inside the range",
        )


def _count(deployment: Deployment) -> Iterator[Finding]:
    """The number of drafted tokens against the block, in the engine's own unit."""
    drafter, options = deployment.drafter, deployment.options
    if drafter is None:
        return
    fits = drafter.block_size - 1
    extra = 1 if deployment.engine.drafts_are == "block_size" else 0
    if options.drafts is None:
        yield note("k-missing", f"no number of speculative tokens was given; checked with {engine_count(deployment)}")
    elif options.drafts != fits:
        make = error if options.drafts > fits else warning
        effect = "rows the drafter was never trained on" if options.drafts > fits else "drafts thrown away"
        yield make(
            "k-not-block",
            f"the number of speculative tokens does not fit the drafter's block of {drafter.block_size}: {effect}",
            fits + extra,
            options.drafts + extra,
            "num_speculative_tokens" if not extra else "--speculative-num-draft-tokens",
            f"use {fits + extra}",
        )


def _finding(rule: Rule, applied: Applied) -> Finding:
    refuted = applied.verified and rule.severity is not Severity.NOTE
    return Finding(
        code=rule.code,
        severity=rule.severity,
        verdict=Verdict.REFUTED if refuted else Verdict.CANNOT_TELL,
        message=f"{rule.does} {rule.consequence}",
        where=rule.key,
        fix="" if rule.severity is Severity.NOTE else rule.fix,
    )


def _unproved(links: tuple[LinkVerdict, ...], deployment: Deployment, applied: Applied) -> Iterator[Finding]:
    """Links nobody can settle from configs and data, named once; a refusal or an unknown release explains them."""
    silent = [v.link.value for v in links if v.required and v.verdict is Verdict.CANNOT_TELL and not v.codes]
    if silent and applied.verified and applied.starts:
        yield warning(
            "link-unproved",
            f"nothing is known for certain about these links on {deployment.engine.name}: {', '.join(silent)}",
            "proved",
            "cannot tell",
            f"engines.toml, {deployment.engine.as_of}",
            "start it and measure: compare its acceptance with `draftproof replay` on the same text",
        )
