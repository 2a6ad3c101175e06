"""Where the fixture configs lie, and small edits of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIXTURES = Path(__file__).parents[1] / "fixtures"
CONFIGS = FIXTURES / "configs"
TARGETS = FIXTURES / "targets"
YARDSTICK = Path(__file__).parents[2].parent / "shared" / "data" / "smollm2-135m-dflash-b8-yardstick"


def load(folder: Path) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return raw


def edited(raw: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A copy with dotted keys (written with __) set, or removed when the value is `...`."""
    result = json.loads(json.dumps(raw))
    for key, value in changes.items():
        *parents, last = key.split("__")
        level = result
        for parent in parents:
            level = level[parent]
        if value is ...:
            del level[last]
        else:
            level[last] = value
    return result
