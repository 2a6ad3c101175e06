"""Draft trees on a GPU: both builders alike, padded buckets, lossless text, and the whole round as one CUDA graph."""

from __future__ import annotations

import pytest
import torch

from draftproof.bench.shape import captured, whole_round
from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.dflash import DraftDist
from draftproof.models.target import Target
from draftproof.spec.builders import BUILDERS, frontier, heap
from tests import tiny

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def texts(engine: Engine, requests: list[Request]) -> list[list[int]]:
    out: list[list[int]] = [[] for _ in requests]
    for result in engine.generate(requests):
        out[result.index] += result.tokens
    return out


@pytest.mark.parametrize("name", BUILDERS)
def test_frontier_on_the_device_is_the_heap_on_the_host(name: str) -> None:
    draw = torch.Generator().manual_seed(3)
    logp = torch.randn(4, 15, 500, generator=draw).mul(2).log_softmax(-1).sort(-1, descending=True).values[..., :48]
    ids = torch.stack([torch.randperm(500, generator=draw)[:48] for _ in range(60)]).view(4, 15, 48)
    anchor = torch.tensor([5, 6, 7, 8])
    for budget in (5, 16, 63, 255):
        one = heap(BUILDERS[name], anchor, DraftDist(ids, logp), budget, 15)
        two = frontier(BUILDERS[name], anchor.cuda(), DraftDist(ids.cuda(), logp.cuda()), budget, 15)
        for field in ("token", "parent", "depth", "n"):
            assert torch.equal(getattr(one, field), getattr(two, field).cpu()), (budget, field)


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
@pytest.mark.parametrize("budget", [3, 16, 64])
def test_trees_change_no_text(kind: str, budget: int) -> None:
    target = Target.load(tiny.target_folder(kind), dtype=torch.float64, device="cuda")
    if kind in tiny.HYBRIDS:
        tiny.in_double(target.model)
    requests = [Request([5, 9, 11], 40, SamplingParams(t, seed=3)) for t in (0.0, 0.8)]
    plain = texts(Engine(target, slots=2, context=64), requests)
    for aware in (True, False):
        how = Speculation(budget, noise_aware=aware)
        assert texts(Engine(target, tiny.drafter(target), slots=2, context=64, how=how), requests) == plain


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_a_round_with_a_tree_can_be_captured(kind: str) -> None:
    """The graph emits what the eager round emits."""
    target = Target.load(tiny.target_folder(kind), dtype=torch.float32, device="cuda")
    engine = Engine(target, tiny.drafter(target), context=128, how=Speculation(31))
    batch = engine.seat([Request([5, 9, 11, 13], 64)])
    engine.run_prompt(engine.table.taken[0], engine.chunk)
    batch.longest = 4
    act, first = whole_round(engine, batch, engine.proposer), batch.anchors.clone()
    states = [(s, s.state.clone(), s.window.clone()) for s in engine.cache.states.values()]

    def again() -> None:
        batch.anchors.copy_(first)
        for store, state, window in states:  # a round moves them on
            store.state.copy_(state)
            store.window.copy_(window)
        act()

    again()
    eager = batch.anchors.clone()
    graph = captured(target, again, "round")
    assert graph is not None
    graph()
    assert torch.equal(batch.anchors, eager)
