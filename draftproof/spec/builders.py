"""Draft trees from one pass's distributions: which prefixes get a node of the budget, and in which order.

The drafter's depths are independent, so a prefix weighs the sum of its log-probabilities and the heaviest prefixes are
the tree that expects most accepted drafts (DDTree, arXiv 2604.12989). Every builder gives one nested order: the first b
nodes are its tree of budget b. Two forms of each, equal node for node:

  heap      on the host, one request after another; fewest operations, for a CPU
  frontier  depth by depth on the device, all requests at once, static shapes, no sync; for a GPU

Order: higher weight first (float64 sums from the root down), then smaller depth, then the parent that came first, then
lower rank. A node's parent always comes before it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from heapq import heappop, heappush

import torch
from torch import Tensor

from draftproof.models.dflash import DraftDist, Scorer
from draftproof.spec.tree import NO_PARENT, ROOT, Tree, chain

WIDEST = 64  # candidates of a depth; the reference takes as many as the budget, which only flat drafts can use


@dataclass(frozen=True)
class Builder:
    """spine: the drafter's best path comes first, whatever it weighs, so a tree accepts at least what the chain does.
    deep: a node off the spine may have children."""

    name: str
    spine: bool
    deep: bool


BEST_FIRST = Builder("best-first", spine=False, deep=True)
SPINE_FIRST = Builder("spine-first", spine=True, deep=True)
SIBLINGS = Builder("siblings", spine=True, deep=False)
BUILDERS = {b.name: b for b in (SPINE_FIRST, BEST_FIRST, SIBLINGS)}


def width_for(budget: int, vocab: int) -> int:
    """Candidates a depth that a tree of `budget` nodes can use: rank r comes after r better siblings."""
    return min(budget, WIDEST, vocab)


def build(kind: Builder, anchor: Tensor, dist: DraftDist, budget: int, levels: int | None = None) -> Tree:
    """The tree of `budget` nodes and the root: anchor int64 [R], dist [R, D, k]; nodes no deeper than `levels`."""
    depth = dist.ids.shape[1]
    levels = depth if levels is None else min(levels, depth)
    if levels < 1:
        return chain(anchor)
    form = heap if anchor.device.type == "cpu" else frontier
    return form(kind, anchor, dist, budget, levels)


# --- heap -----------------------------------------------------------------------------------------------

Children = Callable[
    [int, int], tuple[list[float], list[int]]
]  # (token, depth) -> log-probabilities and ids, best first


@dataclass
class Grown:
    """One request's nodes in order, the root first."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    weight: list[float]

    def add(self, node: int, logp: float, token: int) -> int:
        self.token.append(token)
        self.parent.append(node)
        self.depth.append(self.depth[node] + 1)
        self.weight.append(self.weight[node] + logp)
        return len(self.token) - 1


def heap(kind: Builder, anchor: Tensor, dist: DraftDist, budget: int, levels: int) -> Tree:
    """The heap form. A scorer is asked once a node that has children."""
    roots, ids, logps = anchor.tolist(), dist.ids.tolist(), dist.logp.tolist()
    grown = []
    for row, root in enumerate(roots):
        if dist.scorer is None:
            children = _same_for_all(logps[row], ids[row])
        else:
            children = _scored(dist.scorer, row, ids[row], anchor.device)
        grown.append(grow(kind, root, children, budget, levels))
    return _packed(grown, levels, anchor.device)


def grow(kind: Builder, root: int, children: Children, budget: int, levels: int) -> Grown:
    """Nodes of one request: the spine if asked for, then the heaviest prefix that is left, again and again."""
    tree = Grown([root], [ROOT], [0], [0.0])
    known: dict[int, tuple[list[float], list[int]]] = {}
    waiting: list[tuple[float, int, int, int]] = []  # (-weight, depth, parent, rank)

    def offer(node: int, rank: int) -> None:
        if tree.depth[node] == levels:
            return
        if node not in known:
            known[node] = children(tree.token[node], tree.depth[node])
        logps = known[node][0]
        if rank < len(logps) and logps[rank] > -math.inf:
            heappush(waiting, (-(tree.weight[node] + logps[rank]), tree.depth[node] + 1, node, rank))

    def take(node: int, rank: int) -> int:
        logps, ids = known[node]
        return tree.add(node, logps[rank], ids[rank])

    node = 0
    while kind.spine and tree.depth[node] < levels and len(tree.token) <= budget:
        offer(node, 1)
        if known[node][0][0] == -math.inf:
            break
        node = take(node, 0)
    if not kind.spine:
        offer(0, 0)
    while waiting and len(tree.token) <= budget:
        _, _, node, rank = heappop(waiting)
        child = take(node, rank)
        offer(node, rank + 1)
        if kind.deep:
            offer(child, 0)
    return tree


def _same_for_all(logps: list[list[float]], ids: list[list[int]]) -> Children:
    return lambda _token, depth: (logps[depth], ids[depth])


