"""How many drafts of a tree the target will accept: the drafter's probabilities, corrected by what became of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import exp
from typing import Any

MEMORY = 400.0  # followed branches that a calibration remembers
FORGET = 100.0  # rounds in which an untested factor goes most of the way back to the drafter's own word
PRIOR = 8.0  # branches' worth of trust in the drafter's own probabilities


@dataclass
class Calibration:
    """How often the target followed a branch, over what the drafter promised: by depth on the spine, at once off it.

    Only nodes that the walk reached count. Index -1 stands for parents off the spine.
    """

    followed: dict[int, float] = field(default_factory=dict)
    promised: dict[int, float] = field(default_factory=dict)

    def factor(self, depth: int) -> float:
        """depth: of the parent; -1 off the spine."""
        return (self.followed.get(depth, 0.0) + PRIOR) / (self.promised.get(depth, 0.0) + PRIOR)

    def learn(self, depth: int, promised: float, followed: bool) -> None:
        keep = 1.0 - 1.0 / MEMORY
        self.followed[depth] = self.followed.get(depth, 0.0) * keep + followed
        self.promised[depth] = self.promised.get(depth, 0.0) * keep + promised

    def fade(self, tested: set[int]) -> None:
        """Forget a little of what this round did not test: a factor that keeps itself from being tested comes back."""
        for depth in self.promised.keys() - tested:
            self.followed[depth] *= 1.0 - 1.0 / FORGET
            self.promised[depth] *= 1.0 - 1.0 / FORGET

    def as_dict(self) -> dict[str, Any]:
        return {str(d): [self.followed[d], self.promised[d]] for d in self.followed}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Calibration:
        pairs = {int(d): (float(f), float(p)) for d, (f, p) in data.items()}
        return cls({d: f for d, (f, _) in pairs.items()}, {d: p for d, (_, p) in pairs.items()})


@dataclass(frozen=True)
class Nodes:
    """One request's tree on the host, in order, the root first: parent, depth, conditional probability given the parent
    as the drafter has it, and whether the node lies on the spine (every node on its path is its parent's first)."""

    token: list[int]
    parent: list[int]
    depth: list[int]
    chance: list[float]
    spine: list[bool]

    @classmethod
    def of(
        cls, token: Sequence[int], parent: Sequence[int], depth: Sequence[int], logw: Sequence[float], n: int
    ) -> Nodes:
        chance, spine, begun = [1.0], [True], {-1}
        for node in range(1, n):
            above = parent[node]
            chance.append(exp(logw[node] - logw[above]))
            spine.append(spine[above] and above not in begun)
            begun.add(above)
        return cls(list(token[:n]), list(parent[:n]), list(depth[:n]), chance, spine)

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that carries `token`."""
        places = range(node + 1, len(self.parent))
        return next((i for i in places if self.parent[i] == node and self.token[i] == token), None)

    def key(self, node: int) -> int:
        """What the calibration knows the node's children by."""
        return self.depth[node] if self.spine[node] else -1

    def gains(self, calibration: Calibration) -> list[float]:
        """Expected accepted drafts of the first 0, 1, 2, ... nodes behind the root."""
        reach, gains = [1.0], [0.0]
        for node in range(1, len(self.parent)):
            above = self.parent[node]
            reach.append(reach[above] * min(1.0, self.chance[node] * calibration.factor(self.key(above))))
            gains.append(gains[-1] + reach[-1])
        return gains

    def learn(self, calibration: Calibration, path: Sequence[int], nodes: int, over: bool = True) -> set[int]:
        """path: followed nodes, the root first; `nodes` were in the tree, root included; unless it is `over`, nobody
        knows yet where the last of them leads."""
        promised: dict[int, float] = {}
        for node in range(1, min(nodes, len(self.parent))):
            if self.parent[node] in path:
                promised[self.parent[node]] = promised.get(self.parent[node], 0.0) + self.chance[node]
        for node, mass in promised.items():
            if over or node != path[-1]:
                calibration.learn(self.key(node), mass, node != path[-1])
        return {self.key(node) for node in promised}
