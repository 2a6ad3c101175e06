"""Grammars of tool calls: one file's worth for the forms that `parsers/` reads.

A function takes what its schema declares: other arguments are in the grammar only where `additionalProperties` of a
JSON form says so. The Qwen3 Coder form has declared parameters only, since the parser reads others as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from draftproof.errors import UserError
from draftproof.serve.parsers.base import TOOL, TOOL_END
from draftproof.serve.parsers.qwen3_coder import FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END, types_of
from draftproof.serve.schemas.checks import check
from draftproof.serve.schemas.ebnf import TAGGED_JSON, TAGGED_TEXT, one_of, quote, refuse
from draftproof.serve.schemas.keywords import ALONE, OPTIONS, Schema, fields, kinds_of, values
from draftproof.serve.schemas.references import followed, resolve
from draftproof.serve.schemas.rules import Rules
from draftproof.serve.schemas.writer import Writer, content_of

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
KEY = re.compile(r"[^<>\s\x00-\x1f\x7f]{1,200}")  # a parameter's name between `<parameter=` and `>`
FREE_TEXT = f'TagDispatch(loop_after_dispatch=false, excludes=("{PARAMETER_END}", "{PARAMETER}", "{FUNCTION_END}"))'
MOST_LOOKED = 4096  # schemas that the properties of one function lead to, each counted once for every property
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
    """Parameters as the Qwen3 Coder parser needs them: the types of each, whether or not a grammar could enforce them.
    UserError bad-schema for what is no schema."""
    try:
        schema = followed(root, root)
    except UserError:  # the reference leads nowhere
        schema = root
    properties = schema.get("properties") if isinstance(schema, Mapping) else 0
    if properties is None:  # absent, or how some clients write an empty one
        return {}
    if not isinstance(properties, Mapping):
        raise refuse("'properties' must be an object", "mend it")
    reach = Reach(root)
    return {"properties": {name: {"type": sorted(reach.types(sub, name))} for name, sub in properties.items()}}


class Reach:
    """What the subschemas of one root lead to by references and alternatives. Each schema is looked at once for every
    subschema: where several references lead to one, there are exponentially many ways to it."""

    def __init__(self, root: Schema) -> None:
        self._root = root
        self._all: dict[int, list[Any]] = {}  # a schema's id -> all it leads to
        self._types: dict[int, set[str]] = {}  # and what it names itself
        self._looked = 0

    def types(self, schema: Any, name: str) -> set[str]:
        """The JSON types that the property `name` allows, as the parser names them."""
        return set[str]().union(*map(self._own, self.all(schema, name))) or {"string"}

    def leaves(self, schema: Any, name: str) -> list[Any]:
        """The alternatives that have no alternatives."""
        return [s for s in self.all(schema, name) if not isinstance(s, Mapping) or s.keys().isdisjoint(ALONE)]

    def all(self, schema: Any, name: str) -> list[Any]:
        """The schema of the property `name` and all that it leads to, in their order. UserError bad-schema."""
        left, seen = [(f"properties.{name[:80]}", schema)], dict[int, Any]()
        while left and id(schema) not in self._all:
            where, one = left.pop()
            if id(one) not in seen:
                seen[id(one)] = one
                left += reversed(self._inside(where, one))
        return self._all.setdefault(id(schema), list(seen.values()))

    def _inside(self, where: str, schema: Any) -> list[tuple[str, Any]]:
        if not isinstance(schema, (bool, Mapping)):
            raise refuse(f"{where} must be an object or true, it is {str(schema)[:40]!r}", "mend it")
        lists = {} if isinstance(schema, bool) else {word: schema[word] for word in OPTIONS if word in schema}
        for word, given in lists.items():
            if not isinstance(given, list):
                raise refuse(f"{where}.{word} must be a list, it is {str(given)[:40]!r}", "mend it")
        self._looked += max(1, sum(map(len, lists.values())))
        if self._looked > MOST_LOOKED:
            raise refuse(f"the properties have more than {MOST_LOOKED:,} alternatives", "make them fewer")
        inside = [(f"{where}.{word}[{at}]", sub) for word, given in lists.items() for at, sub in enumerate(given)]
        ref = None if isinstance(schema, bool) else schema.get("$ref")
        with suppress(UserError):  # a reference that leads nowhere says nothing
            inside += [(ref[:80], resolve(self._root, ref))] if isinstance(ref, str) else []
        return inside

    def _own(self, schema: Any) -> set[str]:
        if id(schema) not in self._types:
            self._types[id(schema)] = _named(schema)
        return self._types[id(schema)]


def _named(schema: Any) -> set[str]:
    """What a schema says of the type, its alternatives aside; a text where it says nothing and has none."""
    if isinstance(schema, bool):
        return {"string"}
    said = {"enum": [schema["const"]]} if "const" in schema else {}
    said |= {"type": kinds_of(schema)} if "type" not in schema else {}
    said |= {word: schema[word] for word in ("type", "enum") if schema.get(word)}
    return set() if not any(said.values()) and not schema.keys().isdisjoint(ALONE) else types_of(said)


def _parameters(function: Mapping[str, Any]) -> Schema:
    root: Schema = function.get("parameters") or NO_PARAMETERS
    check(root)
    schema = followed(root, root)
    plain = isinstance(schema, Mapping) and kinds_of(schema) in (["object"], [])
    if not plain or {*OPTIONS, "enum", "const"} & schema.keys():
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
    schema, reach = followed(parameters, parameters), Reach(parameters)
    if extra := set(schema.get("required", [])) - set(schema.get("properties", {})):
        raise refuse(f"{sorted(extra)[0]!r} is required and no declared parameter of {name!r}", "declare it")
    rules.once("text", FREE_TEXT)
    parts, writer = [], Writer(parameters, rules)
    for key, sub in schema.get("properties", {}).items():
        if not KEY.fullmatch(key):
            raise refuse(f"the parameter name {key[:80]!r} cannot stand in a tag", "rename it")
        value = _value(key, sub, reach, writer)
        one = f"{quote(f'{PARAMETER}{key}>' + chr(10))} {value} {quote(chr(10) + PARAMETER_END + chr(10))}"
        parts.append(one if key in schema.get("required", []) else f"({one})?")
    head, tail = f"{TOOL}\n{FUNCTION}{name}>\n", f"{FUNCTION_END}\n{TOOL_END}"
    return " ".join([quote(head), *parts, quote(tail)])


def _value(key: str, schema: Any, reach: Reach, writer: Writer) -> str:
    """What the parser takes for a string stands as it is, everything else as JSON, in which `<` is an escape."""
    types, leaves = reach.types(schema, key), reach.leaves(schema, key)
    if types == {"string"}:
        return writer.rules.name(one_of([_raw(key, leaf, writer.rules) for leaf in leaves]))
    if types == {"string", "null"} and all(isinstance(s, bool) or not fields(s) - {"type"} for s in leaves):
        return "text"  # each is null, or a string without any rule
    return writer.write(schema)


def _raw(key: str, schema: Any, rules: Rules) -> str:
    """The rule of one leaf."""
    if not isinstance(schema, Mapping) or not fields(schema):
        return "text"
    if "enum" not in schema and "const" not in schema:
        return content_of(schema, TAGGED_TEXT, rules) or "text"
    for value in values(schema):
        if not isinstance(value, str) or "<" in value or not all(c in "\t\n" or c >= " " for c in value):
            raise refuse(f"the value {str(value)[:60]!r} of parameter {key!r} cannot stand in a tag", "change it")
    return one_of([quote(value) for value in values(schema)])
