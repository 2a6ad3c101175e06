"""Second judge: the authors' own generation loop needs the same number of steps for the same text."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from draftproof.engine.engine import Engine
from draftproof.engine.replay import Text
from draftproof.engine.request import Request
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.hub import EMBEDDED_DRAFTER, resolve_drafter
from draftproof.models.target import Target

pytestmark = [
    pytest.mark.real,
    pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning"),  # their call, not ours
]

CHATS, NEW_TOKENS, STOP = 3, 48, 2


@pytest.fixture(scope="module", params=["yardstick", "shipped"])
def folder(request: pytest.FixtureRequest, yardstick: Path) -> Path:
    return yardstick if request.param == "yardstick" else resolve_drafter(EMBEDDED_DRAFTER)


@pytest.fixture(scope="module")
def drafter(folder: Path, target: Target) -> DFlashDrafter:
    return DFlashDrafter.load(folder, target)


@pytest.fixture(scope="module")
def their_pair(authors: ModuleType, folder: Path, target_folder: Path) -> tuple[Any, Any]:
    """(their drafter, the target as transformers runs it), float32."""
    from transformers import AutoModelForCausalLM

    drafter = authors.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32).eval()
    return drafter, AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32).eval()


def theirs(authors: ModuleType, pair: tuple[Any, Any], prompt: list[int]) -> tuple[list[int], list[int]]:
    """Text and tokens per step."""
    out = authors.dflash_generate(*pair, torch.tensor([prompt]), NEW_TOKENS, [STOP], return_stats=True)
    return out.output_ids[0, len(prompt) :].tolist(), out.acceptance_lengths


def ours(target: Target, drafter: DFlashDrafter, prompt: list[int]) -> tuple[list[int], list[int]]:
    engine = Engine(target, drafter, slots=1, context=len(prompt) + NEW_TOKENS)
    results = list(engine.generate([Request(prompt, NEW_TOKENS, stop_ids=(STOP,))]))
    return [t for r in results for t in r.tokens], [len(r.tokens) for r in results if not r.prefill]


def test_same_text_in_the_same_steps(
    authors: ModuleType, their_pair: tuple[Any, Any], target: Target, drafter: DFlashDrafter, texts: list[Text]
) -> None:
    for text in texts[:CHATS]:
        assert ours(target, drafter, text.prompt_ids) == theirs(authors, their_pair, text.prompt_ids)


def test_control_reversed_taps_need_other_steps(
    authors: ModuleType, their_pair: tuple[Any, Any], target: Target, drafter: DFlashDrafter, texts: list[Text]
) -> None:
    their_drafter, prompt = their_pair[0], texts[0].prompt_ids
    taps = their_drafter.target_layer_ids
    their_drafter.target_layer_ids = taps[::-1]
    try:
        words, steps = theirs(authors, their_pair, prompt)
    finally:
        their_drafter.target_layer_ids = taps
    assert ours(target, drafter, prompt)[0] == words
    assert len(steps) > len(ours(target, drafter, prompt)[1])
