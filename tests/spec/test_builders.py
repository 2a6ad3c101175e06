"""Builders against a listing of every prefix, the reference's heap and each other; what every tree promises."""

from __future__ import annotations

import dataclasses
import heapq
import math
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.models.dflash import DraftDist
from draftproof.spec import builders
from draftproof.spec.accept import walk
from draftproof.spec.builders import BEST_FIRST, BUILDERS, SIBLINGS, SPINE_FIRST, Builder, build, frontier, heap
from draftproof.spec.tree import NO_PARENT, ROOT, Tree, bucket, chain, visibility
from tests.spec.forest import forest, path_to

VOCAB = 6
TIED = [-0.25, -0.5, -0.75, -1.0, -2.0, -math.inf]  # sums are exact, so equal weights are really equal
Node = tuple[int, int, int, float]  # token, parent, depth, logw
Form = Callable[[Builder, Tensor, DraftDist, int, int], Tree]

FORMS = pytest.mark.parametrize("form", [heap, frontier])
KINDS = pytest.mark.parametrize("kind", BUILDERS.values(), ids=BUILDERS)
FEW = settings(deadline=None, max_examples=40, derandomize=True, database=None)


@dataclasses.dataclass(frozen=True)
class Table:
    """A conditional scorer: logp [R, D, V, k] by parent token, candidates in the order of the ids, not best first."""

    logp: Tensor

    def __call__(self, rows: Tensor, parents: Tensor, depth: int) -> Tensor:
        return self.logp[rows, depth, parents]


@dataclasses.dataclass(frozen=True)
class Case:
    anchor: Tensor
    dist: DraftDist
    budget: int
    levels: int

    def children(self, row: int, parent: int, depth: int) -> list[tuple[float, int]]:
        """(logp, token) of a node's candidates, best first."""
        logp = self.dist.logp[row, depth]
        if isinstance(self.dist.scorer, Table):
            logp = self.dist.scorer.logp[row, depth, parent]
        pairs = list(zip(logp.tolist(), self.dist.ids[row, depth].tolist(), strict=True))
        return sorted(pairs, key=lambda pair: -pair[0])


def case(logp: Tensor, seed: int, budget: int, levels: int | None = None, *, scored: bool = False) -> Case:
    """logp [R, D, k], or [R, D, VOCAB, k] by parent token; the ids of every row and depth are shuffled."""
    rows, depth, *_, width = logp.shape
    draw = torch.Generator().manual_seed(seed)
    ids = torch.rand(rows, depth, VOCAB, generator=draw).argsort(-1)[..., :width]
    anchor = torch.randint(VOCAB, (rows,), generator=draw)
    plain = logp[:, :, 0] if scored else logp.sort(-1, descending=True).values
    return Case(anchor, DraftDist(ids, plain, Table(logp) if scored else None), budget, levels or depth)


@st.composite
def cases(draw: st.DrawFn, *, ties: bool = True, scored: bool | None = None) -> Case:
    """A row has at least one candidate everywhere that is not -inf, as a softmax has."""
    rows, depth, width = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.integers(1, 4))
    by_parent = draw(st.booleans()) if scored is None else scored
    shape = (rows, depth, VOCAB, width) if by_parent else (rows, depth, width)
    make = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if ties:
        logp = torch.tensor(TIED)[torch.randint(len(TIED), shape, generator=make)]
        logp[..., 0] = logp[..., 0].clamp(min=-2.0)
    else:
        logp = (2 * torch.randn(shape, generator=make)).log_softmax(-1)
    budget = draw(st.sampled_from([1, 2, 3, 5, 9, 17, 200]))
    return case(logp, draw(st.integers(0, 99)), budget, draw(st.integers(1, depth)), scored=by_parent)


def nodes(tree: Tree, row: int) -> list[Node]:
    columns = (tree.token, tree.parent, tree.depth, tree.logw)
    return list(zip(*(column[row, : int(tree.n[row])].tolist() for column in columns), strict=True))


def made(form: Form, kind: Builder, case: Case, budget: int | None = None) -> Tree:
    return form(kind, case.anchor, case.dist, budget or case.budget, case.levels)


# --- the order --------------------------------------------------------------------------------------


