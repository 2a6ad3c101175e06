"""A real server under mixed requests for long (`make soak`): does its memory stay, does every request end as it should?

Eight clients at once ask in turn for chats, streams, two choices, tool calls, JSON by a schema, stop strings and
conversations, and go away in the middle of streams. Exit code 1 when the second half's memory grows by more than 3 %,
or anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from draftproof.models.hub import resolve_drafter, resolve_target
from tests.serve.made import eventually, user
from tests.serve.running import Running, serving
from tests.serve.wire import CHAT, events

CLIENTS, EVERY, GROWTH = 8, 10.0, 0.03  # seconds between two looks at the memory; share of it
OPTIONS: tuple[object, ...] = (
    *("--target", "smollm2-135m", "--dtype", "float32", "--max-model-len", 2048, "--max-num-seqs", 4),
    *("--prefix-cache", 0.05, "--tool-call-parser", "hermes", "--enable-auto-tool-choice"),  # soon full, then steady
)
TOPICS = (
    "rivers",
    "copper",
    "the moon",
    "bread",
    "sorting a list",
    "Lisbon",
    "violins",
    "prime numbers",
    "tea",
    "ants",
)
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer"}}}
TOOL = {"type": "function", "function": {"name": "look_up", "parameters": {**SCHEMA, "required": ["name"]}}}


@dataclass
class Course:
    """What has happened. memory: (requests that have ended, resident bytes); other: texts that were another before."""

    asked: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)
    memory: list[tuple[int, int]] = field(default_factory=list)
    texts: dict[str, str] = field(default_factory=dict)
    other: int = 0

    @property
    def done(self) -> int:
        return sum(self.ended.values()) + len(self.failed)

    def same(self, what: str, text: str) -> None:
        """Greedy texts repeat, but for near-ties under another batch shape's rounding: counted, not judged."""
        self.other += self.texts.setdefault(what, text) != text


class Client:
    """One of those who ask; every method is a kind of request, and raises where the answer is not as it must be."""

    def __init__(self, http: httpx.AsyncClient, course: Course) -> None:
        self.http, self.course = http, course

    async def ask(self, topic: str, **fields: Any) -> Any:
        """The choices of a whole answer."""
        body = {"messages": user(f"Tell me about {topic}."), "max_tokens": 24, "temperature": 0, **fields}
        answer = await self.http.post(CHAT, json=body)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"]

    async def chat(self, topic: str, number: int) -> None:
        [choice] = await self.ask(topic)
        self.course.same(topic, choice["message"]["content"])

    async def stream(self, topic: str, number: int) -> None:
        body = {"messages": user(f"Tell me about {topic}."), "max_tokens": 24, "temperature": 0, "stream": True}
        told = events((await self.http.post(CHAT, json=body)).content)
        text = "".join(event["choices"][0]["delta"].get("content") or "" for event in told)
        self.course.same(topic, text)

    async def two_choices(self, topic: str, number: int) -> None:
        choices = await self.ask(topic, n=2, temperature=0.9, seed=number)
        assert [choice["index"] for choice in choices] == [0, 1]

    async def tool(self, topic: str, number: int) -> None:
        [choice] = await self.ask(topic, tools=[TOOL], tool_choice="required", max_tokens=80)
        if choice["finish_reason"] != "length":
            [call] = choice["message"]["tool_calls"]
            assert call["function"]["name"] == "look_up" and "name" in json.loads(call["function"]["arguments"])

    async def schema(self, topic: str, number: int) -> None:
        shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
        [choice] = await self.ask(topic, response_format=shape, max_tokens=80, temperature=0.7, seed=number)
        if choice["finish_reason"] == "stop":
            assert isinstance(json.loads(choice["message"]["content"]), dict)

    async def stop_string(self, topic: str, number: int) -> None:
        stops = [" the", "\n"]
        [choice] = await self.ask(topic, stop=stops, max_tokens=40)
        assert not any(stop in choice["message"]["content"] for stop in stops)

    async def gone(self, topic: str, number: int) -> None:
        """An event, and away."""
        body = {"messages": user(f"Tell me all about {topic}."), "max_tokens": 400, "ignore_eos": True, "stream": True}
        async with self.http.stream("POST", CHAT, json=body) as answer:
            assert answer.status_code == 200
            lines = answer.aiter_lines()
            while not (await anext(lines)).startswith("data: "):
                pass

    async def conversation(self, topic: str, number: int) -> None:
        told: list[dict[str, str]] = user(f"Conversation {number}: what of {topic}?")
        for turn in range(3):
            [choice] = await self.ask(topic, messages=told)
            told += [{"role": "assistant", "content": choice["message"]["content"]}, *user(f"And {turn + 2}?")]


