"""A finding: one statement about a checkpoint, a pair or a deployment, with its evidence."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any


class Verdict(StrEnum):
    """Never "ok" by default: what was not shown is CANNOT_TELL."""

    PROVED = "proved"
    REFUTED = "refuted"
    CANNOT_TELL = "cannot tell"


class Severity(StrEnum):
    ERROR = "error"  # will not run, or will run wrongly
    WARNING = "warning"  # may run wrongly: somebody has to look
    NOTE = "note"  # worth knowing


@dataclass(frozen=True)
class Finding:
    """`expected` and `seen` are values as a person would write them; `where` names the file and key."""

    code: str
    severity: Severity
    verdict: Verdict
    message: str
    expected: str = ""
    seen: str = ""
    where: str = ""
    fix: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def error(code: str, message: str, expected: object, seen: object, where: str, fix: str) -> Finding:
    """A fault the configs themselves show."""
    return Finding(code, Severity.ERROR, Verdict.REFUTED, message, str(expected), str(seen), where, fix)


def warning(code: str, message: str, expected: object, seen: object, where: str, fix: str) -> Finding:
    """Something configs alone cannot settle and somebody has to look at."""
    return Finding(code, Severity.WARNING, Verdict.CANNOT_TELL, message, str(expected), str(seen), where, fix)


def note(code: str, message: str, expected: object = "", seen: object = "", where: str = "") -> Finding:
    return Finding(code, Severity.NOTE, Verdict.CANNOT_TELL, message, str(expected), str(seen), where)
