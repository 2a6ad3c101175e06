"""Bodies of requests: what is taken, and what is refused by name with a 400."""

from __future__ import annotations

import ast
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from draftproof.serve.asked.body import DEEPEST, MOST_PARTS, parse, strict_json
from draftproof.serve.asked.fields import Strict
from draftproof.serve.asked.schema import (
    HARMLESS,
    LONGEST_STOP,
    MOST_MESSAGES,
    MOST_STOPS,
    REFUSED,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    Sampled,
    TokenizeRequest,
)
from draftproof.serve.errors import ApiError
from tests.serve.made import user

HERE = Path(__file__).parents[2] / "draftproof" / "serve"


def chat(**fields: Any) -> ChatRequest:
    return parse(json.dumps({"messages": user("hi"), **fields}).encode(), ChatRequest)


def completion(**fields: Any) -> CompletionRequest:
    return parse(json.dumps(fields).encode(), CompletionRequest)


def refused(**fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        chat(**fields)
    assert caught.value.status == 400
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"temprature": 1}, "temprature", "no such parameter"),
        ({"temperature": "1"}, "temperature", "number"),
        ({"temperature": True}, "temperature", "number"),
        ({"temperature": -0.1}, "temperature", "greater than or equal to 0"),
        ({"top_p": 0}, "top_p", "greater than 0"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_completion_tokens", "differ"),
        ({"n": 0}, "n", "greater"),
        ({"n": 129}, "n", "128"),
        ({"stop": ["a"] * (MOST_STOPS + 1)}, "stop", "at most 16"),
        ({"messages": [{"role": "user", "content": "a"}] * (MOST_MESSAGES + 1)}, "messages", "at most 4096"),
        ({"stop": "a" * (LONGEST_STOP + 1)}, "stop", "at most 16384"),
        ({"stop": [""]}, "stop[0]", "at least 1"),
        ({"stop": ["a", 3]}, "stop[1]", "string"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"functions": []}, "functions", "not supported: give tools"),
        ({"audio": {}}, "audio", "answers text"),
        ({"guided_json": {}}, "guided_json", "response_format"),
        ({"store": True}, "store", "False"),
        ({"service_tier": "flex"}, "service_tier", "'auto'"),
        ({"modalities": ["audio"]}, "modalities[0]", "text"),
        ({"top_logprobs": 2}, "top_logprobs", "logprobs is true"),
        ({"logprobs": 2}, "logprobs", "boolean"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream is true"),
        ({"stream": True, "stream_options": {"usage": True}}, "stream_options.usage", "no such parameter"),
        ({"draft_details": True}, "draft_details", "stream is true"),
        ({"spec_decode_metrics": "summary", "n": 2}, "spec_decode_metrics", "n is 1"),
        ({"spec_decode_metrics": "summary", "stream": True}, "spec_decode_metrics", "include_usage"),
        ({"speculation": {"budget": "auto"}}, "speculation.budget", "'none' or 'chain'"),
        ({"speculation": {"budget": -1}}, "speculation.budget", "greater"),
        ({"tool_choice": "auto"}, "tool_choice", "tools are given"),
        ({"response_format": {"type": "xml"}}, "response_format", "json_schema"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "required"),
        ({"logit_bias": {"5": 101}}, "logit_bias.5", "100"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", "'tool'"),
        ({"messages": [{"role": "user", "content": "x", "mood": 1}]}, "messages[0].mood", "no such parameter"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]", "image_url"),
        ({"messages": [{"role": "assistant"}]}, "messages[0]", "content or tool_calls"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1]"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
            "no JSON object",
        ),
    ],
)
def test_a_wrong_field_is_refused_by_name(fields: dict[str, Any], param: str, words: str) -> None:
    error = refused(**fields)
    assert error.param == param and words in error.message, (error.param, error.message)


def test_two_tools_of_one_name_and_a_choice_of_none_are_refused() -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    assert refused(tools=[tool, tool]).param == "tools"
    assert refused(tools=[tool], tool_choice={"type": "function", "function": {"name": "g"}}).param == "tool_choice"


def test_a_null_is_as_good_as_absent() -> None:
    nothing = dict.fromkeys((*REFUSED, *HARMLESS, "temperature", "stop", "tools", "n", "response_format"))
    assert chat(**nothing) == chat()
    assert refused(nonsense=None).param == "nonsense"


def test_everything_the_openai_clients_know_is_either_taken_or_refused_with_a_hint() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsBase as Chat
    from openai.types.completion_create_params import CompletionCreateParamsBase as Text

    known = set(Chat.__annotations__) - {"extra_headers"}
    assert known <= ChatRequest.model_fields.keys() | REFUSED.keys()
    assert set(Text.__annotations__) <= CompletionRequest.model_fields.keys() | REFUSED.keys() | {"stream"}


def test_every_field_is_read_somewhere() -> None:
    """One that no code mentions would be accepted and ignored; those that ask for nothing are listed."""
    read = set()
    for path in HERE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                read.add(node.attr)
            if isinstance(node, ast.Constant) and path.name == "ask.py" and isinstance(node.value, str):
                read.add(node.value)  # sampling parameters are fetched by name
    taken = (
        ChatRequest.model_fields.keys() | CompletionRequest.model_fields.keys() | TokenizeRequest.model_fields.keys()
    )
    assert taken - read - set(HARMLESS) == {"echo"}  # only false is taken
    assert set(HARMLESS) <= taken


