"""What acceptance this pair should have on the server's own text, and which known fault explains what it has.

The bridge between the doctor and the engine: torch is imported inside functions. The text plays the target's choices,
as in `engine/replay.py`; its features come from one causal pass over the taps of all hypotheses together. Then every
drafter drafts at the server's own anchors (at every position, if the server tells only totals), see `follow.py`.
Hypotheses that are far off on the first texts are dropped there: `rank.py` says when.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from draftproof.doctor.facts import Answer, OracleFacts
from draftproof.doctor.follow import Evidence, Route, accept_at, features_by_tap, follow
from draftproof.doctor.hypotheses import Hypothesis, hypotheses
from draftproof.doctor.rank import HEALTHY, NONE, Prediction, hopeless, rank
from draftproof.doctor.told import Sums, first_anchor, kind_of, last_position, observed_sums, told_steps, walked
from draftproof.engine.acceptance import Acceptance, TextAcceptance
from draftproof.errors import UserError

if TYPE_CHECKING:
    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.target import Target

Say = Callable[[str], None]
FIRST_SHARE, FIRST_MIN = 4, 3  # every 4th text, at least 3, decide which hypotheses are hopeless


def consult(
    target: str,
    drafter: str,
    answers: Sequence[Answer],
    *,
    say: Say = lambda _line: None,
    device: str = "auto",
    dtype: str = "float32",
    names: Sequence[str] | None = None,
    sums: Sums | None = None,
) -> OracleFacts:
    """Load the pair once and judge. `names` limits the hypotheses; `sums` are the server's counters, for engines that
    tell nothing of single requests. UserError as `load_pair`, and bad-texts if no answer has two tokens."""
    from draftproof.engine.pair import load_pair
    from draftproof.models.dflash import DFlashDrafter

    pair = load_pair(target, drafter, dtype=dtype, device=device, plain=True)
    assert isinstance(pair.drafter, DFlashDrafter)
    return judge(pair.target, pair.drafter, answers, say=say, names=names, sums=sums)


def judge(
    target: Target,
    drafter: DFlashDrafter,
    answers: Sequence[Answer],
    *,
    say: Say = lambda _line: None,
    names: Sequence[str] | None = None,
    sums: Sums | None = None,
) -> OracleFacts:
    """`consult` for a loaded pair."""
    usable = [answer for answer in answers if len(answer.output_ids) > 1]
    _require_some(usable)
    listed = hypotheses(drafter.spec, len(target.layers), drafts_of(usable))
    chosen = [h for h in listed if names is None or h.name in names or h.name == HEALTHY]
    say(f"oracle: features of {len(usable)} texts")
    evidence = Evidence(tuple(usable), features_by_tap(target, usable, sorted({t for h in chosen for t in h.taps})))
    predictions = predict(target, drafter, evidence, chosen, say)
    return oracle_facts(evidence.answers, predictions, sums)


def _require_some(answers: Sequence[Answer]) -> None:
    if not answers:
        raise UserError("bad-texts", "no answer has two tokens", "let the server write longer answers")


def oracle_facts(answers: Sequence[Answer], predictions: Sequence[Prediction], sums: Sums | None) -> OracleFacts:
    """`predictions[0]` is HEALTHY's, with its own walk along every text."""
    ranking, seen = rank(answers, predictions, sums), observed_sums(answers, sums)
    sound = healthy_walk(answers, predictions[0])
    low, high = sound.interval()
    return OracleFacts(
        expected=sound.tau,
        expected_steps=sound.steps,
        interval=None if low != low else (low, high),
        per_position=tuple(sound.per_position),
        observed=seen.accepted / seen.steps + 1 if seen.steps else float("nan"),
        observed_steps=seen.steps,
        observed_per_position=tuple(n / seen.steps for n in seen.per_position) if seen.steps else (),
        fits=ranking.fits,
        leaders=ranking.leaders,
        kind=ranking.kind,
    )


def healthy_walk(answers: Sequence[Answer], prediction: Prediction) -> Acceptance:
    walks = [walked(at, answer) for answer, at in zip(answers, prediction.at, strict=True)]
    return Acceptance([TextAcceptance(steps) for steps in walks if steps is not None], prediction.depth)


