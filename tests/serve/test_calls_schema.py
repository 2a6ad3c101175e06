"""Schemas that are made to cost time: what is done grows as they do, wrong shapes are refused where they are, and forms
that are compiled keep nothing else from its thread."""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from draftproof.errors import UserError
from draftproof.serve.asked import ask as asking
from draftproof.serve.asked import chat
from draftproof.serve.asked.body import parse
from draftproof.serve.asked.prompts import from_text
from draftproof.serve.asked.schema import ChatRequest
from draftproof.serve.errors import ApiError
from draftproof.serve.grammar import Grammars
from draftproof.serve.parsers.qwen3_coder import types_of
from draftproof.serve.schemas import writer
from draftproof.serve.schemas.calls import calls, readable
from draftproof.serve.schemas.rules import MOST_KEY_STATES, MOST_RULES, Rules
from draftproof.serve.schemas.writer import Writer
from draftproof.serve.served import Parsers, Served
from tests.serve.made import served, user
from tests.serve.test_grammar import grammars, text_of, valid, write

NEW = {"type": "object", "properties": {"new": {"type": "null"}}}
MOST_CALLS = 400_000  # of Python functions; a schema of 64 KB has some thousand parts


def counted(act: Callable[[], Any], most: int = MOST_CALLS) -> Any:
    """What is called, but not with more calls than that: their number does not depend on the machine."""
    made = 0

    def count(_: Any, event: str, __: Any) -> None:
        nonlocal made
        made += event == "call"
        if made > most:
            sys.setprofile(None)
            raise AssertionError(f"more than {most:,} calls")

    sys.setprofile(count)
    try:
        return act()
    finally:
        sys.setprofile(None)


def nested(depth: int, around: Callable[[Any], Any]) -> Any:
    made: Any = {"type": "string"}
    for _ in range(depth):
        made = around(made)
    return made


def ladder(levels: int, last: Any) -> dict[str, Any]:
    """Definitions x0, x1, ... in which every level leads to the next one twice."""
    steps = {f"x{i}": {"anyOf": [{"$ref": f"#/$defs/x{i + 1}"}] * 2} for i in range(levels)}
    return {**steps, f"x{levels}": last}


def spellings() -> list[str]:
    """Different references to one definition."""
    return ["#/$defs/" + "".join(letters) for letters in itertools.product(("a", "%61"), repeat=7)]


def chain() -> dict[str, Any]:
    """Every reference ends only once the next one does, and each is a long list."""
    start: list[dict[str, Any]] = [{}] * 2000
    return {
        f"d{i}": {"type": "array", "minItems": 2001, "prefixItems": [*start, {"$ref": f"#/$defs/d{i + 1}"}]}
        for i in range(6)
    } | {f"d{i}": {"type": "array", "minItems": 1, "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(6, 200)}


TAGS = {"enum": [*range(4500)]}
COSTLY: dict[str, dict[str, Any]] = {
    "arrays in arrays": nested(60, lambda s: {"type": "array", "items": s}),
    "lists in lists": nested(28, lambda s: {"type": "array", "prefixItems": [s], "minItems": 1}),
    "undeclared in undeclared": nested(
        30, lambda s: {"type": "object", "required": ["a", "b"], "additionalProperties": s}
    ),
    "one reference in many spellings": {
        "type": "array",
        "prefixItems": [{"$ref": ref} for ref in spellings()],
        "$defs": {"a" * 7: {"type": "array", "prefixItems": [{"type": "null"}] * 1500, "maxItems": 0}},
    },
    "a chain of references": {"$ref": "#/$defs/d0", "$defs": chain() | {"d200": {"type": "null"}}},
    "a ladder of references": {"$ref": "#/$defs/x0", "$defs": ladder(45, {"type": "null"})},
}


@pytest.mark.parametrize("case", COSTLY)
def test_writing_rules_costs_what_the_schema_is_long(case: str) -> None:
    counted(lambda: Writer(COSTLY[case], Rules()).write(COSTLY[case]))


def test_alternatives_are_told_apart_by_few_values() -> None:
    one = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/one"} for i in range(100)}}
    other = {"type": "object", "properties": {f"p{i}": {"$ref": "#/$defs/other"} for i in range(100)}}
    both = [{**o, "required": [*o["properties"]]} for o in (one, other)]
    schema = {"oneOf": both, "$defs": {"one": TAGS, "other": {"enum": [-1, *range(4499, 0, -1)]}}}
    with pytest.raises(UserError, match="overlap"):
        counted(lambda: Writer(schema, Rules()), 50_000)


def test_rules_end_where_they_are_too_long() -> None:
    refs = [{"$ref": ref} for ref in spellings()]
    schema = {"type": "array", "prefixItems": refs, "$defs": {"a" * 7: {"enum": ["b" * 50_000]}}}
    rules = Rules()
    with pytest.raises(UserError, match="more than"):
        Writer(schema, rules).write(schema)
    assert len(rules.grammar("any")) < MOST_RULES + 10_000


def test_undeclared_keys_cost_a_bounded_number_of_states() -> None:
    names = [f"{i:03}{'x' * 40}" for i in range(200)]
    schema = {"type": "object", "properties": {n: {} for n in names}, "additionalProperties": {"type": "null"}}
    rules = Rules()
    Writer(schema, rules).write(schema)
    assert rules.key_states <= MOST_KEY_STATES


def test_undeclared_keys_of_a_bounded_grammar_are_none_of_the_declared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "MOST_KEY_STATES", 2)
    declared = {name: {"type": "null"} for name in ("a", "ab", "b c", "")}
    schema = {"type": "object", "properties": declared, "additionalProperties": {"type": "boolean"}}
    texts = [text_of(write(grammars().json_schema(schema), seed)) for seed in range(30)]
    assert all(valid(schema, text) for text in texts)
    assert {key for text in texts for key in json.loads(text)} - {*declared}


def test_undeclared_keys_beside_names_that_need_an_escape() -> None:
    schema = {"type": "object", "properties": {'q"t': {"type": "null"}}, "additionalProperties": {"type": "boolean"}}
    allowed = {
        text: grammars().json_schema(schema)._matcher.accept_string(text)
        for text in (
            '{"q\\"t": null, "other": true}',
            '{"other": true}',
            '{"q\\"t": true}',
            '{"other": true, "q\\"t": true}',
        )
    }
    assert list(allowed.values()) == [True, True, False, False]


# ---- tools


def tool(parameters: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "look", "parameters": parameters}}


