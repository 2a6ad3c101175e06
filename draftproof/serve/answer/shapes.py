"""The answers' JSON objects as types: OpenAI's fields, vLLM's beside them, and our `draft`. The OpenAPI document shows
them."""

from __future__ import annotations

from typing import Any, Literal, NotRequired

from typing_extensions import TypedDict

from draftproof.serve.answer.choice import DraftDetails, SpeculativeDecoding
from draftproof.serve.answer.logprobs import ChatLogprobs, CompletionLogprobs

Finish = Literal["stop", "length", "tool_calls"]


class CachedTokens(TypedDict):
    cached_tokens: int


class Usage(TypedDict):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: CachedTokens


class RequestMetrics(TypedDict):
    speculative_decoding: SpeculativeDecoding


class CalledFunction(TypedDict):
    name: str
    arguments: str


class ToolCall(TypedDict):
    id: str
    type: Literal["function"]
    function: CalledFunction


class ChatMessage(TypedDict):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning: NotRequired[str | None]
    tool_calls: NotRequired[list[ToolCall]]


class ChatChoice(TypedDict):
    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    token_ids: NotRequired[list[int]]


class ChatCompletion(TypedDict):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: NotRequired[list[int]]
    metrics: NotRequired[RequestMetrics]


class ChunkChoice(TypedDict):
    index: int
    delta: dict[str, Any]
    logprobs: ChatLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str | int | None]
    token_ids: NotRequired[list[int]]
    draft: NotRequired[DraftDetails]


class ChatChunk(TypedDict):
    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: NotRequired[Usage | None]
    prompt_token_ids: NotRequired[list[int]]
    metrics: NotRequired[RequestMetrics]


class TextChoice(TypedDict):
    """Whole, or a chunk of a stream: then finish_reason may be null."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: Finish | None
    stop_reason: NotRequired[str | int | None]
    prompt_token_ids: NotRequired[list[int]]
    token_ids: NotRequired[list[int]]
    draft: NotRequired[DraftDetails]


class TextCompletion(TypedDict):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: NotRequired[Usage | None]
    metrics: NotRequired[RequestMetrics]


class ModelCard(TypedDict):
    id: str
    object: Literal["model"]
    created: int
    owned_by: Literal["draftproof"]
    root: str
    max_model_len: int


class ModelList(TypedDict):
    object: Literal["list"]
    data: list[ModelCard]


class Tokenized(TypedDict):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class Detokenized(TypedDict):
    prompt: str


class Version(TypedDict):
    version: str
