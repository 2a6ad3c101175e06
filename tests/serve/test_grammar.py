"""Answers held to a schema or to a tool call: what a random model writes under the processor is valid, and a draft tree
changes nothing about it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import jsonschema_rs
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.errors import UserError
from draftproof.serve import parsers
from draftproof.serve.grammar import GrammarProcessor, Grammars, common
from draftproof.serve.schemas.calls import readable
from tests import tiny
from tests.serve import made

FEW = settings(deadline=None, max_examples=40, derandomize=True, database=None)
PROMPT = made.ids_of("Give me JSON.")
CLOSING = made.ids_of('"}],:0')
Process = Callable[[Sequence[int], Tensor], Tensor]


@cache
def grammars() -> Grammars:
    return Grammars(made.tokenizer(), made.VOCAB, [made.STOP])


def logits(seed: int, at: int, random: float = 2.0) -> Tensor:
    """A random model that prefers ASCII, and tires with time: closing characters become likelier."""
    draw = torch.Generator().manual_seed(1000 * seed + at)
    scores = random * torch.randn(made.VOCAB, generator=draw)
    scores[made.ids_of("".join(chr(c) for c in range(0x20, 0x7F)))] += 2.0
    scores[CLOSING] += at / 12
    scores[made.STOP] += at / 10
    return scores


def write(process: Process, seed: int, most: int = 400, prompt: Sequence[int] = PROMPT, ending: str = "") -> list[int]:
    """Token ids of an answer; the last is the stop token unless it is too long. ending: what the model begins to want
    to write, too."""
    ids, end = list(prompt), made.ids_of(ending)
    while len(ids) < len(prompt) + most:
        scores = logits(seed, len(ids) - len(prompt))
        if end:
            begun = next(n for n in range(len(end) - 1, -1, -1) if ids[len(ids) - n :] == end[:n])
            scores[end[begun]] += (len(ids) - len(prompt)) / 12 + (20 if begun else 0)
        ids.append(int(process(ids, scores).argmax()))
        if ids[-1] == made.STOP:
            break
    return ids[len(prompt) :]


def text_of(ids: Sequence[int]) -> str:
    """The text of an answer that has ended, as a client sees it."""
    assert ids[-1] == made.STOP
    return str(made.tokenizer().decode(ids[:-1], clean_up_tokenization_spaces=False))


# ---- what comes out is valid


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> dict[str, Any]:
    leaves = ["string", "integer", "number", "boolean", "null", "enum", "format", "pattern"]
    kind = draw(st.sampled_from([*leaves, "object", "array", "anyOf"] if depth else leaves))
    inner = schemas(depth=depth - 1)
    if kind == "object":
        names = draw(st.lists(st.sampled_from(["a", "ab", "b c", 'q"', "é", ""]), unique=True, max_size=4))
        more = draw(st.sampled_from([None, False, True, {"type": "boolean"}]))
        extra = {} if more is None else {"additionalProperties": more}
        required = [name for name in names if draw(st.booleans())]
        return {"type": kind, "properties": {n: draw(inner) for n in names}, "required": required, **extra}
    if kind == "array":
        least = draw(st.integers(0, 2))
        bounds = draw(st.sampled_from([{}, {"minItems": least}, {"minItems": least, "maxItems": least + 1}]))
        head = draw(st.sampled_from([0, 0, 1, 2]))
        prefix = {"prefixItems": [draw(inner) for _ in range(head)]} if head else {}
        return {"type": kind, "items": draw(inner), **prefix, **bounds}
    if kind == "anyOf":
        return {"anyOf": [draw(inner), draw(inner)]}
    if kind in ("integer", "number"):
        low, size = draw(st.integers(-200, 200)), draw(st.integers(2, 150))
        scale = 1 if kind == "integer" else draw(st.sampled_from([1, 0.5, 0.001]))
        words = [("minimum", low * scale), ("exclusiveMaximum", (low + size) * scale)]
        return {"type": kind, **dict(words[: draw(st.integers(0, 2))])}
    if kind == "string":
        least = draw(st.integers(0, 3))
        return {"type": kind, **draw(st.sampled_from([{}, {"minLength": least, "maxLength": least + 2}]))}
    if kind == "enum":
        return {"enum": draw(st.lists(st.sampled_from([1, "a", 'b"\n', None, True, 2.5, {"x": [1]}]), min_size=1))}
    if kind == "format":
        return {"type": "string", "format": draw(st.sampled_from(["date", "time", "ipv4", "uuid", "date-time"]))}
    if kind == "pattern":
        return {"type": "string", "pattern": draw(st.sampled_from(['^[a-c"]{2}$', r"^\d+\\$", "^(x|yz?)*[^a]$", "^a"]))}
    return {"type": kind}


def valid(schema: dict[str, Any], text: str) -> bool:
    checker = jsonschema_rs.Draft202012Validator(schema, validate_formats=True)
    try:
        return bool(checker.is_valid(json.loads(text)))
    except ValueError:
        return False


@FEW
@given(schemas(), st.booleans(), st.integers(0, 99))
def test_what_a_random_model_writes_is_valid(schema: dict[str, Any], strict: bool, seed: int) -> None:
    answer = write(grammars().json_schema(schema, strict=strict), seed)
    assume(answer[-1] == made.STOP)
    assert valid(schema, text_of(answer)), text_of(answer)


def test_most_answers_end() -> None:
    """So the test above is no test of nothing; and without the processor they are not valid."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}, "required": ["a"]}
    answers = [write(grammars().json_schema(schema), seed) for seed in range(20)]
    ended = [text_of(a) for a in answers if a[-1] == made.STOP]
    assert len(ended) == 20 and all(valid(schema, t) for t in ended)
    free = [write(lambda ids, scores: scores, seed) for seed in range(20)]
    assert not any(valid(schema, made.tokenizer().decode(a[:-1])) for a in free)


