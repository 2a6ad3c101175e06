"""The links in the order a value travels, and the diagnosis they add up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import ModuleType

from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.doctor.facts import Facts
from draftproof.doctor.published import unlike_published


@dataclass(frozen=True)
class LinkResult:
    """One judged link. `explained_by` is the title of an earlier broken link that accounts for this one."""

    code: str
    title: str
    required: bool
    finding: Finding
    explained_by: str | None = None


@dataclass(frozen=True)
class Diagnosis:
    """`exit_code`: 1 some link is refuted; 3 none is, but a required one cannot be told; 0 all required are proved."""

    facts: Facts
    links: tuple[LinkResult, ...]

    @property
    def exit_code(self) -> int:
        if any(link.finding.verdict is Verdict.REFUTED for link in self.links):
            return 1
        return 3 if any(link.required and link.finding.verdict is Verdict.CANNOT_TELL for link in self.links) else 0


def diagnose(facts: Facts, links: Sequence[ModuleType]) -> Diagnosis:
    """Judge every link. Each module has CODE, TITLE, EXPLAINS (codes of later links that its break explains),
    `required(facts)` and `judge(facts)`."""
    results: list[LinkResult] = []
    broken: dict[str, str] = {}  # code of a later link -> title of the break that explains it
    for link in links:
        finding = link.judge(facts)
        if finding.verdict is Verdict.PROVED:
            finding = unlike_published(link.CODE, facts) or finding
        result = LinkResult(link.CODE, link.TITLE, link.required(facts), finding)
        if finding.verdict is not Verdict.PROVED and link.CODE in broken:
            result = replace(result, explained_by=broken[link.CODE])
        if finding.verdict is Verdict.REFUTED:
            for code in link.EXPLAINS:
                broken.setdefault(code, link.TITLE)
        results.append(result)
    return Diagnosis(facts, tuple(results))


def proved(code: str, message: str, expected: object = "", seen: object = "", where: str = "") -> Finding:
    return Finding(code, Severity.NOTE, Verdict.PROVED, message, str(expected), str(seen), where)


def refuted(code: str, message: str, expected: object, seen: object, where: str, fix: str) -> Finding:
    return Finding(code, Severity.ERROR, Verdict.REFUTED, message, str(expected), str(seen), where, fix)


def cannot_tell(code: str, message: str, where: str = "", fix: str = "") -> Finding:
    """`message` says what is missing, `fix` what would decide it."""
    return Finding(code, Severity.WARNING, Verdict.CANNOT_TELL, message, where=where, fix=fix)
