"""PlainStepper (what a CUDA graph captures) gives plain decoding's text; on a CPU it runs the same step eagerly."""

from __future__ import annotations

import pytest
import torch

from draftproof.engine.batch import Batch, sampling_of
from draftproof.engine.graphs import BUCKET, PlainStepper
from draftproof.engine.inflight import InFlight
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.target import causal_plan
from tests import tiny
from tests.engine.decoding import PROMPTS, decode, texts


def stepped(kind: str, asked: list[Request], steps: int, *, honest_bound: bool = True) -> list[list[int]]:
    """All requests through PlainStepper, `steps` times; prompts without their last token are prefilled."""
    target, slots = tiny.target(kind), slice(0, len(asked))
    capacity = max(len(r.prompt_ids) + r.max_tokens for r in asked)
    cache = target.new_cache(slots=len(asked), capacity=capacity, chunk=capacity)
    for i, request in enumerate(asked):
        rows = len(request.prompt_ids) - 1
        if rows:
            plan = causal_plan(cache, slice(i, i + 1), rows, rows)
            target.forward(torch.tensor([list(request.prompt_ids[:-1])]), plan, rows=1)
            cache.commit(slice(i, i + 1), torch.tensor([rows]))
    batch = Batch(
        slots=slots,
        anchors=torch.tensor([r.prompt_ids[-1] for r in asked]),
        budget=torch.tensor([r.max_tokens for r in asked]),
        stops=torch.tensor(list(asked[0].stop_ids), dtype=torch.long),
        sampling=sampling_of([InFlight(0, r, 0.0) for r in asked], target.spec.vocab_size, target.device),
        longest=0,
    )
    stepper = PlainStepper(target, cache, batch, max(r.max_tokens for r in asked))
    longest = max(len(r.prompt_ids) for r in asked)
    for i in range(steps):
        stepper.step(longest + i if honest_bound else 1)
    return [row[:n] for row, n in zip(stepper.history.tolist(), stepper.written.tolist(), strict=True)]


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
@pytest.mark.parametrize("stops", [(), (2, 11, 18)])
def test_stepper_equals_the_engine(kind: str, stops: tuple[int, ...]) -> None:
    params = (SamplingParams(), SamplingParams(temperature=1.0, seed=3), SamplingParams(temperature=0.7, seed=4))
    asked = [Request(p, n, s, stops) for p, n, s in zip(PROMPTS, (20, 7, 13), params, strict=True)]
    engine = texts(decode(tiny.target(kind), None, asked))
    assert stepped(kind, asked, 24) == engine  # the extra steps change nothing
    assert stepped(kind, asked, 5) == [t[:5] for t in engine]


def test_text_across_a_bucket_and_a_control() -> None:
    prompt = [4 + i * 7 % 60 for i in range(BUCKET - 10)]
    asked = [Request(prompt, 24, SamplingParams(temperature=1.0, seed=1))]
    engine = texts(decode(tiny.target(), None, asked))
    assert stepped("llama", asked, 24) == engine
    assert stepped("llama", asked, 24, honest_bound=False) != engine  # rows past the bound are out of sight
