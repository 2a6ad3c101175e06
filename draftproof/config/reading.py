"""Reading one JSON config without trusting it.

`load_config` turns a folder or file into a plain dict and refuses everything that is not a JSON object.
`Fields` looks values up by dotted key, checks type and range, and writes down where each value came from,
which keys were asked for, and where two keys for the same thing disagree. Nothing here knows what a drafter
is.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar, cast

from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.errors import UserError

T = TypeVar("T")
MISSING: Final = object()
MAX_BYTES: Final = 16 * 2**20  # a config is a few kilobytes; a bigger file is not one


def load_config(path: str | Path) -> tuple[Path, str, dict[str, Any]]:
    """The folder, the file's name and its content. UserError: not-found, not-a-model, bad-json."""
    given = Path(path).expanduser()
    if not given.exists():
        raise UserError("not-found", f"{given} does not exist", "name a folder with a config.json, or the file itself")
    file = given / "config.json" if given.is_dir() else given
    if not file.is_file() or file.suffix != ".json":
        seen = "holds no config.json" if given.is_dir() else "is not a config.json"
        raise UserError("not-a-model", f"{given} {seen}", "name the folder of a checkpoint, or its config.json")
    return file.parent, file.name, load_object(file)


def load_object(file: Path) -> dict[str, Any]:
    """A JSON object from a file; a doubled key is refused because readers differ in which one they keep."""
    fix = f"open {file} and mend it, or download the file again"
    try:
        if file.stat().st_size > MAX_BYTES:
            raise UserError("bad-json", f"{file} is larger than {MAX_BYTES} bytes", fix)
        raw = json.loads(file.read_text(encoding="utf-8-sig"), object_pairs_hook=_no_doubled_keys)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("bad-json", f"{file} cannot be read as JSON: {error}", fix) from error
    if not isinstance(raw, dict):
        raise UserError("bad-json", f"{file} holds {_kind(raw)}, not an object", fix)
    return raw


def _no_doubled_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(n for n in names if names.count(n) > 1)!r} is written twice")
    return result


class Fields:
    """One config's values by dotted key, with a record of what was read from where.

    `sources` maps field names to their origin; `findings` grows while reading; `asked` holds every dotted
    key that was looked up, so that a caller can name the keys nobody read.
    """

    def __init__(self, raw: Mapping[str, Any], file: str) -> None:
        self.raw = raw
        self.file = file
        self.sources: dict[str, str] = {}
        self.findings: list[Finding] = []
        self.asked: set[str] = set()

    def raw_value(self, key: str) -> Any:
        """The value at a dotted key, None when absent or null. UserError bad-config if a parent is no
        object."""
        self.asked.add(key)
        here: Any = self.raw
        parents: list[str] = []
        for part in key.split("."):
            if here is None:
                return None
            if not isinstance(here, Mapping):
                raise self.bad(".".join(parents), f"must be an object, not {_kind(here)}")
            here = here.get(part)
            parents.append(part)
        return here

    def get(
        self,
        field: str,
        keys: Iterable[str],
        check: Callable[[Any], T],
        default: Any = MISSING,
        why: str = "",
        decisive: bool = False,
    ) -> T:
        """The first of `keys` that has a value, checked. Later keys with another value become a finding.

        `default` is taken, with `why` as its source, when no key has a value; without one that is a
        UserError. `decisive` makes a contradiction between two keys an error-level finding.
        """
        names = list(keys)
        found = [(key, self.check(key, check)) for key in names if self.raw_value(key) is not None]
        if not found:
            if default is MISSING:
                raise self.bad(names[0], "is missing")
            self.sources[field] = f"default: {why or default}"
            return cast(T, default)
        key, value = found[0]
        self.sources[field] = f"{self.file}: {key}"
        for other, second in found[1:]:
            if second != value:
                self.contradiction(key, value, other, second, decisive)
        return value

    def check(self, key: str, check: Callable[[Any], T]) -> T:
        """The value at `key` after its check; the error names the key."""
        try:
            return check(self.raw_value(key))
        except ValueError as error:
            raise self.bad(key, str(error)) from error

    def contradiction(self, key: str, value: object, other: str, second: object, decisive: bool) -> None:
        self.findings.append(
            Finding(
                code="config-contradicts-itself",
                severity=Severity.ERROR if decisive else Severity.WARNING,
                verdict=Verdict.CANNOT_TELL,
                message=f"two keys for one thing disagree; readers differ in which one they take, here {key}",
                expected=f"{key} = {value}",
                seen=f"{other} = {second}",
                where=f"{self.file}: {other}",
                fix="find out with which value the drafter was trained and state it once",
            )
        )

    def bad(self, key: str, problem: str) -> UserError:
        return UserError("bad-config", f"{self.file}: {key} {problem}", f"correct {key} in {self.file}")


def an_int(minimum: int = 1) -> Callable[[Any], int]:
    def check(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"must be an integer, not {_kind(value)}")
        if value < minimum:
            raise ValueError(f"must be at least {minimum}, not {value}")
        return value

    return check


def a_number(minimum: float = 0.0, *, zero: bool = False) -> Callable[[Any], float]:
    """A finite number above `minimum`, or equal to it with `zero`."""

    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"must be a number, not {_kind(value)}")
        try:
            number = float(value)
        except OverflowError as error:
            raise ValueError("must be a finite number") from error
        if not math.isfinite(number):
            raise ValueError(f"must be a finite number, not {number}")
        if number < minimum or (number == minimum and not zero):
            raise ValueError(f"must be {'at least' if zero else 'above'} {minimum:g}, not {value}")
        return number

    return check


def a_bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"must be true or false, not {_kind(value)}")
    return value


def a_string(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"must be a non-empty string, not {_kind(value)}")
    return value


def an_object(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"must be an object, not {_kind(value)}")
    return value


def strings(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise ValueError(f"must be a list of strings, not {_kind(value)}")
    return tuple(value)


def ints(minimum: int = 0) -> Callable[[Any], tuple[int, ...]]:
    """A non-empty list of integers without repeats."""
    one = an_int(minimum)

    def check(value: Any) -> tuple[int, ...]:
        if not isinstance(value, list) or not value:
            raise ValueError(f"must be a non-empty list of integers, not {_kind(value)}")
        numbers = tuple(one(item) for item in value)
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"names one layer twice: {list(numbers)}")
        return numbers

    return check


def _kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | dict):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return repr(value)[:80]
