"""The fixed prompts, and what engines' answers tell. vLLM's JSON is as the real 0.32.0 printed it."""

from __future__ import annotations

import json

import httpx
import pytest

from draftproof.doctor.facts.llamacpp import read_events, read_stream, streamed_whole
from draftproof.doctor.facts.probe import probe, probe_ids, read_generate, read_llamacpp, read_openai, read_prompts
from draftproof.errors import UserError

from .servers import Reply, closed_port, serving

CHAT = (
    '{"id":"chatcmpl-a3a787d9dc14f7da","object":"chat.completion","created":1795996278,"model":"tiny","choices":[{'
    '"index":0,'
    '"message":{"role":"assistant","content":" w104 w104","refusal":null,"reasoning":null},"logprobs":null,'
    '"finish_reason":"length","stop_reason":null,"token_ids":[104,104,104],"routed_experts":null}],"usage":{"prompt_tokens":3,'
    '"total_tokens":6,"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":2}},"prompt_token_ids":[5,9,10],'
    '"metrics":{"time_to_first_token_ms":null,"speculative_decoding":{"mean_acceptance_length":1.0,"draft_acceptance_rate":'
    '0.0,"acceptance_histogram":[2,0,0,0,0,0,0,0],"num_spec_steps":2,"num_accepted_draft_tokens":0,"num_draft_tokens":14,'
    '"num_spec_tokens":7,"per_step_accepted":[0,0],"per_step_drafted":[7,7]}}}'
)


def test_prompts_are_sixteen_and_varied() -> None:
    prompts = read_prompts()
    assert len(prompts) == len(set(prompts)) == 16
    assert all(20 < len(prompt) < 900 for prompt in prompts)
    assert sum(len(prompt) > 600 for prompt in prompts) == 4, "longer than a cache block"


def test_vllm() -> None:
    answer = read_openai(json.loads(CHAT), 0.5)
    assert (answer.prompt_ids, answer.output_ids, answer.finish) == ((5, 9, 10), (104, 104, 104), "length")
    assert (answer.steps, answer.accepted, answer.drafted, answer.per_step) == (2, 0, 14, (0, 0))
    assert answer.cached_tokens == 2 and answer.text == " w104 w104"


def test_an_older_or_unknown_server_tells_less() -> None:
    body = {"choices": [{"index": 0, "text": "hi", "finish_reason": "stop"}], "usage": None, "metrics": None}
    answer = read_openai(body, 0.1, [1, 2])
    assert answer.prompt_ids == (1, 2) and answer.output_ids == () and answer.steps is None and answer.per_step is None


def test_sglang() -> None:
    meta = {
        "finish_reason": {"type": "length", "length": 9}, "cached_tokens": 1, "spec_verify_ct": 3,
        "spec_num_correct_drafts": 5, "spec_num_proposed_drafts": 45, "spec_accept_length": 3.0,
    }  # fmt: skip
    answer = read_generate({"text": "x", "output_ids": [7] * 9, "meta_info": meta}, 1.0, [1, 2])
    assert (answer.steps, answer.accepted, answer.drafted, answer.cached_tokens) == (3, 5, 45, 1)
    choice = {"message": {"content": "x"}, "prompt_token_ids": [1, 2], "response_token_ids": [7], "meta_info": meta}
    chat = read_openai({"choices": [choice]}, 1.0)
    assert (chat.prompt_ids, chat.output_ids, chat.steps) == ((1, 2), (7,), 3)


def test_llamacpp() -> None:
    timings = {"draft_n": 30, "draft_n_accepted": 12, "cache_n": 4}
    answer = read_llamacpp({"content": "x", "tokens": [7, 8], "stop_type": "limit", "timings": timings}, 1.0, [1])
    assert (answer.steps, answer.accepted, answer.drafted, answer.finish) == (None, 12, 30, "length")
    assert answer.output_ids == (7, 8) and answer.cached_tokens == 4


