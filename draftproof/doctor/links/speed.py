"""Is it faster than the target alone?"""

from __future__ import annotations

from collections.abc import Iterable

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import GET, lack
from draftproof.doctor.facts import Answer, Facts

CODE = "doctor-speed"
TITLE = "it is faster than the target alone"
EXPLAINS: tuple[str, ...] = ()
NEEDS = ("probe",)
PROVES = "The same prompts came back at more tokens a second than from the server without the drafter (--baseline)."
REFUTES = "They came back more slowly."
NOISE = 0.05
FIX = (
    "with healthy acceptance, look at the cost of a step: concurrency, CUDA graphs, quantised verification; fewer "
    "drafts may pay more"
)


def required(facts: Facts) -> bool:
    return False


def judge(facts: Facts) -> Finding:
    probe = facts.probe
    if probe is None:
        return lack(CODE, facts, "probe")
    if probe.baseline is None:
        return cannot_tell(CODE, "there is no server without the drafter to compare with", "probe", GET["baseline"])
    ours, theirs = rate(probe.answers), rate(probe.baseline)
    if not ours or not theirs:
        return cannot_tell(CODE, "no tokens were timed", "probe", "run doctor again")
    expected, seen = f"more than {theirs:.1f} tokens/s", f"{ours:.1f} tokens/s, {ours / theirs:.2f} times"
    where = "probe: both servers, the same prompts"
    if ours > theirs * (1 + NOISE):
        return proved(CODE, "it is faster than the target alone", expected, seen, where)
    if ours < theirs * (1 - NOISE):
        return refuted(CODE, "it is slower than the target alone", expected, seen, where, FIX)
    return cannot_tell(CODE, f"no difference beyond noise: {seen}", where, "time more prompts on quiet machines")


def rate(answers: Iterable[Answer]) -> float:
    """Tokens a second over all answers, prefill included."""
    told = list(answers)
    seconds = sum(one.seconds for one in told)
    return sum(len(one.output_ids) for one in told) / seconds if seconds else 0.0
