"""Which hypothesis explains the acceptance that a server reported? Pure numbers, no models.

A hypothesis says for an anchor, that is a position of the server's own text, how many leading drafts would have been
right there. Behind a given text that is one number a position, whatever steps led there (the context is every row
before the anchor), so the server's steps can be compared one by one:

    steps    the engine told every step. A miss is a step whose accepted drafts differ from the number predicted for
             that very anchor. The last step of an answer, which a limit may have cut, is left out.
    totals   the engine told steps per request. A hypothesis walks the text by its own numbers; misses are the steps it
             is off, summed over the requests, of all observed steps. A text that ended by a stop token may have one
             step more than its tokens show.
    rates    only sums are known. Misses are accepted drafts, position by position, at the observed number of steps.

Two engines that both do the right thing still differ where two tokens are nearly tied. SmolLM2 in bfloat16 against
float32, sound or faulty: 1 to 3 % of the steps that are alive, up to 2 % of the totals. LIMIT allows for more, as a
share of the steps that are alive: where some draft was or should have been accepted (that two dead drafters agree on
zeros says nothing). A hypothesis reproduces the server when its misses are not significantly above the limit; if none
does, the answer is NONE. Hypotheses are compared in pairs on the same steps or requests: with d the difference of their
misses on one, two are tied while sum(d) <= 2 sqrt(sum(|d|)). For steps that is McNemar's test; for totals every step of
difference counts as one event. All that are tied with the best and reproduce the server lead together, HEALTHY first.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftproof.doctor.facts import Answer, Fit
from draftproof.doctor.told import Sums, kind_of, last_position, observed_sums, told_steps, walked

HEALTHY, NONE = "healthy", "none"
LIMIT = {"steps": 0.06, "totals": 0.03, "rates": 0.03}  # share of misses that rounding may cause
HOPELESS = 3.5  # standard errors behind the best
Key = tuple[int, int]  # (answer, anchor) of a step; (answer, -1) of a request


@dataclass(frozen=True)
class Prediction:
    """`at[i]` maps anchors of answer i, as positions in prompt + output, to accepted drafts; empty where it was not
    computed. `random` drafts cannot be compared step by step, only by their rates."""

    name: str
    depth: int
    at: tuple[Mapping[int, int], ...]
    random: bool = False


@dataclass(frozen=True)
class Ranking:
    """`fits` best first; `leaders` explain the server together, (NONE,) if nothing does, () without numbers to compare.
    `silent` hypotheses predict the same as HEALTHY on all that was compared, so they are not ranked."""

    kind: str
    fits: tuple[Fit, ...]
    leaders: tuple[str, ...]
    silent: tuple[str, ...] = ()


def rank(answers: Sequence[Answer], predictions: Sequence[Prediction], sums: Sums | None = None) -> Ranking:
    """Fits of all hypotheses, best first, and which of them explain the server. `predictions` holds HEALTHY."""
    kind, seen = kind_of(answers), observed_sums(answers, sums)
    silent = silent_names(predictions)
    scored = [_score(kind, answers, p, seen) for p in predictions if p.name not in silent]
    scored = [score for score in scored if score.fit.compared]
    scored.sort(key=lambda score: (score.random, score.share, score.fit.name != HEALTHY))
    chosen = _leaders(kind, scored, bool(seen.per_position))
    fits = [s.fit for s in scored]
    order = sorted(fits, key=lambda fit: chosen.index(fit.name) if fit.name in chosen else len(chosen))
    return Ranking(kind, tuple(order), tuple(chosen) if chosen or not scored else (NONE,), silent)


def silent_names(predictions: Sequence[Prediction]) -> tuple[str, ...]:
    """Those that predict what HEALTHY does wherever both were computed."""
    sound = next((p.at for p in predictions if p.name == HEALTHY), ())
    names = []
    for prediction in predictions:
        pairs = [(own[x], ref[x]) for own, ref in zip(prediction.at, sound, strict=False) for x in own.keys() & ref]
        if prediction.name != HEALTHY and pairs and all(one == other for one, other in pairs):
            names.append(prediction.name)
    return tuple(names)


def hopeless(answers: Sequence[Answer], predictions: Sequence[Prediction]) -> set[str]:
    """Names far behind the best on what was compared so far: more of the text cannot bring them back."""
    kind, seen = kind_of(answers), observed_sums(answers)
    scored = [_score(kind, answers, p, seen) for p in predictions if not p.random]
    scored = [score for score in scored if score.fit.compared]
    best = min(scored, key=lambda score: score.share, default=None)
    if best is None or kind == "rates":
        return set()
    return {s.fit.name for s in scored if _behind(best, s) > HOPELESS and not _reproduces(s, kind)}


@dataclass(frozen=True)
class _Score:
    """`alive` of what was compared could differ at all."""

    fit: Fit
    errors: Mapping[Key, float]
    alive: float
    random: bool

    @property
    def share(self) -> float:
        return self.fit.misses / self.fit.compared


def _score(kind: str, answers: Sequence[Answer], prediction: Prediction, seen: Sums) -> _Score:
    errors, alive = dict[Key, float](), 0.0
    if kind == "rates" or prediction.random:
        misses, compared = _rate_misses(answers, prediction, seen)
        alive = compared
    elif kind == "steps":
        errors, alive = _step_errors(answers, prediction)
        misses, compared = sum(errors.values()), len(errors)
    else:
        errors, alive = _total_errors(answers, prediction)
        misses, compared = sum(errors.values()), sum(answers[i].steps or 0 for i, _ in errors)
    accepted = _accepted(kind, answers, prediction)
    count = max(len(accepted), 1)
    rates = tuple(sum(a >= i for a in accepted) / count for i in range(1, prediction.depth + 1))
    fit = Fit(prediction.name, misses, compared, sum(accepted) / count + 1, rates)
    return _Score(fit, errors, alive, prediction.random)


def _step_errors(answers: Sequence[Answer], prediction: Prediction) -> tuple[dict[Key, float], float]:
    """A prediction cannot exceed the text; nor does it count what lies beyond it."""
    errors, alive = dict[Key, float](), 0
    for i, (answer, at) in enumerate(zip(answers, prediction.at, strict=True)):
        last = last_position(answer)
        for anchor, accepted in told_steps(answer) or ():
            if anchor in at:
                errors[i, anchor] = float(accepted != min(at[anchor], last - anchor))
                alive += accepted > 0 or at[anchor] > 0
    return errors, alive


def _total_errors(answers: Sequence[Answer], prediction: Prediction) -> tuple[dict[Key, float], float]:
    errors, alive = dict[Key, float](), 0
    for i, (answer, at) in enumerate(zip(answers, prediction.at, strict=True)):
        steps = walked(at, answer)
        if answer.steps is None or steps is None or not steps:
            continue
        more = answer.steps - len(steps)
        errors[i, -1] = 0.0 if more == 1 and answer.finish == "stop" else float(abs(more))
        alive += min(answer.steps, len(answer.output_ids) - 1 - min(answer.steps, len(steps)))
    return errors, alive


def _rate_misses(answers: Sequence[Answer], prediction: Prediction, seen: Sums) -> tuple[float, int]:
    accepted = _accepted("totals", answers, prediction)
    if not accepted or not seen.steps:
        return 0.0, 0
    scale = seen.steps / len(accepted)
    if not seen.per_position:
        return abs(seen.accepted - scale * sum(accepted)), max(seen.accepted, round(scale * sum(accepted)), 1)
    wide = max(len(seen.per_position), prediction.depth)
    told = [*seen.per_position, *[0.0] * wide][:wide]
    own = [scale * sum(a >= i for a in accepted) for i in range(1, wide + 1)]
    return sum(abs(a - b) for a, b in zip(told, own, strict=True)), max(seen.accepted, round(sum(own)), 1)


def _accepted(kind: str, answers: Sequence[Answer], prediction: Prediction) -> list[int]:
    """The hypothesis' own walk where it was computed, else its numbers at the anchors that were."""
    walks = [walked(at, answer) for answer, at in zip(answers, prediction.at, strict=True)]
    known = [steps for steps in walks if steps is not None]
    if kind == "steps" and len(known) < len(walks):
        return [a for at in prediction.at for a in at.values()]
    return [a for steps in known for a in steps]


