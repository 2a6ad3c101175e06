"""Requests that come and go on a GPU: each gets the text that it gets alone, in every company, with or without hits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.target import Target
from tests import tiny

pytestmark = pytest.mark.gpu
KINDS = ("llama", "gemma3", "qwen3_5")


def on_gpu(kind: str) -> Target:
    return Target.load(tiny.target_folder(kind), dtype=torch.float32, device="cuda")


def asked() -> list[Request]:
    shared = [5, 9, 11, *range(20, 53)]
    settings: list[dict[str, Any]] = [
        {}, {"temperature": 0.8}, {"temperature": 1.0, "presence_penalty": 0.5}, {"repetition_penalty": 1.3},
        {"logit_bias": {7: 2.0}}, {"temperature": 0.7, "top_k": 9},
    ]  # fmt: skip
    return [
        Request([*shared, 4 + i, 60 - i], 20 + 3 * i, SamplingParams(seed=i, **own)) for i, own in enumerate(settings)
    ]


def drive(engine: Engine, requests: list[Request], every: int) -> tuple[list[list[int]], int]:
    """One more request every so many steps; texts by request, and prompt tokens found in the prefix cache."""
    texts: dict[int, list[int]] = {}
    numbers, step = [], 0
    while len(numbers) < len(requests) or engine.busy:
        if step % every == 0 and len(numbers) < len(requests):
            numbers.append(engine.add(requests[len(numbers)]))
        for result in engine.step():
            texts.setdefault(result.index, []).extend(result.tokens)
        step += 1
    return [texts[n] for n in numbers], engine.state.hits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [None, "chain", 8])
def test_company_changes_no_text(kind: str, budget: str | int | None) -> None:
    target = on_gpu(kind)
    drafter = tiny.drafter(target) if budget else None
    how = Speculation(budget) if budget else None
    alone = [
        [t for result in Engine(target, context=96).generate([request]) for t in result.tokens] for request in asked()
    ]
    settings: dict[str, Any] = {"slots": 3, "context": 96, "how": how, "chunk": 8, "prefill_rows": 8}
    engine = Engine(target, drafter, **settings, memory=2**24, prefix=2**24)
    texts, hits = drive(engine, asked(), every=3)
    assert texts == alone
    assert hits > 0 and not engine.busy
