"""A chat's messages: as OpenAI's clients send them, and as chat templates read them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from draftproof.serve.asked.fields import FIRST, Strict

NOT_TEXT = ("image_url", "input_audio", "file", "video_url", "audio_url", "refusal", "image", "video")


class Said(Strict):
    """Clients send answers back as they got them, with a null for every field that was empty."""

    refused: ClassVar[Mapping[str, str]] = {
        "audio": "this server reads text",
        "refusal": "send it as content",
        "function_call": "send tool_calls",
        "tool_calls": "only the assistant calls",
        "tool_call_id": "only a tool's message has one",
        "reasoning": "only the assistant reasons",
        "reasoning_content": "only the assistant reasons",
        "annotations": "only the assistant's messages have some",
    }


class Part(Strict):
    type: Literal["text"]
    text: str

    @model_validator(mode="before")
    @classmethod
    def _refuse_media(cls, sent: Any) -> Any:
        if isinstance(sent, dict) and sent.get("type") in NOT_TEXT:
            raise ValueError(f"content of type {sent['type']} is not supported: this server reads text")
        return sent


Content = str | Annotated[list[Part], FIRST]


class CalledFunction(Strict):
    name: str
    arguments: str = ""

    @field_validator("arguments")
    @classmethod
    def _require_object(cls, text: str) -> str:
        try:
            value = json.loads(text) if text.strip() else {}
        except (ValueError, RecursionError):
            raise ValueError("arguments of an earlier tool call are no JSON text") from None
        if not isinstance(value, dict):
            raise ValueError("arguments of an earlier tool call are no JSON object")
        return text


class ToolCall(Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    index: int | None = None  # left over from a stream's deltas
    function: CalledFunction


class Instruction(Said):
    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class User(Said):
    role: Literal["user"]
    content: Content
    name: str | None = None


class Assistant(Said):
    """`reasoning` and `reasoning_content` are two names for one thing."""

    role: Literal["assistant"]
    content: Content | None = None
    name: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCall], FIRST] = Field([])
    annotations: list[Any] = Field([], max_length=0)  # OpenAI's own answers hold an empty list

    @model_validator(mode="after")
    def _require_something(self) -> Assistant:
        if self.content is None and not self.tool_calls and not (self.reasoning or self.reasoning_content):
            raise ValueError("an assistant's message needs content or tool_calls")
        return self


class ToolResult(Said):
    role: Literal["tool"]
    content: Content
    tool_call_id: str | None = None
    name: str | None = None


Message = Annotated[Instruction | User | Assistant | ToolResult, Field(discriminator="role")]


def for_template(messages: Sequence[Message], template: str) -> list[dict[str, Any]]:
    """Content becomes one string (parts on lines of their own, as in vLLM), arguments an object, and the developer a
    system message where the template knows no developer."""
    return [_plain(message, "developer" in template) for message in messages]


def _plain(message: Message, developer: bool) -> dict[str, Any]:
    made: dict[str, Any] = {"role": message.role, "content": _text(message.content)}
    if message.role == "developer" and not developer:
        made["role"] = "system"
    if message.name is not None:
        made["name"] = message.name
    if isinstance(message, ToolResult) and message.tool_call_id is not None:
        made["tool_call_id"] = message.tool_call_id
    if isinstance(message, Assistant):
        if reasoning := message.reasoning or message.reasoning_content:
            made["reasoning_content"] = reasoning
        if message.tool_calls:
            made["tool_calls"] = [_call(call) for call in message.tool_calls]
    return made


def _text(content: Content | None) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(part.text for part in content)


def _call(call: ToolCall) -> dict[str, Any]:
    arguments = json.loads(call.function.arguments) if call.function.arguments.strip() else {}
    made = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    return made if call.id is None else {"id": call.id} | made
