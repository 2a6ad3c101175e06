"""The one reader of prompt files: JSON lines, checked line by line. Nothing here imports torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftproof.errors import UserError

ROLES = ("system", "user", "assistant")
KEYS = {"prompt", "messages", "id", "category", "source"}


def read_chats(path: Path) -> list[list[dict[str, str]]]:
    """The chats of a file of {"prompt": text} or {"messages": [...]} lines."""
    return [row["messages"] for _, row in read_rows(path)]


def read_rows(path: Path) -> list[tuple[int, dict[str, Any]]]:
    """(line number, row with checked `messages`, other keys as written). UserError: not-found, bad-texts."""
    require_file(path)
    try:
        lines = path.read_text(encoding="utf-8").split(
            "\n"
        )  # some prompts hold what str.splitlines takes for line ends
    except UnicodeDecodeError as error:
        raise UserError("bad-texts", f"{path} is not UTF-8: {error}", "save the file as UTF-8") from error
    rows = [(number, _row(path, number, line)) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise UserError("bad-texts", f"{path} holds no prompts", 'write one {"prompt": "..."} a line')
    return rows


def require_file(path: Path) -> None:
    if not path.is_file():
        raise UserError(
            "not-found", f"{path} is no file", "name a JSONL file of chats (`draftproof prompts` writes one)"
        )


def _row(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise _bad_line(path, number, f"it is not JSON: {error}") from error
    if not isinstance(row, dict) or ("prompt" in row) == ("messages" in row):
        raise _bad_line(path, number, "it needs either `prompt` or `messages`")
    if unknown := sorted(row.keys() - KEYS):
        raise _bad_line(path, number, f"it has the unknown key {unknown[0]!r}")
    messages = row.get("messages", [{"role": "user", "content": row.get("prompt")}])
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise _bad_line(path, number, f"a message is a role of {', '.join(ROLES)} and a non-empty text")
    return row | {"messages": messages}


def _is_message(item: Any) -> bool:
    if not isinstance(item, dict) or item.keys() != {"role", "content"}:
        return False
    return item["role"] in ROLES and isinstance(item["content"], str) and bool(item["content"].strip())


def _bad_line(path: Path, number: int, why: str) -> UserError:
    return UserError(
        "bad-texts", f"{path} line {number}: {why}", 'write {"prompt": "..."} or {"messages": [...]} in that line'
    )
