"""Do the two configs fit each other and what is published of the drafter?"""

from __future__ import annotations

from draftproof.check.links import open_links
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import lack
from draftproof.doctor.facts import Facts

CODE = "doctor-pair"
TITLE = "the two checkpoints fit each other"
EXPLAINS = (
    "doctor-taps", "doctor-windows", "doctor-causality", "doctor-rope", "doctor-heads", "doctor-block",
    "doctor-acceptance", "doctor-speed",
)  # fmt: skip
NEEDS = ("pair",)
PROVES = "The configs show no fault, and published values settle what they leave open."
REFUTES = "A certain error in the configs: a tap out of range, another width, a value unlike the published drafter's."


def required(facts: Facts) -> bool:
    return True


def judge(facts: Facts) -> Finding:
    pair = facts.pair
    if pair is None:
        return lack(CODE, facts, "pair")
    errors = [finding for finding in pair.findings if finding.severity is Severity.ERROR]
    faults = [finding for finding in errors if finding.verdict is Verdict.REFUTED]
    if faults:
        worst = faults[0]
        more = f" (and {len(faults) - 1} more)" if len(faults) > 1 else ""
        message = f"[{worst.code}] {worst.message}{more}"
        return refuted(CODE, message, worst.expected, worst.seen, worst.where or "config.json", worst.fix)
    if errors:  # such as a difference from a published drafter that this one may not be
        doubt = errors[0]
        return cannot_tell(CODE, f"[{doubt.code}] {doubt.message}", doubt.where or "config.json", doubt.fix)
    unsettled = open_links(pair.findings, pair.published)
    if unsettled:
        names = ", ".join(link.value for link in unsettled)
        fix = "draftproof check names each doubt; settle it with the drafter's own repository"
        return cannot_tell(CODE, f"the configs leave open: {names}", "config.json of both", fix)
    known = "no fault" if pair.published is None else f"no fault; published as {pair.published.title}"
    return proved(CODE, "the configs fit", "no fault", known, "config.json of both")
