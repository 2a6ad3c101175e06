"""A chat request -> what the engine is asked, and how its text becomes reasoning, content and tool calls."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from draftproof.errors import UserError
from draftproof.serve import parsers
from draftproof.serve.asked.ask import Asked, MakeGrammar, Manner, ask
from draftproof.serve.asked.prompts import from_chat, reads, require_prompt, template_of
from draftproof.serve.asked.schema import ChatRequest, NamedTool, SchemaFormat, Tool
from draftproof.serve.errors import bad, from_user_error
from draftproof.serve.parsers import Parser
from draftproof.serve.schemas.calls import readable
from draftproof.serve.served import Served


async def prepare(served: Served, sent: ChatRequest) -> Asked:
    """ApiError for what cannot be done."""
    served.require_model(sent.model)
    tools = offered(served, sent)
    schemas = await asyncio.to_thread(schemas_of, tools) if tools else {}
    prompt = await from_chat(served, sent.messages, tools, template_kwargs(served, sent))
    require_prompt(served, prompt)
    thinking = served.parsers.reasoning is not None and parsers.starts_thinking(prompt.text)
    grammar, source = grammar_of(served, sent, tools, thinking)
    manner = Manner(
        parser=parser_of(served, sent, schemas, thinking),
        keep_special=bool(served.parsers.reasoning or (served.parsers.tools and tools)),
        parallel=sent.parallel_tool_calls,
        hide_reasoning=not sent.include_reasoning,
        grammar=grammar,
        grammar_from=source,
        logprobs=(sent.top_logprobs or 0) if sent.logprobs else None,
        most_tokens=sent.max_completion_tokens or sent.max_tokens,
    )
    return await ask(served, sent, [prompt], manner)


def template_kwargs(served: Served, sent: ChatRequest) -> dict[str, Any]:
    """reasoning_effort is the template's own business: it must read it."""
    if sent.reasoning_effort is None:
        return sent.chat_template_kwargs
    if not reads(template_of(served.tokenizer), "reasoning_effort"):
        message = "the model's chat template reads no reasoning_effort; see chat_template_kwargs"
        raise bad(message, "reasoning_effort", "unsupported_parameter")
    return {**sent.chat_template_kwargs, "reasoning_effort": sent.reasoning_effort}


def offered(served: Served, sent: ChatRequest) -> list[dict[str, Any]]:
    """The tools as the template reads them; ApiError where their calls could not be read."""
    choice = choice_of(sent)
    if not sent.tools or choice == "none":
        return [plain(tool) for tool in sent.tools]
    if served.parsers.tools is None:
        raise bad("tools need a server started with --tool-call-parser", "tools")
    if choice == "auto" and not served.parsers.auto_tools:
        message = '"auto" tool choice needs a server started with --enable-auto-tool-choice and --tool-call-parser'
        raise bad(message, "tool_choice")
    if choice == "auto" and any(tool.function.strict_ for tool in sent.tools):
        message = 'strict tools need tool_choice "required" or a named one: a free choice is not held to a schema'
        raise bad(message, "tools")
    return [plain(tool) for tool in sent.tools]


def choice_of(sent: ChatRequest) -> str:
    """auto, none, required, or named."""
    if isinstance(sent.tool_choice, NamedTool):
        return "named"
    return sent.tool_choice or ("auto" if sent.tools else "none")


def plain(tool: Tool) -> dict[str, Any]:
    return tool.model_dump(exclude_unset=True, by_alias=True)


def grammar_of(
    served: Served, sent: ChatRequest, tools: list[dict[str, Any]], thinking: bool
) -> tuple[MakeGrammar | None, str]:
    """How to make the processor that holds the answer to a form, and the field that asked for it."""
    form, choice = sent.response_format, choice_of(sent)
    wanted = form is not None and form.type != "text"
    if wanted and choice != "none":
        message = 'response_format and tools exclude each other: give tool_choice "none", or leave one of them out'
        raise bad(message, "response_format")
    if not wanted and choice not in ("required", "named"):
        return None, ""
    if thinking and served.think_end is None:
        raise bad("the model reasons first, and its tokenizer has no single token that ends it", "response_format")
    if not served.stop_ids:
        raise bad("the model has no token that ends an answer, so none can have a form", "response_format")
    after = served.think_end if thinking else None
    grammars = served.grammars
    if isinstance(form, SchemaFormat):
        asked = form.json_schema
        return partial(grammars.json_schema, asked.schema_ or {}, strict=asked.strict_, after=after), "response_format"
    if wanted:
        return partial(grammars.json_object, after=after), "response_format"
    name = sent.tool_choice.function.name if isinstance(sent.tool_choice, NamedTool) else None
    assert served.parsers.tools  # `offered` made sure
    make = partial(
        grammars.tool_call, tools, served.parsers.tools, name, parallel=sent.parallel_tool_calls, after=after
    )
    return make, "tools"


def parser_of(
    served: Served, sent: ChatRequest, schemas: Mapping[str, Mapping[str, Any]], thinking: bool
) -> Callable[[], Parser]:
    return partial(
        parsers.make,
        served.parsers.reasoning,
        served.parsers.tools if schemas else None,
        thinking=thinking,
        schemas=schemas,
        tool_choice_none=choice_of(sent) == "none",
        new_id=new_call_id,
    )


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Parameters by function, as the parser reads them; ApiError for what is no schema."""
    made = {}
    for at, function in enumerate(tool["function"] for tool in tools):
        try:
            made[function["name"]] = readable(function.get("parameters") or {})
        except UserError as error:
            named = UserError(error.code, f"the parameters of {function['name'][:80]!r}: {error.message}", error.fix)
            raise from_user_error(named, f"tools[{at}].function.parameters") from None
    return made


def new_call_id() -> str:
    return f"call_{secrets.token_hex(12)}"
