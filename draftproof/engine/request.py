"""What a user asks for, checked at the border, and what comes back step by step. Nothing here imports torch."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.errors import UserError

MOST_LOGPROBS = 20


@dataclass(frozen=True)
class SamplingParams:
    """temperature 0 is greedy. top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence_penalty 0 and
    frequency_penalty 0 switch a filter off.

    repetition_penalty is transformers' and sees prompt and answer; presence and frequency penalty are OpenAI's and see
    the answer alone: they take that much from a token's logit once, and for every time it occurred. logit_bias is
    added to the logits, by token id.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    choice: int = 0  # which of several answers to the same request
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", self.temperature, ">= 0")
        _check(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _check(0 <= self.top_k < 2**31, "top_k", self.top_k, "in [0, 2^31) (0 switches it off)")
        _check(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _check(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "> 0 (1 switches it off)")
        for name in ("presence_penalty", "frequency_penalty"):
            _check(-2 <= getattr(self, name) <= 2, name, getattr(self, name), "in [-2, 2] (0 switches it off)")
        for token, bias in self.logit_bias.items():
            _check(token >= 0 and math.isfinite(bias), "logit_bias", f"{bias} for token {token}", "a number a token id")
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
    one's own (`spec/processors.py`), asked before bias, penalties, temperature and filters.

    budget: drafted nodes a round at most for this request: "none", "chain" or a number; None: the engine's own.
    logprobs: report the log-probability of every token, with this many of the likeliest in its place; None: none.
    keep_trees: every result of a step brings its draft tree.
    """

    prompt_ids: Sequence[int]
    max_tokens: int
    sampling: SamplingParams = field(default_factory=SamplingParams)
    stop_ids: Sequence[int] = ()
    processors: Sequence[Any] = ()
    budget: str | int | None = None
    logprobs: int | None = None
    keep_trees: bool = False

    def __post_init__(self) -> None:
        _check(self.max_tokens >= 1, "max_tokens", self.max_tokens, ">= 1")
        known = self.budget in (None, "none", "chain") or (isinstance(self.budget, int) and self.budget >= 0)
        _check(known, "budget", self.budget, "none, chain or a number of nodes")
        within = self.logprobs is None or 0 <= self.logprobs <= MOST_LOGPROBS
        _check(within, "logprobs", self.logprobs, f"in [0, {MOST_LOGPROBS}]")
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
class TokenLogprob:
    """Of the model itself, before bias, penalties, temperature and filters; `top`: (token id, logprob), likeliest
    first."""

    logprob: float
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class StepResult:
    """Tokens one step added to request `index`. The first `accepted` of them were drafted, the last is the target's own
    unless a limit cut the step short. nodes: drafted tokens that the target verified. tree: if it was asked for.

    finish: None while running, "stop" (a stop token), "length", or "error": the request failed for the reason `error`,
    and has no tokens in this result.
    """

    index: int
    tokens: list[int]
    accepted: int
    finish: str | None
    nodes: int = 0
    tree: StepTree | None = None
    prefill: bool = False  # the token that the prompt's own forward gave; no draft was made for it
    logprobs: list[TokenLogprob] | None = None  # one a token, if the request asked for them
    cached: int = 0  # with `prefill`: prompt tokens that were not run, since an earlier request had left their rows
    waited: float = 0.0  # with `prefill`: seconds from arrival until the prompt began to run
    error: str | None = None


@dataclass(frozen=True)
class EngineState:
    """running: requests in a slot; waiting: those that have none. usage: share of the K/V memory in use, in [0, 1].

    The rest counts from the engine's beginning: prompt tokens looked up in the prefix cache and found there, prompt
    tokens run, requests that lost their slot for a while.
    """

    running: int = 0
    waiting: int = 0
    usage: float = 0.0
    queries: int = 0
    hits: int = 0
    prompt_tokens: int = 0
    preemptions: int = 0


def _check(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise UserError("bad-option", f"{name} is {value}, it must be {rule}", f"give {name} {rule}")
