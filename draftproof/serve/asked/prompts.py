"""Prompts as token ids. What is slow runs in threads, and what cannot fit is refused before it is tokenised."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from draftproof.serve.asked.messages import Message, for_template
from draftproof.serve.errors import bad
from draftproof.serve.served import Served


@dataclass(frozen=True)
class Prompt:
    """text: as the template wrote it; "" of a prompt that came as token ids."""

    ids: list[int]
    text: str = ""


async def from_text(served: Served, text: str, *, special: bool) -> Prompt:
    """special: with the tokens that the tokenizer puts around a text, such as a first one."""
    _require_short(served, text)
    return Prompt(await asyncio.to_thread(_encode, served.tokenizer, text, special), text)


def from_ids(served: Served, ids: Sequence[int], param: str = "prompt") -> Prompt:
    if ids and max(ids) >= served.vocab:
        raise bad(f"{param}: token id {max(ids)} is outside the vocabulary of {served.vocab}", param)
    return Prompt(list(ids))


async def from_chat(
    served: Served,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    generation: bool = True,
    special: bool = False,
) -> Prompt:
    """By the tokenizer's chat template. generation: with the header of the answer."""
    template = template_of(served.tokenizer, with_tools=bool(tools))
    _require_known(served.tokenizer, template, kwargs)
    _require_short(served, *(m.content for m in messages if isinstance(m.content, str)))
    chat = for_template(messages, template)
    text = await asyncio.to_thread(_render, served.tokenizer, chat, tools, kwargs, generation)
    return await from_text(served, text, special=special)


def template_of(tokenizer: Any, *, with_tools: bool = False) -> str:
    """ApiError where the model has none."""
    if not tokenizer.chat_template:
        raise bad("the model has no chat template: use /v1/completions, or start the server with --chat-template")
    return str(tokenizer.get_chat_template(tools=[{}] if with_tools else None))


def reads(template: str, name: str) -> bool:
    """Whether a template mentions a variable."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _require_known(tokenizer: Any, template: str, kwargs: Mapping[str, Any]) -> None:
    own = inspect.signature(tokenizer.apply_chat_template).parameters.keys() | {"messages"}
    for name in kwargs:
        if name in own or not name.isidentifier() or not reads(template, name):
            message = f"the chat template reads no {name[:100]!r}"
            raise bad(message, f"chat_template_kwargs.{name[:100]}", "unsupported_parameter")


def _render(
    tokenizer: Any, chat: Sequence[Any], tools: Sequence[Any], kwargs: Mapping[str, Any], generation: bool
) -> str:
    try:
        return str(
            tokenizer.apply_chat_template(
                list(chat), tools=list(tools) or None, tokenize=False, add_generation_prompt=generation, **kwargs
            )
        )
    except Exception as error:  # a template is a program: it raises what it likes about messages it does not like
        raise bad(f"the chat template refuses these messages: {str(error)[:300]}", "messages") from None


def _encode(tokenizer: Any, text: str, special: bool) -> list[int]:
    return list(tokenizer(text, add_special_tokens=special)["input_ids"])


def _require_short(served: Served, *texts: str) -> None:
    size = sum(map(len, texts))
    if size > served.limits.context * served.longest_token:
        raise served.too_long(f"{size} characters")


def require_prompt(served: Served, prompt: Prompt) -> None:
    """At least one token, and room for one more."""
    if not prompt.ids:
        raise bad("the prompt holds no tokens", "prompt")
    served.require_room(len(prompt.ids))
