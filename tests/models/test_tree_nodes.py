"""Every node of a random tree, padded and beside others of other sizes, is its root -> node path run alone.

Wholly in float64. The trees are deeper than the sliding window and the rings have wrapped; earlier rounds have left
their compacted paths in the caches.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.models.cache import Cache, Slots
from draftproof.models.plan import Plan
from draftproof.models.target import FINAL, Tap, Target, TargetOut, causal_plan
from draftproof.spec.accept import walk
from draftproof.spec.tree import ROOT, Tree, visibility
from tests import tiny
from tests.spec.forest import forest, path_to

KINDS = ("llama", "gemma3", "qwen3_5", "qwen3_next")
LENGTHS, SIZES, ROWS, CHUNK = (3, 70, 9), (17, 8, 1), 24, 72
WINDOW = 8  # of gemma3's sliding layers
TAPS: tuple[Tap, ...] = (0, 2, 5, FINAL)
LIMIT = 1e-9


def random_tree(seed: int, sizes: tuple[int, ...] = SIZES) -> Tree:
    """Deep and bushy; siblings carry different tokens."""
    draw = Random(seed)
    parents = [[ROOT, *(draw.randrange(max(0, i - 2), i) for i in range(1, size))] for size in sizes]
    return forest(parents, [draw.sample(range(4, tiny.VOCAB), size) for size in sizes]).padded(ROWS)


def alone(owner: Target, tokens: list[int]) -> tuple[Tensor, Tensor]:
    """Logits and tapped features of the last token of a fresh prefill."""
    cache = owner.new_cache(slots=1, capacity=len(tokens), chunk=len(tokens))
    plan = causal_plan(cache, slice(0, 1), len(tokens), len(tokens))
    out = owner.forward(torch.tensor([tokens]), plan, taps=TAPS, rows=1)
    assert out.features is not None
    return out.logits[0, -1], out.features[0, -1]


class Requests:
    """Several texts on one cache."""

    def __init__(self, kind: str) -> None:
        self.owner = tiny.target(kind)
        self.cache = self.owner.new_cache(slots=len(LENGTHS), capacity=120, chunk=CHUNK)
        draw = Random(1)
        self.texts = [[draw.randrange(4, tiny.VOCAB) for _ in range(length)] for length in LENGTHS]
        for slot, text in enumerate(self.texts):
            where = slice(slot, slot + 1)
            self.owner.forward(torch.tensor([text]), causal_plan(self.cache, where, len(text), CHUNK), rows=1)
            self.cache.commit(where, torch.tensor([len(text)]))

    def verify(self, tree: Tree) -> TargetOut:
        plan = self.cache.plan(slice(0, len(LENGTHS)), tree.depth, visibility(tree), max(map(len, self.texts)) + ROWS)
        return self.owner.forward(tree.token, plan, taps=TAPS)

    def commit(self, tree: Tree, paths: list[list[int]]) -> None:
        padded = torch.tensor([p + p[-1:] * (ROWS - len(p)) for p in paths])
        self.cache.commit(slice(0, len(LENGTHS)), torch.tensor([len(p) for p in paths]), padded)
        for text, path, tokens in zip(self.texts, paths, tree.token.tolist(), strict=True):
            text += [tokens[node] for node in path]

    def error(self, tree: Tree, out: TargetOut) -> float:
        """The greatest distance of any node's logits or features from those of its path alone."""
        assert out.features is not None
        worst = 0.0
        for row, text in enumerate(self.texts):
            for node in range(int(tree.n[row])):
                logits, features = alone(self.owner, text + tree.token[row, path_to(tree, row, node)].tolist())
                worst = max(worst, float((out.logits[row, node] - logits).abs().max()))
                worst = max(worst, float((out.features[row, node] - features).abs().max()))
        return worst


