"""The minimal reproduction of docs/vllm_cpu_context_keys.md, as it stands there, on the real CPU kernel."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from .conftest import COMMON, RUNNER, VENV

pytestmark = pytest.mark.vllm
PAGE = Path(__file__).parents[2] / "docs" / "vllm_cpu_context_keys.md"


def test_the_cpu_kernel_norms_every_layer_with_the_first_weight() -> None:
    code = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    env = {**os.environ, **COMMON, **RUNNER["v1"]}
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", code], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [line.split() for line in done.stdout.splitlines() if re.fullmatch(r"\d \S+ \S+", line)]
    assert len(rows) == 5
    assert all(float(first) < 1e-5 for _, _, first in rows)
    assert float(rows[0][1]) < 1e-5 and all(float(own) > 0.1 for _, own, _ in rows[1:])
