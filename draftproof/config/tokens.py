"""What a target's tokenizer uses the drafter's mask id for, from its JSON files alone.

A mask id should be a row of the embedding that no text ever produces: past the tokenizer's ids, reserved,
or special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from draftproof.config.finding import Finding, note, warning

BRACKETED: Final = re.compile(r"^(<.*>|\[.*\]|\{.*\})$", re.DOTALL)
IN_USE: Final = ("bos_token", "eos_token")
FIX: Final = "compare the mask id with the drafter's own repository"


def check_mask_token(mask_id: int, folder: Path, where: str) -> list[Finding]:
    """A warning when the tokenizer in `folder` uses `mask_id` for text or to begin or end it; a note when
    its files cannot be read; nothing when it has none or the id is free."""
    try:
        entry = _token(mask_id, folder)
        ends = [_content(_read(folder / "tokenizer_config.json").get(name)) for name in IN_USE]
    except (OSError, ValueError, RecursionError, AttributeError, TypeError) as error:
        message = f"the target's tokenizer files cannot be read, so the mask id was not looked up: {error}"
        return [note("tokenizer-unreadable", message, where=str(folder))]
    if entry is None:
        return []
    text, special = entry
    if not special and not BRACKETED.match(text):
        return [_in_use("the target's tokenizer uses the mask id for text", text, where)]
    if text in ends:
        return [_in_use("the mask id is the token that begins or ends every text", text, where)]
    return []


def _in_use(message: str, text: str, where: str) -> Finding:
    expected = "an unused, reserved or special token"
    return warning("mask-id-in-use", message, expected, repr(text), where, FIX)


def _read(file: Path) -> dict[str, Any]:
    if not file.is_file():
        return {}
    raw = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(raw, dict):
        raise ValueError(f"{file.name} is not an object")
    return raw


def _token(mask_id: int, folder: Path) -> tuple[str, bool] | None:
    """The token's text and whether it is special; None when no file has the id."""
    tokenizer = _read(folder / "tokenizer.json")
    for added in tokenizer.get("added_tokens") or []:
        if added.get("id") == mask_id:
            return str(added.get("content")), bool(added.get("special"))
    decoder = _read(folder / "tokenizer_config.json").get("added_tokens_decoder") or {}
    if str(mask_id) in decoder:
        added = decoder[str(mask_id)]
        return str(added.get("content")), bool(added.get("special"))
    for text, number in _read(folder / "added_tokens.json").items():
        if number == mask_id:
            return text, False
    model = tokenizer.get("model") or {}
    for text, number in _entries(model.get("vocab") or _read(folder / "vocab.json")):
        if number == mask_id:
            return text, False
    return None


def _entries(vocab: Any) -> Iterator[tuple[str, int]]:
    """(text, id) of a word-to-id object or of a list whose position is the id."""
    if isinstance(vocab, dict):
        yield from vocab.items()
    else:
        yield from ((str(item[0]), number) for number, item in enumerate(vocab))


def _content(token: Any) -> str | None:
    """A special token is written as a string or as an object with its content."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else None
