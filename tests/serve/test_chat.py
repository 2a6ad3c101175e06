"""From a chat request to the engine and back: templates, tools, reasoning, log-probabilities, limits."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from draftproof.engine.request import StepResult, TokenLogprob
from draftproof.engine.text import TextStream
from draftproof.serve.answer.choice import Choice, SpecCount, spec_metrics
from draftproof.serve.answer.logprobs import Tokens, completion_logprobs
from draftproof.serve.asked import chat, completions
from draftproof.serve.asked.ask import Asked
from draftproof.serve.asked.body import parse
from draftproof.serve.asked.messages import for_template
from draftproof.serve.asked.schema import ChatRequest, CompletionRequest
from draftproof.serve.errors import ApiError
from draftproof.serve.parsers import Call, collect, make
from draftproof.serve.served import Limits, Parsers, Served
from tests.serve.made import STOP, TEMPLATE, VOCAB, ids_of, served, tokenizer, user

QWEN = Parsers("qwen3", "qwen3_coder", auto_tools=True)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}},
}
CALL = "<tool_call>\n<function=f>\n<parameter=x>\n3\n</parameter>\n</function>\n</tool_call>"


def ask(what: Served, **fields: Any) -> Asked:
    sent = parse(json.dumps({"messages": user("hi"), **fields}).encode(), ChatRequest)
    return asyncio.run(chat.prepare(what, sent))


def complete(what: Served, **fields: Any) -> Asked:
    return asyncio.run(completions.prepare(what, parse(json.dumps(fields).encode(), CompletionRequest)))


def refusal(what: Served, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        ask(what, **fields)
    return caught.value


@pytest.fixture(scope="module")
def plain() -> Served:
    return served()


@pytest.fixture(scope="module")
def qwen() -> Served:
    return served(parsers=QWEN)


def test_the_prompt_is_the_template_and_nothing_else(plain: Served) -> None:
    asked = ask(plain, messages=[{"role": "system", "content": "Be."}, *user("hi")])
    expected = "<|im_start|>system\nBe.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert list(asked.requests[0].prompt_ids) == ids_of(expected)


def test_messages_as_templates_read_them() -> None:
    sent = parse(
        json.dumps({
            "messages": [
                {"role": "developer", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
                {
                    "role": "assistant", "content": None, "reasoning": "why", "refusal": None, "annotations": [],
                    "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 3}'}}],
                },
                {"role": "tool", "tool_call_id": "1", "content": "9"},
            ]
        }).encode(),
        ChatRequest,
    )  # fmt: skip
    made = for_template(sent.messages, TEMPLATE)
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 3}}}
    assert made == [
        {"role": "system", "content": "a\nb"},
        {"role": "assistant", "content": "", "reasoning_content": "why", "tool_calls": [call]},
        {"role": "tool", "content": "9", "tool_call_id": "1"},
    ]
    assert for_template(sent.messages, "developer")[0]["role"] == "developer"


def test_template_arguments_must_be_read_by_the_template(plain: Served) -> None:
    asked = ask(plain, chat_template_kwargs={"enable_thinking": True})
    assert list(asked.requests[0].prompt_ids)[-1:] == ids_of("<think>")
    for name in ("temperature", "tokenize", "messages", "tools", "a b"):
        error = refusal(plain, chat_template_kwargs={name: 1})
        assert error.param == f"chat_template_kwargs.{name}"
    assert refusal(plain, reasoning_effort="low").param == "reasoning_effort"


def test_a_template_that_refuses_is_a_400(monkeypatch: pytest.MonkeyPatch, plain: Served) -> None:
    monkeypatch.setattr(tokenizer(), "chat_template", "{{ raise_exception('roles must alternate') }}")
    assert "roles must alternate" in refusal(plain).message
    monkeypatch.setattr(tokenizer(), "chat_template", None)
    assert "no chat template" in refusal(plain).message  # the words that doctor/facts/probe.py looks for


def test_defaults_are_the_models_own_then_openais() -> None:
    own = served(defaults={"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1})
    sampling = ask(own).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.repetition_penalty) == (0.6, 20, 1, 1.1)
    sampling = ask(own, temperature=0, top_k=-1, repetition_penalty=1).requests[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.repetition_penalty) == (0, 0, 1)
    assert ask(served()).requests[0].sampling.temperature == 1


def test_choices_share_the_seed_and_differ_in_their_number(plain: Served) -> None:
    one, two = ask(plain, n=2).requests
    assert one.sampling.seed == two.sampling.seed is not None
    assert (one.sampling.choice, two.sampling.choice) == (0, 1)
    asked = complete(plain, prompt=["a", "b"], n=2, seed=5)
    assert [r.sampling.choice for r in asked.requests] == [0, 1, 0, 1]
    assert [c.index for c in asked.choices] == [0, 1, 2, 3] and asked.requests[2].prompt_ids == ids_of("b")


def test_limits_of_tokens() -> None:
    small = served(limits=Limits(64, answer=10))
    assert ask(small).requests[0].max_tokens == 10
    assert ask(small, max_completion_tokens=30).requests[0].max_tokens == 30
    error = refusal(small, max_tokens=60)
    assert error.code == "context_length_exceeded" and "64 tokens" in error.message
    assert refusal(small, messages=user("x" * 60)).code == "context_length_exceeded"
    assert "characters" in refusal(small, messages=user("x" * 5000)).message  # not tokenised at all
    assert refusal(small, min_tokens=11).param == "min_tokens"
    assert ask(served(limits=Limits(64))).requests[0].max_tokens == 64 - len(ask(small).requests[0].prompt_ids)


def test_stop_tokens_and_biases(plain: Served) -> None:
    assert ask(plain).requests[0].stop_ids == (STOP,)
    assert ask(plain, ignore_eos=True).requests[0].stop_ids == ()
    assert ask(plain, stop_token_ids=[9, 9]).requests[0].stop_ids == (STOP, 9)
    assert ask(plain, logit_bias={"7": -5}).requests[0].sampling.logit_bias == {7: -5}
    for wrong in (str(VOCAB), "-1", "07", "x", "٣"):
        assert refusal(plain, logit_bias={wrong: 1}).param == "logit_bias"
    assert refusal(plain, stop_token_ids=[VOCAB]).param == "stop_token_ids"
    with pytest.raises(ApiError, match="outside the vocabulary"):
        complete(plain, prompt=[1, VOCAB])


def test_speculation_needs_a_drafter(plain: Served) -> None:
    assert ask(plain, speculation={"budget": 3}).requests[0].budget == 3
    none = served(depth=0)
    assert ask(none, speculation={"budget": "none"}).requests[0].budget == "none"
    assert refusal(none, speculation={"budget": "chain"}).param == "speculation"
    assert refusal(none, spec_decode_metrics="summary").param == "spec_decode_metrics"


def test_tools_need_what_reads_them(plain: Served, qwen: Served) -> None:
    assert "--tool-call-parser" in refusal(plain, tools=[TOOL]).message
    assert ask(plain, tools=[TOOL], tool_choice="none").requests
    by_hand = served(parsers=Parsers(None, "qwen3_coder"))
    assert "--enable-auto-tool-choice" in refusal(by_hand, tools=[TOOL]).message
    strict = {"type": "function", "function": {**TOOL["function"], "strict": True}}  # type: ignore[dict-item]
    assert "strict" in refusal(qwen, tools=[strict]).message
    assert refusal(qwen, tools=[TOOL], response_format={"type": "json_object"}).param == "response_format"
    text = str(tokenizer().decode(ask(qwen, tools=[TOOL]).requests[0].prompt_ids))
    assert '"name": "f"' in text


def test_forms_come_as_processors_one_a_choice(plain: Served, qwen: Served) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    one, two = (r.processors[0] for r in ask(plain, n=2, response_format=form).requests)
    assert one is not two
    assert ask(qwen, tools=[TOOL], tool_choice="required").requests[0].processors
    bad = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "elephant"}}}
    error = refusal(plain, response_format=bad)
    assert (error.status, error.param, error.code) == (400, "response_format", "bad_schema")
    assert refusal(plain, response_format=form, ignore_eos=True).param == "ignore_eos"
    assert refusal(plain, response_format=form, min_tokens=3).param == "min_tokens"


# ---- results -> parts


def choice(text: str = "", **more: Any) -> Choice:
    thinking = more.pop("thinking", False)
    parser = make("qwen3" if thinking else None, "qwen3_coder", thinking=thinking, schemas=None, new_id=lambda: "id")
    return Choice(0, TextStream(tokenizer(), (text,), keep_special=True), parser, **more)


def feed(one: Choice, text: str, *, size: int = 1, finish: str = "stop") -> list[Any]:
    """The text in steps of so many tokens; the last brings the stop token."""
    ids = [*ids_of(text), STOP]
    steps = [ids[at : at + size] for at in range(0, len(ids), size)]
    parts = []
    for number, tokens in enumerate(steps):
        parts.append(one.take(StepResult(0, tokens, len(tokens) - 1, finish if number == len(steps) - 1 else None)))
        if parts[-1].finish:
            break
    return parts


@pytest.mark.parametrize("size", [1, 2, 7, 500])
def test_reasoning_content_and_calls_in_steps_of_any_size(size: int) -> None:
    one = choice(thinking=True)
    parts = feed(one, f"hmm</think>\n\nhere: {CALL}", size=size)
    told = collect(part.delta for part in parts)
    assert told.reasoning == "hmm" and (told.content or "").strip() == "here:"
    assert told.calls == [Call("id", "f", '{"x": "3"}')]
    assert parts[-1].finish == "tool_calls" and one.tokens == sum(len(part.tokens) for part in parts)


def test_a_call_cut_by_the_limit_ends_as_length() -> None:
    assert feed(choice(), CALL[:40], finish="length")[-1].finish == "length"


@pytest.mark.parametrize("size", [1, 9, 500])
def test_one_call_at_most_where_only_one_may_come(size: int) -> None:
    two = CALL + "\n" + CALL.replace("3", "4")
    assert len(collect(part.delta for part in feed(choice(), two, size=size)).calls) == 2
    parts = feed(choice(parallel=False), two, size=size)
    assert [c.arguments for c in collect(part.delta for part in parts).calls] == ['{"x": "3"}']
    assert parts[-1].finish == "tool_calls"


def test_what_a_stop_string_cuts_off_is_not_counted() -> None:
    one = choice("c")
    logprobs = [TokenLogprob(-1.0, [])] * 5
    part = one.take(StepResult(0, ids_of("abcde"), 4, None, nodes=4, logprobs=logprobs))
    assert part.delta.content == "ab" and part.finish == "stop" and part.stopped_by == "c"
    assert part.tokens == ids_of("abc") and len(part.logprobs or ()) == 3 and one.tokens == 3
    assert one.spec.accepted == [3]


def test_a_stop_token_of_the_request_is_named_and_is_no_text() -> None:
    token = ids_of("!")[0]
    part = choice(stop_ids=frozenset([token])).take(StepResult(0, [*ids_of("a"), token], 0, "stop"))
    assert part.delta.content == "a" and part.stopped_by == token
    assert choice().take(StepResult(0, [STOP], 0, "stop")).stopped_by is None


def test_a_step_that_drafted_is_counted_and_the_prefill_is_not() -> None:
    one = choice()
    one.take(StepResult(0, ids_of("a"), 0, None, prefill=True, cached=7))
    one.take(StepResult(0, ids_of("bcd"), 2, None, nodes=5))
    one.take(StepResult(0, ids_of("e"), 0, None, nodes=0))
    one.take(StepResult(0, ids_of("f"), 0, "length", nodes=3))
    assert one.cached == 7 and one.tokens == 6
    told = spec_metrics(one.spec, 3, detailed=True)
    assert told == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": 0.25,
        "acceptance_histogram": [1, 0, 1, 0],
        "num_spec_steps": 2,
        "num_accepted_draft_tokens": 2,
        "num_draft_tokens": 8,
        "num_spec_tokens": 3,
        "per_step_accepted": [2, 0],
        "per_step_drafted": [5, 3],
    }
    assert "per_step_accepted" not in spec_metrics(SpecCount(), 3, detailed=False)


def test_bytes_of_tokens_are_their_own() -> None:
    tokens, euro = Tokens(tokenizer()), ids_of("€")
    assert [byte for token in euro for byte in tokens.bytes(token)] == list("€".encode()) and len(euro) == 3
    assert tokens.bytes(ids_of(" ")[0]) == [32]


def test_parts_of_characters_are_told_apart_in_completion_logprobs() -> None:
    first, second, third = ids_of("€")
    likely = TokenLogprob(-3, [(second, -0.5), (third, -1.0)])
    told = completion_logprobs(Tokens(tokenizer()), [first], [likely], 0)
    names = {second: "bytes:\\x82", third: "bytes:\\xac", first: "bytes:\\xe2"}
    assert told["tokens"] == [names[first]]
    assert told["top_logprobs"] == [{names[second]: -0.5, names[third]: -1.0, names[first]: -3}]


def test_the_chosen_token_keeps_its_own_value_beside_a_twin() -> None:
    """Two tokens of a vocabulary may have the same text."""
    tokens = Tokens(tokenizer())
    tokens.text = lambda token: "same"  # type: ignore[assignment]
    assert completion_logprobs(tokens, [5], [TokenLogprob(-3, [(6, -0.5)])], 0)["top_logprobs"] == [{"same": -3}]


def test_offsets_of_completion_logprobs() -> None:
    ids = ids_of("ab")
    told = completion_logprobs(
        Tokens(tokenizer()), ids, [TokenLogprob(-1, [(ids[1], -0.5)]), TokenLogprob(-1e30, [])], 4
    )
    assert told == {
        "tokens": ["a", "b"],
        "token_logprobs": [-1, -9999.0],
        "top_logprobs": [{"b": -0.5, "a": -1}, {"b": -9999.0}],
        "text_offset": [4, 5],
    }
