"""Results as JSON: one object on stdout, NaN as null (JSON has no NaN). Nothing here imports torch."""

from __future__ import annotations

import json
import math
from typing import Any


def print_json(value: Any) -> None:
    print(json.dumps(without_nan(value), indent=2, allow_nan=False))


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
