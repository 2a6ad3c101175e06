"""The Tree record. Plain decoding is a tree of one node, a chain is a tree with one path; one verify path serves all.

Nodes are in topological order (a parent stands before its children), node 0 is the root: the last emitted token, not
yet run through the target. Padding nodes carry parent NO_PARENT, are seen by nobody and are never walked to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

ROOT = -1  # parent of node 0
NO_PARENT = -2  # parent of padding
BUCKETS = (1, 8, 16, 24, 32, 40, 48, 64, 72, 96, 136, 192, 264)  # rows of a forward, root included, where shapes repeat


@dataclass(frozen=True)
class Tree:
    """token, parent, depth int64 [R, N]; logw float32 [R, N], log-weight of the path under the drafter; n int64 [R].

    The host knows two facts: `chain`, node i's parent is i - 1, so accepted nodes are already in place; `height`,
    a bound on the depth of any node.
    """

    token: Tensor
    parent: Tensor
    depth: Tensor
    logw: Tensor
    n: Tensor
    chain: bool = False
    height: int | None = None

    @property
    def nodes(self) -> int:
        return self.token.shape[1]

    @property
    def levels(self) -> int:
        return self.nodes - 1 if self.height is None else min(self.height, self.nodes - 1)

    def cut(self, nodes: int, *, chain: bool = False) -> Tree:
        """The first `nodes` nodes: parents stand before their children, so they are a tree too."""
        token, parent, depth, logw = (t[:, :nodes] for t in (self.token, self.parent, self.depth, self.logw))
        return Tree(token, parent, depth, logw, self.n.clamp(max=nodes), self.chain or chain, self.height)

    def instead_of(self, other: Tree, rows: Tensor) -> Tree:
        """`other` with these trees in the requests where `rows` [R] is true; as many nodes in both."""
        own = rows[:, None]
        return Tree(
            torch.where(own, self.token, other.token),
            torch.where(own, self.parent, other.parent),
            torch.where(own, self.depth, other.depth),
            torch.where(own, self.logw, other.logw),
            torch.where(rows, self.n, other.n),
            height=max(self.levels, other.levels),
        )

    def capped(self, nodes: Tensor) -> Tree:
        """At most nodes [R] of each request behind the root; the others become padding."""
        n = torch.minimum(self.n, nodes + 1)
        kept = torch.arange(self.nodes, device=n.device) < n[:, None]
        return replace(
            self,
            token=torch.where(kept, self.token, 0),
            parent=torch.where(kept, self.parent, NO_PARENT),
            logw=torch.where(kept, self.logw, -torch.inf),
            n=n,
        )

    def padded(self, rows: int) -> Tree:
        """The same tree in `rows` nodes a request: padding is seen by nobody and never walked to."""
        more = rows - self.nodes
        if more <= 0:
            return self
        token, parent, depth, logw = (
            F.pad(t, (0, more), value=fill)
            for t, fill in ((self.token, 0), (self.parent, NO_PARENT), (self.depth, 0), (self.logw, -torch.inf))
        )
        return Tree(token, parent, depth, logw, self.n, height=self.levels)


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


def bucket(rows: int) -> int:
    """The smallest bucket that holds `rows`."""
    return next(size for size in BUCKETS if size >= rows)


def visibility(tree: Tree) -> Tensor:
    """bool [R, N, N]: node i sees node j when j is i or an ancestor of i. Padding sees itself alone."""
    nodes = tree.nodes
    own = torch.eye(nodes, dtype=torch.bool, device=tree.token.device)
    if tree.chain:
        return own.cumsum(0).bool().expand(tree.token.shape[0], nodes, nodes)
    columns = torch.arange(nodes, device=tree.token.device)
    up = (tree.parent[:, :, None] == columns).float()  # one step towards the root
    reached = own.float() + up
    for _ in range(max(tree.levels, 1).bit_length()):  # pointer doubling: 1, 2, 4, ... steps
        up = up @ up
        reached = reached + reached @ up
    return reached > 0