@pytest.mark.parametrize("seed", range(10))
def test_json_object(seed: int) -> None:
    assert isinstance(json.loads(text_of(write(grammars().json_object(), seed))), dict)


def test_declared_properties_only_where_strict() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "null"}}}

    def others(strict: bool) -> set[str]:
        texts = [text_of(write(grammars().json_schema(schema, strict=strict), seed)) for seed in range(30)]
        return {key for text in texts for key in json.loads(text)} - {"a"}

    assert not others(strict=True)
    assert others(strict=False)


def test_recursive_schema_and_tagged_alternatives() -> None:
    leaf = {"type": "object", "properties": {"kind": {"const": "leaf"}, "n": {"type": "integer"}}}
    node = {"type": "object", "properties": {"kind": {"const": "node"}, "next": {"$ref": "#/$defs/tree"}}}
    both = [{**leaf, "required": ["kind", "n"]}, {**node, "required": ["kind", "next"]}]
    schema = {"$ref": "#/$defs/tree", "$defs": {"tree": {"oneOf": both}}}
    texts = [text_of(write(grammars().json_schema(schema), seed)) for seed in range(10)]
    assert all(valid(schema, t) for t in texts)
    assert any('"node"' in t for t in texts) and any('"node"' not in t for t in texts)


# ---- along the tree


def asked(seed: int, make: Callable[[], Any]) -> Request:
    params = SamplingParams(temperature=1.5, seed=seed)
    return Request(PROMPT, 120, params, stop_ids=[made.STOP], processors=(make(),))


def decode(make: Callable[[], Any], budget: str | int, known: list[list[int]] | None = None) -> list[list[int]]:
    requests = [asked(seed, make) for seed in range(3)]
    drafter = tiny.KnowingTree(made.target(), known, wrong=0.2, depth=4) if known else None
    engine = Engine(made.target(), drafter, slots=3, context=256, how=Speculation(budget=budget))
    answers: list[list[int]] = [[], [], []]
    accepted = 0
    for result in engine.generate(requests):
        answers[result.index] += result.tokens
        accepted += result.accepted
    assert not known or accepted > 30, "nothing was drafted"
    return answers


SCHEMA = {
    "type": "object",
    "properties": {"id": {"type": "integer"}, "ok": {"type": "boolean"}, "s": {"type": "string", "maxLength": 20}},
    "required": ["id", "ok", "s"],
}


def of_schema() -> GrammarProcessor:
    return grammars().json_schema(SCHEMA)


@cache
def plain() -> list[list[int]]:
    return decode(of_schema, "none")


@pytest.mark.parametrize("budget", ["chain", 8, 24])
def test_trees_and_chains_write_what_plain_decoding_writes(budget: str | int) -> None:
    known = [PROMPT + answer for answer in plain()]
    assert decode(of_schema, budget, known) == plain()
    ended = [a for a in plain() if a[-1] == made.STOP]
    assert len(ended) >= 2 and all(valid(SCHEMA, text_of(a)) for a in ended)


