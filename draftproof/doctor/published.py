"""Where an engine does what a config says, and the config is not the published drafter's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from draftproof.check.links import published_link
from draftproof.config.engines import Link
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.doctor.facts import Facts

# The links of a check that each link of the doctor answers for.
LINKS: Final[Mapping[str, tuple[Link, ...]]] = {
    "doctor-taps": (Link.TAPS,),
    "doctor-windows": (Link.WINDOWS,),
    "doctor-causality": (Link.CAUSALITY,),
    "doctor-rope": (Link.ROPE,),
    "doctor-block": (Link.MASK, Link.BLOCK),
}


def unlike_published(code: str, facts: Facts) -> Finding | None:
    """A proved link only says that the engine follows the config; this is the finding that the config itself is not
    what was published under its name (refuted), or of its shape (cannot tell)."""
    for finding in facts.pair.findings if facts.pair else ():
        if finding.code != "published-difference" or finding.severity is not Severity.ERROR:
            continue
        if published_link(finding) in LINKS.get(code, ()):
            verdict = Verdict.REFUTED if finding.verdict is Verdict.REFUTED else Verdict.CANNOT_TELL
            severity = Severity.ERROR if verdict is Verdict.REFUTED else Severity.WARNING
            message = f"the engine does what the config says, but {finding.message}"
            return Finding(code, severity, verdict, message, finding.expected, finding.seen, finding.where, finding.fix)
    return None
