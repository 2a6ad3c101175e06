"""The shipped toy of Qwen3.5's architecture, its own drafter and its MTP head: lossless, and accepting as measured."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from draftproof.bench import bridge
from draftproof.bench.lossless import compare
from draftproof.bench.workloads import load_workload
from draftproof.engine.pair import Pair, load_pair

pytestmark = pytest.mark.real
TARGET, DRAFTER = "toy-qwen3.5", "toy-qwen3.5-dflash"
PROMPTS, TOKENS = 6, 48


@pytest.fixture(scope="module")
def pairs() -> dict[str, Pair]:
    made = {f"mtp {k}": load_pair(TARGET, None, mtp=k, dtype="float32", device="cpu") for k in (1, 2, 4)}
    return made | {"dflash": load_pair(TARGET, DRAFTER, dtype="float32", device="cpu")}


def chats(pair: Pair) -> Sequence[tuple[str, list[int]]]:
    return [(p.id, bridge.encode(pair, p)) for p in load_workload("mtbench", PROMPTS)]


@pytest.mark.parametrize("method", ["dflash", "mtp 1", "mtp 4"])
def test_drafting_changes_no_text(pairs: dict[str, Pair], method: str) -> None:
    pair = pairs[method]
    results = compare(pair, chats(pair), (0.0, 0.7), TOKENS, seed=0)
    assert len(results) == 3 * PROMPTS and not [r for r in results if r.verdict == "bug"]
    assert sum(r.verdict == "identical" for r in results) >= 3 * PROMPTS - 1


def test_acceptance_is_that_of_a_trained_pair(pairs: dict[str, Pair]) -> None:
    """Along the target's own answers: more drafts a step accept more, and none less than in the measured table."""
    pair = pairs["dflash"]
    texts = bridge.write_texts(pair, [ids for _, ids in chats(pair)], 0.0, TOKENS, seed=0)
    tau = {}
    for method, other in pairs.items():
        assert other.drafter is not None
        (run,) = bridge.replay_texts(pair, [other.drafter], texts)
        tau[method] = run.tau
    print(tau)
    assert 1.3 < tau["mtp 1"] < tau["mtp 2"] < tau["mtp 4"]
    assert tau["dflash"] > 1.8