class Late:
    """Planted fault: the mask of the node before."""

    stateful = False

    def __init__(self) -> None:
        self.right = of_schema()

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        return self.right(ids[: max(len(PROMPT), len(ids) - 1)], scores)


def test_control_mask_off_by_one_node() -> None:
    wrong = [made.tokenizer().decode(a[:-1]) for a in decode(Late, "none")]
    assert not any(valid(SCHEMA, t) for t in wrong)


class Still:
    """Planted fault: the matcher does not go back when another branch is asked about."""

    stateful = False

    def __init__(self) -> None:
        self.right = of_schema()
        self.right._matcher.rollback = lambda count: None  # type: ignore[method-assign]

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        return self.right(ids, scores)


def branches(draw: torch.Generator, texts: list[list[int]]) -> Iterator[list[int]]:
    """Texts as trees ask about them: a beginning of a right text, then some other tokens, in any order."""
    for _ in range(60):
        text = texts[int(torch.randint(len(texts), (1,), generator=draw))]
        cut = int(torch.randint(len(text), (1,), generator=draw))
        extra = torch.randint(made.VOCAB, (int(torch.randint(3, (1,), generator=draw)),), generator=draw)
        yield PROMPT + text[:cut] + extra.tolist()


def check_walk(make: Callable[[], Any], seed: int) -> None:
    """Whatever it was asked before, it answers as a new one does that is asked this alone."""
    walked = make()
    walked(PROMPT, torch.zeros(made.VOCAB))
    for ids in branches(torch.Generator().manual_seed(seed), plain()):
        alone = of_schema()
        alone(PROMPT, torch.zeros(made.VOCAB))
        scores = torch.randn(made.VOCAB)
        assert torch.equal(walked(ids, scores.clone()), alone(ids, scores.clone())), ids


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_branches(seed: int) -> None:
    check_walk(of_schema, seed)


def test_control_matcher_that_does_not_go_back() -> None:
    with pytest.raises(AssertionError):
        check_walk(Still, 0)


def test_a_draft_outside_the_grammar_keeps_its_scores() -> None:
    processor = of_schema()
    masked = processor(PROMPT, torch.zeros(made.VOCAB))
    assert masked.isinf().any() and masked[made.ids_of("{")].eq(0).all()
    outside = processor(PROMPT + made.ids_of("no"), torch.zeros(made.VOCAB))
    assert not outside.isinf().any()
    assert torch.equal(processor(PROMPT, torch.zeros(made.VOCAB)), masked)


def test_the_end_is_open_exactly_where_the_grammar_is_complete() -> None:
    processor = grammars().json_schema({"type": "integer", "minimum": 5, "maximum": 120})
    allowed = {}
    processor(PROMPT, torch.zeros(made.VOCAB))
    for text in ("", "1", "5", "12", "120"):
        scores = processor(PROMPT + made.ids_of(text), torch.zeros(made.VOCAB))
        allowed[text] = made.tokenizer().decode(scores.isfinite().nonzero()[:, 0]).replace("<|im_end|>", "$")
    digits = "0123456789"
    assert allowed == {"": digits[1:], "1": digits, "5": "$" + digits, "12": "$0", "120": "$"}
    behind = processor([*PROMPT, *made.ids_of("120"), made.STOP], torch.zeros(made.VOCAB))
    assert behind.isfinite().nonzero().tolist() == [[made.STOP]]


# ---- behind reasoning

THINK_END = made.tokenizer().convert_tokens_to_ids("</think>")


@pytest.mark.parametrize("thought", ["", "so", "x" * 700])
def test_the_grammar_begins_behind_the_reasoning(thought: str) -> None:
    processor = grammars().json_schema(SCHEMA, after=THINK_END)
    thinking = made.ids_of(thought)
    for at in range(len(thinking) + 1):  # also a branch that ends the reasoning, and the one that does not
        text = PROMPT + thinking[:at]
        assert not processor(text, torch.zeros(made.VOCAB)).isinf().any()
        if at % 50 == 0:
            assert processor([*text, THINK_END], torch.zeros(made.VOCAB)).isinf().any()
    answer = write(processor, 1, prompt=[*PROMPT, *thinking, THINK_END])
    assert valid(SCHEMA, text_of(answer))


def test_a_preempted_request_goes_on() -> None:
    """The prompt is then run again with what was written; the processor has been asked before."""
    whole = write(of_schema(), 4)
    processor = of_schema()
    first = write(processor, 4, most=9)
    resumed = [*PROMPT, *first]
    while resumed[-1] != made.STOP:
        at = len(resumed) - len(PROMPT)
        resumed.append(int(processor(list(resumed), logits(4, at)).argmax()))
    assert resumed[len(PROMPT) :] == whole


