"""What is served: everything that the routes need to know, in one value."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from draftproof.serve.answer.logprobs import Tokens
from draftproof.serve.errors import ApiError, ErrorAnswer, bad
from draftproof.serve.parsers.base import THINK_END
from draftproof.serve.worker import Worker

if TYPE_CHECKING:
    from draftproof.serve.grammar import Grammars
    from draftproof.serve.stats.metrics import Metrics

__all__ = ["ErrorAnswer", "Limits", "Parsers", "Served", "generation_defaults"]

DEFAULT_NAME = "default"  # the served model answers to it too
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True)
class Limits:
    """context: tokens of prompt and answer; answer: tokens when a request names no number (None: the rest of the
    context); seconds: for a request, None: no limit; body: bytes; drain: seconds for what runs when the server
    stops."""

    context: int
    answer: int | None = None
    seconds: float | None = None
    body: int = 8 << 20
    drain: float = 30.0


@dataclass(frozen=True)
class Parsers:
    """Names as in `parsers.make`. auto_tools: the model may decide to call (`--enable-auto-tool-choice`)."""

    reasoning: str | None = None
    tools: str | None = None
    auto_tools: bool = False


@dataclass(frozen=True)
class Served:
    """names: the first is the model's id, the others answer too. vocab: rows of the logits. depth: drafts in a row at
    most, 0 without a drafter. defaults: sampling of the model's generation_config.json. about: what /server_info
    tells of the pair.
    """

    tokenizer: Any
    worker: Worker
    names: Sequence[str]
    root: str
    vocab: int
    stop_ids: Sequence[int]
    limits: Limits
    depth: int = 0
    parsers: Parsers = Parsers()
    defaults: Mapping[str, float] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)
    metrics: Metrics | None = None
    spec_metrics: Literal["summary", "detailed"] | None = None  # in every answer
    api_keys: Sequence[str] = ()
    origins: Sequence[str] = ()
    tasks: Sequence[Callable[[], Coroutine[Any, Any, None]]] = ()  # run while the app runs
    created: int = field(default_factory=lambda: int(time.time()))

    @cached_property
    def tokens(self) -> Tokens:
        return Tokens(self.tokenizer)

    @cached_property
    def grammars(self) -> Grammars:
        from draftproof.serve.grammar import Grammars

        return Grammars(self.tokenizer, self.vocab, self.stop_ids)

    @cached_property
    def think_end(self) -> int | None:
        """The token that ends reasoning, if it is one token."""
        ids = self.tokenizer(THINK_END, add_special_tokens=False)["input_ids"]
        return int(ids[0]) if len(ids) == 1 else None

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token, for a quick word on texts that cannot fit; 16 where all are short."""
        return max(16, *map(len, self.tokenizer.get_vocab()))

    def require_model(self, name: str | None) -> None:
        if name is not None and name not in (*self.names, DEFAULT_NAME):
            message = f"the model {name[:200]!r} does not exist: this server has {self.names[0]!r}"
            raise ApiError(404, message, param="model", code="model_not_found")

    def require_room(self, prompt: int) -> None:
        """At least one token of an answer must fit behind `prompt` tokens."""
        if prompt >= self.limits.context:
            raise self.too_long(f"{prompt} tokens")

    def too_long(self, prompt: str) -> ApiError:
        message = f"the context holds {self.limits.context} tokens of prompt and answer; the prompt has {prompt}"
        return bad(message, "prompt", "context_length_exceeded")

    def check(self) -> None:
        if not self.worker.alive:
            raise ApiError(503, "the engine has ended", code="engine_dead")
        if self.worker.draining:
            raise ApiError(503, "the server is stopping", code="draining")


def generation_defaults(config: Any) -> dict[str, float]:
    """The sampling that a generation_config.json asks for; vLLM takes it as the default too."""
    told = {name: getattr(config, name, None) for name in SAMPLING}
    return {name: value for name, value in told.items() if value is not None}
