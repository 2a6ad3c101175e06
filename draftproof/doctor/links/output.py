"""Is the text that of the target alone?"""

from __future__ import annotations

from collections.abc import Sequence

from draftproof.config.finding import Finding
from draftproof.doctor.chain import cannot_tell, proved, refuted
from draftproof.doctor.evidence import GET, lack
from draftproof.doctor.facts import Answer, Facts

CODE = "doctor-output"
TITLE = "the text is that of the target alone"
EXPLAINS: tuple[str, ...] = ()
NEEDS = ("probe",)
PROVES = "Greedy answers equal, token for token, those of the same target without the drafter (--baseline)."
REFUTES = (
    "They part after a few tokens on average. A late difference is left open: other batch shapes round differently, "
    "and a near tie may then fall the other way."
)
SOON = 16  # mean tokens before the first difference, below which rounding is no excuse
TIE = "compare both tokens' logprobs at that place: a near tie is rounding, a gap is a fault"
ROLLBACK = "report it to the engine with this prompt: state or cache is not rolled back, or a lossy rule is on"


def required(facts: Facts) -> bool:
    return facts.probe is not None and facts.probe.baseline is not None


def judge(facts: Facts) -> Finding:
    probe = facts.probe
    if probe is None:
        return lack(CODE, facts, "probe")
    if probe.baseline is None:
        return cannot_tell(CODE, "there is no server without the drafter to compare with", "probe", GET["baseline"])
    pairs = list(zip(probe.answers, probe.baseline, strict=False))
    if not pairs or len(probe.answers) != len(probe.baseline) or not all(one.output_ids for one, _ in pairs):
        return cannot_tell(CODE, "the answers of both servers do not pair up", "probe", "run doctor again")
    if any(one.prompt_ids != other.prompt_ids for one, other in pairs):
        return cannot_tell(CODE, "both servers read the prompts as other tokens", "probe", "serve the same tokenizer")
    places = [(number, first_difference(one, other)) for number, (one, other) in enumerate(pairs)]
    apart = [(number, place) for number, place in places if place is not None]
    if not apart:
        tokens = sum(len(one.output_ids) for one in probe.answers)
        return proved(CODE, "every token equals the target's own", "equal", f"{tokens} tokens, all equal", "probe")
    number, place = apart[0]
    seen, where = f"{len(apart)} of {len(pairs)} answers differ", f"probe: prompt {number}, token {place}"
    if sum(at for _, at in apart) / len(apart) < SOON and len(apart) * 2 > len(pairs):
        return refuted(CODE, "the text is not the target's", "equal", seen, where, ROLLBACK)
    if probe.again and any(first_difference(*both) for both in zip(probe.answers, probe.again, strict=False)):
        return cannot_tell(CODE, f"{seen}, but the server differs from itself as well", where, TIE)
    return cannot_tell(CODE, f"{seen}, late in the text", where, TIE)


def first_difference(one: Answer, other: Answer) -> int | None:
    """The place of the first token that differs; None when the answers are equal."""
    left: Sequence[int] = one.output_ids
    for place, (mine, theirs) in enumerate(zip(left, other.output_ids, strict=False)):
        if mine != theirs:
            return place
    return None if len(left) == len(other.output_ids) else min(len(left), len(other.output_ids))
