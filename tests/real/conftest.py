"""The real pair: SmolLM2-135M and the yardstick drafter, float32."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch

from draftproof.engine.replay import Text, load_texts
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.hub import resolve_target
from draftproof.models.target import Target

YARDSTICK = Path(__file__).parents[2].parent / "shared" / "data" / "smollm2-135m-dflash-b8-yardstick"


@pytest.fixture(scope="session")
def yardstick() -> Path:
    if not YARDSTICK.is_dir():
        pytest.skip(f"the yardstick is not on this machine ({YARDSTICK})")
    return YARDSTICK


@pytest.fixture(scope="session")
def target_folder() -> Path:
    return resolve_target("smollm2-135m")


@pytest.fixture(scope="session")
def target(target_folder: Path) -> Target:
    return Target.load(target_folder, dtype=torch.float32)


@pytest.fixture(scope="session")
def drafter(yardstick: Path, target: Target) -> DFlashDrafter:
    return DFlashDrafter.load(yardstick, target)


@pytest.fixture(scope="session")
def texts(yardstick: Path) -> list[Text]:
    return load_texts(yardstick / "texts.json", 200)


@pytest.fixture(scope="session")
def authors() -> ModuleType:
    """The authors' own loop, with a clock that needs no GPU."""
    import time

    model = pytest.importorskip(
        "dflash.model", reason="the authors' loop is absent: pip install --no-deps dflash==0.1.0"
    )
    model._cuda_time = time.perf_counter
    return model
