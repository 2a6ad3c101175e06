"""The body of a request: read within a limit, parsed as strict JSON, checked against its model.

Everything a client can get wrong here is a 4xx that says what: size, content type, encoding, JSON (names given
twice, NaN, nesting, half surrogates), unknown and mistyped fields.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from draftproof.serve.errors import ApiError, FieldError, bad

DEEPEST = 64  # nesting of lists and objects
MOST_PARTS, MOST_NAMES = 100_000, 10_000  # lists and objects of a body, names of an object: far above any real request
LARGE = 1 << 16  # bytes from which parsing goes to a thread
NO_MARKS = bytes(set(range(256)) - set(b'"[{'))
Body = TypeVar("Body", bound=BaseModel)


async def read(request: Request, kind: type[Body], most: int) -> Body:
    """The checked body; ApiError 400, 413, 415. most: bytes."""
    sent = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if sent != "application/json":
        raise ApiError(415, f"the content type is {sent[:100] or 'not given'}: send application/json")
    raw = await _bytes(request, most)
    return await asyncio.to_thread(parse, raw, kind) if len(raw) > LARGE else parse(raw, kind)


async def _bytes(request: Request, most: int) -> bytes:
    too_large = ApiError(413, f"the body is larger than {most} bytes", code="request_too_large")
    told = request.headers.get("content-length", "")
    if told.isdigit() and int(told) > most:
        raise too_large
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > most:
                raise too_large
            parts.append(part)
    except ClientDisconnect:
        raise bad("the client went away before the body was complete") from None
    return b"".join(parts)


def parse(raw: bytes, kind: type[Body]) -> Body:
    value = strict_json(raw)
    if not isinstance(value, dict):
        raise bad("the body must be a JSON object")
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _told(error, value) from None


def strict_json(raw: bytes) -> Any:
    """ApiError 400 for what is no JSON, or JSON that readers would understand in different ways."""
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise bad(f"the body is not UTF-8 at byte {error.start}") from None
    if _opened(raw) > MOST_PARTS:  # before they are made: a few megabytes of brackets become gigabytes of objects
        raise bad(f"the JSON holds more than {MOST_PARTS:,} lists and objects")
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_float=_finite, parse_constant=_finite)
    except RecursionError:
        raise bad(f"the JSON is nested deeper than {DEEPEST}") from None
    except ValueError as error:
        raise bad(f"the body is no valid JSON: {str(error)[:200]}") from None
    _require_shallow(value)
    if "\\u" in text:  # the only way in for half a surrogate pair
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise bad("a string holds half of a surrogate pair, which is no character") from None
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MOST_NAMES:
        raise ValueError(f"an object has more than {MOST_NAMES:,} names")
    made: dict[str, Any] = {}
    for name, value in pairs:
        if name in made:
            raise ValueError(f"the name {name[:100]!r} is given twice in one object")
        made[name] = value
    return made


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is no finite number")
    return number


def _opened(raw: bytes) -> int:
    """Lists and objects that a JSON text opens, exact where it matters: brackets within strings are left out."""
    most = raw.count(b"[") + raw.count(b"{")
    if most <= MOST_PARTS:
        return most
    marks = raw.replace(rb"\\", b"").replace(rb"\"", b"").translate(None, NO_MARKS).replace(b'""', b"")
    runs = re.finditer(rb'"[^"]*"?|[^"]+', marks)  # of a string, of brackets outside of strings
    return sum(len(run[0]) for run in runs if run[0][0] != ord('"'))


def _require_shallow(value: Any) -> None:
    level, depth = _containers([value]), 0
    while level:
        depth += 1
        if depth > DEEPEST:
            raise bad(f"the JSON is nested deeper than {DEEPEST}")
        level = _containers(inner for outer in level for inner in (outer.values() if type(outer) is dict else outer))


def _containers(values: Iterable[Any]) -> list[Any]:
    return [value for value in values if isinstance(value, dict | list)]


def _told(error: ValidationError, sent: dict[str, Any]) -> ApiError:
    """The first wrong field as the client knows it; of a union of types, what the best fitting one says."""
    errors = error.errors(include_url=False, include_input=False)
    raised = errors[0].get("ctx", {}).get("error")
    if isinstance(raised, FieldError):
        return bad(raised.message, _joined(_path(errors[0], sent), raised.param), raised.code)
    field = errors[0]["loc"][:1]
    paths = [(_path(e, sent), e) for e in errors if e["loc"][:1] == field]
    path, first = max(paths, key=lambda pair: _reach(*pair))
    said = " or ".join(dict.fromkeys(e["msg"].removeprefix("Value error, ") for where, e in paths if where == path))
    code = "missing_required_parameter" if first["type"] == "missing" else "invalid_value"
    if first["type"] == "extra_forbidden":
        said, code = "this server knows no such parameter", "unknown_parameter"
    return bad(f"{path}: {said}" if path else said, path or None, code)


def _reach(path: str, error: Any) -> tuple[int, list[int]]:
    """How far a form of a union went along with what was sent: how deep, and over how many items of lists."""
    return path.count(".") + path.count("["), [step for step in error["loc"] if isinstance(step, int)]


def _path(error: Any, sent: dict[str, Any]) -> str:
    """Where in the body: pydantic's own path names types of unions too."""
    path, at = "", sent
    for number, step in enumerate(error["loc"], 1):
        here = isinstance(at, list) and isinstance(step, int) and step < len(at)
        if here or (isinstance(at, dict) and step in at):
            path, at = _joined(path, step), at[step]
        elif error["type"] == "missing" and number == len(error["loc"]):
            path = _joined(path, step)
    return path


def _joined(path: str, step: int | str) -> str:
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step[:100]}" if path else step[:100]
