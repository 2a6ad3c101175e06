"""Draft trees on the two real pairs in float32: the same text as plain decoding, more tokens a step than the chain."""

from __future__ import annotations

from functools import cache

import pytest

from draftproof.bench import bridge
from draftproof.bench.workloads import load_workload
from draftproof.engine.engine import Engine
from draftproof.engine.pair import Pair, load_pair
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.spec.builders import BEST_FIRST, SIBLINGS, SPINE_FIRST

pytestmark = pytest.mark.real
PAIRS = {"smollm2-135m": (3, 40), "toy-qwen3.5": (4, 48)}  # prompts, new tokens


@cache
def pair(name: str) -> Pair:
    return load_pair(name, f"{name}-dflash", dtype="float32", device="cpu")


def decode(name: str, temperature: float, how: Speculation | None) -> tuple[list[list[int]], float]:
    """Texts of the prompts, side by side, and tokens a step (1 without drafts)."""
    count, tokens = PAIRS[name]
    loaded = pair(name)
    prompts = [bridge.encode(loaded, p) for p in load_workload("mtbench", count)]
    context = max(map(len, prompts)) + tokens
    engine = Engine(loaded.target, loaded.drafter if how else None, slots=count, context=context, how=how)
    texts: list[list[int]] = [[] for _ in prompts]
    emitted = steps = 0
    asked = [
        Request(ids, tokens, SamplingParams(temperature, seed=i), loaded.stop_ids) for i, ids in enumerate(prompts)
    ]
    for result in engine.generate(asked):
        texts[result.index] += result.tokens
        if not result.prefill:
            emitted, steps = emitted + len(result.tokens), steps + 1
    return texts, emitted / steps


@cache
def plain(name: str, temperature: float) -> list[list[int]]:
    return decode(name, temperature, None)[0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", PAIRS)
def test_trees_keep_the_text_and_accept_more_than_the_chain(name: str, temperature: float) -> None:
    chain_texts, chain_tau = decode(name, temperature, Speculation())
    assert chain_texts == plain(name, temperature)
    for nodes, builder in ((16, SPINE_FIRST), (24, SIBLINGS), (48, BEST_FIRST)):
        texts, tau = decode(name, temperature, Speculation(nodes, builder))
        assert texts == plain(name, temperature), (nodes, builder.name)
        assert tau > chain_tau + 0.05, (nodes, builder.name)


@pytest.mark.parametrize("name", PAIRS)
def test_drafts_ranked_with_the_noise_are_accepted_more_often(name: str) -> None:
    aware, blind = (decode(name, 1.0, Speculation(32, noise_aware=on)) for on in (True, False))
    assert aware[0] == blind[0] == plain(name, 1.0)
    assert aware[1] > blind[1]
