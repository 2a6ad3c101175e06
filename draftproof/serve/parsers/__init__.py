"""From generated text to reasoning, content and tool calls, as it arrives. One file a family of models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from draftproof.errors import UserError
from draftproof.serve.parsers.base import (
    THINK_END,
    Call,
    CallDelta,
    Delta,
    Message,
    Parser,
    Plain,
    Reasoner,
    collect,
)
from draftproof.serve.parsers.hermes import Hermes
from draftproof.serve.parsers.qwen3 import Qwen3Reasoning, starts_thinking
from draftproof.serve.parsers.qwen3_coder import Qwen3Coder

REASONING = ("qwen3",)
TOOLS = ("qwen3_coder", "hermes")

__all__ = [
    "REASONING",
    "TOOLS",
    "Call",
    "CallDelta",
    "Delta",
    "Message",
    "Parser",
    "collect",
    "make",
    "starts_thinking",
]


def make(
    reasoning: str | None,
    tools: str | None,
    *,
    thinking: bool,
    schemas: Mapping[str, Mapping[str, Any]] | None,
    tool_choice_none: bool = False,
    new_id: Callable[[], str],
) -> Parser:
    """The parser of one answer. UserError bad-option for an unknown name.

    thinking: the generation starts inside reasoning; means nothing without a reasoning parser. schemas: JSON schema of
    the parameters by function name. tool_choice_none: calls are parsed, and left out of the message.
    """
    _known("reasoning parser", reasoning, REASONING)
    _known("tool parser", tools, TOOLS)
    drop = (THINK_END,) if reasoning else ()  # a second one, after the reasoning
    ids = None if tool_choice_none else new_id
    rest: Parser
    if tools == "qwen3_coder":
        rest = Qwen3Coder(schemas, ids, drop=drop)
    elif tools == "hermes":
        rest = Hermes(ids, drop=drop)
    else:
        rest = Plain(drop)
    return _Chain(Qwen3Reasoning(thinking=thinking, tools=tools is not None), rest) if reasoning else rest


class _Chain:
    """Text that is no longer reasoning goes on to the parser of content and calls."""

    def __init__(self, reasoner: Reasoner, rest: Parser) -> None:
        self._reasoner, self._rest = reasoner, rest

    def feed(self, text: str) -> Delta:
        reasoning, text = self._reasoner.feed(text)
        delta = self._rest.feed(text)
        return Delta(reasoning, delta.content, delta.calls)

    def finish(self) -> Delta:
        delta = self._rest.finish()
        return Delta(self._reasoner.finish(), delta.content, delta.calls)


def _known(what: str, name: str | None, names: tuple[str, ...]) -> None:
    if name is not None and name not in names:
        raise UserError("bad-option", f"there is no {what} {name[:40]!r}", f"use one of: {', '.join(names)}")
