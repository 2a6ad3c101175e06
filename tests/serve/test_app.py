"""The server over a real socket: shapes, streams, limits, keys, and everything that can go wrong on the way."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from draftproof.engine.request import StepResult
from draftproof.serve.answer.objects import ChatAnswer
from draftproof.serve.app import create_app
from draftproof.serve.served import Limits, Parsers, Served
from draftproof.serve.stats.metrics import Metrics
from tests.serve.made import CONTEXT, NAME, STOP, VOCAB, eventually, ids_of, running, served, tokenizer, user

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with running(served(parsers=Parsers("qwen3", "hermes", auto_tools=True))) as address:
        yield address


def post(url: str, path: str = CHAT, **fields: Any) -> httpx.Response:
    if path == CHAT:
        fields.setdefault("messages", user("say: Hello"))
    return httpx.post(url + path, json=fields, timeout=60)


def error_of(response: httpx.Response) -> dict[str, Any]:
    body = response.json()
    assert body.keys() == {"error"} and body["error"].keys() == {"message", "type", "param", "code"}, body
    return dict(body["error"])


def events(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines) and lines[-1] == "data: [DONE]"
    return [json.loads(line[6:]) for line in lines[:-1]]


# ---- shapes


def test_a_chat_answer_has_openais_shape(url: str) -> None:
    body = post(url, model=NAME).json()
    prompt = len(ids_of("<|im_start|>user\nsay: Hello<|im_end|>\n<|im_start|>assistant\n"))
    assert re.fullmatch("chatcmpl-[0-9a-f]{24}", body.pop("id")) and abs(body.pop("created") - time.time()) < 60
    cached = body["usage"].pop("prompt_tokens_details")["cached_tokens"]
    assert 0 <= cached < prompt
    message = {"role": "assistant", "content": None, "refusal": None, "reasoning": "Hello"}  # </think> never came
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop", "stop_reason": None}
    usage = {"prompt_tokens": prompt, "completion_tokens": 6, "total_tokens": prompt + 6}
    assert body == {"object": "chat.completion", "model": NAME, "choices": [choice], "usage": usage}


def test_a_completion_has_openais_shape(url: str) -> None:
    body = post(url, TEXT, prompt="say: Hi", model="default", return_token_ids=True).json()
    assert body.pop("id").startswith("cmpl-") and body.pop("created") and body.pop("usage")
    ids = {"token_ids": [*ids_of("Hi"), STOP], "prompt_token_ids": ids_of("say: Hi")}
    choice = {"index": 0, "text": "Hi", "logprobs": None, "finish_reason": "stop", "stop_reason": None, **ids}
    assert body == {"object": "text_completion", "model": NAME, "choices": [choice]}


def test_a_stream_says_what_the_whole_answer_says(url: str) -> None:
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "n": 2, "max_tokens": 20, "messages": user("go on")}
    fields |= {"logprobs": True, "top_logprobs": 2, "return_token_ids": True, "ignore_eos": True}
    whole = post(url, **fields).json()
    chunks = events(post(url, stream=True, stream_options={"include_usage": True}, **fields))
    assert len({c["id"] for c in chunks}) == 1 and {c["object"] for c in chunks} == {"chat.completion.chunk"}
    assert chunks[-1]["choices"] == [] and all(c["usage"] is None for c in chunks[:-1])
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert chunks[-1]["usage"][name] == whole["usage"][name]
    for number, choice in enumerate(whole["choices"]):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == number]
        assert own[0]["delta"] == {"role": "assistant", "content": ""} and len(own) > 2
        assert all("role" not in c["delta"] for c in own[1:])
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["length"]
        for field in ("reasoning", "content"):
            joined = "".join(c["delta"].get(field, "") for c in own)
            assert joined == (choice["message"][field] or "")
        assert [token for c in own for token in c.get("token_ids", [])] == choice["token_ids"]
        told = [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
        assert [t["token"] for t in told] == [t["token"] for t in choice["logprobs"]["content"]]
        assert len(told) == 20 and all(len(t["top_logprobs"]) == 2 for t in told)
    assert whole["choices"][0]["token_ids"] != whole["choices"][1]["token_ids"]


def test_an_answer_of_many_logprobs_is_put_together_beside_the_event_loop(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields: dict[str, Any] = {"messages": user("go on"), "seed": 3, "max_tokens": 20, "logprobs": True}
    few = post(url, **fields).json()["choices"]
    threads, made = [], ChatAnswer.whole

    def whole(*given: Any) -> Any:
        threads.append(threading.current_thread())
        return made(*given)

    monkeypatch.setattr(ChatAnswer, "whole", whole)
    assert post(url, **fields).json()["choices"] == few
    monkeypatch.setattr("draftproof.serve.app.MANY_LOGPROBS", 10)
    assert post(url, **fields).json()["choices"] == few
    assert len(set(threads)) == len(threads) == 2


def test_a_completion_without_max_tokens_is_short(url: str) -> None:
    """As OpenAI's; a chat goes on to the end of the context, and a server's own number counts for both."""
    body = post(url, TEXT, prompt="go on", ignore_eos=True).json()
    assert (body["usage"]["completion_tokens"], body["choices"][0]["finish_reason"]) == (16, "length")
    tight = post(url, TEXT, prompt=[60] * (CONTEXT - 4), ignore_eos=True).json()
    assert tight["usage"]["completion_tokens"] == 4
    with running(served(limits=Limits(CONTEXT, answer=20, drain=5.0))) as other:
        assert post(other, TEXT, prompt="go on", ignore_eos=True).json()["usage"]["completion_tokens"] == 20


def test_logprobs_are_the_models_own(url: str) -> None:
    """The bytes of the tokens make the text, the best of the top ones is what greedy decoding takes."""
    choice = post(url, TEXT, prompt="abc", max_tokens=8, temperature=0, logprobs=3, ignore_eos=True).json()["choices"][
        0
    ]
    told = choice["logprobs"]
    assert told["text_offset"][0] == 0 and len(told["tokens"]) == 8
    for token, logprob, top in zip(told["tokens"], told["token_logprobs"], told["top_logprobs"], strict=True):
        assert top[token] == logprob == max(top.values()) <= 0


def test_usage_of_every_chunk(url: str) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = events(post(url, TEXT, prompt="say: abc", stream=True, stream_options=options))
    counts = [c["usage"]["completion_tokens"] for c in chunks]
    assert counts == sorted(counts) and counts[-1] == 4 and chunks[-1]["choices"] == []


def test_draft_details_of_every_step(url: str) -> None:
    fields: dict[str, Any] = {"draft_details": True, "stream": True, "stop": "zzz"}
    drafts = [
        c["choices"][0]["draft"]
        for c in events(post(url, messages=user("say: so zz it is"), **fields))
        if "draft" in c["choices"][0]
    ]
    assert "".join(p["text"] for d in drafts for p in d["pieces"]) == "so zz it is"
    assert drafts[0]["nodes"] == 0 and drafts[0]["tree"] is None  # the prompt's own forward
    assert any(not d["pieces"] for d in drafts)  # "z" might have become the stop string
    for draft in drafts[1:]:
        tree = draft["tree"]
        assert len(tree["tokens"]) == draft["nodes"] + 1 == len(tree["parent"]) and tree["parent"][0] == -1
        assert len(tree["path"]) == draft["accepted"] + 1


def test_acceptance_of_one_request(url: str) -> None:
    fields: dict[str, Any] = {"spec_decode_metrics": "detailed", "stream_options": {"include_usage": True}}
    told = events(post(url, stream=True, **fields))[-1]["metrics"]["speculative_decoding"]
    assert told["num_spec_steps"] == len(told["per_step_accepted"]) == sum(told["acceptance_histogram"]) > 0
    assert told["num_draft_tokens"] == sum(told["per_step_drafted"])


def test_the_server_option_for_metrics_is_of_single_choices() -> None:
    with running(served(spec_metrics="summary")) as url:
        assert post(url).json()["metrics"]["speculative_decoding"]["num_spec_tokens"] == 3
        assert "metrics" not in post(url, n=2).json()


def test_a_stop_string_frees_the_slot_at_once() -> None:
    what = served(slots=1)
    with running(what) as url:
        body = post(url, messages=user("say: one STOP two"), stop=["STOP"], max_tokens=1000).json()
        choice = body["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"], choice["stop_reason"]) == (
            "one ",
            "stop",
            "STOP",
        )
        assert body["usage"]["completion_tokens"] == len("one STOP")
        assert what.worker.open == 0 and eventually(lambda: what.worker.engine.state.running == 0)


def test_reasoning_and_tools(url: str) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    call = '<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call>'
    messages = user(f"say: so</think>\n\nwell {call}")
    choice = post(url, messages=messages, tools=[tool]).json()["choices"][0]
    message = choice["message"]
    assert message["reasoning"] == "so" and message["content"].strip() == "well"
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": 1}'}
    assert choice["finish_reason"] == "tool_calls"
    hidden = post(url, messages=messages, tools=[tool], tool_choice="none", include_reasoning=False).json()["choices"][
        0
    ]
    assert hidden["message"]["reasoning"] is None and "tool_calls" not in hidden["message"]
    assert hidden["finish_reason"] == "stop"
    parts = [c["choices"][0]["delta"] for c in events(post(url, messages=messages, tools=[tool], stream=True))]
    calls = [part["tool_calls"][0] for part in parts if "tool_calls" in part]
    assert calls[0]["type"] == "function" and calls[0]["id"].startswith("call_") and calls[0]["function"]["name"] == "f"
    assert "".join(c["function"]["arguments"] for c in calls) == '{"x": 1}'
    plain = post(url, messages=messages, chat_template_kwargs={"enable_thinking": False}).json()["choices"][0][
        "message"
    ]
    assert plain["reasoning"] is None and plain["content"].startswith("so")


def test_structured_output_holds_whatever_the_model_wants(url: str) -> None:
    schema = {
        "type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a", "b"],
        "additionalProperties": False,
    }  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    off = {"enable_thinking": False}
    for seed in range(3):
        fields: dict[str, Any] = {"response_format": form, "seed": seed, "chat_template_kwargs": off}
        choice = post(url, messages=user("hi"), max_tokens=200, **fields).json()["choices"][0]
        made = json.loads(choice["message"]["content"])
        assert made["a"] in (1, 2) and isinstance(made["b"], bool) and choice["finish_reason"] == "stop"
    end = ids_of("</think>")[0]
    fields = {"response_format": form, "logit_bias": {str(end): 100}, "chat_template_kwargs": {"enable_thinking": True}}
    message = post(url, messages=user("hi"), max_tokens=200, **fields).json()["choices"][0]["message"]
    assert message["reasoning"] is None and json.loads(message["content"])["a"] in (1, 2)  # behind the reasoning


# ---- what the server tells of itself


def test_models_health_version_info(url: str) -> None:
    listed = httpx.get(f"{url}/v1/models").json()
    card = listed["data"][0]
    assert card.pop("created") > 0
    assert card == {
        "id": NAME, "object": "model", "owned_by": "draftproof", "root": "tiny-llama", "max_model_len": CONTEXT,
    }  # fmt: skip
    assert httpx.get(f"{url}/v1/models/default").json()["id"] == NAME
    assert error_of(httpx.get(f"{url}/v1/models/gpt-9"))["code"] == "model_not_found"
    assert httpx.get(f"{url}/health").status_code == 200
    assert httpx.get(f"{url}/version").json()["version"]
    info = httpx.get(f"{url}/server_info").json()
    assert info["engine"] == "draftproof" and info["max_model_len"] == CONTEXT and info["method"] == "ddtree"


def test_tokenize_and_back(url: str) -> None:
    made = post(url, "/tokenize", prompt="Hé").json()
    assert made == {"count": 3, "max_model_len": CONTEXT, "tokens": ids_of("Hé"), "token_strs": None}
    assert post(url, "/detokenize", tokens=made["tokens"]).json() == {"prompt": "Hé"}
    chat = post(url, "/tokenize", messages=user("x"), add_generation_prompt=False, return_token_strs=True).json()
    assert (
        tokenizer().decode(chat["tokens"]) == "<|im_start|>user\nx<|im_end|>\n"
        and len(chat["token_strs"]) == chat["count"]
    )
    assert error_of(post(url, "/detokenize", tokens=[VOCAB]))["param"] == "tokens"
    assert error_of(post(url, "/tokenize"))["param"] == "prompt"


def test_the_page_and_its_files(url: str) -> None:
    page = httpx.get(url + "/")
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["cache-control"] == "no-cache"
    script = httpx.get(f"{url}/page/page.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    for path in ("/page/../app.py", "/page/%2e%2e%2fapp.py", "/page/nothing.js"):
        assert httpx.get(url + path).status_code == 404


# ---- what goes wrong


def test_errors_have_openais_shape(url: str) -> None:
    assert error_of(post(url, model="gpt-9")) == {
        "message": f"the model 'gpt-9' does not exist: this server has '{NAME}'",
        "type": "not_found_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip
    assert error_of(post(url, frobnicate=1))["param"] == "frobnicate"
    assert error_of(post(url, max_tokens=CONTEXT))["code"] == "context_length_exceeded"
    assert error_of(httpx.get(url + CHAT))["type"] == "invalid_request_error"
    assert error_of(httpx.get(url + "/v2"))["code"] == "not_found"
    assert error_of(post(url, TEXT, prompt=[]))["param"] == "prompt"


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_only_json_is_read(url: str, kind: str) -> None:
    """A page of another origin may send these without asking first."""
    response = httpx.post(url + CHAT, content=b"{}", headers={"content-type": kind})
    assert response.status_code == 415 and "application/json" in error_of(response)["message"]


def test_a_large_body_is_refused_before_it_is_read() -> None:
    with running(served(limits=Limits(CONTEXT, body=1000))) as url:
        assert error_of(httpx.post(url + CHAT, json={"x": "y" * 2000}))["code"] == "request_too_large"
        sent = 0

        def endless() -> Iterator[bytes]:
            nonlocal sent
            while sent < 50_000_000:
                sent += 100_000
                yield b" " * 100_000

        try:
            response = httpx.post(url + CHAT, content=endless(), headers={"content-type": "application/json"})
            assert response.status_code == 413
        except httpx.WriteError:  # the server closed while we still wrote
            pass
        assert sent < 50_000_000
        assert post(url).status_code == 200


def test_keys_guard_what_costs_and_what_tells() -> None:
    with running(served(api_keys=("one", "zwei-ü"))) as url:
        for path in ("/v1/models", "/server_info"):
            assert error_of(httpx.get(url + path))["code"] == "invalid_api_key"
        for path in (CHAT, TEXT, "/tokenize", "/detokenize"):
            response = httpx.post(url + path, content=b"not json", headers={"authorization": "Bearer no"})
            assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
        for key in ("Bearer one", "bearer zwei-ü"):
            headers = {"authorization": key.encode()}
            assert httpx.get(f"{url}/v1/models", headers=headers).status_code == 200  # type: ignore[arg-type]
        for path in ("/health", "/version", "/"):
            assert httpx.get(url + path).status_code == 200


def test_origins_are_let_in_by_name() -> None:
    ask = {"origin": "https://a.example", "access-control-request-method": "POST"}
    with running(served()) as url:
        assert "access-control-allow-origin" not in httpx.get(f"{url}/v1/models", headers=ask).headers
    with running(served(origins=("https://a.example",))) as url:
        assert httpx.options(url + CHAT, headers=ask).headers["access-control-allow-origin"] == "https://a.example"
        other = httpx.options(url + CHAT, headers=ask | {"origin": "https://b.example"})
        assert "access-control-allow-origin" not in other.headers


def test_a_full_queue_is_429_with_a_time_to_wait() -> None:
    what = served(slots=1, queue=1, pause=0.05, metrics=Metrics(NAME, 3))
    with running(what) as url:
        done: list[int] = []
        threads = [threading.Thread(target=lambda: done.append(slow(url))) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert eventually(lambda: what.worker.open == 2)
        response = post(url)
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert error_of(response)["type"] == "rate_limit_error"
        for thread in threads:
            thread.join()
        assert done == [200, 200] and post(url).status_code == 200
        page = httpx.get(f"{url}/metrics").text
        assert 'request_success_total{engine="0",finished_reason="length",model_name="tiny"} 2.0' in page


def slow(url: str, tokens: int = 12) -> int:
    return post(url, TEXT, prompt="abc", max_tokens=tokens, ignore_eos=True).status_code


def test_a_request_has_its_time() -> None:
    with running(served(pause=0.05, limits=Limits(CONTEXT, seconds=0.5, drain=5))) as url:
        fields: dict[str, Any] = {"prompt": "abc", "max_tokens": 500, "ignore_eos": True}
        response = post(url, TEXT, **fields)
        assert response.status_code == 504 and error_of(response)["code"] == "timeout"
        assert events(post(url, TEXT, stream=True, **fields))[-1]["error"]["code"] == "timeout"


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_frees_its_slot(stream: bool) -> None:
    what = served(slots=1, pause=0.02, metrics=Metrics(NAME, 3))
    with running(what) as url:
        body = json.dumps({"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": stream}).encode()
        with raw(url, TEXT, body) as client:
            assert eventually(lambda: what.worker.engine.state.running == 1)
            if stream:
                assert client.recv(100)
        assert eventually(lambda: what.worker.engine.state.running == 0 and what.worker.open == 0)
        assert post(url).status_code == 200
        page = httpx.get(f"{url}/metrics").text
        assert 'request_success_total{engine="0",finished_reason="abort",model_name="tiny"} 1.0' in page


def raw(url: str, path: str, body: bytes) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    client = socket.create_connection((host, int(port)))
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    client.sendall(head.encode() + body)
    return client


def test_a_client_that_does_not_read_ends_its_request_and_blocks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app itself with a connection that takes two messages and no more, while another one is served."""
    monkeypatch.setattr("draftproof.serve.answer.stream.STALLED", 1.5)
    what = served(slots=2, pause=0.02)
    app = create_app(what)

    async def ask(most: int, tokens: int) -> list[Any]:
        sent: list[Any] = []

        async def receive() -> Any:
            if receive.__dict__.setdefault("read", False):
                await asyncio.Event().wait()
            receive.__dict__["read"] = True
            body = {"prompt": "abc", "max_tokens": tokens, "ignore_eos": True, "stream": True}
            return {"type": "http.request", "body": json.dumps(body).encode(), "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)
            if len(sent) > most:
                await asyncio.Event().wait()

        headers = [(b"content-type", b"application/json")]
        scope = {
            "type": "http", "method": "POST", "path": TEXT, "raw_path": TEXT.encode(), "headers": headers,
            "query_string": b"", "http_version": "1.1", "scheme": "http", "root_path": "", "asgi": {"version": "3.0"},
        }  # fmt: skip
        await app(scope, receive, send)
        return sent

    async def both() -> None:
        what.worker.start()
        stalled = asyncio.create_task(ask(2, 1500))
        whole = await ask(1000, 5)
        assert whole[-2]["body"] == b"data: [DONE]\n\n" and not stalled.done()
        assert len(await stalled) == 3 and what.worker.open == 0
        await what.worker.drain(5)

    asyncio.run(both())


@pytest.mark.parametrize("stream", [True, False])
def test_a_fault_of_the_engine_is_one_requests_error(stream: bool) -> None:
    what = served(fault="boom")
    with running(what) as url:
        response = post(url, TEXT, prompt="boom", stream=stream)
        error = events(response)[-1]["error"] if stream else error_of(response)
        assert response.status_code == (200 if stream else 500)
        assert error["type"] == "server_error" and error["code"] == "engine_error"
        assert post(url, TEXT, prompt="fine", max_tokens=3).status_code == 200


def test_an_engine_that_has_ended_is_unhealthy() -> None:
    what = served()
    with running(what) as url:
        with what.worker._wake:
            what.worker._stopping = True
            what.worker._wake.notify()
        assert eventually(lambda: not what.worker.alive)
        assert httpx.get(f"{url}/health").status_code == 503
        assert error_of(post(url))["code"] == "engine_dead"


def test_a_server_that_stops_lets_answers_end() -> None:
    what = served(pause=0.02)
    with running(what) as url:
        got: list[httpx.Response] = []
        thread = threading.Thread(
            target=lambda: got.append(post(url, TEXT, prompt="say: " + "x" * 40, max_tokens=50, stream=True))
        )
        thread.start()
        assert eventually(lambda: what.worker.engine.state.running == 1)
        what.worker.draining = True
        assert httpx.get(f"{url}/health").status_code == 503
        assert error_of(post(url))["code"] == "draining"
        what.worker.draining = False
    thread.join()
    assert "".join(c["choices"][0]["text"] for c in events(got[0])) == "x" * 40


def test_what_runs_too_long_when_the_server_stops_is_told_so() -> None:
    what = served(pause=0.05, limits=Limits(CONTEXT, drain=0.3))
    with running(what) as url:
        got: list[httpx.Response] = []
        fields: dict[str, Any] = {"prompt": "abc", "max_tokens": 1500, "ignore_eos": True, "stream": True}
        thread = threading.Thread(target=lambda: got.append(post(url, TEXT, **fields)))
        thread.start()
        assert eventually(lambda: what.worker.engine.state.running == 1)
    thread.join(20)
    assert events(got[0])[-1]["error"]["code"] == "draining"


def test_no_key_reaches_the_outside(url: str) -> None:
    what = served(api_keys=("sehr-geheim",))
    with running(what) as address:
        info = httpx.get(f"{address}/server_info", headers={"authorization": "Bearer sehr-geheim"}).text
    assert "geheim" not in info


def test_the_openapi_document_names_bodies_and_answers(url: str) -> None:
    document = httpx.get(f"{url}/openapi.json").json()
    schemas = document["components"]["schemas"]
    assert {"ChatRequest", "CompletionRequest", "ChatCompletion", "ErrorAnswer"} <= schemas.keys()
    for found in re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document)):
        assert found in schemas
    assert schemas["ChatRequest"]["additionalProperties"] is False


def test_steps_are_results_of_the_real_engine(url: str) -> None:
    """A control: the answers above come from real draft trees, accepted tokens among them."""
    what: Served = served()
    with running(what) as address:
        for seed in range(8):
            told = post(address, messages=user("x"), seed=seed, max_tokens=60, spec_decode_metrics="summary").json()
            if told["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"]:
                return
    pytest.fail(f"no draft was ever accepted, {StepResult.__name__} says")
