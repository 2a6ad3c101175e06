"""Who sees whom: pointer doubling against a walk to the root, node by node."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings

from draftproof.spec import tree as trees
from draftproof.spec.accept import walk
from draftproof.spec.tree import NO_PARENT, Tree, chain, visibility
from tests.spec.forest import forest, forests, path_to


def check_ancestors(tree: Tree) -> None:
    seen = visibility(tree)
    for row in range(tree.token.shape[0]):
        for node in range(tree.nodes):
            expected = path_to(tree, row, node) or [node]
            assert seen[row, node].nonzero()[:, 0].tolist() == expected


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(forests(max_nodes=12))
def test_a_node_sees_itself_and_its_ancestors(tree: Tree) -> None:
    check_ancestors(tree)


def test_control_doubling_that_stops_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """One doubling fewer loses the ancestors of deep nodes."""
    deep = forest([[-1, 0, 1, 2, 3, 4, 5, 6, 7, 8]], [list(range(10))])
    check_ancestors(deep)
    monkeypatch.setattr(trees, "max", lambda *_: 2, raising=False)
    with pytest.raises(AssertionError):
        check_ancestors(deep)


@pytest.mark.parametrize("drafts", [0, 1, 2, 3, 7, 15])
def test_a_chain_takes_the_short_cut_and_the_general_path_alike(drafts: int) -> None:
    ids = torch.arange(2 * drafts).view(2, drafts)
    line = chain(torch.tensor([5, 6]), ids, -torch.ones(2, drafts))
    assert torch.equal(visibility(line), visibility(dataclasses.replace(line, chain=False)))
    check_ancestors(line)


def test_control_the_short_cut_is_wrong_for_a_branching_tree() -> None:
    branching = forest([[-1, 0, 0]], [[1, 2, 3]])
    with pytest.raises(AssertionError):
        check_ancestors(dataclasses.replace(branching, chain=True))


def test_chain_fields() -> None:
    line = chain(torch.tensor([5]), torch.tensor([[7, 8]]), torch.tensor([[-1.0, -2.0]]))
    assert line.token.tolist() == [[5, 7, 8]] and line.parent.tolist() == [[-1, 0, 1]]
    assert line.depth.tolist() == [[0, 1, 2]] and line.logw.tolist() == [[0, -1, -3]]
    assert line.n.tolist() == [3] and line.chain
    alone = chain(torch.tensor([5]))
    assert alone.token.tolist() == [[5]] and alone.parent.tolist() == [[-1]] and alone.nodes == 1


def padded() -> Tree:
    """A root and a child, then two padding nodes whose token, 0, is what the target will want."""
    return forest([[-1, 0]], [[1, 2]], nodes=4)


def check_padding(tree: Tree) -> None:
    others = visibility(tree)[0, :2, 2:]
    assert not others.any(), "padding is seen"
    taken = walk(tree, torch.zeros(1, 4, dtype=torch.long), torch.empty(0, dtype=torch.long), torch.tensor([9]))
    assert taken.counts.tolist() == [1] and taken.drafts.tolist() == [0], "padding was walked to"


def test_padding_is_seen_by_nobody_and_never_walked_to() -> None:
    check_padding(padded())


def test_control_padding_with_a_parent() -> None:
    tree = padded()
    parent = torch.where(tree.parent == NO_PARENT, 0, tree.parent)
    with pytest.raises(AssertionError, match="walked"):
        check_padding(dataclasses.replace(tree, parent=parent))
