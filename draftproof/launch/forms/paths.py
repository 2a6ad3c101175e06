"""Telling a checkpoint's path from its id on the Hub."""

from __future__ import annotations

import os
import re

_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?", re.ASCII)


def is_hub_id(name: str) -> bool:
    """Whether a name that is no absolute path means the Hub: it has the shape of an id, and nothing here bears it."""
    return bool(_ID.fullmatch(name)) and not os.path.exists(name)
