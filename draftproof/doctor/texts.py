"""Prompts of the user's own for the probe, as token ids: the format of `draftproof replay`, outputs not needed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftproof.errors import UserError

HELP = 'the format is {"prompt_ids": [[1, 2], ...]}'


def read_prompt_ids(path: Path) -> list[list[int]]:
    """UserError not-found, bad-texts."""
    try:
        raw: Any = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError("not-found", f"{path} does not exist", "name a JSON file of prompts") from None
    except (OSError, ValueError) as error:
        raise UserError("bad-texts", f"{path} is not a readable JSON file: {error}", HELP) from None
    ids = raw.get("prompt_ids") if isinstance(raw, dict) else None
    if not (isinstance(ids, list) and ids and all(isinstance(p, list) and p for p in ids)) or not all(
        type(token) is int and token >= 0 for prompt in ids for token in prompt
    ):
        raise UserError("bad-texts", f"{path} holds no lists of token ids under prompt_ids", HELP)
    return [list(prompt) for prompt in ids]
