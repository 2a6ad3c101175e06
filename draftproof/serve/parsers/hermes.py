"""Hermes (ChatML) tool calls: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

A call is reported when its object is complete. A body that is no such object is content, its tags included.
"""

from __future__ import annotations

from collections.abc import Callable

from draftproof.serve.parsers.base import TOOL, TOOL_END, Delta, Draft, Prose, Scanner, Tags, dumps, loads

OUTSIDE = frozenset(" \t\r\n:,.+-0123456789abcdefghijklmnopqrstuvwxyzEIN")  # of JSON, outside strings and brackets


class Hermes:
    """drop: tags that are left out of the content. new_id: None suppresses the calls."""

    def __init__(self, new_id: Callable[[], str] | None, *, drop: tuple[str, ...] = ()) -> None:
        self._scanner = Scanner()
        self._draft = Draft(new_id)
        self._prose = Prose(self._draft)
        self._tags = Tags(TOOL, TOOL_END, *drop)
        self._body: _Body | None = None  # of the call we are in

    def feed(self, text: str) -> Delta:
        self._scanner.feed(text)
        self._run()
        return self._draft.take()

    def finish(self) -> Delta:
        while self._body:
            self._give_up(self._body)
            self._run()
        self._prose.add(self._scanner.rest())
        self._prose.finish()
        return self._draft.take()

    def _run(self) -> None:
        while self._in_body(self._body) if self._body else self._in_content():
            pass

    def _in_content(self) -> bool:
        text, tag = self._scanner.scan(self._tags)
        self._prose.add(text)
        if tag == TOOL:
            self._body = _Body()
        elif tag == TOOL_END:
            self._prose.end()
        return tag is not None

    def _in_body(self, body: _Body) -> bool:
        text = self._scanner.rest()
        used = body.feed(text)
        if not body.broken and not body.complete:
            return False
        self._scanner.unread(text[used:])
        call = None if body.broken else _call("".join(body.parts))
        if call is None:
            self._give_up(body)
            return True
        self._prose.call()
        self._draft.open(call[0])
        self._draft.arguments(call[1])
        self._prose.expect_end()
        self._body = None
        return True

    def _give_up(self, body: _Body) -> None:
        """The tag was text; what followed it may still hold calls."""
        self._prose.add(TOOL)
        self._scanner.unread("".join(body.parts))
        self._body = None


class _Body:
    """Finds the end of a JSON object without parsing it; `broken` as soon as no object can come of it.

    Breaking at the first impossible character keeps the work linear when many bodies begin and none ends.
    """

    def __init__(self) -> None:
        self.parts: list[str] = []  # of the text used
        self.broken = self.complete = False
        self._depth = 0
        self._string = self._escaped = False

    def feed(self, text: str) -> int:
        """Characters used: all of them, unless the object ends or breaks among them."""
        for at, char in enumerate(text):
            self._step(char)
            if self.complete or self.broken:
                self.parts.append(text[: at + 1])
                return at + 1
        self.parts.append(text)
        return len(text)

    def _step(self, char: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._string:
            self._escaped, self._string = char == "\\", char != '"'
        elif char in "{[" and (self._depth or char == "{"):
            self._depth += 1
        elif self._depth and char in "}]":
            self._depth -= 1
            self.complete = not self._depth
        elif self._depth and char == '"':
            self._string = True
        else:
            self.broken = char not in OUTSIDE if self._depth else not char.isspace()


def _call(text: str) -> tuple[str, str] | None:
    """Name and arguments of a call's object; None when it is no call."""
    try:
        value = loads(text)
        name = value.get("name")
        arguments = value.get("arguments", value.get("parameters"))
        if isinstance(arguments, str):
            arguments = loads(arguments)
        arguments = {} if arguments is None else arguments
        if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
            return None
        return name.strip(), dumps(arguments)
    except ValueError:
        return None
