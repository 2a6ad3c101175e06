"""What must hold on a GPU: the same noise bits as on a CPU, graphs that equal eager steps, lossless decoding."""

from __future__ import annotations

import pytest
import torch

from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.target import Target
from draftproof.spec.noise import gumbel, hash_bits
from draftproof.train.regen import Job, Writer
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture(params=["llama", "qwen3_5", "qwen3_next"])
def target(request: pytest.FixtureRequest) -> Target:
    loaded = Target.load(tiny.target_folder(request.param), dtype=torch.float64, device="cuda")
    if request.param in tiny.HYBRIDS:
        tiny.in_double(loaded.model)
    return loaded


def texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in requests]
    for result in engine.generate(requests):
        out[result.index] += result.tokens
    return out


def test_noise_has_the_same_bits_and_values_within_an_ulp() -> None:
    seed, choice = torch.tensor([7, -3]), torch.tensor([0, 2])
    position = torch.arange(12).view(2, 6)
    here = hash_bits(seed, choice, position, 4096)
    there = hash_bits(seed.cuda(), choice.cuda(), position.cuda(), 4096)
    assert torch.equal(here, there.cpu())
    one, two = gumbel(seed, choice, position, 4096), gumbel(seed.cuda(), choice.cuda(), position.cuda(), 4096).cpu()
    torch.testing.assert_close(one, two, rtol=3e-7, atol=3e-7)


def test_drafting_changes_nothing(target: Target) -> None:
    requests = [Request([5, 9, 11], 40, SamplingParams(t, seed=3)) for t in (0.0, 0.8)]
    plain = texts(Engine(target, slots=2, context=64), requests)
    assert texts(Engine(target, tiny.drafter(target), slots=2, context=64), requests) == plain


def test_captured_steps_write_what_eager_steps_write(target: Target) -> None:
    jobs = [Job([5, 9, 11 + i], 0.0 if i % 2 else 0.9, seed=i, max_tokens=30) for i in range(7)]
    writer = Writer(target, slots=3, max_prompt=8, max_tokens=30, stops=[2])
    written = {job.seed: ids for job, ids in writer.write(jobs)}
    for job in jobs:
        request = Request(job.prompt_ids, 30, SamplingParams(job.temperature, seed=job.seed), (2,))
        assert written[job.seed] == texts(Engine(target, context=64), [request])[0]
