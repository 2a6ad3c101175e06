"""From the parts of a run to the JSON of an answer: whole, or chunk by chunk."""

from __future__ import annotations

import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from draftproof.serve.answer.choice import Part, spec_metrics
from draftproof.serve.answer.logprobs import chat_logprobs, completion_logprobs
from draftproof.serve.answer.shapes import ChatMessage, RequestMetrics, Usage
from draftproof.serve.asked.ask import Asked
from draftproof.serve.asked.schema import Sampled, StreamOptions
from draftproof.serve.parsers import CallDelta, collect
from draftproof.serve.served import Served

Json = Mapping[str, Any]


@dataclass
class Answer(ABC):
    """One answer to one request; `asked.choices` count while the run goes on."""

    served: Served
    sent: Sampled
    asked: Asked
    created: int = field(default_factory=lambda: int(time.time()))

    whole_kind = chunk_kind = prefix = ""

    def __post_init__(self) -> None:
        self.id = f"{self.prefix}-{secrets.token_hex(12)}"
        self.tokens = self.served.tokens
        self.options = self.sent.stream_options or StreamOptions()
        self._opened: set[int] = set()

    # ---- whole

    def whole(self, parts: Sequence[Part]) -> Json:
        """parts: all of them, in the order in which they came."""
        by_choice: list[list[Part]] = [[] for _ in self.asked.choices]
        for part in parts:
            by_choice[part.choice].append(part)
        choices = [self.finished(number, own) for number, own in enumerate(by_choice)]
        return {**self.head(self.whole_kind, choices), "usage": self.usage(), **self.shared(), **self.metrics()}

    @abstractmethod
    def finished(self, number: int, parts: Sequence[Part]) -> Json:
        """One choice of a whole answer."""

    def shared(self) -> Json:
        """What stands once in an answer, and in the first chunk of every choice."""
        return {}

    # ---- in chunks

    def chunks(self, part: Part) -> Iterator[Json]:
        """None at all for a step that adds nothing to see."""
        if part.choice not in self._opened:
            self._opened.add(part.choice)
            yield from self.opening(part.choice)
        if part.delta or part.finish or part.logprobs or part.draft or self.sent.return_token_ids:
            yield self.chunk([self.addition(part)])

    def opening(self, number: int) -> Iterator[Json]:
        return iter(())

    @abstractmethod
    def addition(self, part: Part) -> Json:
        """The choice of a chunk."""

    def chunk(self, choices: Sequence[Json]) -> Json:
        made = self.head(self.chunk_kind, choices)
        if self.options.continuous_usage_stats:
            return {**made, "usage": self.usage()}
        return {**made, "usage": None} if self.options.include_usage else made

    def closing(self) -> Iterator[Json]:
        if self.options.include_usage:
            yield {**self.head(self.chunk_kind, []), "usage": self.usage(), **self.metrics()}

    # ---- both

    def head(self, kind: str, choices: Sequence[Json]) -> Json:
        name = self.served.names[0]
        return {"id": self.id, "object": kind, "created": self.created, "model": name, "choices": choices}

    def usage(self) -> Usage:
        """A prompt counts once, whatever the number of its choices; so do its cached tokens."""
        prompt = sum(len(p.ids) for p in self.asked.prompts)
        answer = sum(choice.tokens for choice in self.asked.choices)
        cached = sum(choice.cached for choice in self.asked.choices[:: self.sent.n])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": answer,
            "total_tokens": prompt + answer,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def metrics(self) -> dict[str, RequestMetrics]:
        level = self.sent.spec_decode_metrics or self.served.spec_metrics
        if not level or not self.served.depth or len(self.asked.choices) > 1:
            return {}
        told = spec_metrics(self.asked.choices[0].spec, self.served.depth, detailed=level == "detailed")
        return {"metrics": {"speculative_decoding": told}}

    def extras(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Fields that stand only where they were asked for, or where the choice ends."""
        made: dict[str, Any] = {}
        if parts[-1].finish:
            made["stop_reason"] = parts[-1].stopped_by
        if self.sent.return_token_ids:
            made["token_ids"] = [token for part in parts for token in part.tokens]
        if parts[-1].draft is not None:
            made["draft"] = parts[-1].draft
        return made


class ChatAnswer(Answer):
    whole_kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def finished(self, number: int, parts: Sequence[Part]) -> Json:
        told = collect(part.delta for part in parts)
        message: ChatMessage = {"role": "assistant", "content": told.content, "refusal": None}
        if self.served.parsers.reasoning:
            message["reasoning"] = told.reasoning
        if told.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in told.calls
            ]
        return {
            "index": number,
            "message": message,
            "logprobs": self.logprobs(parts),
            "finish_reason": parts[-1].finish,
            **self.extras(parts),
        }

    def shared(self) -> Json:
        return {"prompt_token_ids": self.asked.prompts[0].ids} if self.sent.return_token_ids else {}

    def opening(self, number: int) -> Iterator[Json]:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": number, "delta": delta, "logprobs": None, "finish_reason": None}
        yield {**self.chunk([choice]), **self.shared()}

    def addition(self, part: Part) -> Json:
        delta: dict[str, Any] = {}
        if part.delta.reasoning:
            delta["reasoning"] = part.delta.reasoning
        if part.delta.content:
            delta["content"] = part.delta.content
        if part.delta.calls:
            delta["tool_calls"] = [call_delta(call) for call in part.delta.calls]
        logprobs = self.logprobs([part])
        choice = {"index": part.choice, "delta": delta, "logprobs": logprobs, "finish_reason": part.finish}
        return choice | self.extras([part])

    def logprobs(self, parts: Sequence[Part]) -> Json | None:
        if all(part.logprobs is None for part in parts):
            return None
        ids = [token for part in parts for token in part.tokens]
        return chat_logprobs(self.tokens, ids, [told for part in parts for told in part.logprobs or ()])


class TextAnswer(Answer):
    whole_kind = chunk_kind = "text_completion"
    prefix = "cmpl"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._offsets = [0] * len(self.asked.choices)  # characters of the tokens that were reported

    def finished(self, number: int, parts: Sequence[Part]) -> Json:
        return self.choice(number, parts, prompt=True)

    def addition(self, part: Part) -> Json:
        first = part.tokens and self.asked.choices[part.choice].tokens == len(part.tokens)
        return self.choice(part.choice, [part], prompt=bool(first))

    def choice(self, number: int, parts: Sequence[Part], *, prompt: bool) -> Json:
        """prompt: the token ids of the prompt, too, if token ids were asked for."""
        made = {
            "index": number,
            "text": "".join(part.delta.content for part in parts),
            "logprobs": self.logprobs(number, parts),
            "finish_reason": parts[-1].finish,
            **self.extras(parts),
        }
        if prompt and self.sent.return_token_ids:
            made["prompt_token_ids"] = self.asked.prompts[number // self.sent.n].ids
        return made

    def logprobs(self, number: int, parts: Sequence[Part]) -> Json | None:
        if all(part.logprobs is None for part in parts):
            return None
        ids = [token for part in parts for token in part.tokens]
        told = [logprob for part in parts for logprob in part.logprobs or ()]
        made = completion_logprobs(self.tokens, ids, told, self._offsets[number])
        self._offsets[number] += sum(len(self.tokens.text(token)) for token in ids)
        return made


def call_delta(call: CallDelta) -> dict[str, Any]:
    """The first of a call names it."""
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}
