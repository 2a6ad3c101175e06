"""The server process against what clients send, by mistake or on purpose, and against how they behave."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftproof.models.hub import resolve_drafter, resolve_target
from tests.serve import bodies, wire
from tests.serve.made import eventually
from tests.serve.running import Running, healthy, serving
from tests.serve.wire import CHAT, TEXT

pytestmark = pytest.mark.serve
SLOTS, QUEUE, CLIENTS, MIB = 4, 16, 200, 1 << 20
OPTIONS: tuple[object, ...] = (
    *("--target", "smollm2-135m", "--budget", "chain", "--dtype", "float32", "--max-model-len", 2048),
    *("--max-num-seqs", SLOTS, "--max-queue", QUEUE, "--prefix-cache", 0.25, "--drain-timeout", 90),
)
PLAIN: dict[str, Any] = {"prompt": "One, two, three,", "max_tokens": 6, "temperature": 0}
LONG: dict[str, Any] = {"prompt": "Once upon a time", "max_tokens": 1900, "temperature": 0, "ignore_eos": True}
GROWTH = 128 * MIB  # in one test: a body of 7 MB in one more thread, some hundred rows of the prefix cache
SOON = 30.0  # seconds, on a busy machine; a request of LONG takes longer on any


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """Warm: every slot was used, the caches have grown and the largest bodies were read, so that what grows later is
    something else."""
    resolve_target("smollm2-135m"), resolve_drafter("smollm2-135m-dflash")
    with serving(tmp_path_factory.mktemp("hostile") / "log", *OPTIONS) as made:
        answer = httpx.post(made.url + TEXT, json=PLAIN | {"n": SLOTS, "max_tokens": 64}, timeout=120)
        assert answer.status_code == 200
        assert set(statuses(made, TEXT, bodies.HUGE).values()) == {400}
        yield made


@pytest.fixture(scope="module")
def text(server: Running) -> str:
    return plain(server.url)


@pytest.fixture(autouse=True)
def unharmed(server: Running, text: str) -> Iterator[None]:
    """After every test: healthy, nothing left running or open, the same text as before, no more memory."""
    files, before = open_files(server), server.rss()
    yield
    assert eventually(server.idle, SOON), server.metrics()
    assert healthy(server.url)
    assert plain(server.url) == text
    assert eventually(lambda: open_files(server) <= files)
    assert server.rss() - before < GROWTH


def open_files(server: Running) -> int:
    return len(os.listdir(f"/proc/{server.pid}/fd"))


def plain(url: str) -> str:
    answer = httpx.post(url + TEXT, json=PLAIN, timeout=120)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])


def post(path: str, **fields: object) -> bytes:
    return wire.request(path, json.dumps(fields).encode())


# ---- what they send


def statuses(server: Running, path: str, table: Mapping[str, bytes]) -> dict[str, int]:
    """The status of each; every refusal carries OpenAI's error object and blames the client."""
    found = {}
    for name, body in table.items():
        reply = wire.ask(server.address, wire.request(path, body))
        found[name] = reply.status
        assert reply.status == 200 or reply.error["type"] == "invalid_request_error", (name, reply)
    return found


@pytest.mark.parametrize(
    ("path", "table"),
    [
        pytest.param(CHAT, bodies.JSON, id="no JSON"),
        pytest.param(CHAT, {name: bodies.chat(**fields) for name, fields in bodies.FIELDS.items()}, id="wrong fields"),
        pytest.param(CHAT, {name: bodies.schema(value) for name, value in bodies.SCHEMAS.items()}, id="bad schemas"),
        pytest.param(TEXT, bodies.HUGE, id="huge"),
    ],
)
def test_bodies_that_are_refused(server: Running, path: str, table: Mapping[str, bytes]) -> None:
    assert statuses(server, path, table) == dict.fromkeys(table, 400)


def test_a_foreign_model_and_a_body_beyond_the_limit(server: Running) -> None:
    reply = wire.ask(server.address, wire.request(CHAT, bodies.chat(model="gpt-5")))
    assert (reply.status, reply.error["code"]) == (404, "model_not_found")
    large = b'{"prompt":"' + b"a" * (9 * MIB) + b'"}'
    assert wire.ask(server.address, wire.request(TEXT, large)).status == 413
    pieces = b"".join(b"%x\r\n%s\r\n" % (MIB, b"a" * MIB) for _ in range(9)) + b"0\r\n\r\n"
    chunked = wire.request(TEXT, b"", Content_Length="", Transfer_Encoding="chunked") + pieces
    assert wire.ask(server.address, chunked).status == 413


def test_schemas_that_are_hard_and_allowed(server: Running) -> None:
    hard = {"nested": bodies.nested(25), "exponential": bodies.exponential(20), "counts": bodies.COUNTS}
    table = {name: bodies.schema(value) for name, value in hard.items()}
    assert statuses(server, CHAT, table) == dict.fromkeys(table, 200)


def test_long_stop_strings(server: Running, text: str) -> None:
    """Sixteen of 10,000 characters, which all begin as the answer does."""
    stops = [(text * 10_000)[:9_999] + mark for mark in "abcdefghijklmnop"]
    reply = wire.ask(server.address, post(TEXT, **PLAIN | {"stop": stops}))
    assert reply.status == 200 and json.loads(reply.body)["choices"][0]["text"] == text


