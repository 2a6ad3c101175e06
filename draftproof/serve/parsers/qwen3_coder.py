"""Tool calls of the Qwen3 Coder format, as vLLM 0.24 and later read them.

    <tool_call>
    <function=NAME>
    <parameter=KEY>
    value
    </parameter>
    </function>
    </tool_call>

The parser is a machine of six states; each reads up to the next tag that means something there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from draftproof.serve.parsers.base import TOOL, TOOL_END, Delta, Draft, Prose, Scanner, Tags, dumps, loads

FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
MARKUP = Tags(TOOL, TOOL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
NAMING = Tags(">", TOOL, TOOL_END, FUNCTION, FUNCTION_END, PARAMETER, PARAMETER_END)
VALUE_ENDS = Tags(PARAMETER_END, PARAMETER, FUNCTION_END)
LONGEST_NAME = 256  # a longer function name is prose that happens to hold the tag
TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean", "dict": "object", "list": "array"}
KINDS = frozenset({"null", "integer", "number", "boolean", "object", "array", "string"})

Schemas = Mapping[str, Mapping[str, Any]]


class Qwen3Coder:
    """schemas: JSON schema of the parameters by function. drop: tags that are left out of the content.
    new_id: None suppresses the calls.
    """

    def __init__(
        self, schemas: Schemas | None, new_id: Callable[[], str] | None, *, drop: tuple[str, ...] = ()
    ) -> None:
        self._schemas = schemas or {}
        self._scanner = Scanner()
        self._draft = Draft(new_id)
        self._prose = Prose(self._draft)
        self._content_tags = Tags(TOOL, TOOL_END, FUNCTION, *drop)
        self._read: Callable[[], bool] = self._content  # the state; False: no whole tag is left
        self._raw: list[str] = []  # markup of a call that has no name yet, to be content if none comes
        self._name: list[str] = []  # of the function or the parameter, while it is read
        self._properties: Mapping[str, Any] | None = None  # of the open call
        self._fields = 0  # parameters of the open call
        self._value: _Text | _Typed = _Text()

    def feed(self, text: str) -> Delta:
        self._scanner.feed(text)
        self._run()
        return self._draft.take()

    def finish(self) -> Delta:
        """A call that is open is closed: with the value so far, without a parameter whose name is unfinished."""
        if self._read == self._function_name and not "".join(self._name).strip():
            self._no_call()
            self._run()
        left = self._scanner.rest()
        if self._read == self._content:
            self._prose.add(left)
        elif self._read == self._preamble:
            self._prose.add("".join(self._raw) + left)
        else:
            if self._read == self._function_name:
                self._open()
            elif self._read == self._in_value:
                self._draft.arguments(self._value.feed(left) + self._value.end())
            self._close()
        self._prose.finish()
        return self._draft.take()

    def _run(self) -> None:
        while self._read():
            pass

    # The states.

    def _content(self) -> bool:
        text, tag = self._scanner.scan(self._content_tags)
        self._prose.add(text)
        if tag == TOOL_END:
            self._prose.end()
        elif tag in (TOOL, FUNCTION):
            self._begin(tag)
        return tag is not None

    def _preamble(self) -> bool:
        """Between <tool_call> and <function=, where only whitespace may stand."""
        text, tag = self._scanner.scan(MARKUP)
        self._raw.append(text)
        if not text.strip() and tag is None:
            return False
        if not text.strip() and tag == FUNCTION:
            self._begin(FUNCTION)
            return True
        self._prose.add(TOOL)
        self._scanner.unread("".join(self._raw[1:]) + (tag or ""))
        self._read = self._content
        return True

    def _function_name(self) -> bool:
        text, tag = self._scanner.scan(NAMING)
        self._name = ["".join(self._name) + text]
        if len(self._name[0]) > LONGEST_NAME or (tag and not self._name[0].strip()):
            self._no_call(tag or "")
            return True
        if tag:
            self._open()
            self._after(tag)
        return tag is not None

    def _between(self) -> bool:
        """In a call, outside its parameters: text has no meaning here."""
        _, tag = self._scanner.scan(MARKUP)
        if tag:
            self._after(tag)
        return tag is not None

    def _key(self) -> bool:
        text, tag = self._scanner.scan(NAMING)
        self._name.append(text)
        if tag == ">":
            self._begin_value("".join(self._name))
        elif tag:
            self._after(tag)
        return tag is not None

    def _in_value(self) -> bool:
        text, tag = self._scanner.scan(VALUE_ENDS)
        self._draft.arguments(self._value.feed(text))
        if tag:
            self._draft.arguments(self._value.end())
            self._after(tag)
        return tag is not None

    # What leads from one to another.

    def _begin(self, tag: str) -> None:
        """The opening tag of a call, which has no name yet."""
        self._raw = [*self._raw, tag] if tag == FUNCTION and self._read == self._preamble else [tag]
        self._name = []
        self._read = self._preamble if tag == TOOL else self._function_name

    def _no_call(self, tag: str = "") -> None:
        """The markup so far is content after all; what came after it is read again."""
        self._prose.add("".join(self._raw))
        self._scanner.unread("".join(self._name) + tag)
        self._read = self._content

    def _open(self) -> None:
        name = "".join(self._name).strip()
        self._prose.call()
        self._draft.open(name)
        properties = self._schemas.get(name, {}).get("properties")
        self._properties = properties if isinstance(properties, Mapping) and properties else None
        self._fields = 0

    def _after(self, tag: str) -> None:
        """A tag inside an open call, outside a value; every tag that cannot belong to the call closes it."""
        if tag == PARAMETER:
            self._name, self._read = [], self._key
        elif tag in (PARAMETER_END, ">"):
            self._read = self._between
        else:
            self._close()
            if tag == FUNCTION_END:
                self._prose.expect_end()
            elif tag in (TOOL, FUNCTION):
                self._begin(tag)

    def _close(self) -> None:
        self._draft.arguments("}" if self._fields else "{}")
        self._read = self._content

    def _begin_value(self, key: str) -> None:
        self._draft.arguments((", " if self._fields else "{") + dumps(key) + ": ")
        self._fields += 1
        self._value = _Text()
        if self._properties is not None:
            types = types_of(self._properties[key]) if key in self._properties else None
            if types != {"string"}:
                self._value = _Typed(types or {"string"})
        self._read = self._in_value


class _Text:
    """A value that is a string whatever comes, so that it can go out while it is read."""

    def __init__(self) -> None:
        self._begun = False
        self._newline = False  # held back: the last newline of a value is not part of it

    def feed(self, text: str) -> str:
        if not text:
            return ""
        opening = ""
        if not self._begun:
            opening, self._begun, text = '"', True, text.removeprefix("\n")
        if text and self._newline:
            text, self._newline = "\n" + text, False
        if text.endswith("\n"):
            text, self._newline = text[:-1], True
        return opening + dumps(text)[1:-1]

    def end(self) -> str:
        return '"' if self._begun else '""'


class _Typed:
    """A value that is read to its end before its type is known."""

    def __init__(self, types: set[str]) -> None:
        self._types, self._parts = types, list[str]()

    def feed(self, text: str) -> str:
        self._parts.append(text)
        return ""

    def end(self) -> str:
        return coerce("".join(self._parts).removeprefix("\n").removesuffix("\n"), self._types)


def types_of(schema: Any) -> set[str]:
    """The JSON types a schema allows, by `type`, `enum`, `anyOf`, `oneOf` and `allOf`; string when it names none."""
    if not isinstance(schema, Mapping):
        return {"string"}
    named = schema.get("type")
    names = [named] if isinstance(named, str) else named if isinstance(named, list) else []
    types = {TYPES.get(name.lower(), name.lower()) for name in names if isinstance(name, str)}
    enum = schema.get("enum")
    types |= {_type(value) for value in enum} if isinstance(enum, list) else set()
    for word in ("anyOf", "oneOf", "allOf"):
        choices = schema.get(word)
        for choice in choices if isinstance(choices, list) else ():
            types |= types_of(choice)
    return types or {"string"}


def _type(value: Any) -> str:
    if value is None:
        return "null"
    pairs = ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string"), (list, "array"))
    return next((name for kind, name in pairs if isinstance(value, kind)), "object")


def coerce(text: str, types: set[str]) -> str:
    """JSON of a value that the model wrote as text. What fits none of the types stays a string; so does text that may
    be one and is no JSON of another type. Types that JSON schema does not know allow any JSON.
    """
    word = text.strip().lower()
    if "null" in types and word == "null":
        return "null"
    if types & {"integer", "number"} and (number := _number(text, "number" in types)) is not None:
        return number
    if "boolean" in types and word in ("true", "1", "false", "0"):
        return "true" if word in ("true", "1") else "false"
    try:
        value = loads(text)
        return dumps(value if _type(value) in types or not types & KINDS else text)
    except ValueError:
        return dumps(text)


def _number(text: str, real: bool) -> str | None:
    """JSON of a number, whole ones without a fraction; None when it is none, or is not whole and not `real`."""
    if not text.isascii() or "_" in text:
        return None
    try:
        return dumps(int(text))
    except ValueError:
        pass
    try:
        value = float(text)
    except ValueError:
        return None
    if value.is_integer() and abs(value) < 2**53:
        return dumps(int(value))
    return dumps(value) if real and math.isfinite(value) else None