def error_of(kind: str, rounds: int = 1) -> float:
    """Rounds of verifying a tree and committing a path each; the last round's error."""
    requests, draw, worst = Requests(kind), Random(2), 0.0
    for number in range(rounds):
        tree = random_tree(number)
        out = requests.verify(tree)
        if number == rounds - 1:
            worst = requests.error(tree, out)
        requests.commit(tree, [path_to(tree, row, draw.randrange(size // 2, size)) for row, size in enumerate(SIZES)])
    return worst


@pytest.mark.parametrize("rounds", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_every_node_equals_its_path_alone(kind: str, rounds: int) -> None:
    assert error_of(kind, rounds) < LIMIT


def test_the_trees_cross_the_window_and_have_siblings() -> None:
    for number in (0, 3):
        tree = random_tree(number)
        assert int(tree.depth.max()) >= WINDOW  # from the deepest node the root is out of sight
        parents = tree.parent[0, 1 : SIZES[0]].tolist()
        assert len(set(parents)) < len(parents) and tree.nodes > max(SIZES)


def test_the_order_of_siblings_changes_nothing() -> None:
    """Nodes renumbered, parents still first: the same logits at the same paths, the same tokens walked."""
    one, draw = random_tree(5), Random(6)
    orders = []
    for row, size in enumerate(SIZES):
        order: list[int] = [0]
        while len(order) < size:
            order.append(draw.choice([i for i in range(size) if i not in order and int(one.parent[row, i]) in order]))
        orders.append(order)
    parents = [[ROOT, *(order.index(int(one.parent[row, i])) for i in order[1:])] for row, order in enumerate(orders)]
    tokens = [one.token[row, order].tolist() for row, order in enumerate(orders)]
    two = forest(parents, tokens).padded(ROWS)
    assert orders[0] != list(range(SIZES[0]))
    for kind in ("gemma3", "qwen3_5"):
        first, second = Requests(kind).verify(one).logits, Requests(kind).verify(two).logits
        for row, order in enumerate(orders):
            torch.testing.assert_close(second[row, : len(order)], first[row, order], rtol=0, atol=LIMIT)
    # A target that always follows some child, so that long paths are walked in both numberings.
    picks = torch.randint(4, tiny.VOCAB, (len(SIZES), ROWS), generator=torch.Generator().manual_seed(1))
    for row in range(len(SIZES)):
        for node in range(1, SIZES[row]):
            picks[row, one.parent[row, node]] = one.token[row, node]
    moved = picks.clone()
    for row, order in enumerate(orders):
        moved[row, : len(order)] = picks[row, order]
    walks = [walk(t, p, torch.tensor([2]), torch.tensor([99, 99, 99])) for t, p in ((one, picks), (two, moved))]
    assert torch.equal(walks[0].tokens, walks[1].tokens) and torch.equal(walks[0].counts, walks[1].counts)
    assert int(walks[0].drafts[0]) > 3


# --- the comparison must fail on a planted fault --------------------------------------------------------


def flat_positions(depth: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    return torch.arange(depth.shape[1]).expand_as(depth), visible, False


def taken_for_causal(depth: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    return depth, torch.ones_like(visible).tril(), True


def siblings_seen(depth: Tensor, visible: Tensor) -> tuple[Tensor, Tensor, bool]:
    """A node also sees earlier nodes with the same ancestors."""
    above = visible & ~torch.eye(depth.shape[1], dtype=torch.bool)
    same = (above[:, :, None] == above[:, None]).all(-1) & above.any(-1)[:, :, None]
    return depth, visible | same.tril(), False


Fault = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, bool]]


@pytest.mark.parametrize("fault", [flat_positions, taken_for_causal, siblings_seen])
@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_control_faulty_plans(kind: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.plan

    def plan(self: Cache, slots: Slots, depth: Tensor, visible: Tensor, reach: int, *, causal: bool = False) -> Plan:
        if depth.shape[1] == ROWS and len(depth) == len(SIZES):
            depth, visible, causal = fault(depth, visible)
        return honest(self, slots, depth, visible, reach, causal=causal)

    monkeypatch.setattr(Cache, "plan", plan)
    assert error_of(kind) > 1e-3


def test_control_a_window_by_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Any = Plan._build_mask

    def build(self: Plan, *sizes: Any) -> Tensor:
        positions, self.positions = self.positions, self._flat
        mask: Tensor = honest(self, *sizes)
        self.positions = positions
        return mask

    monkeypatch.setattr(Plan, "_build_mask", build)
    assert error_of("gemma3") > 1e-3
    assert error_of("llama") < LIMIT  # it has no window


@pytest.mark.parametrize("kind", KINDS[:3])
def test_control_a_commit_that_ignores_the_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.commit
    monkeypatch.setattr(Cache, "commit", lambda self, slots, counts, path=None: honest(self, slots, counts))
    assert error_of(kind, 2) > 1e-3
