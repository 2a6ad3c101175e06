"""What all parsers share: the pieces of a message, the scanner that holds back half tags, and the assembly of a delta.

A parser gets the generated text in pieces of any size. What it gives must not depend on where the pieces end, so it
looks only at the sequence of text and whole tags that the scanner finds, never at a piece.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol

THINK, THINK_END = "<think>", "</think>"
TOOL, TOOL_END = "<tool_call>", "</tool_call>"
ENCODE = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(frozen=True)
class CallDelta:
    """Part of one tool call. The first of a call has id and name; `arguments` is a fragment of a JSON text."""

    index: int
    id: str | None
    name: str | None
    arguments: str


@dataclass(frozen=True)
class Delta:
    """What one piece of text adds to the message; at most one `CallDelta` per index. False when it adds nothing."""

    reasoning: str = ""
    content: str = ""
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.reasoning or self.content or self.calls)


@dataclass
class Call:
    """One whole tool call; `arguments` is a JSON text."""

    id: str
    name: str
    arguments: str


@dataclass
class Message:
    """A whole answer; a field that has nothing is None, but an answer without anything has the content ""."""

    reasoning: str | None
    content: str | None
    calls: list[Call]


class Parser(Protocol):
    """Turns text into deltas. `finish` gives what was held back, once, when the generation has ended."""

    def feed(self, text: str) -> Delta: ...

    def finish(self) -> Delta: ...


class Reasoner(Protocol):
    """Splits text into reasoning and the rest; `finish` gives the reasoning that was held back."""

    def feed(self, text: str) -> tuple[str, str]: ...

    def finish(self) -> str: ...


def collect(deltas: Iterable[Delta]) -> Message:
    """Put deltas together as a client of the API does."""
    reasoning, content = [], []
    calls: dict[int, tuple[str, str, list[str]]] = {}
    for delta in deltas:
        reasoning.append(delta.reasoning)
        content.append(delta.content)
        for part in delta.calls:
            if part.index not in calls:
                assert part.id and part.name, "the first delta of a call has id and name"
                calls[part.index] = (part.id, part.name, [])
            calls[part.index][2].append(part.arguments)
    thought, said = "".join(reasoning), "".join(content)
    nothing_else = not (thought or calls)
    done = [Call(id_, name, "".join(parts)) for _, (id_, name, parts) in sorted(calls.items())]
    return Message(thought or None, said if said or nothing_else else None, done)


class Tags:
    """A set of literal tags to look for at once. No tag begins another."""

    def __init__(self, *tags: str) -> None:
        self.pattern = re.compile("|".join(map(re.escape, tags)))
        self.longest = max(map(len, tags))
        self.beginnings = {tag[:n] for tag in tags for n in range(1, len(tag))}

    def held(self, text: str, start: int) -> int:
        """Length of the longest end of `text[start:]` that could become a tag."""
        most = min(self.longest - 1, len(text) - start)
        return next((n for n in range(most, 0, -1) if text[-n:] in self.beginnings), 0)


class Scanner:
    """Cuts arriving text at tags. The end of the text waits while it could still become one of them."""

    def __init__(self) -> None:
        self._text = ""
        self._at = 0  # what lies before is used up

    def feed(self, text: str) -> None:
        self._text = self._text[self._at :] + text
        self._at = 0

    def scan(self, tags: Tags) -> tuple[str, str | None]:
        """The text up to the next tag, and the tag; or the text so far, and None when no whole tag has arrived."""
        start, found = self._at, tags.pattern.search(self._text, self._at)
        if found:
            self._at = found.end()
            return self._text[start : found.start()], found.group()
        self._at = len(self._text) - tags.held(self._text, start)
        return self._text[start : self._at], None

    def rest(self) -> str:
        """All that is left, half tags too."""
        start, self._at = self._at, len(self._text)
        return self._text[start:]

    def unread(self, text: str) -> None:
        """Give back what was taken last, to be scanned once more."""
        if self._at >= len(text):
            self._at -= len(text)
        else:
            self._text, self._at = text + self._text[self._at :], 0


class Draft:
    """Gathers the content and calls of one delta. Without `new_id` calls are parsed but not reported."""

    def __init__(self, new_id: Callable[[], str] | None) -> None:
        self._new_id = new_id
        self._content: list[str] = []
        self._calls: dict[int, tuple[str | None, str | None, list[str]]] = {}
        self.opened = 0  # calls since the beginning

    def content(self, text: str) -> None:
        self._content.append(text)

    def open(self, name: str) -> None:
        if self._new_id:
            self._calls[self.opened] = (self._new_id(), name, [])
        self.opened += 1

    def arguments(self, text: str) -> None:
        """A fragment for the call opened last."""
        if self._new_id:
            self._calls.setdefault(self.opened - 1, (None, None, []))[2].append(text)

    def take(self) -> Delta:
        calls = tuple(
            CallDelta(index, id_, name, "".join(parts))
            for index, (id_, name, parts) in self._calls.items()
            if name or any(parts)
        )
        delta = Delta(content="".join(self._content), calls=calls)
        self._content, self._calls = [], {}
        return delta


class Prose:
    """The content around tool calls: a stretch of nothing but whitespace before or after a call is no content."""

    def __init__(self, draft: Draft) -> None:
        self._draft = draft
        self._space: list[str] = []  # the stretch so far, while it is only whitespace
        self._words = False
        self._open = False  # a call was closed, but not yet its <tool_call>

    def add(self, text: str) -> None:
        if not self._words:
            if not text.strip():
                self._space.append(text)
                return
            text, self._space, self._words = "".join(self._space) + text, [], True
        self._draft.content(text)

    def call(self) -> None:
        """A call begins here."""
        self._space, self._words, self._open = [], False, False

    def expect_end(self) -> None:
        self._open = True

    def end(self) -> None:
        """A closing tag: that of the last call, or text."""
        if not self._open:
            self.add(TOOL_END)
        elif not self._words:
            self._space = []
        self._open = False

    def finish(self) -> None:
        if not self._draft.opened:
            self._draft.content("".join(self._space))
        self._space = []


class Plain:
    """Everything is content, without the tags in `drop`."""

    def __init__(self, drop: tuple[str, ...]) -> None:
        self._tags = Tags(*drop) if drop else None
        self._scanner = Scanner()

    def feed(self, text: str) -> Delta:
        if not self._tags:
            return Delta(content=text)
        self._scanner.feed(text)
        parts: list[str] = []
        while True:
            part, tag = self._scanner.scan(self._tags)
            parts.append(part)
            if tag is None:
                return Delta(content="".join(parts))

    def finish(self) -> Delta:
        return Delta(content=self._scanner.rest())


def loads(text: str) -> Any:
    """The value of a JSON text, control characters in strings allowed, as models write them. ValueError for all else,
    numbers beyond a float and nesting beyond Python's stack included.
    """
    try:
        return json.loads(text, strict=False, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def dumps(value: Any) -> str:
    """JSON text as it goes to the client; escaped where a lone surrogate would make it impossible to encode."""
    try:
        text = ENCODE(value)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(value)
    return text


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no JSON number")
    return number