def test_what_is_no_http(server: Running) -> None:
    found = {name: wire.ask(server.address, raw).status for name, raw in bodies.RUBBISH.items()}
    assert found == {name: 404 if "way out" in name else 400 for name in found}


# ---- how they behave


def test_requests_that_never_come_to_their_end(server: Running, text: str) -> None:
    """Half a head and half a body, from many, while somebody else asks."""
    whole = post(CHAT, messages=[{"role": "user", "content": "Hi"}])
    with wire.connected(server.address, 40) as clients:
        for number, client in enumerate(clients):
            client.sendall(whole[: 20 if number % 2 else -5])
        assert plain(server.url) == text
        for client in clients:
            wire.vanish(client)


def test_clients_that_vanish(server: Running) -> None:
    """In the middle of streams, before whole answers, and while they wait for a slot."""
    before = aborted(server)
    with wire.connected(server.address, 3 * SLOTS) as clients:
        for number, client in enumerate(clients):
            client.sendall(post(TEXT, **LONG, stream=number % 2 == 0))
        assert clients[0].recv(1) and eventually(lambda: running(server) == (SLOTS, 2 * SLOTS), SOON), running(server)
        for number, client in enumerate(clients):
            client.close() if number % 3 else wire.vanish(client)
    assert eventually(server.idle, SOON)
    assert aborted(server) - before == len(clients)


def running(server: Running) -> tuple[float, float]:
    now = server.metrics()
    return now["vllm:num_requests_running"], now["vllm:num_requests_waiting"]


def aborted(server: Running) -> float:
    return server.metrics(finished_reason="abort")["vllm:request_success_total"]


def test_slow_readers(server: Running, text: str) -> None:
    """They fill all slots and read nothing: their answers wait, the slots do not. Then they read everything."""
    fields = LONG | {"max_tokens": 48, "logprobs": 20}
    with wire.connected(server.address, SLOTS, buffer=4096) as clients:
        for client in clients:
            client.sendall(post(TEXT, **fields, stream=True))
        assert eventually(lambda: running(server)[0] == SLOTS, SOON)
        assert plain(server.url) == text and eventually(server.idle, SOON)
        told = [texts(wire.drain(client)) for client in clients]
    whole = json.loads(wire.ask(server.address, post(TEXT, **fields)).body)["choices"][0]["text"]
    assert told == [whole] * SLOTS


def texts(raw: bytes) -> str:
    """What the events of a whole answer hold."""
    return "".join(event["choices"][0]["text"] for event in wire.events(wire.parse(raw).body))


def test_two_hundred_connections_at_once(server: Running, text: str) -> None:
    """Everybody hears something: the answer, or that there is no room and when to come again."""
    refused = server.metrics()["draftproof:requests_refused_total"]
    replies = asyncio.run(crowd(server.url, CLIENTS))
    served = [reply for reply in replies if reply.status_code == 200]
    rest = [reply for reply in replies if reply.status_code != 200]
    assert SLOTS + QUEUE <= len(served) < CLIENTS
    assert {reply.json()["choices"][0]["text"] for reply in served} == {text}
    assert {(reply.status_code, reply.json()["error"]["code"]) for reply in rest} == {(429, "queue_full")}
    assert all(int(reply.headers["Retry-After"]) >= 1 for reply in rest)
    assert server.metrics()["draftproof:requests_refused_total"] - refused == len(rest)


async def crowd(url: str, clients: int) -> list[httpx.Response]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(limits=limits, timeout=120) as client:
        return await asyncio.gather(*(client.post(url + TEXT, json=PLAIN) for _ in range(clients)))


def test_a_stop_in_the_middle_of_streams(tmp_path: Path) -> None:
    """What runs comes to its end, word for word; whoever comes now is sent away; the exit code is 0."""
    fields = LONG | {"max_tokens": 48}
    with serving(tmp_path / "log", *OPTIONS) as other:
        whole = json.loads(wire.ask(other.address, post(TEXT, **fields)).body)["choices"][0]["text"]
        with wire.connected(other.address, 1) as (late,), wire.connected(other.address, SLOTS + 1) as clients:
            for client in clients:  # one of them waits for a slot
                client.sendall(post(TEXT, **fields, stream=True))
            begun = [client.recv(1) for client in clients]
            other.process.send_signal(signal.SIGTERM)
            assert eventually(lambda: "stopping" in other.log.read_text(), SOON)
            assert sent_away(late, post(TEXT, **PLAIN))
            with pytest.raises(OSError):
                wire.connect(other.address).close()
            told = [texts(first + wire.drain(client)) for first, client in zip(begun, clients, strict=True)]
        assert told == [whole] * len(clients)
        assert other.process.wait(SOON) == 0


def sent_away(client: Any, raw: bytes) -> bool:
    """A 503, or a connection that is closed without an answer."""
    try:
        client.sendall(raw)
        answer = wire.drain(client)
    except BrokenPipeError:
        return True
    return not answer or wire.parse(answer).status == 503
