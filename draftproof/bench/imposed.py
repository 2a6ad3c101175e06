"""Speed of every budget at an imposed acceptance: measured times of rounds, drafts followed by chance.

Weights of a published size are random here, so acceptance must be assumed. A profile says how often the target takes
the drafter's best candidate of a depth, how the rest is spread, and how much worse drafts do once a path has left the
drafter's own best one. Rounds are drawn from it; trees are built, walked and budgeted by the product's own code.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Any

from draftproof.spec.budget import Auto
from draftproof.spec.costs import Costs
from draftproof.spec.expected import Nodes

if TYPE_CHECKING:
    from draftproof.spec.builders import Children

ROUNDS = 1500
WIDTH = 8  # candidates of a depth
KIND = "imposed"


@dataclass(frozen=True)
class Profile:
    """first: chance of the best candidate at the first depth; fade: factor a depth; share: of the remaining chance that
    each further candidate takes; astray: factor of every chance off the spine; spread: of `first` between rounds."""

    name: str
    first: float
    fade: float
    share: float
    astray: float
    spread: float = 0.15

    def drawn(self, draw: Random, depth: int) -> list[list[float]]:
        """This round's chances [depth][candidate], as a calibrated drafter would give them."""
        best = min(max(draw.gauss(self.first, self.spread), 0.05), 0.98)
        rows = []
        for level in range(depth):
            chances, left = [], 1.0
            for rank in range(WIDTH):
                chance = best * self.fade**level if rank == 0 else left * self.share
                chances.append(min(chance, left))
                left -= chances[-1]
            rows.append(sorted(chances, reverse=True))
        return rows


# A drafter like the embedded one on chat, and one like a published 8B drafter on mathematics.
PROFILES = (Profile("chat", 0.62, 0.86, 0.3, 0.4), Profile("maths", 0.85, 0.98, 0.35, 0.5))


def table(costs: Costs, context: int, depth: int) -> list[dict[str, Any]]:
    """tau and tokens/s of each measured budget and of the measured choice, for every profile."""
    rows = []
    for profile in PROFILES:
        taus: dict[str, float] = {}
        rates: dict[str, float] = {}
        for nodes in costs.nodes:
            taus[str(nodes)], rates[str(nodes)] = _simulate(costs, context, depth, profile, nodes)
        taus["auto"], rates["auto"] = _simulate(costs, context, depth, profile, None)
        rows.append({"profile": profile.name, "context": context, "tau": taus, "tokens_per_second": rates})
    return rows


def _simulate(costs: Costs, context: int, depth: int, profile: Profile, nodes: int | None) -> tuple[float, float]:
    """(tau, tokens/s) over ROUNDS rounds of one budget; None: the measured choice."""
    from draftproof.spec.builders import SPINE_FIRST, grow

    draw, auto = Random(1), Auto(costs)
    seconds = dict(zip(costs.nodes, costs.at(context), strict=True))
    emitted, spent = 0, 0.0
    for _ in range(ROUNDS):
        chances = profile.drawn(draw, depth)
        steps = [draw.random() for _ in range(depth)]
        if nodes == 0 or (nodes is None and not auto.drafts()):
            auto.plain(1.0)
            emitted, spent = emitted + 1, spent + seconds[0]
            continue
        most = auto.most if nodes is None else nodes
        logps = [[math.log(c) if c > 0 else -math.inf for c in row] for row in chances]
        grown = grow(SPINE_FIRST, 0, _children(logps), most, depth)
        tree = Nodes.of(grown.token, grown.parent, grown.depth, grown.weight, len(grown.token))
        count = auto.choose([(tree, KIND)], context) if nodes is None else nodes
        path = _walked(tree, count, chances, steps, profile.astray)
        if nodes is None:  # as the engine does: unverified trees are compared with the text that follows
            seen = path if count else _walked(tree, auto.most, chances, steps, profile.astray)
            auto.learn([(tree, KIND)], [seen], count or auto.most)
        unused = seconds[0] + costs.drafting(context)
        emitted, spent = emitted + len(path), spent + (seconds[count] if count else unused)
    return emitted / ROUNDS, emitted / spent


def _children(logps: list[list[float]]) -> Children:
    return lambda _token, depth: (logps[depth], list(range(WIDTH)))


def _walked(tree: Nodes, nodes: int, chances: list[list[float]], steps: Sequence[float], astray: float) -> list[int]:
    """The accepted path: at every depth one draw says which candidate the target took, or none of them."""
    path = [0]
    for level, point in enumerate(steps):
        factor, rank, mass = 1.0 if tree.spine[path[-1]] else astray, 0, 0.0
        while rank < WIDTH:
            mass += chances[level][rank] * factor
            if point < mass:
                break
            rank += 1
        child = tree.child(path[-1], rank)
        if child is None or child > nodes:
            break
        path.append(child)
    return path
