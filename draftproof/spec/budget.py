"""How many nodes a round should send to the target: none, a chain of w, a tree of b, whichever is fastest here.

A round of b nodes that expects `gain` accepted drafts emits 1 + gain tokens in `seconds(b)`. The seconds are measured
(`Costs`); the gain is the sum of the nodes' probabilities, corrected by how often the target followed (`Calibration`).
Plain decoding is the point b = 0 of the same axis; it needs no draft at all, so while it wins the drafter is asked only
now and then (`Auto`). Nothing here knows a model or a clock.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from draftproof.errors import UserError
from draftproof.spec.costs import Costs
from draftproof.spec.expected import Calibration, Nodes

MODES = ("auto", "none", "chain")
MOST_NODES = 256  # largest budget of a tree, the root not counted
HYSTERESIS = 0.03  # another budget must promise this much more before it replaces the last one
FIRST_PAUSE, LONGEST_PAUSE = 16, 256  # tokens decoded plainly before the drafter is asked again
SMOOTH = 0.2  # weight of one tree of the newest round in the running ratio
USUAL = 0.05  # weight of the newest tree in what is usual
HOPELESS = 0.9  # of plain decoding: where the usual drafts would reach less, the first look waits longest
BENEFIT = 0.05  # of the doubt: how far above plain decoding the ratio starts, so that one dull passage does not decide
PROBE = 48  # drafted rounds after which a plain one tells again how long it takes
FELT = {True: 0.3, False: 0.1}  # weight of the newest round's time: of a plain one (they are rare), of a drafted one
FAR = 5.0  # a round that took so many times longer, or shorter, than measured says no more than this


def parse_budget(text: str) -> str | int:
    """auto, none, chain, or a number of nodes from 1 to MOST_NODES. Errors: bad-option."""
    if text in MODES:
        return text
    nodes = int(text) if text.isascii() and text.isdecimal() and len(text) < 6 else 0
    if not 1 <= nodes <= MOST_NODES:
        raise UserError(
            "bad-option", f"a budget of {text[:20]!r} nodes", f"use auto, none, chain, or 1 to {MOST_NODES} nodes"
        )
    return nodes


@dataclass
class Auto:
    """The measured choice. One object serves an engine for as long as it lives: what it learned stays."""

    costs: Costs
    calibrations: dict[str, Calibration] = field(default_factory=dict)
    usual: dict[str, dict[int, float]] = field(default_factory=dict)  # expected drafts by kind of request and nodes
    opened: bool = False  # it is known whether a first look is worth while
    ratio: float = 1.0 + 2 * BENEFIT  # running tokens a second of drafted rounds over plain ones
    pause: int = FIRST_PAUSE  # tokens of the next pause
    waiting: float = 0.0  # tokens left of this one
    last: int = 0
    place: str = ""  # what the costs belong to, so that a pause is kept for the same machine alone
    live: bool = False  # rounds in service tell how long they took: what is measured alone may not hold under load
    slower: dict[bool, float] = field(default_factory=lambda: {True: 1.0, False: 1.0})  # than measured: plain, drafted
    timed: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})  # rounds that told it
    since_plain: int = 0

    @property
    def most(self) -> int:
        return self.costs.nodes[-1]

    def open(self, kinds: Sequence[str], context: int) -> None:
        """Before the first round for so many requests: where drafts as they usually are, among fewer or more of them,
        would not pay, looking can wait. With nothing known it is looked at once."""
        if self.opened:
            return
        gains = [self.usual.get(kind, {}) for kind in kinds]
        plain, *drafted = self._seconds(context)
        known = [(n, s) for n, s in zip(self.costs.nodes[1:], drafted, strict=True) if all(n in g for g in gains)]
        if not known:
            return
        self.opened = True
        hope = max(sum(1 + g[n] for g in gains) / len(gains) * plain / s for n, s in known)
        if hope < 1.0:
            self.pause = LONGEST_PAUSE if hope < HOPELESS else FIRST_PAUSE
            self.waiting = max(self.waiting, float(self.pause))

    def _seconds(self, context: int) -> list[float]:
        return [s * self.slower[i == 0] for i, s in enumerate(self.costs.at(context))]

    def drafts(self) -> bool:
        if self.live and self.since_plain >= PROBE:
            return False
        return self.waiting <= 0 and self.most > 0  # no budget at all can pay where 0 is the only one measured

    def felt(self, nodes: int, seconds: float, context: int) -> None:
        """A round of so many nodes took so long, in service."""
        plain = nodes == 0
        self.since_plain = 0 if plain else self.since_plain + 1
        told = self.costs.at(context)[self.costs.nodes.index(nodes)]
        ratio = min(max(seconds / told, 1 / FAR), FAR)
        self.timed[plain] += 1
        weight = max(FELT[plain], 1 / (self.timed[plain] + 1))  # the first ones count as much as the measurement
        self.slower[plain] += weight * (ratio - self.slower[plain])

    def choose(self, trees: Sequence[tuple[Nodes, str]], context: int) -> int:
        """Nodes for a round whose drafts are made: trees of the running requests with their calibrations' names."""
        plain, *drafted = self._seconds(context)
        gains = [self._gains(tree, name) for tree, name in trees]
        rates = {n: sum(1 + g[n] for g in gains) / s for n, s in zip(self.costs.nodes[1:], drafted, strict=True)}
        best = max(rates, key=lambda nodes: rates[nodes])
        if self.last in rates and rates[self.last] * (1 + HYSTERESIS) >= rates[best]:
            best = self.last
        unused = len(trees) / (plain + self.costs.drafting(context))
        self.opened = True
        self._judge(max(rates[best], unused) * plain / len(trees), len(trees))
        self.last = best if rates[best] > unused else 0
        return self.last

    def _gains(self, tree: Nodes, name: str) -> dict[int, float]:
        """Expected accepted drafts by number of nodes; what is usual follows."""
        told = tree.gains(self._calibration(name))
        gains = {nodes: told[min(nodes, len(told) - 1)] for nodes in self.costs.nodes[1:]}
        usual = self.usual.setdefault(name, {})
        for nodes, gain in gains.items():
            usual[nodes] = usual.get(nodes, gain) + USUAL * (gain - usual.get(nodes, gain))
        return gains

    def _judge(self, ratio: float, trees: int) -> None:
        self.ratio += (1 - (1 - SMOOTH) ** trees) * (ratio - self.ratio)
        if self.ratio < 1.0:
            self.waiting, self.pause = self.pause, min(2 * self.pause, LONGEST_PAUSE)
            self.ratio = 1.0 + BENEFIT
        elif self.ratio > 1.0 + BENEFIT:
            self.pause = FIRST_PAUSE

    def learn(
        self, trees: Sequence[tuple[Nodes, str]], paths: Sequence[Sequence[int]], nodes: int, over: bool = True
    ) -> None:
        """The followed path of every tree, of which the first `nodes` behind the root count."""
        tested: dict[str, set[int]] = {}
        for (tree, name), path in zip(trees, paths, strict=True):
            tested.setdefault(name, set()).update(tree.learn(self._calibration(name), path, nodes + 1, over))
        for name, keys in tested.items():
            self._calibration(name).fade(keys)

    def plain(self, tokens: float) -> None:
        """`tokens` a request were decoded without a draft."""
        self.waiting -= tokens

    def _calibration(self, name: str) -> Calibration:
        return self.calibrations.setdefault(name, Calibration())


@dataclass(frozen=True)
class Autos:
    """A measured choice for every number of requests a round that was measured, for greedy rounds and for those where
    somebody samples. What is learned of acceptance they share; what pays they do not."""

    choices: dict[tuple[int, bool], Auto]  # by (requests, sampled)

    def __post_init__(self) -> None:
        first = next(iter(self.choices.values()))
        for auto in self.choices.values():
            auto.calibrations, auto.usual = first.calibrations, first.usual

    @property
    def most(self) -> int:
        return max(auto.most for auto in self.choices.values())

    def of(self, requests: int, sampled: bool) -> Auto:
        """The choice that was measured for as many requests, or for the next greater number."""
        sizes = {size for size, _ in self.choices}
        size = min((n for n in sizes if n >= requests), default=max(sizes))
        return self.choices.get((size, sampled)) or self.choices[size, not sampled]

    def drafts(self) -> bool:
        """Some number of requests would be drafted for now."""
        return any(auto.drafts() for auto in self.choices.values())