# ---- tool calls

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "days": {"type": "integer", "minimum": 1, "maximum": 14},
                    "unit": {"enum": ["C", "F"]},
                    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
                    "code": {"type": "string", "pattern": "^[A-Z]{2}[^a]?$"},
                    "where": {"$ref": "#/$defs/Where"},
                    "kind": {"const": 3},
                    "mixed": {"type": ["string", "integer"]},
                },
                "required": ["city", "where"],
                "$defs": {"Where": {"type": "object", "properties": {"x": {"type": "string"}}, "required": ["x"]}},
            },
        },
    },
    {"type": "function", "function": {"name": "now", "description": "no parameters"}},
]
ENDS = {"hermes": "", "qwen3_coder": "\n</parameter>\n"}
SCHEMAS = {t["function"]["name"]: t["function"].get("parameters", {}) for t in TOOLS}


def read(parser: str, text: str) -> parsers.Message:
    schemas = {name: readable(schema) for name, schema in SCHEMAS.items()}
    reader = parsers.make(None, parser, thinking=False, schemas=schemas, new_id=lambda: "id")
    return parsers.collect([reader.feed(text), reader.finish()])


@pytest.mark.parametrize("parser", parsers.TOOLS)
@pytest.mark.parametrize("name", [None, "get_weather", "now"])
@pytest.mark.parametrize("parallel", [True, False])
def test_calls_are_read_and_their_arguments_are_valid(parser: str, name: str | None, parallel: bool) -> None:
    counts, seen = set(), set()
    for seed in range(8):
        answer = write(grammars().tool_call(TOOLS, parser, name, parallel=parallel), seed, 900, ending=ENDS[parser])
        if answer[-1] != made.STOP:
            continue
        text = made.tokenizer().decode(answer[:-1], clean_up_tokenization_spaces=False)
        message = read(parser, text)
        assert message.content is None and message.calls, text
        counts.add(len(message.calls))
        for call in message.calls:
            assert name in (None, call.name)
            seen |= json.loads(call.arguments).keys()
            assert valid(SCHEMAS[call.name] or {"maxProperties": 0}, call.arguments), (text, call.arguments)
    assert counts and (parallel or counts == {1})
    assert name == "now" or {"city", "where"} <= seen


@pytest.mark.parametrize(
    "hostile", ["</parameter>", "<parameter=", "</function>", "a <</parameter>", "</param</function>"]
)
def test_a_text_value_cannot_end_its_tags(hostile: str) -> None:
    """A model that wants to write a tag into a value cannot; it can write everything short of one."""
    processor = grammars().tool_call(TOOLS, "qwen3_coder", "get_weather")
    begin = made.ids_of("<tool_call>\n<function=get_weather>\n<parameter=city>\n")
    processor(PROMPT, torch.zeros(made.VOCAB))

    def open_behind(text: str) -> bool:
        ids = [*PROMPT, *begin, *[t for c in text for t in made.ids_of(c)]]
        return bool(processor(ids, torch.zeros(made.VOCAB)).isinf().any())

    assert open_behind(hostile[:-1])
    assert not open_behind(hostile), "unmasked scores are those of a text outside the grammar"


# ---- refusals

