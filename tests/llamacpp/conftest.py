"""Where the real llama.cpp is: what build.sh made, and the shipped pair as GGUF beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

HOME = Path(os.environ.get("DRAFTPROOF_LLAMACPP", "~/llamacpp")).expanduser()
SERVER = HOME / "build" / "bin" / "llama-server"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"no {SERVER}; `make test-llamacpp` builds it")
    for item in items:
        if item.get_closest_marker("llamacpp") and not SERVER.exists():
            item.add_marker(missing)