def _leaders(kind: str, scored: Sequence[_Score], by_position: bool) -> list[str]:
    """A random hypothesis leads only if nothing else does, and by rates of positions: one sum is too easily met."""
    good = [s for s in scored if not s.random and _reproduces(s, kind)]
    if not good and by_position:
        good = [s for s in scored if s.random and s.share <= LIMIT["rates"]]
    tied = [s.fit.name for s in good if _tied(good[0], s, kind)]
    return sorted(tied, key=lambda name: name != HEALTHY)


def _reproduces(score: _Score, kind: str) -> bool:
    """Two standard errors above the limit are still allowed: few steps prove little."""
    limit = LIMIT[kind] * score.alive
    return score.fit.misses <= limit + (2 * math.sqrt(limit) if kind != "rates" else 0.0)


def _behind(best: _Score, other: _Score) -> float:
    """Standard errors by which `other` misses more, over what both were compared on."""
    gaps = [other.errors[key] - best.errors[key] for key in best.errors.keys() & other.errors.keys()]
    events = sum(abs(gap) for gap in gaps)
    return sum(gaps) / math.sqrt(events) if events else 0.0


def _tied(best: _Score, other: _Score, kind: str) -> bool:
    if kind == "rates" or best.random:
        return other.share - best.share <= LIMIT["rates"] / 3
    return _behind(best, other) <= 2