OBJECT = {"type": "object"}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "not": ({"not": {"type": "null"}}, "not"),
    "if": ({"type": "integer", "if": {"minimum": 3}, "then": {"maximum": 5}}, "if"),
    "dependentRequired": ({**OBJECT, "dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({**OBJECT, "dependentSchemas": {}}, "dependentSchemas"),
    "patternProperties": ({**OBJECT, "patternProperties": {"^x": {}}}, "patternProperties"),
    "propertyNames": ({**OBJECT, "propertyNames": {"pattern": "x"}}, "propertyNames"),
    "minProperties": ({**OBJECT, "minProperties": 1}, "minProperties"),
    "maxProperties": ({**OBJECT, "maxProperties": 1}, "maxProperties"),
    "unevaluatedProperties": ({**OBJECT, "unevaluatedProperties": False}, "unevaluatedProperties"),
    "uniqueItems": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "contains": ({"type": "array", "contains": {}}, "contains"),
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "multipleOf"),
    "contentEncoding": ({"type": "string", "contentEncoding": "base64"}, "contentEncoding"),
    "nullable": ({"type": "string", "nullable": True}, "nullable"),
    "a typing error": ({"type": "string", "maxlength": 3}, "maxlength"),
    "deep inside": ({**OBJECT, "properties": {"a": {"type": "array", "items": {"not": {}}}}}, "not"),
    "in a definition": ({"$ref": "#/$defs/a", "$defs": {"a": {"multipleOf": 2, "type": "number"}}}, "multipleOf"),
    "dynamic reference": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "keyword of another type": ({"type": "integer", "minLength": 2}, "minLength"),
    "beside anyOf": ({"anyOf": [{"type": "null"}], "type": "null"}, "type"),
    "beside $ref": ({"$ref": "#/$defs/a", "minimum": 2, "$defs": {"a": {"type": "integer"}}}, "minimum"),
    "beside enum": ({"enum": ["a"], "maxLength": 1, "type": "string"}, "maxLength"),
    "two of allOf": ({"allOf": [{"type": "integer"}, {"minimum": 3}]}, "allOf"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "oneOf with wrong types": ({"oneOf": [{"type": [["x"]]}, {"required": 5}]}, "must be"),
    "pattern and length": ({"type": "string", "pattern": "a", "maxLength": 3}, "pattern"),
    "unknown format": ({"type": "string", "format": "isbn"}, "format"),
    "look-ahead": ({"type": "string", "pattern": "^(?=a)b"}, "(?...)"),
    "back reference": ({"type": "string", "pattern": r"(a)\1"}, r"\1"),
    "word boundary": ({"type": "string", "pattern": r"\bfoo"}, r"\b"),
    "anchor inside": ({"type": "string", "pattern": "a^b"}, "^"),
    "broken pattern": ({"type": "string", "pattern": "(a"}, "group"),
    "unknown type": ({"type": "text"}, "text"),
    "no type": ({"type": []}, "type"),
    "false": ({**OBJECT, "properties": {"a": False}}, "false"),
    "empty enum": ({"enum": []}, "enum"),
    "enum of another type": ({"enum": [1], "type": "string"}, "enum"),
    "no such value": ({"type": "integer", "minimum": 5, "maximum": 3}, "5"),
    "no such number": ({"type": "number", "exclusiveMinimum": 5, "maximum": 5}, "5"),
    "no such length": ({"type": "string", "minLength": 5, "maxLength": 3}, "5"),
    "no such array": ({"type": "array", "prefixItems": [{}], "items": False, "minItems": 2}, "2"),
    "required, not allowed": ({**OBJECT, "required": ["b"], "additionalProperties": False}, "b"),
    "reference outside": ({"$ref": "https://example.org/s.json"}, "example.org"),
    "reference to nothing": ({"$ref": "#/$defs/a"}, "#/$defs/a"),
    "reference to itself": ({"$ref": "#"}, "#"),
    "left recursion": ({"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {}]}}}, "#/$defs/a"),
    "no end": ({**OBJECT, "properties": {"n": {"$ref": "#"}}, "required": ["n"]}, "#"),
    "NaN": ({"const": float("nan")}, "JSON"),
    "half a surrogate": ({"const": "\ud800"}, "JSON"),
    "tuple of old drafts": ({"type": "array", "items": [{}]}, "items"),
    "bounds of old drafts": ({"type": "integer", "minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_enforced_is_refused_by_name(case: str) -> None:
    schema, named = REFUSED[case]
    with pytest.raises(UserError) as refused:
        grammars().json_schema(schema)
    assert refused.value.code == "bad-schema"
    assert named in str(refused.value)


@pytest.mark.parametrize(
    ("change", "parser", "named"),
    [
        ({"name": "a b"}, "hermes", "a b"),
        ({"name": "a>b"}, "qwen3_coder", "a>b"),
        ({"parameters": {"type": "string"}}, "hermes", "object"),
        ({"parameters": {**OBJECT, "properties": {"a<b": {}}}}, "qwen3_coder", "a<b"),
        ({"parameters": {**OBJECT, "properties": {"a": {"enum": ["</function>"]}}}}, "qwen3_coder", "</function>"),
        ({"parameters": {**OBJECT, "properties": {"a": {"not": {}}}}}, "qwen3_coder", "not"),
        ({"parameters": {**OBJECT, "required": ["z"], "additionalProperties": True}}, "qwen3_coder", "z"),
    ],
)
def test_tools_that_cannot_be_held_to(change: dict[str, Any], parser: str, named: str) -> None:
    with pytest.raises(UserError) as refused:
        grammars().tool_call([{"type": "function", "function": {"name": "f", **change}}], parser, None)
    assert refused.value.code == "bad-schema" and named in str(refused.value)


HOSTILE = """
import json, sys
sys.path.insert(0, ".")
from draftproof.errors import UserError
from tests.serve.test_grammar import grammars
def deep(n, word):
    schema = {"type": "integer"}
    for _ in range(n):
        schema = {"anyOf": [schema]} if word == "anyOf" else {"type": "object", "properties": {"a": schema}}
    return schema
chain = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(2000)}
cases = [
    deep(10_000, "properties"), deep(10_000, "anyOf"), {"enum": [f"v{i}" for i in range(100_000)]},
    {"$ref": "#/$defs/d0", "$defs": chain | {"d2000": {}}}, {"type": "string", "pattern": "((a{100}){100}){100}"},
    {"type": "string", "pattern": "(" * 500 + ")" * 500}, {"type": "string", "pattern": "(((a*)*)*)*" * 50},
    {"type": "array", "minItems": 10**9}, {"type": "number", "minimum": 10**4000},
    {"type": "object", "properties": {f"p{i}": {} for i in range(5000)}},
    {"type": "object", "properties": {"k" * 100_000: {}}}, {"type": "array", "x": "y" * 10**6},
]
for case in cases:
    try:
        grammars().json_schema(case)
    except UserError as refused:
        assert refused.code == "bad-schema"
    else:
        sys.exit(f"accepted {str(case)[:80]}")
print("refused", len(cases))
"""


def test_hostile_schemas_are_refused_and_the_process_lives() -> None:
    begun = time.monotonic()
    done = subprocess.run([sys.executable, "-c", HOSTILE], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip() == "refused 12"
    assert time.monotonic() - begun < 120


# ---- the parts


@FEW
@given(st.lists(st.integers(0, 2), max_size=80), st.lists(st.integers(0, 2), max_size=80), st.integers(0, 80))
def test_common_beginning(one: list[int], other: list[int], same: int) -> None:
    other = one[:same] + other
    known = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    assert common(one, other) == known


def test_equal_grammars_are_compiled_once() -> None:
    fresh = Grammars(made.tokenizer(), made.VOCAB, [made.STOP])
    for _ in range(2):
        fresh.json_schema(SCHEMA)
        fresh.json_object()
    assert len(fresh._cache) == 2
    for size in range(80):
        fresh.json_schema({"type": "string", "maxLength": size + 1})
    assert len(fresh._cache) == 64


def test_special_tokens_are_no_text() -> None:
    """`<|im_start|>` decodes to nothing, so it must not count as text; `<tool_call>` is shown and may come."""
    scores = grammars().json_schema({"type": "string"})
    scores(PROMPT, torch.zeros(made.VOCAB))
    inside = scores(PROMPT + made.ids_of('"'), torch.zeros(made.VOCAB))
    special = made.tokenizer().convert_tokens_to_ids(["<|im_start|>", "<pad>", "<mask>", "<tool_call>"])
    assert inside[special].isfinite().tolist() == [False, False, False, True]


def test_a_tokenizer_that_cannot_write_json_is_refused() -> None:
    with pytest.raises(UserError, match="tokenizer"):
        Grammars(tiny.tokenizer(), tiny.VOCAB, [2]).json_object()


@pytest.mark.real
def test_real_vocabulary_valid_and_fast() -> None:
    """SmolLM2's 49,152 tokens: answers are valid, and a node costs less than a millisecond."""
    from transformers import AutoTokenizer

    from draftproof.models.hub import resolve_target

    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_target("smollm2-135m"))
    size = 49_152
    held = Grammars(tokenizer, size, [2])
    spent, calls, ended = 0.0, 0, 0
    for seed in range(6):
        processor, draw = held.json_schema(SCHEMA), torch.Generator().manual_seed(seed)
        ids = [1]
        for _ in range(150):
            scores = 3 * torch.randn(size, generator=draw)
            begun = time.process_time()
            scores = processor(ids, scores)
            spent, calls = spent + time.process_time() - begun, calls + 1
            ids.append(int(scores.argmax()))
            if ids[-1] == 2:
                ended += 1
                assert valid(SCHEMA, tokenizer.decode(ids[1:-1], clean_up_tokenization_spaces=False))
                break
    assert ended >= 4
    assert spent / calls < 1e-3
