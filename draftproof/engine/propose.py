"""From a drafter's pass to the tree of a round: how much to draft, with which candidates, in which shape.

`Speculation` is what was asked for; `Proposer` is that for one engine. While the measured budget says that plain
decoding wins, the drafter is not run at all: the committed rows' features wait until it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.engine.backlog import Backlog
from draftproof.engine.batch import Batch, Drafter
from draftproof.engine.measured import Measured
from draftproof.errors import UserError
from draftproof.models.dflash import DraftDist
from draftproof.spec.accept import Accepted
from draftproof.spec.budget import MODES, MOST_NODES, Auto, Autos
from draftproof.spec.builders import SPINE_FIRST, Builder, build, width_for
from draftproof.spec.candidates import noise_aware, noise_for
from draftproof.spec.tree import Tree, bucket, chain


@dataclass(frozen=True)
class Speculation:
    """budget: "none", "chain" (the drafter's best path, in full), a number of nodes, or "auto" (measured).

    padded: pad trees to the buckets where shapes repeat (None: on a GPU).
    """

    budget: str | int = "chain"
    builder: Builder = SPINE_FIRST
    noise_aware: bool = True
    padded: bool | None = None

    def __post_init__(self) -> None:
        if not (self.budget in MODES or (isinstance(self.budget, int) and 0 <= self.budget <= MOST_NODES)):
            raise UserError(
                "bad-option", f"a budget of {self.budget} nodes", f"use {', '.join(MODES)}, or up to {MOST_NODES} nodes"
            )


@dataclass(frozen=True)
class Drafting:
    """What a command was asked: a drafter, or drafts of the target's own head, or neither; and how much to draft."""

    drafter: str | None
    mtp: int
    how: Speculation


@dataclass(frozen=True)
class Round:
    """The tree to verify, and the noise by depth [R, levels + 1, V] if somebody samples and it was needed."""

    tree: Tree
    noise: Tensor | None = None


class Proposer:
    """A drafter under one `Speculation`. auto: the measured choice, for the budget "auto"."""

    def __init__(self, drafter: Drafter, how: Speculation, vocab: int, auto: Auto | Autos | None = None) -> None:
        if (how.budget == "auto") != (auto is not None):
            raise AssertionError(
                'the budget "auto" needs its measured choice (`calibrate.auto_for`), and no other does'
            )
        self.drafter, self.how, self.vocab = drafter, how, vocab
        self.autos = Autos({(1, False): auto}) if isinstance(auto, Auto) else auto
        self.measured = Measured() if auto else None
        self.backlog = Backlog(drafter)
        self._asked = True  # the drafter, in the round at hand
        self._round: tuple[Auto, int, int] | None = None  # whose choice the round at hand is, its nodes, its context

    @property
    def most(self) -> int:
        """Nodes behind the root that a round may send."""
        if self.autos:
            return self.autos.most
        return self.drafter.depth if isinstance(self.how.budget, str) else self.how.budget

    @property
    def rows(self) -> int:
        """Rows of a round at most, of the target or of the drafter's own block: the budget must not change a draft."""
        return bucket(max(self.most, self.drafter.depth) + 1)

    def propose(self, batch: Batch, positions: Tensor, reach: int) -> Round:
        """positions [R] of the anchors; reach: a bound on committed rows and this round's together."""
        # A deeper node would lie behind the last token; the last token itself may be a draft, as a replay counts it.
        levels = min(self.drafter.depth, max(batch.left))
        auto = self.autos.of(len(batch.left), batch.sampling.sampled) if self.autos else None
        if auto:
            auto.open(batch.kinds, batch.longest)
        self._asked = levels >= 1 and not batch.undrafted and self._drafts(auto)
        self._round = (auto, 0, batch.longest) if auto and not self._asked else None
        if not self._asked:
            return Round(chain(batch.anchors))
        self.backlog.take_in()
        noise = noise_for(batch.sampling, positions, self.drafter.depth, self.vocab)
        rescore = noise_aware(batch.sampling, noise) if self.how.noise_aware else None
        budget = min(self.most, levels) if self.how.budget == "chain" else auto.most if auto else self.most
        line = self.how.budget == "chain" or (self.how.builder.spine and budget <= levels)  # one path, no branch
        width = 1 if line and not auto else width_for(budget, self.vocab)
        dist = self.drafter.draft(batch.slots, batch.anchors, reach, width, rescore)
        if line and not auto and dist.scorer is None:
            return Round(self._capped(batch, self._line(batch, dist, budget)), noise)
        tree = build(SPINE_FIRST if line else self.how.builder, batch.anchors, dist, budget, levels)
        if any(batch.lines):
            tree = self._with_chains(batch, dist, tree)
        tree = self._capped(batch, tree)
        if self.measured and auto:
            nodes = self.measured.choose(auto, batch, tree)
            self._round = (auto, auto.last, batch.longest) if nodes else None
            line = nodes == 0 or (self.how.builder.spine and nodes <= levels)
            tree = tree.cut(nodes + 1)
        return Round(self._shaped(batch, tree, line), noise)

    def _drafts(self, auto: Auto | None) -> bool:
        if auto and not auto.drafts():
            auto.plain(1.0)
            return False
        return self.how.budget != "none"

    def _capped(self, batch: Batch, tree: Tree) -> Tree:
        """No more nodes than a request wants for itself."""
        if not batch.caps:
            return tree
        own = [0 if c == "none" else c if isinstance(c, int) else tree.nodes for c in batch.caps]
        return tree.capped(torch.tensor(own, device=tree.n.device))

    def _line(self, batch: Batch, dist: DraftDist, nodes: int) -> Tree:
        return chain(batch.anchors, dist.ids[:, :nodes, 0], dist.logp[:, :nodes, 0])

    def _with_chains(self, batch: Batch, dist: DraftDist, tree: Tree) -> Tree:
        """Requests that want a chain, or whose logits processors keep state, have it in place of a tree."""
        alone = torch.tensor(batch.lines, device=tree.token.device)
        path = self._line(batch, dist, min(tree.levels, tree.nodes - 1)).padded(tree.nodes)
        return path.instead_of(tree, alone)

    def _shaped(self, batch: Batch, tree: Tree, line: bool) -> Tree:
        """Known to be one path; or a tree, padded where shapes shall repeat."""
        if line:
            return tree.cut(tree.nodes, chain=True)
        padded = batch.anchors.is_cuda if self.how.padded is None else self.how.padded
        return tree.padded(bucket(tree.nodes)) if padded else tree

    def learn(self, taken: Accepted) -> None:
        """What became of the drafts, for the measured choice."""
        if self.measured:
            self.measured.learn(taken)

    def felt(self, seconds: float) -> None:
        """How long the round took."""
        if self._round and self._round[0].live:
            auto, nodes, context = self._round
            auto.felt(nodes, seconds, context)

    def extend(self, slots: slice, features: Tensor, counts: Tensor, reach: int) -> None:
        """Committed rows of a round: features [R, S, F], of which the first counts [R] stay. Where the drafter was not
        asked they wait; such a round has one row a request, and all of them stay."""
        if self._never:
            return
        if not self._asked:
            self.backlog.hold(slots, features, reach)
            return
        self.drafter.extend(slots, features, counts, reach)

    def prefill(self, slots: slice, features: Tensor, counts: Tensor, reach: int) -> None:
        """The same for rows of a prompt, which all stay."""
        if self._never:
            return
        if self.autos and not self.autos.drafts():
            self.backlog.hold(slots, features, reach)
            return
        self.backlog.take_in(range(slots.start, slots.stop))
        self.drafter.extend(slots, features, counts, reach)

    @property
    def _never(self) -> bool:
        """No budget can pay here, whatever the number of requests: the drafter is never asked."""
        return self.autos is not None and self.autos.most == 0

    def changed(self) -> None:
        """Other requests than in the last round."""
        if self.measured:
            self.measured.settle()

    def drop(self, slots: slice) -> None:
        """New requests in these slots."""
        for slot in range(slots.start, slots.stop):
            self.backlog.drop(slot)
        self.drafter.drop(slots)

    def catch_up(self, slot: int) -> None:
        """The drafter's context of this request reaches its last committed row."""
        self.backlog.take_in([slot])