def listed(kind: Builder, case: Case, row: int) -> list[Node]:
    """Every prefix there is, sorted by the words of the documented order and cut at the budget."""
    root = int(case.anchor[row])
    every: list[tuple[Any, Any, int, int, float]] = []  # key, parent's key, token, depth, weight

    def extend(key: Any, token: int, depth: int, weight: float, spine: bool) -> None:
        if depth == case.levels or not (spine or kind.deep):
            return
        for rank, (logp, child) in enumerate(case.children(row, token, depth)):
            if logp == -math.inf:
                continue
            best = spine and rank == 0
            heavy = -math.inf if best and kind.spine else -(weight + logp)
            own = (heavy, depth + 1, key, rank)
            every.append((own, key, child, depth + 1, weight + logp))
            extend(own, child, depth + 1, weight + logp, best)

    extend((), root, 0, 0.0, True)
    every = sorted(every, key=lambda e: e[0])[: case.budget]
    place = {(): 0} | {e[0]: i for i, e in enumerate(every, 1)}
    rounded = torch.tensor([e[4] for e in every]).tolist()
    rest = [(e[2], place[e[1]], e[3], w) for e, w in zip(every, rounded, strict=True)]
    return [(root, ROOT, 0, 0.0), *rest]


def check_order(form: Form, kind: Builder, case: Case) -> None:
    tree = made(form, kind, case)
    for row in range(len(case.anchor)):
        assert nodes(tree, row) == listed(kind, case, row)
        assert (tree.parent[row, int(tree.n[row]) :] == NO_PARENT).all()


@FORMS
@KINDS
@FEW
@given(case=cases())
def test_a_tree_is_the_head_of_all_prefixes_in_the_documented_order(form: Form, kind: Builder, case: Case) -> None:
    check_order(form, kind, case)


FLAT = case(torch.full((1, 3, 3), -1.0), 0, budget=20)  # nothing but ties
LADDER = case(torch.tensor([[[-0.25, -0.5, -0.75]] * 3]), 0, budget=12)