def _scored(scorer: Scorer, row: int, ids: list[list[int]], device: torch.device) -> Children:
    def children(token: int, depth: int) -> tuple[list[float], list[int]]:
        one = torch.tensor([row], device=device), torch.tensor([token], device=device)
        logps = scorer(*one, depth)[0]
        order = logps.sort(descending=True, stable=True).indices.tolist()
        return [float(logps[i]) for i in order], [ids[depth][i] for i in order]

    return children


def _packed(grown: list[Grown], levels: int, device: torch.device) -> Tree:
    nodes = max(len(g.token) for g in grown)

    def column(name: str, fill: float, dtype: torch.dtype) -> Tensor:
        rows = [getattr(g, name) + [fill] * (nodes - len(g.token)) for g in grown]
        return torch.tensor(rows, dtype=dtype, device=device)

    return Tree(
        column("token", 0, torch.long),
        column("parent", NO_PARENT, torch.long),
        column("depth", 0, torch.long),
        column("weight", -math.inf, torch.float32),
        torch.tensor([len(g.token) for g in grown], device=device),
        height=levels,
    )


# --- frontier -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Level:
    """The nodes of one depth that may be in the tree, best first: [R, P] each; parent: index into the level above."""

    token: Tensor
    weight: Tensor
    parent: Tensor
    spine: Tensor


def frontier(kind: Builder, anchor: Tensor, dist: DraftDist, budget: int, levels: int) -> Tree:
    """The frontier form: scores never rise along a path or along siblings, so no depth needs more than `budget`."""
    rows = anchor.shape[0]
    start = torch.zeros(rows, 1, dtype=torch.float64, device=anchor.device)
    above = Level(anchor[:, None], start, start.long(), torch.ones_like(start, dtype=torch.bool))
    found = []
    for depth in range(levels):
        above = _next_level(kind, dist, above, depth, budget)
        found.append(above)
    return _in_order(kind, anchor, found, budget, levels)


def _next_level(kind: Builder, dist: DraftDist, above: Level, depth: int, budget: int) -> Level:
    if not kind.deep:
        above = Level(*(t[:, :1] for t in (above.token, above.weight, above.parent, above.spine)))
    logp, ids = _children(dist, above.token, depth)
    width = ids.shape[-1]
    weight = (above.weight[:, :, None] + logp.double()).flatten(1)
    spine = torch.zeros_like(weight, dtype=torch.bool)
    if kind.spine:
        # the spine's own best child is the first of the first
        spine[:, 0] = above.spine[:, 0] & (weight[:, 0] > -torch.inf)
    key = weight.masked_fill(spine, torch.inf)
    kept = key.sort(dim=1, descending=True, stable=True).indices[:, :budget]
    return Level(ids.flatten(1).gather(1, kept), weight.gather(1, kept), kept // width, spine.gather(1, kept))


def _children(dist: DraftDist, parents: Tensor, depth: int) -> tuple[Tensor, Tensor]:
    """Log-probabilities and ids [R, P, k] of every parent's children, best first."""
    rows, count = parents.shape
    ids = dist.ids[:, None, depth].expand(-1, count, -1)
    if dist.scorer is None:
        return dist.logp[:, None, depth].expand(-1, count, -1), ids
    row = torch.arange(rows, device=parents.device)[:, None].expand(rows, count)
    logp, order = dist.scorer(row.flatten(), parents.flatten(), depth).sort(dim=-1, descending=True, stable=True)
    return logp.view(rows, count, -1), ids.gather(2, order.view(rows, count, -1))


def _in_order(kind: Builder, anchor: Tensor, found: list[Level], budget: int, levels: int) -> Tree:
    """All levels' nodes sorted by weight (ties stay in depth order), cut at the budget, parents renumbered."""
    rows, device = anchor.shape[0], anchor.device
    sizes = [level.weight.shape[1] for level in found]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    weight, token, spine = (torch.cat([getattr(v, n) for v in found], 1) for n in ("weight", "token", "spine"))
    depth = torch.cat([torch.full((size,), d + 1, device=device) for d, size in enumerate(sizes)]).expand(rows, -1)
    parent = torch.cat([v.parent + (begins[d - 1] if d else -1) for d, v in enumerate(found)], 1)
    parent[:, : sizes[0]] = ROOT
    order = weight.masked_fill(spine, torch.inf).sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(1, order.shape[1] + 1, device=device).expand_as(order)
    )
    above = torch.where(parent == ROOT, 0, place.gather(1, parent.clamp(min=0)))
    kept = order[:, :budget]
    weight, token, depth, above = (t.gather(1, kept) for t in (weight, token, depth, above))
    real = weight > -torch.inf
    root = torch.zeros(rows, 1, dtype=torch.long, device=device)
    return Tree(
        torch.cat([anchor[:, None], token.masked_fill(~real, 0)], 1),
        torch.cat([root + ROOT, above.masked_fill(~real, NO_PARENT)], 1),
        torch.cat([root, depth.masked_fill(~real, 0)], 1),
        torch.cat([root.float(), weight.float()], 1),
        real.sum(1) + 1,
        height=levels,
    )
