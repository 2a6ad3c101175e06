"""What a user asks for, checked at the border, and what comes back step by step. Nothing here imports torch."""

from __future__ import annotations

import math
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import UserError


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. top_k 0, top_p 1, min_p 0 and repetition_penalty 1 switch a filter off."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    choice: int = 0  # which of several answers to the same request

    def __post_init__(self) -> None:
        _check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "in [0, 2^31) (0 switches it off)")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _check(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "> 0 (1 switches it off)")
        if self.seed is not None:
            _check(-(2**63) <= self.seed < 2**63, "seed", self.seed, "a 64-bit integer")

    def seeded(self) -> SamplingParams:
        """The same settings with a fresh seed where none was given, so that it can be reported and repeated."""
        if self.seed is not None:
            return self
        return SamplingParams(**{**self.__dict__, "seed": secrets.randbits(48)})


@dataclass(frozen=True)
class Request:
    """prompt_ids as the model sees them; stop_ids end the text and are part of it. processors: logits processors of
    one's own (`spec/processors.py`), asked before penalty, temperature and filters."""

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Sequence[int] = ()
    processors: Sequence[Any] = ()

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        if not self.prompt_ids:
            raise UserError("prompt-empty", "the prompt holds no tokens", "give at least one word")


@dataclass(frozen=True)
class StepTree:
    """The tree that one step verified: token, parent (-1 for the root), depth and drafter's log-weight of each node,
    the root first; `path`: the accepted nodes, the root included."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    logw: list[float]
    path: list[int]


@dataclass(frozen=True)
class StepResult:
    """Tokens one step added to request `index`. The first `accepted` of them were drafted, the last is the target's own
    unless a limit cut the step short. finish: None while running, "stop" (a stop token) or "length". nodes: drafted
    tokens that the target verified. tree: if the engine was asked to keep it.
    """

    index: int
    tokens: list[int]
    accepted: int
    finish: str | None
    nodes: int = 0
    tree: StepTree | None = None
    prefill: bool = False  # the token that the prompt's own forward gave; no draft was made for it


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise UserError("bad-option", f"{name} is {value}, it must be {rule}", f"give {name} {rule}")
