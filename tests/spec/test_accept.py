"""The acceptance walk against a plain Python one, and everything that can cut it short."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.spec import accept
from draftproof.spec.accept import Accepted, walk
from draftproof.spec.tree import Tree, chain
from tests.spec.forest import forest, forests

VOCAB = 8
Case = tuple[Tree, Tensor, list[int], Tensor]


def plain_walk(tree: Tree, picks: Tensor, row: int, stops: list[int], budget: int) -> tuple[list[int], list[int], int]:
    """(path, tokens, accepted drafts before truncation) of one row, as the words of the rule say it."""
    node, path, tokens = 0, [0], []
    while True:
        token = int(picks[row, node])
        tokens.append(token)
        children = [i for i in range(tree.nodes) if int(tree.parent[row, i]) == node]
        match = [i for i in children if int(tree.token[row, i]) == token]
        if not match:
            break
        node = match[0]
        path.append(node)
    stop = next((i + 1 for i, token in enumerate(tokens) if token in stops), len(tokens))
    count = min(stop, budget)
    return path[:count], tokens[:count], len(path) - 1


def check(case: Case, rule: Callable[[Tree, Tensor, Tensor, Tensor], Accepted] = walk) -> None:
    tree, picks, stops, budget = case
    taken = rule(tree, picks, torch.tensor(stops, dtype=torch.long), budget)
    for row in range(picks.shape[0]):
        path, tokens, drafts = plain_walk(tree, picks, row, stops, int(budget[row]))
        count = int(taken.counts[row])
        assert count == len(tokens)
        assert taken.tokens[row, :count].tolist() == tokens
        assert taken.path[row, :count].tolist() == path
        assert int(taken.drafts[row]) == drafts


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Trees with picks that follow a child two times out of three."""
    tree = draw(forests(max_nodes=VOCAB))
    rows, nodes = tree.token.shape
    picks = torch.zeros(rows, nodes, dtype=torch.long)
    for row in range(rows):
        for node in range(nodes):
            children = [
                t for t, p in zip(tree.token[row].tolist(), tree.parent[row].tolist(), strict=True) if p == node
            ]
            wanted = draw(st.integers(0, 3 * VOCAB - 1))
            picks[row, node] = children[wanted % len(children)] if children and wanted >= VOCAB else wanted % VOCAB
    stops = draw(st.lists(st.integers(0, VOCAB - 1), max_size=2, unique=True))
    budget = torch.tensor([draw(st.integers(0, nodes + 1)) for _ in range(rows)])
    return tree, picks, stops, budget


@settings(deadline=None, max_examples=250, derandomize=True, database=None)
@given(cases())
def test_walk_equals_the_plain_one(case: Case) -> None:
    check(case)


def line(ids: list[int], picks: list[int], stops: list[int], budget: int) -> Case:
    tree = chain(torch.tensor([7]), torch.tensor([ids]), torch.zeros(1, len(ids)))
    return tree, torch.tensor([picks]), stops, torch.tensor([budget])


def emitted(case: Case) -> list[int]:
    tree, picks, stops, budget = case
    taken = walk(tree, picks, torch.tensor(stops, dtype=torch.long), budget)
    check(case)
    return taken.tokens[0, : int(taken.counts[0])].tolist()


@pytest.mark.parametrize(
    ("stop", "tokens"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 4]), (5, [1, 2, 3, 4])],
    ids=["first token", "inside the path", "last draft", "the bonus", "absent"],
)
def test_the_text_ends_with_a_stop_token(stop: int, tokens: list[int]) -> None:
    assert emitted(line([1, 2, 3], [1, 2, 3, 4], [stop], 99)) == tokens


def test_a_stop_token_that_the_target_did_not_choose_ends_nothing() -> None:
    assert emitted(line([1, 6, 3], [1, 2, 3, 4], [6], 99)) == [1, 2]


@pytest.mark.parametrize("budget", [0, 1, 2, 4, 5])
def test_budget(budget: int) -> None:
    """0 is an idle slot; block size 4 emits at most 4; one more changes nothing."""
    assert emitted(line([1, 2, 3], [1, 2, 3, 4], [], budget)) == [1, 2, 3, 4][:budget]


def test_drafts_count_what_was_accepted_before_truncation() -> None:
    tree, picks, stops, budget = line([1, 2, 3], [1, 2, 3, 4], [1], 1)
    taken = walk(tree, picks, torch.tensor(stops), budget)
    assert taken.counts.tolist() == [1] and taken.drafts.tolist() == [3]


def test_the_mask_id_is_a_token_like_any_other() -> None:
    """A target may emit the drafter's mask id; nothing in the walk treats it apart."""
    mask = 3
    assert emitted(line([mask, mask], [mask, mask, mask], [], 99)) == [mask] * 3


def test_an_idle_slot_beside_a_running_one() -> None:
    tree = chain(torch.tensor([7, 7]), torch.tensor([[1], [1]]), torch.zeros(2, 1))
    check((tree, torch.tensor([[1, 2], [1, 2]]), [], torch.tensor([0, 9])))


BRANCHING = forest([[-1, 0, 0, 1, 2]], [[7, 1, 2, 5, 5]])
DEEP = (BRANCHING, torch.tensor([[2, 0, 5, 0, 4]]), [], torch.tensor([9]))


def test_a_later_sibling_is_taken() -> None:
    assert emitted(DEEP) == [2, 5, 4]


def argmax_walk(tree: Tree, picks: Tensor, stops: Tensor, budget: Tensor) -> Accepted:
    """Fault: follows a matching token whoever its parent is."""
    return walk(dataclasses.replace(tree, parent=torch.arange(-1, tree.nodes - 1)[None]), picks, stops, budget)


def test_control_parents_ignored() -> None:
    with pytest.raises(AssertionError):
        check(DEEP, argmax_walk)


@pytest.mark.parametrize("fault", ["stop excluded", "no truncation"])
def test_control_truncation(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    right = accept._truncate
    faults = {
        "stop excluded": lambda tokens, counts, stops, budget: right(tokens, counts, stops, budget) - 1,
        "no truncation": lambda tokens, counts, stops, budget: counts,
    }
    monkeypatch.setattr(accept, "_truncate", faults[fault])
    with pytest.raises(AssertionError):
        check(line([1, 2, 3], [1, 2, 3, 4], [2], 99))
