"""Which line of an engine's log says why it did not start, and what is known about it (failures.toml)."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.resources import files

# What shutdown itself prints, and lines that only point to an earlier one.
NOISE = re.compile(
    r"EngineDeadError|nanobind: leaked|leaked semaphore|resource_tracker|destroy_process_group|KeyboardInterrupt"
    r"|Engine core initialization failed|See root cause above|Frontend process failed|The above exception was"
)
SHUTDOWN = re.compile(r"SIGTERM|[Rr]eceived signal|\[shutdown\]|Shutting down")
PREFIX = re.compile(
    r"^(?:\(\w+[^)]*pid=\d+[^)]*\) ?)?"  # (EngineCore pid=12)
    r"(?:(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL)\s+\d\d-\d\d \d\d:\d\d:\d\d\s+)?"
    r"(?:\[(?:[\w.]+:\d+|\d{4}-\d\d-\d\d[^]]*)\] ?)?"  # vLLM [core.py:12], SGLang [2026-11-29 12:00:00 TP0]
)
SOURCE = re.compile(r'^\s*File ".+", line \d+')
EXCEPTION = re.compile(r"^(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Failure)(?:: .+|$)")
USAGE = re.compile(r"^(?:\S+ ){1,3}?error: .+|^(?:error|fatal)\b.*", re.IGNORECASE)
COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


@dataclass(frozen=True)
class Failure:
    """A known start-up error: what matches one of its log lines, why it happens, what to do, where that is from."""

    code: str
    pattern: re.Pattern[str]
    cause: str
    fix: str
    evidence: str


@dataclass(frozen=True)
class Explanation:
    """The line that matters, without its logger prefix. `code`, `cause` and `fix` are empty when nothing is known."""

    line: str
    code: str = ""
    cause: str = ""
    fix: str = ""


def failures() -> tuple[Failure, ...]:
    """The table, most telling first."""
    table = tomllib.loads((files("draftproof.launch") / "failures.toml").read_text(encoding="utf-8"))
    return tuple(Failure(**(row | {"pattern": re.compile(row["pattern"])})) for row in table["failure"])


def explain_log(text: str) -> Explanation | None:
    """The first known error by priority, else the last exception of a traceback, else the last line. None if empty."""
    messages, sources = _split(text)
    for lines in (messages, sources):  # a bare `assert` is known by its source line only
        for failure in failures():
            for index, line in enumerate(lines):
                if failure.pattern.search(line):
                    return Explanation(_whole(lines, index), failure.code, failure.cause, failure.fix)
    for pattern in (EXCEPTION, USAGE):
        for index in range(len(messages) - 1, -1, -1):
            if pattern.match(messages[index]):
                return Explanation(_whole(messages, index))
    rest = messages or [plain(raw) for raw in _lines(text)]
    return Explanation(rest[-1]) if rest else None


def plain(line: str) -> str:
    """A log line without colours and logger prefix."""
    return PREFIX.sub("", COLOUR.sub("", line)).strip()


def _lines(text: str) -> Iterator[str]:
    """Progress bars end in carriage returns."""
    return (line for line in re.split(r"[\r\n]+", text) if line.strip())


def _split(text: str) -> tuple[list[str], list[str]]:
    """Lines that can name a cause, up to the shutdown: messages, and source lines of tracebacks. What a logger calls
    no error is left out: engines print their arguments, and warn about things they then work around."""
    messages: list[str] = []
    sources: list[str] = []
    after_file = False
    for raw in _lines(text):
        clean = COLOUR.sub("", raw)
        prefix = PREFIX.match(clean)
        level, line = (prefix["level"], clean[prefix.end() :]) if prefix else (None, clean)
        if SHUTDOWN.search(line) and not EXCEPTION.match(line):
            break
        if level in ("DEBUG", "INFO", "WARNING") or NOISE.search(line) or not line.strip(" ^~|"):
            continue
        if SOURCE.match(line) or after_file:
            sources.append(line.strip())
        elif line.strip():
            messages.append(line.strip())
        after_file = bool(SOURCE.match(line))
    return messages, sources


def _whole(lines: list[str], index: int) -> str:
    """Pydantic names the field in the line before its message, and what is wrong in the lines after the exception."""
    if "validation error" in lines[index]:
        return " | ".join(lines[index : index + 3])
    if "[type=" in lines[index] and index and re.fullmatch(r"[\w.]+", lines[index - 1]):
        return f"{lines[index - 1]}: {lines[index]}"
    return lines[index]
