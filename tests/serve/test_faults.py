"""Faults inside the engine while a server answers: who is hit hears of it, the others' texts stay word for word."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import httpx
import pytest
import torch
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, StepResult
from draftproof.serve.stats.metrics import Metrics
from draftproof.serve.worker import Worker
from tests.serve import wire
from tests.serve.made import NAME, eventually, ids_of, running, served, target, tokenizer
from tests.serve.wire import TEXT

MARK = "<mask>"  # in a prompt: this request shall fail
PROMPTS = ("abc", "Once upon a time", "def f(x):")
FIELDS: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "ignore_eos": True}
KINDS = (FIELDS, FIELDS | {"temperature": 0.8, "seed": 5}, FIELDS)  # of the prompts
FAULTS = (ValueError("planted"), torch.OutOfMemoryError("CUDA out of memory"))


class Raises:
    """A logits processor that raises at the request's eighth token."""

    stateful = False

    def __init__(self, prompt: int, error: Exception) -> None:
        self.length, self.error = prompt + 8, error

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        if len(ids) >= self.length:
            raise self.error
        return scores


class Planted:
    """The real engine, with the processor for a marked prompt; `broken`: what a step with everybody in it raises."""

    def __init__(self, engine: Engine, error: Exception | None) -> None:
        self.engine, self.error, self.slots = engine, error, engine.slots
        self.broken: Exception | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def add(self, request: Request, *more: Any) -> int:
        if self.error and MARK in tokenizer().decode(request.prompt_ids):
            request = replace(request, processors=[Raises(len(request.prompt_ids), self.error)])
        return self.engine.add(request, *more)

    def step(self) -> list[StepResult]:
        if self.broken and self.engine.state.running == len(PROMPTS):
            broken, self.broken = self.broken, None
            raise broken
        time.sleep(0.005)  # so that requests meet
        return self.engine.step()


@contextmanager
def serving(error: Exception | None = None) -> Iterator[tuple[str, Planted, list[str]]]:
    """A server with the fault planted, its engine, and the prompts' texts; at its end nothing runs, it is healthy, and
    a text is what it was."""
    what, metrics = served(), Metrics(NAME, 3)
    spoken: Any = what.worker.engine
    engine: Any = Planted(spoken.engine, error)
    worker = Worker(engine, queue=32, report=metrics.step)
    with running(replace(what, worker=worker, metrics=metrics)) as url:
        texts = [whole(url, prompt, **fields) for prompt, fields in zip(PROMPTS, KINDS, strict=True)]
        yield url, engine, texts
        assert eventually(lambda: gauges(url) == {"0.0"})
        assert httpx.get(f"{url}/health").status_code == 200
        assert whole(url, PROMPTS[0]) == texts[0]


def gauges(url: str) -> set[str]:
    lines = httpx.get(f"{url}/metrics").text.split("\n")
    return {line.split()[1] for line in lines if line.startswith("vllm:num_requests_")}


def ask(url: str, prompt: str, **fields: Any) -> httpx.Response:
    return httpx.post(url + TEXT, json={"prompt": prompt, **FIELDS, **fields}, timeout=60)


def whole(url: str, prompt: str, **fields: Any) -> str:
    return str(ask(url, prompt, **fields).json()["choices"][0]["text"])


def streamed(url: str, prompt: str, **fields: Any) -> str:
    return "".join(
        event["choices"][0]["text"] for event in wire.events(ask(url, prompt, stream=True, **fields).content)
    )


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def others(url: str) -> list[Callable[[], str]]:
    return [partial(streamed, url, prompt, **fields) for prompt, fields in zip(PROMPTS, KINDS, strict=True)]


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: type(error).__name__)
def test_a_fault_of_one_request_is_its_own(error: Exception) -> None:
    with serving(error) as (url, _, texts):
        marked = f"abc {MARK}"
        *told, stream, answer = together(
            *others(url), lambda: wire.events(ask(url, marked, stream=True).content), lambda: ask(url, marked)
        )
        assert told == texts
        assert len(stream) > 1 and stream[-1]["error"]["code"] == "engine_error"
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "server_error"


def test_a_fault_in_a_forward_is_one_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, mark = target().forward, ids_of(MARK)[0]

    def failing(tokens: Tensor, *args: Any, **more: Any) -> Any:
        if (tokens == mark).sum() > 40:  # more than the trees of all requests have nodes
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tokens, *args, **more)

    with serving() as (url, _, texts):
        monkeypatch.setattr(target(), "forward", failing)
        *told, answer = together(*others(url), lambda: ask(url, MARK * 50))
        assert told == texts
        assert answer.status_code == 500 and "out of memory" in answer.json()["error"]["message"]


def test_memory_for_two_serves_three_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, short = target().forward, []

    def narrow(tokens: Tensor, *args: Any, **more: Any) -> Any:
        if len(tokens) > 2:
            short.append(len(tokens))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(tokens, *args, **more)

    with serving() as (url, _, texts):
        monkeypatch.setattr(target(), "forward", narrow)
        assert together(*others(url)) == texts
        assert short


def test_a_fault_of_the_engine_itself_ends_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    with serving() as (url, engine, _):
        engine.broken = RuntimeError("planted in the engine")
        answers = together(*[partial(ask, url, prompt, max_tokens=400) for prompt in PROMPTS])
        assert [answer.status_code for answer in answers] == [500] * len(PROMPTS)
        assert all("planted in the engine" in answer.json()["error"]["message"] for answer in answers)
        assert "all running requests end" in caplog.text


@pytest.mark.parametrize("broken", ["step", "cancel"])
def test_nobody_waits_for_an_engine_that_has_ended(broken: str, caplog: pytest.LogCaptureFixture) -> None:
    """A fault in a step, or when somebody goes away, and none of it can be cleared up, as after a CUDA error."""
    what = served(pause=0.02)
    spoken: Any = what.worker.engine

    def fails(*_: Any) -> Any:
        raise RuntimeError(f"planted in {broken}")

    with running(what) as url, ThreadPoolExecutor(3) as pool:
        kept = [pool.submit(ask, url, "abc", max_tokens=1500, stream=stream) for stream in (False, True)]
        assert eventually(lambda: len(spoken.added) == 2)
        spoken.reset = fails
        if broken == "cancel":
            spoken.cancel = fails
            with httpx.stream("POST", url + TEXT, json={"prompt": "abc", **FIELDS, "stream": True}) as gone:
                next(gone.iter_lines())
        else:
            spoken.step = fails
        whole, stream = (one.result(10) for one in kept)
        assert whole.status_code == 500 and f"planted in {broken}" in whole.json()["error"]["message"]
        assert f"planted in {broken}" in wire.events(stream.content)[-1]["error"]["message"]
        late = ask(url, "abc")
        assert httpx.get(f"{url}/health").status_code == 503
        assert (late.status_code, late.json()["error"]["code"]) == (503, "engine_dead")
        began = time.monotonic()
    assert time.monotonic() - began < 3, "the drain waited for requests that had ended"
    assert "start the server again" in caplog.text
