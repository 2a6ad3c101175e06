"""The measured budget in the loop: the trees on the host, a number of nodes for them, and what became of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftproof.engine.batch import Batch
from draftproof.spec.accept import Accepted
from draftproof.spec.budget import Auto
from draftproof.spec.expected import Nodes
from draftproof.spec.tree import Tree


@dataclass
class Watched:
    """Trees whose fate is not told yet: the first `nodes` behind the root are verified now; with 0 none is, and the
    target's plain text goes on to tell which of them it would have followed."""

    auto: Auto
    trees: list[tuple[Nodes, str]]
    nodes: int
    paths: list[list[int]]  # of the requests, as far as known
    open: list[bool]  # the path may go on

    def go_on(self, tokens: list[list[int]]) -> None:
        """The next tokens of every request, in plain rounds."""
        for row, (tree, _) in enumerate(self.trees):
            for token in tokens[row]:
                child = tree.child(self.paths[row][-1], token) if self.open[row] else None
                if child is None:
                    self.open[row] = False
                    break
                self.paths[row].append(child)


@dataclass
class Measured:
    _watched: Watched | None = None

    def choose(self, auto: Auto, batch: Batch, tree: Tree) -> int:
        """How many nodes behind the root to verify; one copy to the host where the tree lies on a device."""
        self.settle()
        trees = list(zip(_on_host(batch, tree), batch.kinds, strict=True))
        nodes = auto.choose([t for t, left in zip(trees, batch.left, strict=True) if left], batch.longest)
        self._watched = Watched(auto, trees, nodes, [[0] for _ in trees], [bool(n) for n in batch.left])
        return min(nodes, tree.nodes - 1)

    def learn(self, taken: Accepted) -> None:
        """What the walk, or in a pause the plain text, says of the drafter's promises."""
        watched = self._watched
        if watched is None:
            return
        if watched.nodes:
            packed = torch.cat([taken.path, taken.drafts[:, None]], 1).tolist()
            paths = [path[: drafts + 1] for *path, drafts in packed]
            watched.auto.learn(watched.trees, paths, watched.nodes)
            self._watched = None
            return
        counts = taken.counts.tolist()
        watched.go_on([tokens[:count] for tokens, count in zip(taken.tokens.tolist(), counts, strict=True)])
        if not any(watched.open):
            self.settle(over=True)

    def settle(self, over: bool = False) -> None:
        """The watched trees' fate is known as far as it will be; unless it is over, their last nodes are still open."""
        watched, self._watched = self._watched, None
        if watched and not watched.nodes:
            watched.auto.learn(watched.trees, watched.paths, watched.auto.most, over)


def _on_host(batch: Batch, tree: Tree) -> list[Nodes]:
    """A request that has ended has no nodes: it teaches nothing."""
    whole = [t.double() for t in (tree.token, tree.parent, tree.depth, tree.logw, tree.n[:, None])]
    size, made = tree.nodes, []
    for line, left in zip(torch.cat(whole, 1).tolist(), batch.left, strict=True):
        token, parent, depth = ([int(v) for v in line[i * size : (i + 1) * size]] for i in range(3))
        n = int(line[-1]) if left else 1
        made.append(Nodes.of(token, parent, depth, line[3 * size : -1], n))
    return made