def test_prompts_of_every_form() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]
    for wrong in (3, [1, "a"], [], "", [[1], "a"], [-1], [1.0]):
        with pytest.raises(ApiError) as caught:
            completion(prompt=wrong)
        assert str(caught.value.param).startswith("prompt")
    with pytest.raises(ApiError, match="128 at most"):
        completion(prompt=["a"] * 65, n=2)


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"", "no valid JSON"),
        (b"{", "no valid JSON"),
        (b"[]", "must be a JSON object"),
        (b"null", "must be a JSON object"),
        (b'{"a": 1, "a": 2}', "given twice"),
        (b'{"a": {"b": 1, "b": 1}}', "given twice"),
        (b'{"temperature": NaN}', "no finite number"),
        (b'{"temperature": -Infinity}', "no finite number"),
        (b'{"temperature": 1e999}', "no finite number"),
        (b'{"max_tokens": ' + b"9" * 5000 + b"}", "no valid JSON"),
        (b'{"prompt": "\\ud800"}', "surrogate"),
        (b'{"\\udfff": 1}', "surrogate"),
        (b'{"prompt": "\xff"}', "not UTF-8 at byte 12"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8"),
        (b'{"prompt": "a\nb"}', "control character"),
        (b'{"prompt": "a"} x', "Extra data"),
        (b"[" * (DEEPEST + 1) + b"]" * (DEEPEST + 1), f"deeper than {DEEPEST}"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, f"deeper than {DEEPEST}"),
    ],
)
def test_what_is_no_clean_json_is_refused(raw: bytes, words: str) -> None:
    with pytest.raises(ApiError, match=words) as caught:
        parse(raw, CompletionRequest)
    assert caught.value.status == 400


def test_pairs_of_surrogates_and_nesting_up_to_the_limit_are_json() -> None:
    assert strict_json(b'"\\ud83d\\ude00"') == "\U0001f600"
    strict_json(b"[" * DEEPEST + b"]" * DEEPEST)


def test_lists_and_objects_are_counted_before_they_are_made() -> None:
    """And those only: not the brackets of a text, whatever quotes and backslashes stand around them."""
    text = '[{"\\\\"' * MOST_PARTS
    assert strict_json(json.dumps({"prompt": text, '[\\"': [text]}).encode()) == {"prompt": text, '[\\"': [text]}
    assert len(strict_json(b"[" + b"[]," * (MOST_PARTS - 2) + b'"["]')) == MOST_PARTS - 1
    tracemalloc.start()
    try:
        for raw in (b"[" + b"[]," * MOST_PARTS + b"1]", b'["\\\\",' + b'{"[":"\\""},' * MOST_PARTS + b"1]"):
            tracemalloc.reset_peak()
            before, _ = tracemalloc.get_traced_memory()
            with pytest.raises(ApiError, match="100,000 lists and objects"):
                strict_json(raw)
            assert tracemalloc.get_traced_memory()[1] - before < 4 * len(raw)
    finally:
        tracemalloc.stop()


NAMES = {f"name{n}": n for n in range(1000)}
CALL = {"function": {"name": "f"}}


@pytest.mark.parametrize(
    ("kind", "sent"),
    [
        *((CompletionRequest, {"prompt": p}) for p in ([1.0] * 1000, ["a"] * 999 + [1], [[1]] * 999 + [["a"] * 1000])),
        (CompletionRequest, {"prompt": "a", **NAMES}),
        (ChatRequest, {"messages": [1] * 1000}),
        (ChatRequest, {"messages": [{"role": "user", "content": [1] * 1000}]}),
        (ChatRequest, {"messages": [*user("a"), *[{"role": "user", "content": "a", **NAMES}] * 9]}),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "text", "text": "a", **NAMES}] * 9}]}),
        (ChatRequest, {"messages": [{"role": "assistant", "tool_calls": [CALL] * 9 + [1] * 1000}]}),
        (ChatRequest, {"messages": user("a"), "modalities": ["text", *[1] * 1000]}),
        (ChatRequest, {"messages": user("a"), "tools": [1] * 1000}),
        (ChatRequest, {"messages": user("a"), "stop": [1] * 1000}),
        (ChatRequest, {"messages": user("a"), "stop_token_ids": ["a"] * 1000}),
        (DetokenizeRequest, {"tokens": ["a"] * 1000}),
    ],
)
def test_a_wrong_list_or_object_raises_a_few_complaints(kind: type[Strict], sent: dict[str, Any]) -> None:
    """Each takes a kilobyte or more: one for each of a million items would be the end of the server."""
    with pytest.raises(ValidationError) as caught:
        kind.model_validate(sent)
    assert caught.value.error_count() <= 20


def test_of_several_forms_the_one_that_fits_longest_is_told() -> None:
    for wrong, told in ((["a", 1], "prompt[1]: Input should be a valid string"), ([1, "a"], "prompt[1]: Input")):
        with pytest.raises(ApiError) as caught:
            completion(prompt=wrong)
        assert str(caught.value).startswith(told)


def test_sampling_fields_are_those_the_engine_knows() -> None:
    """What `Sampled` offers as a number reaches SamplingParams under the same name."""
    from draftproof.engine.request import SamplingParams

    shared = Sampled.model_fields.keys() & SamplingParams.__dataclass_fields__.keys()
    assert shared == set(SamplingParams.__dataclass_fields__) - {"choice"}
