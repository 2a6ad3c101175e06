"""Helpers of the engine tests: decode requests and keep every step, steer a real drafter's proposals, plant faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.batch import Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, SamplingParams, StepResult
from draftproof.models.cache import Slots
from draftproof.models.dflash import DFlashDrafter, DraftDist
from draftproof.models.target import Target
from draftproof.spec.accept import Accepted, walk
from draftproof.spec.tree import Tree
from tests import tiny

PROMPTS = ([5, 9, 11, 20, 33, 40, 7], [8], [12, 60, 4, 4, 31, 17, 50, 44, 23, 9, 10, 38])  # unequal lengths


@dataclass
class Answer:
    """What one request gave."""

    tokens: list[int] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    finish: str | None = None


def requests(
    prompts: Sequence[Sequence[int]] = PROMPTS, max_tokens: int = 16, stop_ids: Sequence[int] = (), **sampling: Any
) -> list[Request]:
    params = SamplingParams(**sampling)
    return [Request(list(p), max_tokens, params, stop_ids) for p in prompts]


def decode(
    target: Target,
    drafter: Drafter | None,
    asked: Sequence[Request],
    *,
    after_prefill: Callable[[Engine], None] | None = None,
) -> list[Answer]:
    """All requests side by side in one engine; `after_prefill` may plant a fault in it once the prompts are in."""
    answers = [Answer() for _ in asked]
    context = max(len(r.prompt_ids) + r.max_tokens for r in asked)
    engine = Engine(target, drafter, slots=len(asked), context=context)
    prefills = 0
    for result in engine.generate(asked):
        answer = answers[result.index]
        answer.tokens += result.tokens
        answer.steps.append(result)
        answer.finish = result.finish
        prefills += result.prefill
        if after_prefill and result.prefill and prefills == len(asked):
            after_prefill(engine)
    return answers


def texts(answers: Sequence[Answer]) -> list[list[int]]:
    return [a.tokens for a in answers]


def knowing(target: Target, asked: Sequence[Request], wrong: float, **settings: Any) -> tiny.KnowingDrafter:
    """A drafter that knows what plain decoding of these requests gives, and errs at the rate `wrong`."""
    plain = texts(decode(target, None, asked))
    known = [list(r.prompt_ids) + t for r, t in zip(asked, plain, strict=True)]
    return tiny.KnowingDrafter(target, known, wrong=wrong, **settings)


class Steered:
    """A DFlash drafter that runs in full, with the proposals of another: partial accepts on a random drafter."""

    def __init__(self, real: DFlashDrafter, guide: tiny.KnowingDrafter) -> None:
        assert guide.depth == real.depth
        self.real, self.guide, self.taps, self.depth = real, guide, real.taps, real.depth

    @property
    def cache(self) -> Any:
        return self.real.cache

    @property
    def stores(self) -> list[Any]:
        return [*self.real.stores, *self.guide.stores]

    def allocate(self, **sizes: int) -> None:
        self.real.allocate(**sizes)
        self.guide.allocate(**sizes)

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        self.real.extend(slots, features, counts, reach)
        self.guide.extend(slots, features, counts, reach)

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        self.real.draft(slots, anchors, reach, width, rescore)  # stages block rows behind the committed ones
        return self.guide.draft(slots, anchors, reach, width, rescore)

    def drop(self, slots: Slots) -> None:
        self.real.drop(slots)
        self.guide.drop(slots)


def one_too_many(tree: Tree, picks: Tensor, stops: Tensor, budget: Tensor) -> Accepted:
    """Planted fault: the acceptance rule, and one more draft than the target chose."""
    taken = walk(tree, picks, stops[..., :0], budget)
    step = torch.arange(tree.nodes, device=picks.device)
    length = (taken.drafts + 1).clamp(max=tree.nodes - 1)[:, None]
    following = torch.cat([tree.token[:, 1:], picks[:, -1:]], dim=1)
    tokens = torch.where(step < length, following, picks)
    route = step.expand_as(picks)
    return Accepted(route, tokens, torch.minimum(length[:, 0] + 1, budget), length[:, 0])


def commits_one_more(engine: Engine) -> None:
    """Planted fault: the cache keeps one row behind what was accepted, while there is one."""
    honest = engine.cache.commit

    def commit(slots: Slots, counts: Tensor, path: Tensor | None = None) -> None:
        honest(slots, torch.where(counts > 0, counts + 1, counts), path)

    engine.cache.commit = commit  # type: ignore[method-assign]
