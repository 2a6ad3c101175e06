"""What a parser gives does not depend on where the pieces of the text end; nothing is lost, and the work is linear."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Sequence

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from draftproof.serve.parsers import TOOLS, Message, Parser, base, collect, make

SCHEMAS = {"f": {"properties": {"s": {"type": "string"}, "i": {"type": "integer"}, "o": {"type": "object"}}}}
KINDS = [(r, t, k, n) for r in (None, "qwen3") for t in (None, *TOOLS) for k in (False, True) for n in (False, True)]
TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<function=", "</function>", "<parameter=",
        "</parameter>", ">", "<function=f>", "<parameter=s>", "<parameter=i>", "<parameter=o>"]  # fmt: skip
CODER = (
    "<tool_call>\n<function=f>\n<parameter=s>\na\n\n</parameter>\n<parameter=i>12</parameter></function></tool_call>"
)
HERMES = '<tool_call>\n{"name": "f", "arguments": {"s": "}\\"</tool_call>{", "o": {"a": [1, {}]}}}\n</tool_call>'
WHOLE = ["x</think>", CODER, HERMES, f"Hi {CODER}", f"{HERMES}\n"]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
PARTS = st.one_of(
    st.sampled_from(TAGS),
    st.sampled_from(WHOLE),
    st.builds(lambda tag, n: tag[:n], st.sampled_from(TAGS), st.integers(1, 12)),
    st.sampled_from(["\n", " ", "<", "/", '"', "\\", "{", "}", "f", "x" * 260, '{"name": "f", "arguments": ']),
    JSON.map(lambda value: json.dumps(value, ensure_ascii=False)),
    JSON.map(lambda value: f"<tool_call>{json.dumps({'name': 'g', 'parameters': value})}</tool_call>"),
    st.text(max_size=8),
)
DOCUMENTS = st.lists(PARTS, max_size=9).map("".join)
Kind = tuple[str | None, str | None, bool, bool]


def build(kind: Kind) -> Parser:
    reasoning, tools, thinking, none = kind
    count = itertools.count()
    return make(reasoning, tools, thinking=thinking, schemas=SCHEMAS, tool_choice_none=none,
                new_id=lambda: f"id{next(count)}")  # fmt: skip


def run(kind: Kind, pieces: Iterable[str]) -> Message:
    """The message; and what every stream of deltas promises."""
    parser = build(kind)
    got = [*map(parser.feed, pieces), parser.finish()]
    seen: set[int] = set()
    for delta in got:
        indices = [part.index for part in delta.calls]
        assert len(set(indices)) == len(indices)
        for part in delta.calls:
            assert (part.index in seen) == (part.id is None) == (part.name is None)
            seen.add(part.index)
    message = collect(got)
    for call in message.calls:
        assert isinstance(json.loads(call.arguments), dict)
    return message


def cut(text: str, places: Sequence[int]) -> list[str]:
    ends = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[a:b] for a, b in itertools.pairwise(ends)]


def every_two_pieces(text: str) -> Iterable[list[str]]:
    return ([text[:at], text[at:]] for at in range(len(text) + 1))


@settings(max_examples=50, deadline=None)
@given(text=DOCUMENTS, kind=st.sampled_from(KINDS), places=st.lists(st.integers(0, 10_000), max_size=12))
@example(text=f"t</think>{CODER}</tool_call>", kind=("qwen3", "qwen3_coder", True, False), places=[])
@example(text=f'<tool_call>{{"a": "{HERMES}', kind=(None, "hermes", False, False), places=[])
def test_any_split_gives_the_same_message(text: str, kind: Kind, places: list[int]) -> None:
    whole = run(kind, [text])
    assert run(kind, text) == whole
    assert run(kind, cut(text, places)) == whole


@pytest.mark.parametrize("kind", [kind for kind in KINDS if not kind[3]])
def test_every_place_to_cut(kind: Kind) -> None:
    for text in (f"a<think>b</think>c</think>{CODER} d <tool_call>e", f"a</think> {HERMES}\n{HERMES}</tool_ca"):
        whole = run(kind, [text])
        assert all(run(kind, pieces) == whole for pieces in every_two_pieces(text))


@settings(max_examples=40, deadline=None)
@given(parts=st.lists(PARTS, max_size=9), kind=st.sampled_from(KINDS))
def test_pieces_like_tokens(parts: list[str], kind: Kind) -> None:
    assert run(kind, parts) == run(kind, ["".join(parts)])


@settings(max_examples=40, deadline=None)
@given(text=DOCUMENTS, kind=st.sampled_from([kind for kind in KINDS if kind[1] is None]))
def test_without_tools_only_think_tags_are_left_out(text: str, kind: Kind) -> None:
    got = run(kind, text)
    if kind[0] is None:
        assert got.content == text
    elif not kind[2]:
        assert got.content == text.replace("</think>", "")
    else:
        reasoning, _, content = text.partition("</think>")
        assert (got.reasoning or "") == reasoning.replace("<think>", "")
        assert (got.content or "") == content.replace("</think>", "")


@settings(max_examples=50, deadline=None)
@given(text=DOCUMENTS, tools=st.sampled_from(TOOLS))
def test_a_message_without_calls_is_the_text(text: str, tools: str) -> None:
    got = run((None, tools, False, False), text)
    if not got.calls:
        assert got.content == text


@settings(max_examples=40, deadline=None)
@given(arguments=st.dictionaries(st.text(max_size=5), JSON, max_size=4), name=st.text("abc_.-", min_size=1, max_size=9))
def test_hermes_arguments_arrive_as_they_are(arguments: dict[str, object], name: str) -> None:
    text = f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"
    (call,) = run((None, "hermes", False, False), text).calls
    assert (call.name, json.loads(call.arguments)) == (name, arguments)


@settings(max_examples=40, deadline=None)
@given(value=st.text(max_size=30).filter(lambda v: "<" not in v))
def test_coder_strings_arrive_as_they_are(value: str) -> None:
    text = f"<tool_call>\n<function=f>\n<parameter=s>\n{value}\n</parameter>\n</function>\n</tool_call>"
    (call,) = run((None, "qwen3_coder", False, False), text).calls
    assert json.loads(call.arguments) == {"s": value}


def splits_agree() -> bool:
    """Whether every cut of some whole documents gives one message, with both tool parsers."""
    kinds: list[Kind] = [("qwen3", tools, True, False) for tools in TOOLS]
    for kind in kinds:
        for text in (f"t</think>{CODER}", f"t</think>{HERMES}"):
            try:
                whole = run(kind, [text])
                if any(run(kind, pieces) != whole for pieces in every_two_pieces(text)):
                    return False
            except AssertionError:
                return False
    return True


def no_hold(self: base.Tags, text: str, start: int) -> int:
    return 0


def hold_all_but_one(self: base.Tags, text: str, start: int) -> int:
    return next((n for n in range(1, len(text) - start + 1) if text[-n:] in self.beginnings), 0) // 2


def forget(self: base.Scanner, text: str) -> None:
    self._text, self._at = text, 0


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [(base.Tags, "held", no_hold), (base.Tags, "held", hold_all_but_one), (base.Scanner, "feed", forget)],
)
def test_the_split_test_catches_a_parser_that_holds_too_little(
    monkeypatch: pytest.MonkeyPatch, owner: type, method: str, broken: Callable[..., object]
) -> None:
    assert splits_agree()
    monkeypatch.setattr(owner, method, broken)
    assert not splits_agree()


def test_the_loss_test_catches_a_scanner_that_drops_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = (None, "qwen3_coder", False, False)
    assert run(kind, ["a <tool"]).content == "a <tool"
    monkeypatch.setattr(base.Scanner, "rest", lambda self: "")
    assert run(kind, ["a <tool"]).content != "a <tool"


SIZE = 200_000
BOTH = ["word ", "<", "<tool_cal", "<think></think>", "<tool_call>", "<tool_call>x"]
ADVERSARIES = [
    *itertools.product(TOOLS, BOTH),
    ("qwen3_coder", "<tool_call>" + " " * 50),
    ("qwen3_coder", "<function=" + "x" * 257),
    ("qwen3_coder", "<function=abcd"),
    ("qwen3_coder", "<function=>"),
    ("qwen3_coder", "<function=a><parameter="),
    ("qwen3_coder", "<function=f><parameter=i>"),
    ("qwen3_coder", CODER),
    ("hermes", "<tool_call>{"),
    ("hermes", '<tool_call>{"'),
    ("hermes", '<tool_call>{"\\"'),
    ("hermes", '<tool_call>{"a":'),
    ("hermes", HERMES),
]


def slowest(kind: Kind, repeat: str, before: str = "", steps: Sequence[int] = (SIZE, 199), size: int = SIZE) -> float:
    """Seconds for a long text, in one piece and in small ones."""
    text = before + repeat * (size // len(repeat))
    times = []
    for step in steps:
        pieces = [text[at : at + step] for at in range(0, len(text), step)]
        start = time.process_time()
        parser = build(kind)
        for piece in pieces:
            parser.feed(piece)
        parser.finish()
        times.append(time.process_time() - start)
    return max(times)


@pytest.mark.parametrize(("tools", "repeat"), ADVERSARIES)
def test_time_is_linear(tools: str, repeat: str) -> None:
    kind = ("qwen3", tools, False, False)
    assert slowest(kind, repeat, steps=[SIZE]) < 1
    assert slowest(kind, repeat, steps=[61], size=SIZE // 8) < 1 / 4


@pytest.mark.parametrize(
    ("tools", "before", "repeat"),
    [
        ("qwen3_coder", "<function=f><parameter=s>", "ab\n"),
        ("qwen3_coder", "<function=f><parameter=o>", "[[[["),
        ("qwen3_coder", "<function=f><parameter=", "key"),
        ("qwen3_coder", "<tool_call>", " "),
        ("hermes", '<tool_call>{"', "<tool_call>{ "),
        ("hermes", "<tool_call>", "{"),
        ("hermes", "<tool_call>", '{"a":'),
    ],
)
def test_one_long_part_is_linear(tools: str, before: str, repeat: str) -> None:
    assert slowest((None, tools, False, False), repeat, before) < 1


def test_the_clock_catches_a_scanner_that_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = base.Scanner.scan

    def copying(self: base.Scanner, tags: base.Tags) -> tuple[str, str | None]:
        found = plain(self, tags)
        for _ in range(4):
            self._text = ("x" + self._text)[1:]
        return found

    kind = (None, "qwen3_coder", False, False)
    honest = slowest(kind, "<function=>", steps=[SIZE], size=SIZE // 2)
    monkeypatch.setattr(base.Scanner, "scan", copying)
    assert slowest(kind, "<function=>", steps=[SIZE], size=SIZE // 2) > 5 * honest
