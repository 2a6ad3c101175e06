"""Fixtures of the config tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write a config into a folder of the given name and return the folder."""

    def write_config(raw: object, name: str = "some-folder") -> Path:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(raw if isinstance(raw, str) else json.dumps(raw))
        return folder

    return write_config
