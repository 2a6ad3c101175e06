"""The Tree record. Plain decoding is a tree of one node, a chain is a tree with one path; one verify path serves all.

Nodes are in topological order (a parent stands before its children), node 0 is the root: the last emitted token, not
yet run through the target. Padding nodes carry parent NO_PARENT, are seen by nobody and are never walked to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ROOT = -1  # parent of node 0
NO_PARENT = -2  # parent of padding


@dataclass(frozen=True)
class Tree:
    """token, parent, depth int64 [R, N]; logw float32 [R, N], log-weight of the path under the drafter; n int64 [R].

    `chain` is known on the host: node i's parent is i - 1, so accepted nodes are already in place.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    logw: Tensor
    n: Tensor
    chain: bool = False

    @property
    def nodes(self) -> int:
        return self.token.shape[1]


def chain(anchor: Tensor, ids: Tensor | None = None, logp: Tensor | None = None) -> Tree:
    """The root and one path: anchor [R], ids and logp [R, D] (the drafter's best token of every depth).

    Without ids it is the tree of one node: plain decoding.
    """
    rows = anchor.shape[0]
    token = anchor[:, None] if ids is None else torch.cat([anchor[:, None], ids], dim=1)
    nodes = token.shape[1]
    depth = torch.arange(nodes, device=anchor.device).expand(rows, nodes)
    logw = torch.zeros(rows, nodes, dtype=torch.float32, device=anchor.device)
    if logp is not None:
        logw[:, 1:] = logp.float().cumsum(1)
    count = torch.full((rows,), nodes, dtype=torch.long, device=anchor.device)
    return Tree(token, depth - 1, depth, logw, count, chain=True)


def visibility(tree: Tree) -> Tensor:
    """bool [R, N, N]: node i sees node j when j is i or an ancestor of i. Padding sees itself alone."""
    nodes = tree.nodes
    own = torch.eye(nodes, dtype=torch.bool, device=tree.token.device)
    if tree.chain:
        return own.cumsum(0).bool().expand(tree.token.shape[0], nodes, nodes)
    columns = torch.arange(nodes, device=tree.token.device)
    up = (tree.parent[:, :, None] == columns).float()  # one step towards the root
    reached = own.float() + up
    for _ in range(max(nodes - 1, 1).bit_length()):  # pointer doubling: 1, 2, 4, ... steps
        up = up @ up
        reached = reached + reached @ up
    return reached > 0
