"""Trees for tests: built from parent lists, drawn by hypothesis, and walked in plain Python."""

from __future__ import annotations

import math

import torch
from hypothesis import strategies as st

from draftproof.spec.expected import Nodes
from draftproof.spec.tree import NO_PARENT, ROOT, Tree


def forest(parents: list[list[int]], tokens: list[list[int]], *, nodes: int | None = None) -> Tree:
    """One tree a row from its parent list; shorter rows are padded to `nodes` with token 0."""
    nodes = nodes or max(map(len, parents))
    depths = [[0] * nodes for _ in parents]
    for row, line in enumerate(parents):
        for i, parent in enumerate(line):
            depths[row][i] = 0 if parent == ROOT else depths[row][parent] + 1
    return Tree(
        token=torch.tensor([t[: len(p)] + [0] * (nodes - len(p)) for p, t in zip(parents, tokens, strict=True)]),
        parent=torch.tensor([p + [NO_PARENT] * (nodes - len(p)) for p in parents]),
        depth=torch.tensor(depths),
        logw=torch.zeros(len(parents), nodes),
        n=torch.tensor([len(p) for p in parents]),
    )


@st.composite
def parent_lists(draw: st.DrawFn, min_nodes: int = 1, max_nodes: int = 8) -> list[int]:
    count = draw(st.integers(min_nodes, max_nodes))
    return [ROOT] + [draw(st.integers(0, i - 1)) for i in range(1, count)]


@st.composite
def forests(draw: st.DrawFn, rows: int = 3, max_nodes: int = 8) -> Tree:
    """Random trees of different sizes; siblings carry different tokens, all below `max_nodes`."""
    parents = draw(st.lists(parent_lists(max_nodes=max_nodes), min_size=1, max_size=rows))
    tokens = []
    for line in parents:
        shift = draw(st.integers(0, max_nodes - 1))
        tokens.append([(i + shift) % max_nodes for i in range(len(line))])
    return forest(parents, tokens, nodes=max(map(len, parents)) + draw(st.integers(0, 2)))


def path_to(tree: Tree, row: int, node: int) -> list[int]:
    """Node indices from the root to `node`; [] for padding."""
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = int(tree.parent[row, node])
    return path if node == ROOT else []


def nodes_of(parent: list[int], chance: list[float]) -> Nodes:
    """Through `Nodes.of`, as the engine makes them."""
    depth, logw = [0], [0.0]
    for node in range(1, len(parent)):
        depth.append(depth[parent[node]] + 1)
        logw.append(logw[parent[node]] + math.log(chance[node]))
    token = list(range(len(parent)))
    return Nodes.of([*token, 0, 0], [*parent, -2, -2], [*depth, 0, 0], [*logw, -math.inf, -math.inf], len(parent))


def line_of(length: int, chance: float) -> Nodes:
    return nodes_of(list(range(-1, length)), [1.0] + [chance] * length)