@pytest.mark.parametrize("fault", ["depth", "deeper first", "later parent first"])
def test_control_order_of_the_heap(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for tied in (FLAT, LADDER):
        check_order(heap, BEST_FIRST, tied)
    if fault == "depth":

        def add(self: builders.Grown, node: int, *args: Any, right: Any = builders.Grown.add) -> int:
            place: int = right(self, node, *args)
            self.depth[place] -= place > 3
            return place

        monkeypatch.setattr(builders.Grown, "add", add)
    else:
        at = ["deeper first", "later parent first"].index(fault) + 1

        def push(waiting: list[Any], entry: tuple[float, ...]) -> None:
            heapq.heappush(waiting, ((*entry[:at], -entry[at], *entry[at + 1 :]), entry))

        monkeypatch.setattr(builders, "heappush", push)
        monkeypatch.setattr(builders, "heappop", lambda waiting: heapq.heappop(waiting)[1])
    with pytest.raises(AssertionError):
        for tied in (FLAT, LADDER):
            check_order(heap, BEST_FIRST, tied)


def turned(level: builders.Level) -> builders.Level:
    """The level's nodes worst first, parents right."""
    return builders.Level(*(t.flip(1) for t in (level.token, level.weight, level.parent, level.spine)))


@pytest.mark.parametrize("fault", ["a level one node too narrow", "ties of a level turned"])
def test_control_order_of_the_frontier(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: Any, right: Any = builders._next_level) -> builders.Level:
        return turned(right(*args)) if fault == "ties of a level turned" else right(*args[:-1], args[-1] - 1)

    wide = case(torch.tensor([[[-0.25, -0.5, -0.75, -1.0]]]), 0, budget=4)
    for tied in (FLAT, wide):
        check_order(frontier, BEST_FIRST, tied)
    monkeypatch.setattr(builders, "_next_level", wrong)
    with pytest.raises(AssertionError):
        for tied in (FLAT, wide):
            check_order(frontier, BEST_FIRST, tied)


def reference(case: Case, row: int) -> list[Node]:
    """ddtree.md 1.2: entries (-w, ranks, parent, depth, rank, w), next sibling and first child pushed at every pop."""
    lp, ids = case.dist.logp[row].tolist(), case.dist.ids[row].tolist()
    out: list[Node] = [(int(case.anchor[row]), ROOT, 0, 0.0)]
    waiting: list[Any] = [(-lp[0][0], (0,), 0, 1, 0, lp[0][0])]
    while waiting and len(out) <= case.budget:
        _, ranks, parent, depth, rank, w = heapq.heappop(waiting)
        out.append((ids[depth - 1][rank], parent, depth, w))
        if rank + 1 < len(lp[depth - 1]):
            beside = w - lp[depth - 1][rank] + lp[depth - 1][rank + 1]
            heapq.heappush(waiting, (-beside, (*ranks[:-1], rank + 1), parent, depth, rank + 1, beside))
        if depth < case.levels:
            below = w + lp[depth][0]
            heapq.heappush(waiting, (-below, (*ranks, 0), len(out) - 1, depth + 1, 0, below))
    return out


@FORMS
@FEW
@given(case=cases(ties=False, scored=False))
def test_without_ties_best_first_is_the_reference_algorithm(form: Form, case: Case) -> None:
    tree = made(form, BEST_FIRST, case)
    for row in range(len(case.anchor)):
        own, theirs = nodes(tree, row), reference(case, row)
        assert [n[:3] for n in own] == [n[:3] for n in theirs]
        assert [n[3] for n in own] == pytest.approx([n[3] for n in theirs])


# --- two forms --------------------------------------------------------------------------------------


def check_forms(case: Case) -> None:
    for kind in BUILDERS.values():
        one, other = made(heap, kind, case), made(frontier, kind, case)
        assert torch.equal(one.n, other.n)
        for row in range(len(case.anchor)):
            assert nodes(one, row) == nodes(other, row)


@FEW
@given(cases())
def test_heap_and_frontier_agree_node_for_node(case: Case) -> None:
    check_forms(case)


@pytest.mark.parametrize("scored", [False, True])
def test_heap_and_frontier_agree_on_large_trees(scored: bool) -> None:
    shape = (3, 7, VOCAB, VOCAB) if scored else (3, 7, VOCAB)
    logp = torch.randn(shape, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    check_forms(case(logp, 0, budget=256, scored=scored))


def test_control_a_frontier_that_scores_children_by_the_anchor(monkeypatch: pytest.MonkeyPatch) -> None:
    logp = torch.randn(2, 3, VOCAB, 4, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    some = case(logp, 0, budget=9, scored=True)
    right = builders._children
    monkeypatch.setattr(builders, "_children", lambda dist, parents, depth: right(dist, 0 * parents, depth))
    with pytest.raises(AssertionError):
        check_forms(some)


@FEW
@given(cases())
def test_build_on_a_cpu_is_the_heap_no_deeper_than_the_drafts(case: Case) -> None:
    whole = dataclasses.replace(case, levels=case.dist.ids.shape[1])
    for levels, same in ((case.levels, case), (None, whole), (99, whole)):
        tree = build(SPINE_FIRST, case.anchor, case.dist, case.budget, levels)
        assert [nodes(tree, 0)] == [nodes(made(heap, SPINE_FIRST, same), 0)]


# --- what every tree is -----------------------------------------------------------------------------


def check_valid(tree: Tree, case: Case) -> None:
    for row in range(len(case.anchor)):
        token, parent, depth, logw = zip(*nodes(tree, row), strict=True)
        assert (parent[0], depth[0], logw[0]) == (ROOT, 0, 0.0)
        ranks: dict[int, list[int]] = {}
        for node in range(1, len(token)):
            above = parent[node]
            assert 0 <= above < node, "a child before its parent"
            assert depth[node] == depth[above] + 1 <= min(case.levels, tree.levels), "wrong depth"
            offered = [t for _, t in case.children(row, token[above], depth[above])]
            ranks.setdefault(above, []).append(offered.index(token[node]))
        assert all(r == list(range(len(r))) for r in ranks.values()), "siblings out of rank order, or the same twice"
        assert len(token) <= case.budget + 1 and math.isfinite(sum(logw))


@FORMS
@KINDS
@FEW
@given(case=cases())
def test_every_tree_is_valid_and_nested_in_the_larger_ones(form: Form, kind: Builder, case: Case) -> None:
    check_valid(made(form, kind, case), case)
    large = made(form, kind, case, budget=case.budget + 7)
    cut, own = large.cut(case.budget + 1), made(form, kind, case)
    assert torch.equal(cut.n, own.n)
    for row in range(len(case.anchor)):
        assert nodes(cut, row) == nodes(own, row)


@pytest.mark.parametrize("fault", ["parent", "depth", "token"])
def test_control_invalid_trees(fault: str) -> None:
    tree = made(heap, BEST_FIRST, LADDER)
    check_valid(tree, LADDER)
    wrong = getattr(tree, fault).clone()
    wrong[0, 5] = {"parent": 6, "depth": wrong[0, 5] + 1, "token": wrong[0, 4]}[fault]
    with pytest.raises(AssertionError):
        check_valid(dataclasses.replace(tree, **{fault: wrong}), LADDER)


def greedy_path(case: Case, row: int) -> list[int]:
    path = [int(case.anchor[row])]
    for depth in range(case.levels):
        path.append(case.children(row, path[-1], depth)[0][1])
    return path


def check_spine(kind: Builder, form: Form, case: Case) -> None:
    tree = made(form, kind, case)
    length = min(case.levels, case.budget)
    for row in range(len(case.anchor)):
        assert tree.token[row, : length + 1].tolist() == greedy_path(case, row)[: length + 1]
        assert tree.parent[row, : length + 1].tolist() == list(range(-1, length))
        if not kind.deep:
            assert all(parent < length for _, parent, *_ in nodes(tree, row)), "a sibling has children"


@FORMS
@FEW
@given(case=cases())
def test_the_spine_comes_first_and_siblings_have_no_children(form: Form, case: Case) -> None:
    check_spine(SPINE_FIRST, form, case)
    check_spine(SIBLINGS, form, case)


def test_control_best_first_does_not_begin_with_the_spine() -> None:
    check_spine(SPINE_FIRST, heap, FLAT)
    with pytest.raises(AssertionError):
        check_spine(BEST_FIRST, heap, FLAT)


def test_control_siblings_with_children() -> None:
    """The same tree passes as spine-first, which may have them."""
    bushy = case(torch.tensor([[[-0.25, -0.5], [-0.25, -4.0], [-0.25, -4.0]]]), 0, budget=6)
    check_spine(SPINE_FIRST, heap, bushy)
    tree = made(heap, SPINE_FIRST, bushy)
    with pytest.raises(AssertionError, match="children"):
        check_spine(SIBLINGS, lambda *_: tree, bushy)


# --- what a tree is worth ---------------------------------------------------------------------------


def competitor(case: Case, row: int, size: int, draw: random.Random) -> float:
    """Expected accepted drafts of a random valid tree of `size` nodes."""
    worth = 0.0
    open_: list[tuple[int, int, int, float]] = [(int(case.anchor[row]), 0, 0, 0.0)]  # token, depth, rank, weight
    for _ in range(size):
        parent, depth, rank, above = open_.pop(draw.randrange(len(open_)))
        offered = case.children(row, parent, depth)
        logp, token = offered[rank]
        worth += math.exp(above + logp)
        if rank + 1 < len(offered):
            open_.append((parent, depth, rank + 1, above))
        if depth + 1 < case.levels:
            open_.append((token, depth + 1, 0, above + logp))
    return worth


def check_worth(kind: Builder, case: Case) -> None:
    tree = made(heap, kind, case)
    draw = random.Random(0)
    for row in range(len(case.anchor)):
        size = int(tree.n[row]) - 1
        worth = float(tree.logw[row, 1 : size + 1].double().exp().sum())
        assert worth >= max(competitor(case, row, size, draw) for _ in range(30)) - 1e-6


@FEW
@given(cases(ties=False))
def test_no_tree_of_its_size_expects_more_than_best_first(case: Case) -> None:
    check_worth(BEST_FIRST, case)


def test_control_the_spine_of_flat_drafts_is_not_worth_most() -> None:
    flat = case(torch.full((1, 4, 6), 1 / 6).log(), 0, budget=4)
    check_worth(BEST_FIRST, flat)
    with pytest.raises(AssertionError):
        check_worth(SPINE_FIRST, flat)


STOPS, PLENTY = torch.empty(0, dtype=torch.long), 99


def targets(tree: Tree, seed: int) -> Tensor:
    """The target's token behind every node: a function of the text so far, whatever the tree around it."""
    picks = torch.zeros_like(tree.token)
    for row in range(tree.token.shape[0]):
        for node in range(int(tree.n[row])):
            text = tree.token[row, path_to(tree, row, node)].tolist()
            picks[row, node] = random.Random(repr((seed, row, text))).randrange(VOCAB)
    return picks


def accepted(tree: Tree, picks: Tensor) -> tuple[list[list[int]], list[int]]:
    """Emitted tokens and accepted drafts of every row."""
    taken = walk(tree, picks, STOPS, torch.full((tree.token.shape[0],), PLENTY))
    emitted = [row[:count] for row, count in zip(taken.tokens.tolist(), taken.counts.tolist(), strict=True)]
    return emitted, taken.drafts.tolist()


def check_no_less_than_the_chain(kind: Builder, case: Case, target: Callable[[Tree], Tensor]) -> None:
    length = min(case.budget, case.levels)
    paths = torch.tensor([greedy_path(case, row)[1 : length + 1] for row in range(len(case.anchor))])
    line, tree = chain(case.anchor, paths), made(heap, kind, case)
    (text, drafts), (more_text, more) = accepted(line, target(line)), accepted(tree, target(tree))
    for row in range(len(case.anchor)):
        assert more[row] >= drafts[row]
        assert more_text[row][: len(text[row])] == text[row]


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(cases(), st.integers(0, 999))
def test_spine_first_and_siblings_accept_at_least_the_chain(case: Case, seed: int) -> None:
    for kind in (SPINE_FIRST, SIBLINGS):
        check_no_less_than_the_chain(kind, case, lambda tree: targets(tree, seed))


def test_control_best_first_may_accept_less_than_the_chain() -> None:
    """Flat drafts: all nodes go to depth 1, and the target follows the chain to its end."""
    flat = case(torch.full((1, 4, 4), 0.25).log(), 0, budget=4)
    line = greedy_path(flat, 0)

    def follows(tree: Tree) -> Tensor:
        return torch.tensor([[*line[1:], 0]])[0][tree.depth]

    check_no_less_than_the_chain(SPINE_FIRST, flat, follows)
    with pytest.raises(AssertionError):
        check_no_less_than_the_chain(BEST_FIRST, flat, follows)


# --- what changes nothing ---------------------------------------------------------------------------


def check_padding(tree: Tree, wide: Tree, picks: Tensor) -> None:
    size = tree.nodes
    seen = visibility(wide)
    assert torch.equal(seen[:, :size, :size], visibility(tree))
    assert not seen[:, :size, size:].any()
    noise = torch.zeros(len(picks), wide.nodes - size, dtype=torch.long)
    assert accepted(tree, picks) == accepted(wide, torch.cat([picks, noise], 1))


@KINDS
@FEW
@given(case=cases(), seed=st.integers(0, 99))
def test_padding_to_a_bucket_changes_nothing(kind: Builder, case: Case, seed: int) -> None:
    tree = made(heap, kind, case)
    wide = tree.padded(bucket(tree.nodes))
    assert wide.nodes == bucket(tree.nodes) and torch.equal(wide.n, tree.n) and wide.levels == tree.levels
    check_padding(tree, wide, targets(tree, seed))


def test_control_padding_that_hangs_on_the_root() -> None:
    """The target wants token 0, which padding carries."""
    tree = forest([[-1, 0]], [[1, 2]])
    wide = tree.padded(4)
    check_padding(tree, wide, torch.zeros(1, 2, dtype=torch.long))
    with pytest.raises(AssertionError):
        hung = dataclasses.replace(wide, parent=wide.parent.clamp(min=ROOT).where(wide.parent != NO_PARENT, 0))
        check_padding(tree, hung, torch.zeros(1, 2, dtype=torch.long))


def shuffled(tree: Tree, seed: int) -> tuple[Tree, list[int]]:
    """A row's tree in another order that keeps parents before children; and the old place of every new node."""
    draw, order = random.Random(seed), [0]
    while len(order) < tree.nodes:
        order.append(draw.choice([i for i in range(tree.nodes) if i not in order and int(tree.parent[0, i]) in order]))
    place = {old: new for new, old in enumerate(order)}
    parents = [place.get(int(tree.parent[0, old]), ROOT) for old in order]
    return forest([parents], [tree.token[0, order].tolist()]), order


@FEW
@given(cases(), st.integers(0, 99), st.integers(0, 9))
def test_the_order_of_siblings_changes_nothing(case: Case, seed: int, order: int) -> None:
    tree = made(heap, BEST_FIRST, dataclasses.replace(case, anchor=case.anchor[:1], budget=min(case.budget, 17)))
    tree = tree.cut(int(tree.n[0]))
    other, _ = shuffled(tree, order)
    assert accepted(tree, targets(tree, seed)) == accepted(other, targets(other, seed))


def test_control_a_shuffle_that_forgets_the_picks() -> None:
    tree = forest([[-1, 0, 0, 1, 2]], [[0, 1, 2, 3, 4]])
    picks = torch.tensor([[1, 3, 4, 5, 5]])
    differs = 0
    for seed in range(20):
        other, order = shuffled(tree, seed)
        assert accepted(other, picks[:, order]) == accepted(tree, picks)
        differs += accepted(other, picks) != accepted(tree, picks)
    assert differs