KINDS: tuple[Callable[[Client, str, int], Awaitable[None]], ...] = (
    Client.chat, Client.stream, Client.two_choices, Client.tool, Client.schema, Client.stop_string, Client.gone,
    Client.conversation,
)  # fmt: skip


async def soak(server: Running, requests: int, minutes: float | None) -> Course:
    """So many requests, or for so long."""
    course, until = Course(), None if minutes is None else time.monotonic() + 60 * minutes
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=server.url, timeout=600, limits=limits) as http:
        client, numbers = Client(http, course), itertools.count()

        async def ask_on() -> None:
            while time.monotonic() < until if until else course.asked < requests:
                course.asked += 1
                await one(client, next(numbers))

        watching = asyncio.create_task(watch(server, course))
        await asyncio.gather(*(ask_on() for _ in range(CLIENTS)))
        watching.cancel()
    course.memory.append((course.done, server.rss()))
    return course


async def one(client: Client, number: int) -> None:
    kind, topic = KINDS[number % len(KINDS)], TOPICS[number // len(KINDS) % len(TOPICS)]
    try:
        await kind(client, topic, number)
        client.course.ended[kind.__name__] += 1
    except (httpx.HTTPError, AssertionError, ValueError, KeyError, StopAsyncIteration) as error:
        client.course.failed.append(f"{kind.__name__}, {topic}: {type(error).__name__}: {str(error)[:300]}")


async def watch(server: Running, course: Course) -> None:
    while True:
        await asyncio.sleep(EVERY)
        course.memory.append((course.done, server.rss()))
        print(
            f"{course.done} requests, {len(course.failed)} failed, {course.memory[-1][1] / 2**20:.0f} MiB", flush=True
        )


def grown(memory: list[tuple[int, int]]) -> tuple[float, float]:
    """Of the second half: MiB per 100 requests by the line through it, and the line's growth as a share."""
    half = [point for point in memory if point[0] >= memory[-1][0] / 2]
    if len({done for done, _ in half}) < 3:
        raise SystemExit("too few looks at the memory for a verdict: ask for more requests")
    slope, start = statistics.linear_regression([done for done, _ in half], [rss / 2**20 for _, rss in half])
    first, last = half[0][0], half[-1][0]
    return 100 * slope, slope * (last - first) / (start + slope * first)


def verdict(server: Running, course: Course) -> list[str]:
    """What must not be; nothing is well."""
    wrong = list(course.failed)
    if not eventually(server.idle, 60):
        wrong.append(f"requests are left running: {server.metrics()}")
    now, aborted = server.metrics(), server.metrics(finished_reason="abort")["vllm:request_success_total"]
    if aborted != course.ended["gone"]:
        wrong.append(f"{course.ended['gone']} clients went away, the server counts {aborted:.0f}")
    if not now["vllm:prefix_cache_hits_total"]:
        wrong.append("no prompt was found in the prefix cache")
    slope, share = grown(course.memory)
    print(f"memory in the second half: {slope:+.2f} MiB per 100 requests, {share:+.1%}; most {GROWTH:.0%}")
    if share > GROWTH:
        wrong.append(f"memory grows: {share:.1%} in the second half")
    return wrong


def main() -> None:
    asking = argparse.ArgumentParser(description=__doc__)
    asking.add_argument("--requests", type=int, default=1000)
    asking.add_argument("--minutes", type=float, help="instead of a number of requests")
    asked = asking.parse_args()
    resolve_target("smollm2-135m"), resolve_drafter("smollm2-135m-dflash")
    with tempfile.TemporaryDirectory() as folder, serving(Path(folder) / "log", *OPTIONS) as server:
        begun = time.monotonic()
        course = asyncio.run(soak(server, asked.requests, asked.minutes))
        print(f"{course.done} requests in {time.monotonic() - begun:.0f} s: {dict(course.ended)}")
        print(f"greedy texts that were another before: {course.other}")
        wrong = verdict(server, course)
    print("\n".join(wrong) or "all is well")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