def event(tokens: list[int], drafted: int, accepted: int, count: int, **more: object) -> dict[str, object]:
    timings = {"draft_n": drafted, "draft_n_accepted": accepted} if drafted else {}
    return {"content": "x", "tokens": tokens, "stop": False, "tokens_predicted": count, "timings": timings} | more


# The prompt's own token; 2 of 3 drafts; none of 3; a step without drafts; all of the 1 draft that the limit left.
STREAM = [
    event([1], 0, 0, 1), event([2], 3, 2, 2), event([3], 3, 2, 3), event([4], 3, 2, 4), event([5], 6, 2, 5),
    event([6], 6, 2, 6), event([7], 7, 3, 7), event([8], 7, 3, 8),
    event([], 7, 3, 8, stop=True, stop_type="limit", content=""),
]  # fmt: skip


def test_llamacpp_streams_its_steps() -> None:
    answer = read_stream(STREAM, 1.0, [9])
    assert answer.output_ids == (1, 2, 3, 4, 5, 6, 7, 8) and answer.text == "x" * 8 and answer.finish == "length"
    assert answer.per_step == (2, 0, 0, 1)
    assert (answer.steps, answer.accepted, answer.drafted) == (2, 2, 6), "steps that a limit cut say less of a drafter"


def test_llamacpp_without_a_drafter_tells_no_steps() -> None:
    plain = [event([1], 0, 0, 1), event([2], 0, 0, 2), event([], 0, 0, 2, stop=True, stop_type="eos")]
    answer = read_stream(plain, 1.0, [9])
    assert answer.output_ids == (1, 2) and (answer.steps, answer.accepted, answer.per_step) == (None, None, None)


def test_llamacpp_hides_tokens_inside_a_character(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = [STREAM[0], *STREAM[2:]]
    assert not streamed_whole(hidden) and read_stream(hidden, 1.0, [9]).per_step is None
    whole = json.dumps({"content": "é", "tokens": [1, 2, 3, 4, 5, 6, 7, 8], "stop_type": "limit", "timings": {}})
    stream = "\n\n".join(f"data: {json.dumps(one)}" for one in hidden)
    replies = iter([httpx.Response(200, text=stream), httpx.Response(200, text=whole)])
    monkeypatch.setattr("draftproof.doctor.facts.probe.ask", lambda *_: next(replies))
    (answer,) = probe_ids("http://127.0.0.1:1", "m", [[9]], 8, engine="llama.cpp")
    assert answer.output_ids == (1, 2, 3, 4, 5, 6, 7, 8) and answer.text == "é"
    assert (answer.steps, answer.accepted, answer.drafted) == (None, 3, 7)


def test_events_are_read_line_by_line() -> None:
    text = 'data: {"content": "a\u2028b"}\n\n: comment\n\ndata: {"stop": true}\n\n'
    assert read_events(text.encode()) == [{"content": "a\u2028b"}, {"stop": True}]
    assert read_events(b"data: no JSON\n") == [] and read_events(b"") == []


@pytest.mark.parametrize(
    ("reply", "code", "what"),
    [
        (Reply(401, "{}"), "auth-needed", "wants an API key"),
        (Reply(404, '{"error":{"message":"The model `m` does not exist."}}'), "server-unfit", "does not exist"),
        (Reply(500, "boom"), "server-unfit", "500: boom"),
        (Reply(200, "no JSON"), "server-unfit", "answers 200: no JSON"),
    ],
)
def test_refusals(reply: Reply, code: str, what: str) -> None:
    with serving({"/v1/chat/completions": reply}) as url, pytest.raises(UserError) as caught:
        probe(url, "m", ["hello"], 4, engine="vllm")
    assert caught.value.code == code and what in caught.value.message


def test_a_server_that_is_gone() -> None:
    with pytest.raises(UserError) as caught:
        probe_ids(f"http://127.0.0.1:{closed_port()}", "m", [[1]], 4)
    assert caught.value.code == "server-unreachable"
