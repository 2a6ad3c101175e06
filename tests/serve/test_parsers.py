"""Reasoning and tool calls in example texts: each rule of the formats, and what models do to them."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.errors import UserError
from draftproof.serve.parsers import REASONING, TOOLS, CallDelta, Delta, Message, Parser, collect, make, starts_thinking

SCHEMA = {
    "properties": {
        "s": {"type": "string"},
        "b": {"type": "boolean"},
        "i": {"type": "integer"},
        "x": {"type": "number"},
        "o": {"type": "object"},
        "a": {"type": "array"},
        "z": {"type": "null"},
        "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "count": {"type": ["integer", "null"]},
        "either": {"oneOf": [{"type": "object"}, {"type": "string"}]},
        "pick": {"enum": ["1", "2"]},
        "level": {"enum": [1, 2]},
        "free": {},
        "odd": {"type": "mystery"},
    }
}


def build(reasoning: str | None, tools: str | None, **options: Any) -> Parser:
    count = itertools.count()
    known: dict[str, Any] = {"thinking": False, "schemas": {"f": SCHEMA}}
    return make(reasoning, tools, new_id=lambda: f"id{next(count)}", **(known | options))


def deltas(parser: Parser, *pieces: str) -> list[Delta]:
    return [*map(parser.feed, pieces), parser.finish()]


def message(text: str, reasoning: str | None, tools: str | None, **options: Any) -> Message:
    return collect(deltas(build(reasoning, tools, **options), text))


def calls(got: Message) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in got.calls]


def coder(text: str, **options: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    got = message(text, None, "qwen3_coder", **options)
    return got.content, calls(got)


def hermes(text: str, **options: Any) -> tuple[str | None, list[tuple[str, Any]]]:
    got = message(text, None, "hermes", **options)
    return got.content, calls(got)


CALL = "<tool_call>\n<function=f>\n<parameter=s>\nhi\n</parameter>\n</function>\n</tool_call>"
F = ("f", {"s": "hi"})


@pytest.mark.parametrize(
    ("text", "reasoning", "content"),
    [
        ("a\n</think>\n\nb", "a\n", "\n\nb"),
        ("<think>\na</think>b", "\na", "b"),
        ("a<think>b</think>c", "ab", "c"),
        ("never ends", "never ends", None),
        ("a</think>b</think>c", "a", "bc"),
        ("a</think>b<think>c", "a", "b<think>c"),
        ("</think>b", None, "b"),
        ("a</think>", "a", None),
        ("a</thin", "a</thin", None),
        ("a</thinking>b", "a</thinking>b", None),
        ("a < b </ c", "a < b </ c", None),
        ("", None, ""),
        (f"a{CALL}", f"a{CALL}", None),
    ],
)
def test_reasoning(text: str, reasoning: str | None, content: str | None) -> None:
    assert message(text, "qwen3", None, thinking=True) == Message(reasoning, content, [])


def test_without_thinking_everything_is_content() -> None:
    assert message("a<think>b", "qwen3", None) == Message(None, "a<think>b", [])
    assert message("a</think>b", "qwen3", None).content == "ab"


def test_without_a_reasoning_parser_the_tags_are_content() -> None:
    text = "<think>a</think>b</think>"
    for tools in (None, *TOOLS):
        assert message(text, None, tools, thinking=True) == Message(None, text, [])


@pytest.mark.parametrize("tools", TOOLS)
def test_a_tool_call_ends_the_reasoning_when_tools_are_parsed(tools: str) -> None:
    text = {"qwen3_coder": CALL, "hermes": '<tool_call>{"name": "f", "arguments": {"s": "hi"}}</tool_call>'}[tools]
    got = message(f"thought\n{text}", "qwen3", tools, thinking=True)
    assert (got.reasoning, got.content, calls(got)) == ("thought\n", None, [F])
    got = message(f"t</think>\n\n</think>\n{text}\n", "qwen3", tools, thinking=True)
    assert (got.reasoning, got.content, calls(got)) == ("t", None, [F])


def test_a_bare_function_tag_does_not_end_the_reasoning() -> None:
    got = message("a<function=f></function>", "qwen3", "qwen3_coder", thinking=True)
    assert got == Message("a<function=f></function>", None, [])


def test_think_tags_inside_a_value_are_its_text() -> None:
    text = "</think><function=f><parameter=s><think>x</think></parameter></function>"
    assert calls(message(text, "qwen3", "qwen3_coder", thinking=True)) == [("f", {"s": "<think>x</think>"})]
    text = '</think><tool_call>{"name": "f", "arguments": {"s": "</think>"}}</tool_call>'
    assert calls(message(text, "qwen3", "hermes", thinking=True)) == [("f", {"s": "</think>"})]


@pytest.mark.parametrize(
    ("prompt", "thinks"),
    [
        ("<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", False),
        ("<|im_start|>assistant\n<think>a</think>b<think>", True),
        ("<|im_start|>assistant\n<think>so far I", True),
        ("<think>a</think>b<|im_end|>\n<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>\n", True),
        ("<|im_start|>user\nwhat is <think>?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n", False),
        ("no turns at all </think>", False),
    ],
)
def test_the_newest_tag_of_the_last_turn_decides_where_generation_starts(prompt: str, thinks: bool) -> None:
    for default in (True, False):
        assert starts_thinking(prompt, default) is thinks


def test_a_turn_without_tags_takes_the_default() -> None:
    for prompt in ("", "<think>a</think>b<|im_end|>\n<|im_start|>assistant\n", "<|im_start|>assistant\n"):
        assert starts_thinking(prompt) and not starts_thinking(prompt, default=False)


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (CALL, None, [F]),
        (f"\n \n{CALL}\n", None, [F]),
        (f"Sure.\n{CALL}\n{CALL}\n", "Sure.\n", [F, F]),
        (f"{CALL}\nDone.", "\nDone.", [F]),
        ("<function=f><parameter=s>hi</parameter></function>", None, [F]),
        ("<function=f><parameter=s>hi</parameter></function>Done.", "Done.", [F]),
        ("<tool_call><function=f></function></tool_call>", None, [("f", {})]),
        ("<function=f>\n</function>", None, [("f", {})]),
        ("<function=f><parameter=s>\n\nhi\n\n</parameter></function>", None, [("f", {"s": "\nhi\n"})]),
        ("<function=f><parameter=s>\n</parameter></function>", None, [("f", {"s": ""})]),
        ("<function=f><parameter=s></parameter></function>", None, [("f", {"s": ""})]),
        ("<function=f><parameter=s>a\n<parameter=i>2</parameter></function>", None, [("f", {"s": "a", "i": 2})]),
        ("<function=f><parameter=new>1</parameter></function>", None, [("f", {"new": "1"})]),
        ("<function=g><parameter=i>1</parameter></function>", None, [("g", {"i": "1"})]),
        ('<function=f><parameter=a"b>1</parameter></function>', None, [("f", {'a"b': "1"})]),
        ("<function=f><parameter=s>a</parameter>b</parameter></function>", None, [("f", {"s": "a"})]),
        ("<function=f><parameter=s>x > y <b> </tool_call></parameter></function>", None,
         [("f", {"s": "x > y <b> </tool_call>"})]),
        # a name that is not closed (vllm#58227), and parameters that are not (vllm#56077)
        ("<function=a</tool_call>", None, [("a", {})]),
        (f"<tool_call>\n<function=a</tool_call>{CALL}", None, [("a", {}), F]),
        (f"<tool_call>\n<function=a</function>\n</tool_call>{CALL}", None, [("a", {}), F]),
        (f"<tool_call>\n<function=a\n{CALL}", None, [("a", {}), F]),
        ("<function=a<function=f><parameter=s>hi</parameter></function>", None, [("a", {}), F]),
        ("<function=f\n<parameter=s>hi</parameter></function>", None, [F]),
        ("<function=f><parameter=s</parameter><parameter=i>1</parameter></function>", None, [("f", {"i": 1})]),
        ("<function=f><parameter=command=ls>\n</parameter></function>", None, [("f", {"command=ls": ""})]),
        # calls that do not end
        (f"<tool_call><function=a>\n</tool_call>{CALL}", None, [("a", {}), F]),
        (f"<tool_call><function=a>\n{CALL}", None, [("a", {}), F]),
        ("<function=f><parameter=s>hi</function>", None, [F]),
        ("<function=f><parameter=s>h", None, [("f", {"s": "h"})]),
        ("<function=f><parameter=s>h</para", None, [("f", {"s": "h</para"})]),
        ("<function=f><parameter=i>1", None, [("f", {"i": 1})]),
        ("<function=f><parameter=s>hi</parameter><parameter=i", None, [F]),
        ("<function=f", None, [("f", {})]),
        ("<function=f</func", None, [("f", {})]),
        # what only looks like a call
        ("a <tool", "a <tool", []),
        ("a <tool_call>", "a <tool_call>", []),
        ("<tool_call>\n<func", "<tool_call>\n<func", []),
        ("<tool_call></tool_call>", "<tool_call></tool_call>", []),
        ('<tool_call>{"name": "f"}</tool_call>', '<tool_call>{"name": "f"}</tool_call>', []),
        (f"<tool_call>oh {CALL}", "<tool_call>oh ", [F]),
        ("<function=>x", "<function=>x", []),
        ("<function=", "<function=", []),
        (f"<function= {CALL}", "<function= ", [F]),
        (f"use <function={'x' * 300}> ok", f"use <function={'x' * 300}> ok", []),
        ("</function></tool_call>", "</function></tool_call>", []),
        ("<parameter=s>x</parameter>", "<parameter=s>x</parameter>", []),
    ],
)  # fmt: skip
def test_coder(text: str, content: str | None, expected: list[tuple[str, Any]]) -> None:
    assert coder(text) == (content, expected)


@pytest.mark.parametrize(
    ("key", "value", "expected"),
    [
        ("s", "5", "5"),
        ("s", '{"a": 1}', '{"a": 1}'),
        ("s", "null", "null"),
        ("s", 'q"uo\\te\t\u00e9\U0001f600', 'q"uo\\te\t\u00e9\U0001f600'),
        ("b", "true", True),
        ("b", "False", False),
        ("b", "1", True),
        ("b", "maybe", "maybe"),
        ("i", "42", 42),
        ("i", "-7", -7),
        ("i", "5.0", 5),
        ("i", "5.5", "5.5"),
        ("i", "1_000", "1_000"),
        ("i", "\u0665", "\u0665"),
        ("x", "2.50", 2.5),
        ("x", "3.0", 3),
        ("x", "1e300", 1e300),
        ("x", "1e999", "1e999"),
        ("x", "nan", "nan"),
        ("o", '{"a": [1, {"b": "\u00e9"}]}', {"a": [1, {"b": "\u00e9"}]}),
        ("o", "{'a': 1}", "{'a': 1}"),
        ("o", '{"a": 1e999}', '{"a": 1e999}'),
        ("o", '{"a": NaN}', '{"a": NaN}'),
        ("o", '{"a": "\\ud800"}', {"a": "\ud800"}),
        ("a", "[1, 2]", [1, 2]),
        ("z", "null", None),
        ("maybe", "null", None),
        ("maybe", "nil", "nil"),
        ("maybe", "5", "5"),
        ("count", "null", None),
        ("count", "3", 3),
        ("either", '{"a": 1}', {"a": 1}),
        ("either", "text", "text"),
        ("either", "[1]", "[1]"),
        ("pick", "1", "1"),
        ("level", "1", 1),
        ("free", "1", "1"),
        ("odd", "[1]", [1]),
        ("odd", "word", "word"),
    ],
)
def test_values_take_the_type_of_the_schema(key: str, value: str, expected: Any) -> None:
    got = message(f"<function=f><parameter={key}>{value}</parameter></function>", None, "qwen3_coder")
    (call,) = got.calls
    call.arguments.encode()
    value_got = json.loads(call.arguments)[key]
    assert value_got == expected and type(value_got) is type(expected)


def test_what_python_cannot_parse_stays_text() -> None:
    for key, value in (("a", "[" * 100_000), ("a", "[" * 50_000 + "]" * 50_000), ("i", "9" * 5000)):
        assert coder(f"<function=f><parameter={key}>{value}</parameter></function>") == (None, [("f", {key: value})])
    text = "<tool_call>" + '{"a":' * 50_000 + "1" + "}" * 50_000 + "</tool_call>"
    assert hermes(text) == (text, [])


@pytest.mark.parametrize("schemas", [None, {}, {"f": {}}, {"f": {"properties": []}}, {"f": {"properties": {"s": 1}}}])
def test_without_a_schema_values_are_strings(schemas: Any) -> None:
    text = "<function=f><parameter=s>1</parameter><parameter=b>true</parameter></function>"
    assert coder(text, schemas=schemas)[1] == [("f", {"s": "1", "b": "true"})]


def call_of(name: str = "f", key: str = "arguments", **arguments: Any) -> str:
    return "<tool_call>\n" + json.dumps({"name": name, key: arguments}) + "\n</tool_call>"


@pytest.mark.parametrize(
    ("text", "content", "expected"),
    [
        (call_of(s="hi"), None, [F]),
        (call_of(s="hi", key="parameters"), None, [F]),
        (f"Sure. {call_of(s='hi')}\n{call_of(s='hi')}\n", "Sure. ", [F, F]),
        ('<tool_call>{"arguments": {"s": "hi"}, "name": "f"}</tool_call>', None, [F]),
        ('<tool_call>{"name": "f"}</tool_call>', None, [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": null}</tool_call>', None, [("f", {})]),
        ('<tool_call>{"name": "f", "arguments": "{\\"s\\": \\"hi\\"}"}</tool_call>', None, [F]),
        (call_of(s={"a": [{"b": {}}]}), None, [("f", {"s": {"a": [{"b": {}}]}})]),
        (call_of(s='}{ \\ " </tool_call> \u00e9'), None, [("f", {"s": '}{ \\ " </tool_call> \u00e9'})]),
        ('<tool_call>{"name": "f", "arguments": {"s": "a\nb"}}</tool_call>', None, [("f", {"s": "a\nb"})]),
        ('<tool_call>{"name": "f", "arguments": {"s": "hi"}}', None, [F]),
        ('<tool_call>{"name": "f", "arguments": {"s": "hi"}} so </tool_call>', " so ", [F]),
        (call_of(s="hi") + "</tool_call>", "</tool_call>", [F]),
        *(
            (f"a {bad} b", f"a {bad} b", [])
            for bad in (
                "<tool_call>",
                "<tool_call></tool_call>",
                "<tool_call>{}</tool_call>",
                "<tool_call>[1]</tool_call>",
                "<tool_call>{'name': 'f'}</tool_call>",
                '<tool_call>{"name": ""}</tool_call>',
                '<tool_call>{"name": 1}</tool_call>',
                '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
                '<tool_call>{"name": "f", "arguments": "text"}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1]</tool_call>',
                '<tool_call>{"name": "f", "arguments": {"a": 1e999}}</tool_call>',
                '<tool_call>{"name": "f", "argu',
                "<tool_call><function=f></function></tool_call>",
            )
        ),
        (f'<tool_call>{{"name": "oops}}</tool_call>{call_of(s="hi")}', '<tool_call>{"name": "oops}</tool_call>', [F]),
        (f"<tool_call>{call_of(s='hi')}", "<tool_call>", [F]),
    ],
)
def test_hermes(text: str, content: str | None, expected: list[tuple[str, Any]]) -> None:
    assert hermes(text) == (content, expected)


@pytest.mark.parametrize("parse", [coder, hermes])
def test_tool_choice_none_leaves_the_calls_out(parse: Callable[..., tuple[str | None, Any]]) -> None:
    text = {coder: CALL, hermes: call_of(s="hi")}[parse]
    assert parse(f"Well.{text}", tool_choice_none=True) == ("Well.", [])
    assert parse(f"Well.{text}") == ("Well.", [F])


def test_without_a_tool_parser_the_markup_is_content() -> None:
    for text in (CALL, call_of(s="hi"), f" {CALL} "):
        assert message(text, None, None) == Message(None, text, [])


def test_a_delta_of_several_tokens_may_hold_everything() -> None:
    first, last = deltas(build("qwen3", "qwen3_coder", thinking=True), f"t</think>c{CALL}{CALL}")
    assert (first.reasoning, first.content) == ("t", "c") and not last
    assert [(part.index, part.id, part.name) for part in first.calls] == [(0, "id0", "f"), (1, "id1", "f")]
    assert [json.loads(part.arguments) for part in first.calls] == [F[1], F[1]]


def test_a_call_streams_name_first_and_then_fragments() -> None:
    parser = build(None, "qwen3_coder")
    pieces = ["<function=f", ">", "<parameter=s>", "\nab", "c\n", "d\n</para", "meter><parameter=i>1", "2</parameter>"]
    got = [parser.feed(piece).calls for piece in [*pieces, "</function>"]]
    assert got == [
        (),
        (CallDelta(0, "id0", "f", ""),),
        (CallDelta(0, None, None, '{"s": '),),
        (CallDelta(0, None, None, '"ab'),),
        (CallDelta(0, None, None, "c"),),
        (CallDelta(0, None, None, "\\nd"),),
        (CallDelta(0, None, None, '", "i": '),),
        (CallDelta(0, None, None, "12"),),
        (CallDelta(0, None, None, "}"),),
    ]
    assert not parser.finish()


@pytest.mark.parametrize("key", ["i", "maybe", "unknown"])
def test_only_plain_strings_go_out_before_their_end(key: str) -> None:
    parser = build(None, "qwen3_coder")
    parser.feed(f"<function=f><parameter={key}>")
    assert not parser.feed("12") and parser.feed("</parameter>")


def test_text_is_held_back_only_while_it_may_become_a_tag() -> None:
    parser = build("qwen3", "hermes", thinking=True)
    assert [parser.feed(piece) for piece in ("a<", "/th", "x", "</think>", "b<tool", "_")] == [
        Delta("a"), Delta(), Delta("</thx"), Delta(), Delta(content="b"), Delta(),
    ]  # fmt: skip
    assert parser.feed("x") == Delta(content="<tool_x")


def test_an_answer_of_nothing_is_an_empty_content() -> None:
    assert collect([]) == Message(None, "", [])
    assert not Delta() and Delta(reasoning="x") and Delta(calls=(CallDelta(0, "i", "n", ""),))


def test_unknown_names_are_refused() -> None:
    for names in (("qwen4", None), (None, "xml"), ("", None)):
        with pytest.raises(UserError) as caught:
            build(*names)
        assert caught.value.code == "bad-option"
        assert any(name in str(caught.value.args) + str(vars(caught.value)) for name in REASONING + TOOLS)