def deep(levels: int, last: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": ladder(levels, last)}


@pytest.mark.parametrize("last", [{"type": "string"}, {"type": "integer"}, {"const": "b"}])
def test_ladders_of_references_in_tools(last: dict[str, Any]) -> None:
    counted(lambda: readable(deep(600, last)), 30_000)
    for parser in ("hermes", "qwen3_coder"):
        counted(lambda: calls([tool(deep(45, last))], parser, None, parallel=True), 30_000)  # noqa: B023


def test_a_long_way_to_a_type_is_no_deep_one() -> None:
    steps = {f"x{i}": nested(30, lambda s: {"allOf": [s]}) | {"title": str(i)} for i in range(100)}
    for i, step in enumerate(steps.values()):
        while "allOf" in step["allOf"][0]:
            step = step["allOf"][0]
        step["allOf"][0] = {"$ref": f"#/$defs/x{i + 1}"}
    steps["x100"] = {"type": "string"}
    parameters = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x0"}}, "$defs": steps}
    assert readable(parameters) == {"properties": {"a": {"type": ["string"]}}}
    assert calls([tool(parameters)], "qwen3_coder", None, parallel=True)


@pytest.mark.parametrize(
    ("schema", "types"),
    [
        ({"$ref": "#/$defs/n"}, {"integer", "null"}),
        ({"anyOf": [{"$ref": "#/$defs/n"}, {"const": 2.5}]}, {"integer", "null", "number"}),
        ({"properties": {"x": {}}}, {"object"}),
        ({"allOf": [{"minimum": 3}]}, {"number"}),
        ({"enum": ["a", None]}, {"string", "null"}),
        ({"type": "int"}, {"integer"}),
        ({"type": "elephant"}, {"elephant"}),
        ({"not": {}}, {"string"}),
        ({"$ref": "#/$defs/loop"}, {"string"}),
        ({"$ref": "https://example.org"}, {"string"}),
        ({"anyOf": [True, {"type": "null"}]}, {"string", "null"}),
    ],
)
def test_types_that_the_parser_reads_by(schema: Any, types: set[str]) -> None:
    loop = {"anyOf": [{"$ref": "#/$defs/loop"}]}
    root = {"properties": {"a": schema}, "$defs": {"n": {"type": ["integer", "null"]}, "loop": loop}}
    assert types_of(readable(root)["properties"]["a"]) == types


def test_more_alternatives_than_any_function_has() -> None:
    steps = ladder(100, {"type": "null"})
    parameters = {"properties": {f"p{i}": {"$ref": "#/$defs/x0"} for i in range(5000)}, "$defs": steps}
    with pytest.raises(UserError, match="alternatives"):
        counted(lambda: readable(parameters), 100_000)


@pytest.fixture(scope="module")
def qwen() -> Served:
    return served(parsers=Parsers("qwen3", "qwen3_coder", auto_tools=True))


def prepared(what: Served, **fields: Any) -> Any:
    return chat.prepare(what, parse(json.dumps({"messages": user("hi"), **fields}).encode(), ChatRequest))


def ask(what: Served, **fields: Any) -> Any:
    return asyncio.run(prepared(what, **fields))


@pytest.mark.parametrize("choice", ["auto", "none", "required"])
@pytest.mark.parametrize(
    ("parameters", "place"),
    [
        ({"properties": [1]}, "'properties'"),
        ({"properties": {"a": {"anyOf": 5}}}, "properties.a.anyOf"),
        ({"properties": {"a": {"anyOf": None}}}, "properties.a.anyOf"),
        ({"properties": {"a": {"oneOf": [{}, {"allOf": "x"}]}}}, "properties.a.oneOf[1].allOf"),
        ({"properties": {"a": 5}}, "properties.a "),
        ({"properties": {"a": {"$ref": "#/$defs/b"}}, "$defs": {"b": {"anyOf": {}}}}, "#/$defs/b.anyOf"),
        ({"$ref": "#/title", "title": "x"}, "'properties'"),
    ],
)
def test_wrong_shapes_are_refused_where_they_are(qwen: Served, parameters: Any, place: str, choice: str) -> None:
    with pytest.raises(ApiError) as caught:
        ask(qwen, tools=[tool({}) | {"function": {"name": "f"}}, tool(parameters)], tool_choice=choice)
    error = caught.value
    assert (error.status, error.param, error.code) == (400, "tools[1].function.parameters", "bad_schema")
    assert "'look'" in error.message and place in error.message


def test_parameters_that_are_anything_are_no_object() -> None:
    with pytest.raises(UserError, match="type object"):
        calls([tool({"$ref": "#/$defs/x", "$defs": {"x": True}})], "hermes", None, parallel=True)


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_what_no_grammar_enforces_is_still_offered(qwen: Served, choice: str) -> None:
    loop = {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"anyOf": [{"$ref": "#/$defs/x"}]}}}
    others: list[dict[str, Any]] = [
        {"type": "object", "properties": None},
        {"properties": {"a": {"not": {}}}},
        {"$ref": "#"},
        {"$ref": "#/nowhere"},
    ]
    for parameters in (loop, *others):
        assert ask(qwen, tools=[tool(parameters)], tool_choice=choice).requests


