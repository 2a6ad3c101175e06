"""Loading, measuring and stepping happen in one thread, and its results and faults come back."""

from __future__ import annotations

import asyncio
import socket
import threading
from typing import Any

import pytest

from draftproof.engine.engine import Engine
from draftproof.engine.propose import Drafting, Speculation
from draftproof.engine.request import Request
from draftproof.errors import UserError
from draftproof.serve import start
from draftproof.serve.one_thread import OneThread
from draftproof.serve.served import Served
from tests import tiny


def test_all_is_run_in_the_same_thread_in_order() -> None:
    thread = OneThread()
    told = [thread.begin(lambda n=n: (n, threading.get_ident())) for n in range(20)]  # type: ignore[misc]
    numbers, where = zip(*(one.result() for one in told), strict=True)
    assert numbers == tuple(range(20)) and len(set(where)) == 1 and threading.get_ident() not in where
    assert OneThread().call(threading.get_ident) not in where, "control: another one"


def test_an_exception_comes_back_and_the_thread_lives_on() -> None:
    thread = OneThread()

    def fail() -> None:
        raise UserError("bad-option", "what", "next")

    with pytest.raises(UserError, match="what"):
        thread.call(fail)
    assert thread.call(lambda: 5) == 5


def test_a_server_loads_and_steps_in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """The real flow from options to an answer, without the HTTP around it."""
    where: dict[str, set[int]] = {"load": set(), "make": set(), "step": set()}

    def watched(name: str, act: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            where[name].add(threading.get_ident())
            return act(*args, **kwargs)

        return call

    def listen(_app: Any, served: Served, taken: socket.socket) -> None:
        async def one() -> list[int]:
            served.worker.start()
            (ticket,) = served.worker.submit(Request([5, 17, 3], 4))
            tokens = [token async for result in ticket for token in result.tokens]
            await served.worker.drain(5.0)
            return tokens

        assert asyncio.run(one()) and not served.worker.alive
        taken.close()

    monkeypatch.setattr(start, "load_pair", watched("load", start.load_pair))
    monkeypatch.setattr(start, "make_engine", watched("make", start.make_engine))
    monkeypatch.setattr(Engine, "step", watched("step", Engine.step))
    monkeypatch.setattr(start, "listen", listen)
    drafting = Drafting(None, 0, Speculation("none"))
    start.serve(
        start.Options(str(tiny.target_folder("llama")), drafting, "none", port=0, device="cpu", dtype="float32")
    )
    assert where["load"] == where["make"] == where["step"] and len(where["step"]) == 1
    assert threading.get_ident() not in where["step"]
