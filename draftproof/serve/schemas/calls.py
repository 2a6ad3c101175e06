"""Grammars of tool calls: one file's worth for the forms that `parsers/` reads.

A function takes what its schema declares: other arguments are in the grammar only where `additionalProperties` of a
JSON form says so. The Qwen3 Coder form has declared parameters only, since the parser reads others as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from draftproof.serve.parsers.base import TOOL, TOOL_END
from draftproof.serve.parsers.qwen3_coder import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, types_of
from draftproof.serve.schemas.checks import check
from draftproof.serve.schemas.ebnf import TAGGED_JSON, TAGGED_TEXT, one_of, quote, refuse
from draftproof.serve.schemas.keywords import Schema, fields, kinds_of, values
from draftproof.serve.schemas.references import followed
from draftproof.serve.schemas.rules import Rules
from draftproof.serve.schemas.writer import Writer, content_of

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[^<>\s\x00-\x1f\x7f]{1,200}")  # a parameter's name between `<parameter=` and `>`
FREE_TEXT = f'TagDispatch(loop_after_dispatch=false, excludes=("{PARAMETER_END}", "{PARAMETER}", "{FUNCTION_END}"))'
NO_PARAMETERS: Schema = {"type": "object", "properties": {}}


def calls(tools: Sequence[Mapping[str, Any]], parser: str, name: str | None, *, parallel: bool) -> tuple[Rules, str]:
    """One call, or with `parallel` one or more, of the function `name` or (None) of any; -> the rules, and the root.
    UserError bad-schema."""
    functions = [tool["function"] for tool in tools if name in (None, tool["function"]["name"])]
    if not functions:
        raise refuse(f"no tool is called {str(name)[:80]!r}", "name one of the tools")
    rules = Rules(TAGGED_JSON) if parser == "qwen3_coder" else Rules()
    write = _xml if parser == "qwen3_coder" else _json
    written = []
    for function in functions:
        if not NAME.fullmatch(function["name"]):
            raise refuse(f"the function name {function['name'][:80]!r}", "use letters, digits, _ . and -, at most 64")
        written.append(write(function["name"], _parameters(function), rules))
    call = rules.name(one_of(written))
    return rules, f'{call} ("\\n" {call})*' if parallel else call


def readable(root: Schema) -> Schema:
    """Parameters as the Qwen3 Coder parser needs them to know the types: references followed, constants as `enum`."""
    schema = followed(root, root)
    properties = {name: _typed(root, sub) for name, sub in schema.get("properties", {}).items()}
    return {**root, **schema, "properties": properties} if properties else schema


def _typed(root: Schema, schema: Any) -> Any:
    schema = followed(root, schema)
    if not isinstance(schema, Mapping):
        return schema
    for word in ("anyOf", "oneOf", "allOf"):
        if word in schema:
            return {**schema, word: [_typed(root, sub) for sub in schema[word]]}
    if "const" in schema:
        schema = {"enum": [schema["const"]], **{k: v for k, v in schema.items() if k != "const"}}
    return {**schema, "type": kinds_of(schema)} if "type" not in schema and kinds_of(schema) else schema


def _parameters(function: Mapping[str, Any]) -> Schema:
    root: Schema = function.get("parameters") or NO_PARAMETERS
    check(root)
    schema = followed(root, root)
    if kinds_of(schema) not in (["object"], []) or {"anyOf", "oneOf", "allOf", "enum", "const"} & schema.keys():
        raise refuse(f"the parameters of {function['name'][:80]!r} must be of type object", 'give "type": "object"')
    return root


def _json(name: str, parameters: Schema, rules: Rules) -> str:
    """Hermes: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    empty = not fields(followed(parameters, parameters))
    arguments = "object" if empty else Writer(parameters, rules).write(parameters)
    head, tail = f'{TOOL}\n{{"name": "{name}", "arguments": ', f"}}\n{TOOL_END}"
    return f"{quote(head)} {arguments} {quote(tail)}"


def _xml(name: str, parameters: Schema, rules: Rules) -> str:
    """Qwen3 Coder: every parameter in tags of its own, in the order of the schema."""
    schema = readable(parameters)
    if extra := set(schema.get("required", [])) - set(schema.get("properties", {})):
        raise refuse(f"{sorted(extra)[0]!r} is required and no declared parameter of {name!r}", "declare it")
    rules.once("text", FREE_TEXT)
    parts, writer = [], Writer(parameters, rules)
    for key, sub in schema.get("properties", {}).items():
        if not KEY.fullmatch(key):
            raise refuse(f"the parameter name {key[:80]!r} cannot stand in a tag", "rename it")
        value = _value(key, sub, writer)
        one = f"{quote(f'{PARAMETER}{key}>' + chr(10))} {value} {quote(chr(10) + PARAMETER_END + chr(10))}"
        parts.append(one if key in schema.get("required", []) else f"({one})?")
    head, tail = f"{TOOL}\n{FUNCTION}{name}>\n", f"{FUNCTION_END}\n{TOOL_END}"
    return " ".join([quote(head), *parts, quote(tail)])


def _value(key: str, schema: Any, writer: Writer) -> str:
    """What the parser takes for a string stands as it is, everything else as JSON, in which `<` is an escape."""
    types = types_of(schema)
    if types == {"string"}:
        return writer.rules.name(_raw(key, schema, writer.rules))
    if types == {"string", "null"} and _loose(schema):
        return "text"
    return writer.write(schema)


def _loose(schema: Schema) -> bool:
    """Is every alternative null, or a string without any rule?"""
    options = [o for word in ("anyOf", "oneOf", "allOf") for o in schema.get(word, [])]
    return all(_loose(o) for o in options) if options else not fields(schema) - {"type"}


def _raw(key: str, schema: Any, rules: Rules) -> str:
    if not isinstance(schema, Mapping) or not fields(schema):
        return "text"
    options = [o for word in ("anyOf", "oneOf", "allOf") for o in schema.get(word, [])]
    if options:
        return one_of([_raw(key, o, rules) for o in options])
    if "enum" not in schema:
        return content_of(schema, TAGGED_TEXT, rules) or "text"
    for value in values(schema):
        if not isinstance(value, str) or "<" in value or not all(c in "\t\n" or c >= " " for c in value):
            raise refuse(f"the value {str(value)[:60]!r} of parameter {key!r} cannot stand in a tag", "change it")
    return one_of([quote(value) for value in values(schema)])
