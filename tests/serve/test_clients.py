"""The official clients, Python's here and JavaScript's through node, are the judges of the protocol."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from draftproof.serve.served import Parsers
from tests.serve.made import NAME, running, served

KEY = "a-key"
SCRIPT = Path(__file__).parent / "client.mjs"
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'


def user(text: str) -> Any:
    return [{"role": "user", "content": text}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    parsers = Parsers("qwen3", "hermes", auto_tools=True)
    with running(served(parsers=parsers, api_keys=(KEY,))) as address:
        yield address


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{url}/v1", api_key=KEY, max_retries=0, timeout=60) as made:
        yield made


def test_chat(client: openai.OpenAI) -> None:
    made = client.chat.completions.create(
        model=NAME, messages=user("say: thought</think>Hello"), logprobs=True, top_logprobs=2, user="u", metadata={}
    )
    choice = made.choices[0]
    assert choice.message.content == "Hello" and choice.finish_reason == "stop"
    assert choice.message.model_extra == {"reasoning": "thought"}
    assert choice.logprobs and choice.logprobs.content and len(choice.logprobs.content[0].top_logprobs) == 2
    assert made.usage and made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens
    assert made.usage.prompt_tokens_details


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    text, finish, usage = "", None, None
    with client.chat.completions.create(
        model=NAME, messages=user("say: t</think>Hi you"), stream=True, stream_options={"include_usage": True}
    ) as stream:
        for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                finish = choice.finish_reason or finish
    assert (text, finish) == ("Hi you", "stop") and usage and usage.completion_tokens == len("t Hi you") + 1


def test_the_clients_own_assembly_of_a_stream(client: openai.OpenAI) -> None:
    """Its helper puts tool calls together from deltas, and checks them as it goes."""
    with client.chat.completions.stream(model=NAME, messages=user(f"say: t</think>{CALL}"), tools=[TOOL]) as stream:
        for _ in stream:
            pass
        made = stream.get_final_completion()
    message = made.choices[0].message
    assert made.choices[0].finish_reason == "tool_calls" and message.tool_calls
    assert message.tool_calls[0].function.name == "add"
    assert json.loads(message.tool_calls[0].function.arguments) == {"a": 1, "b": 2}


def test_a_turn_with_tools_goes_on(client: openai.OpenAI) -> None:
    """The answer is sent back as the client made it, with the tool's result."""
    messages = user(f"say: t</think>{CALL}")
    first = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL])
    answer = first.choices[0].message
    assert answer.tool_calls
    result = {"role": "tool", "tool_call_id": answer.tool_calls[0].id, "content": "say: t</think>3"}
    messages = [*messages, answer.model_dump(), result]
    second = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL])
    assert second.choices[0].message.content == "3"


def test_a_named_function_is_called(client: openai.OpenAI) -> None:
    choice: Any = {"type": "function", "function": {"name": "add"}}
    made = client.chat.completions.create(
        model=NAME, messages=user("hi"), tools=[TOOL], tool_choice=choice, parallel_tool_calls=False, max_tokens=400,
        extra_body={"chat_template_kwargs": {"enable_thinking": False}},
    )  # fmt: skip
    message = made.choices[0].message
    assert message.tool_calls and message.tool_calls[0].function.name == "add"
    assert isinstance(json.loads(message.tool_calls[0].function.arguments), dict)


class Point(BaseModel):
    x: bool
    y: bool


def test_a_parsed_answer(client: openai.OpenAI) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    made = client.chat.completions.parse(
        model=NAME, messages=user("hi"), response_format=Point, max_tokens=200, extra_body=off
    )
    assert isinstance(made.choices[0].message.parsed, Point)


def test_completions(client: openai.OpenAI) -> None:
    made = client.completions.create(model=NAME, prompt=["say: a", "say: b"], n=2, logprobs=1)
    assert [c.text for c in made.choices] == ["a", "a", "b", "b"]
    parts = client.completions.create(model=NAME, prompt="say: streamed", stream=True)
    assert "".join(c.choices[0].text for c in parts) == "streamed"


def test_models_and_errors_by_their_classes(client: openai.OpenAI, url: str) -> None:
    assert [m.id for m in client.models.list()] == [NAME] and client.models.retrieve("default").id == NAME
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="gpt-9", messages=user("hi"))
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model=NAME, messages=user("hi"), extra_body={"nonsense": 1})
    assert caught.value.param == "nonsense" and caught.value.code == "unknown_parameter"
    with (
        pytest.raises(openai.AuthenticationError),
        openai.OpenAI(base_url=f"{url}/v1", api_key="no", max_retries=0) as other,
    ):
        other.models.list()


def test_an_error_inside_a_stream_is_raised() -> None:
    with (
        running(served(fault="boom")) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
        pytest.raises(openai.APIError, match="planted"),
    ):
        list(client.completions.create(model=NAME, prompt="boom", stream=True))


@pytest.mark.serve
def test_the_javascript_client(url: str) -> None:
    """The same with npm's `openai`; node exits with 1 where an answer is not as it should be."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("node and npm are not installed")
    folder = Path(tempfile.gettempdir()) / f"draftproof-openai-js-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    if not (folder / "node_modules" / "openai").exists():
        argv = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "openai@6"]
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=240)
        if done.returncode:
            pytest.skip(f"npm gave no openai: {done.stderr.strip()[-200:]}")
    script = shutil.copy(SCRIPT, folder / "client.mjs")
    done = subprocess.run(["node", script, f"{url}/v1", KEY], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split("\n")[-2] == "all as it should be"
