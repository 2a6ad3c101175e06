"""The fixed prompts, and what engines' answers tell. vLLM's JSON is as the real 0.32.0 printed it."""

from __future__ import annotations

import json

import pytest

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
