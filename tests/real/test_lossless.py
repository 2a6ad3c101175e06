"""The real pair in float32: drafter on, drafter off and transformers' generate give one text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof.engine.engine import Engine
from draftproof.engine.replay import Text
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.target import Target

pytestmark = pytest.mark.real

NEW_TOKENS, STOP, PROMPTS = 48, 2, 2


def decode(target: Target, drafter: DFlashDrafter | None, prompt: list[int], params: SamplingParams) -> list[int]:
    engine = Engine(target, drafter, slots=1, context=len(prompt) + NEW_TOKENS)
    return [t for r in engine.generate([Request(prompt, NEW_TOKENS, params, (STOP,))]) for t in r.tokens]


@pytest.fixture(scope="module")
def generated(target_folder: Path, texts: list[Text]) -> list[list[int]]:
    """What transformers' own generate writes greedily."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(target_folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    written = []
    for text in texts[:PROMPTS]:
        ids = torch.tensor([text.prompt_ids])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            eos_token_id=STOP,
            pad_token_id=STOP,
        )
        written.append(out[0, ids.shape[1] :].tolist())
    return written


def test_greedy(target: Target, drafter: DFlashDrafter, texts: list[Text], generated: list[list[int]]) -> None:
    for text, theirs in zip(texts[:PROMPTS], generated, strict=True):
        assert decode(target, None, text.prompt_ids, SamplingParams()) == theirs
        assert decode(target, drafter, text.prompt_ids, SamplingParams()) == theirs


def test_sampled(target: Target, drafter: DFlashDrafter, texts: list[Text], generated: list[list[int]]) -> None:
    for text, greedy in zip(texts[:PROMPTS], generated, strict=True):
        params = SamplingParams(temperature=0.7, seed=5)
        plain = decode(target, None, text.prompt_ids, params)
        assert decode(target, drafter, text.prompt_ids, params) == plain
        other = decode(target, drafter, text.prompt_ids, SamplingParams(temperature=0.7, seed=6))
        assert plain != greedy and plain != other  # control: the comparison sees another seed