# ---- threads


SCHEMA = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "integer"}}}


def test_while_one_form_is_compiled_all_that_needs_none_goes_on(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """What began and is late is too hard; what never began is told to come back."""
    monkeypatch.setattr(asking, "GRAMMAR_SECONDS", 0.3)
    ask(qwen, response_format=SCHEMA)
    gate = threading.Event()

    async def run() -> None:
        tries = [asking.compiled(gate.wait, "tools") for _ in range(40)]
        errors: list[Any] = await asyncio.gather(*tries, return_exceptions=True)
        try:
            assert (await asyncio.wait_for(from_text(qwen, "hi", special=False), 5)).ids
            assert (await asyncio.wait_for(prepared(qwen, response_format=SCHEMA), 5)).requests
        except TimeoutError:
            gate.set()  # the loop waits for its threads
            raise
        assert sorted(e.status for e in errors) == [400] + [429] * 39
        assert all(e.response().headers["Retry-After"] for e in errors if e.status == 429)
        with pytest.raises(ApiError) as caught:
            await prepared(qwen, response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": NEW}})
        assert caught.value.status == 429
        gate.set()
        assert await asking.compiled(lambda: 1, "tools") == 1

    try:
        asyncio.run(run())
    finally:
        gate.set()


def test_time_in_the_queue_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "GRAMMAR_SECONDS", 1.0)

    async def run() -> None:
        slow = [asking.compiled(partial(time.sleep, 0.7), "tools") for _ in range(2)]
        assert await asyncio.gather(*slow) == [None, None]

    asyncio.run(run())


def test_a_client_that_goes_away_leaves_no_work_waiting() -> None:
    gate, ran = threading.Event(), list[int]()

    async def run() -> None:
        tries = [asyncio.create_task(asking.compiled(partial(gate.wait, 10), "tools"))]
        tries.append(asyncio.create_task(asking.compiled(partial(ran.append, 1), "tools")))
        await asyncio.sleep(0.1)
        for one in tries:
            one.cancel()
        await asyncio.gather(*tries, return_exceptions=True)
        gate.set()
        assert await asking.compiled(lambda: 1, "tools") == 1 and not ran

    try:
        asyncio.run(run())
    finally:
        gate.set()


def test_the_choices_of_a_request_share_one_grammar(qwen: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    made, right = list[bool](), Grammars.json_schema

    def counting(*given: Any, at_once: bool = False, **how: Any) -> Any:
        made.append(at_once)
        return right(*given, at_once=at_once, **how)

    monkeypatch.setattr(Grammars, "json_schema", counting)
    monkeypatch.setattr(qwen.grammars, "_cache", OrderedDict())
    requests = ask(qwen, n=5, response_format=SCHEMA).requests
    assert made == [True, False] and len({id(r.processors[0]) for r in requests}) == 5
    ask(qwen, response_format=SCHEMA)
    assert made == [True, False, True], "it is known"
