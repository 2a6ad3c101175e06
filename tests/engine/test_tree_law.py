"""Chi-square and total variation of text sampled with draft trees against the exact probabilities.

The tokens counted are the second and third of the text: chosen at the root and at a child of the first tree, or at the
root of the next one. Seeds are fixed, so the outcome is.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from draftproof.engine import step as step_module
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.cache import Cache, Slots
from draftproof.models.dflash import DraftDist, likeliest
from draftproof.spec.builders import BUILDERS
from draftproof.spec.sampling import Sampling, choose
from draftproof.spec.tree import Tree
from tests.engine.test_distribution import PROMPT, VOCAB, ForkingEngine, p_value, probabilities, small_target

DRAWS, DEPTH = 2000, 2
SETTINGS: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 0.7, top-k 7, top-p 0.95, min-p 0.01": {"temperature": 0.7, "top_k": 7, "top_p": 0.95, "min_p": 0.01},
    "T 0.3": {"temperature": 0.3},
    "T 1.5, penalty 1.3": {"temperature": 1.5, "repetition_penalty": 1.3},
}
SHAPES = [*((name, "spine-first") for name in SETTINGS), ("T 1", "best-first"), ("T 1.5, penalty 1.3", "siblings")]


@cache
def joint(name: str) -> Tensor:
    """Exact probabilities of the second and third token [V, V]."""
    settings = SETTINGS[name]
    first = probabilities([PROMPT], settings)[0]
    second = probabilities([[*PROMPT, a] for a in range(VOCAB)], settings)
    prefixes = [[*PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)]
    third = probabilities(prefixes, settings).view(VOCAB, VOCAB, VOCAB)
    return (first[:, None, None] * second[:, :, None] * third).sum(0)


@cache
def proposal() -> Tensor:
    """Log-probabilities [V, DEPTH, V] that the drafter gives behind each anchor: sharper than the target and askew."""
    near = probabilities([[*PROMPT, t] for t in range(VOCAB)], {"temperature": 0.7})
    draw = torch.Generator().manual_seed(3)
    askew = torch.randn(VOCAB, DEPTH, VOCAB, generator=draw) * 0.5
    return (torch.stack([near, near @ near], 1).log().float() + askew).log_softmax(-1)


class Candidates:
    """Several likely tokens of each depth, as a drafter with no context gives them."""

    def __init__(self) -> None:
        self.taps: tuple[int, ...] = (0,)
        self.depth, self.cache = DEPTH, cast(Cache | None, None)

    def allocate(self, **sizes: int) -> None: ...
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None: ...
    def drop(self, slots: Slots) -> None: ...

    @property
    def stores(self) -> tuple[()]:
        return ()

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        return likeliest(proposal()[anchors], width, rescore)


def draws(name: str, how: Speculation, begin: int = 0) -> tuple[Tensor, float]:
    """Counts of the second and third token [V, V] over DRAWS seeds, and accepted drafts per text."""
    engine = ForkingEngine(small_target()[0], Candidates(), slots=DRAWS, context=8, how=how)
    asked = [Request(PROMPT, 4, SamplingParams(seed=begin + s, **SETTINGS[name])) for s in range(DRAWS)]
    texts: list[list[int]] = [[] for _ in asked]
    accepted = 0
    for result in engine.generate(asked):
        texts[result.index] += result.tokens
        accepted += result.accepted
    pairs = torch.tensor(texts)[:, 1:3]
    return torch.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB), accepted / DRAWS


def variation(counts: Tensor, exact: Tensor) -> float:
    return float((counts / counts.sum() - exact).abs().sum() / 2)


@pytest.mark.parametrize("aware", [True, False])
@pytest.mark.parametrize(("name", "builder"), SHAPES)
def test_text_sampled_with_trees_has_the_exact_distribution(name: str, aware: bool, builder: str) -> None:
    begin = 20_000 * (1 + 2 * list(BUILDERS).index(builder) + aware)  # the same seeds would give the same text
    counts, accepted = draws(name, Speculation(8, BUILDERS[builder], noise_aware=aware), begin)
    assert p_value(counts, joint(name)) > 1e-3
    assert accepted > 1.0  # of three tokens behind the first


def many(name: str, aware: bool) -> Tensor:
    return sum(
        (draws(name, Speculation(4, noise_aware=aware), 10**6 + DRAWS * i)[0] for i in range(4)), torch.zeros(())
    )


@pytest.mark.parametrize(("name", "aware"), list(zip(list(SETTINGS)[:2], (True, False), strict=True)))
def test_the_total_variation_of_many_draws_is_small(name: str, aware: bool) -> None:
    counts, exact = many(name, aware), joint(name)
    assert counts.sum() == 4 * DRAWS
    assert variation(counts, exact) < 0.06
    assert variation(counts.sum(0), exact.sum(0)) < 0.025 and variation(counts.sum(1), exact.sum(1)) < 0.025


# --- the same checks must fail on a planted fault -------------------------------------------------------


def ratio_rule(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
    """The best child is kept with probability min(1, p / q) and else the residual of p - q is drawn from, as if the
    child had been drawn from q: but it is a deterministic candidate."""
    probs = logits.float().softmax(-1)
    depth = tree.depth.clamp(max=DEPTH - 1)
    q = proposal()[tree.token[:, 0]].exp().gather(1, depth[..., None].expand_as(probs))
    below = tree.parent[:, None] == torch.arange(tree.nodes)[:, None]  # [R, node, child]
    best = tree.token.gather(1, below.int().argmax(-1))[..., None]
    accept = torch.rand(best.shape) < probs.gather(-1, best) / q.gather(-1, best)
    rest = (probs - q).clamp(min=0) + 1e-12
    redrawn = torch.multinomial(rest.flatten(0, 1), 1).view(best.shape)
    picks = torch.where(accept, best, redrawn)[..., 0]
    return torch.where(below.any(-1), picks, choose(logits, tree, positions, sampling))


def argmax_walk(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
    """Where a child is the argmax it is taken without a draw; only the token behind the path is sampled."""
    best = logits.argmax(-1)
    below = tree.parent[:, None] == torch.arange(tree.nodes)[:, None]
    agreed = (below & (tree.token[:, None] == best[..., None])).any(-1)
    return torch.where(agreed, best, choose(logits, tree, positions, sampling))


@pytest.mark.parametrize("fault", [ratio_rule, argmax_walk])
def test_control_biased_rules_are_seen(fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(step_module, "choose", fault)
    counts, accepted = draws("T 1", Speculation(8, noise_aware=False), begin=10_000)
    assert accepted > 1.0
    assert p_value(counts, joint("T 1")) < 1e-9
    assert variation(counts, joint("T 1")) > 0.1


def test_control_noise_by_node_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nodes that draw by their depth alone: each round repeats the noise of the last."""

    def by_depth(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
        return choose(logits, tree, tree.depth, sampling)

    monkeypatch.setattr(step_module, "choose", by_depth)
    counts, _ = draws("T 1", Speculation(8, noise_aware=False), begin=10_000)
    assert p_value(counts, joint("T 1")) < 1e-9