def drafts_of(answers: Sequence[Answer]) -> int | None:
    """Drafts a step, if the engine tells drafted tokens and steps and they divide."""
    told = [(a.drafted, a.steps) for a in answers if a.drafted and a.steps]
    sizes = {drafted / steps for drafted, steps in told}
    return int(max(sizes)) if len(sizes) == 1 and max(sizes) == int(max(sizes)) else None


def all_anchors(
    target: Target, drafter: DFlashDrafter, answers: Sequence[Answer], say: Say = lambda _line: None
) -> list[Prediction]:
    """Every anchor of every text, for all hypotheses that have a number for an anchor as such."""
    _require_some(answers)
    listed = [h for h in hypotheses(drafter.spec, len(target.layers)) if not h.by_step]
    taps = sorted({t for h in listed for t in h.taps})
    run = _Run(target, drafter, Evidence(tuple(answers), features_by_tap(target, answers, taps)))
    found = []
    for h in listed:
        say(f"oracle: {h.name}")
        found.append(run.predict(h, range(run.count), everywhere=True))
    return found


def predict(
    target: Target,
    drafter: DFlashDrafter,
    evidence: Evidence,
    listed: Sequence[Hypothesis],
    say: Say = lambda _line: None,
) -> list[Prediction]:
    """HEALTHY at every anchor; the others at the server's own (at every one if it tells no steps), as long as they are
    not hopeless; random ones only if nothing else explains the server."""
    run = _Run(target, drafter, evidence)
    healthy, *others = listed
    certain = [h for h in others if not h.random]
    sound = run.predict(healthy, range(run.count), everywhere=True)
    first = range(0, run.count, min(FIRST_SHARE, max(1, run.count // FIRST_MIN)))
    early = []
    for h in certain:
        say(f"oracle: {h.name}")
        early.append(run.predict(h, first))
    lost = hopeless(evidence.answers, [_only(sound, first), *early])
    rest = [i for i in range(run.count) if i not in first]
    found = [sound]
    for h, seen in zip(certain, early, strict=True):
        if h.name not in lost and rest:
            say(f"oracle: {h.name}, remaining texts")
            seen = _merge(seen, run.predict(h, rest))
        found.append(seen)
    if rank(evidence.answers, found).leaders in ((), (NONE,)):
        found += [run.predict(h, range(run.count), everywhere=True) for h in others if h.random]
    return found


@dataclass(frozen=True)
class _Run:
    target: Target
    drafter: DFlashDrafter
    evidence: Evidence

    @property
    def count(self) -> int:
        return len(self.evidence.answers)

    def predict(self, h: Hypothesis, chosen: Sequence[int], everywhere: bool = False) -> Prediction:
        """Of the chosen texts, at the server's anchors or at every one."""
        made, texts = h.make(self.drafter), self.evidence.subset(chosen)
        if h.by_step:
            seen = follow(self.target, made, texts, [self._route(a) for a in texts.answers])
        else:
            anchors = [self._anchors(a, everywhere) for a in texts.answers]
            seen = accept_at(self.target, made, texts, anchors, h.random)
        at = dict(zip(chosen, seen, strict=True))
        return Prediction(h.name, made.depth, tuple(at.get(i, {}) for i in range(self.count)), h.random)

    def _anchors(self, answer: Answer, everywhere: bool) -> Sequence[int]:
        if everywhere or kind_of(self.evidence.answers) != "steps":
            return range(first_anchor(answer), last_position(answer))
        return [anchor for anchor, _ in told_steps(answer) or ()]

    def _route(self, answer: Answer) -> Route:
        """The server's own steps if it tells them; else the drafter walks by itself."""
        if kind_of(self.evidence.answers) != "steps":
            return None
        return [accepted + 1 for _, accepted in told_steps(answer) or ()]


def _merge(one: Prediction, other: Prediction) -> Prediction:
    return replace(one, at=tuple({**a, **b} for a, b in zip(one.at, other.at, strict=True)))


def _only(one: Prediction, chosen: Sequence[int]) -> Prediction:
    return replace(one, at=tuple(at if i in chosen else {} for i, at in enumerate(one.at)))
