"""From a drafter's pass to the tree of a round: how much to draft, with which candidates, in which shape.

`Speculation` is what was asked for; `Proposer` is that for one engine. While the measured budget says that plain
decoding wins, the drafter is not run at all: the committed rows' features wait until it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftproof.engine.batch import Batch, Drafter
from draftproof.models.cache import Slots
from draftproof.models.dflash import DraftDist
from draftproof.spec.accept import Accepted
from draftproof.spec.budget import Auto, Nodes
from draftproof.spec.builders import SPINE_FIRST, Builder, build, width_for
from draftproof.spec.candidates import noise_aware, noise_for
from draftproof.spec.tree import Tree, bucket, chain

WAITING_ROWS = 4096  # committed rows whose features may wait for the drafter


@dataclass(frozen=True)
class Speculation:
    """budget: "none", "chain" (the drafter's best path, in full), a number of nodes, or "auto" (measured).

    padded: pad trees to the buckets where shapes repeat (None: on a GPU).
    """

    budget: str | int = "chain"
    builder: Builder = SPINE_FIRST
    noise_aware: bool = True
    padded: bool | None = None


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


@dataclass
class Waiting:
    """Features of committed rows that the drafter has not seen: [R, S, F], and how many count [R]."""

    slots: Slots
    features: list[Tensor]
    counts: Tensor
    reach: int

    @property
    def rows(self) -> int:
        return sum(f.shape[0] * f.shape[1] for f in self.features)


@dataclass
class Proposer:
    """A drafter under one `Speculation`. auto: the measured choice, for the budget "auto"."""

    drafter: Drafter
    how: Speculation
    vocab: int
    auto: Auto | None = None
    _waiting: list[Waiting] = field(default_factory=list)
    _drafted: tuple[list[tuple[Nodes, str]], int] | None = None  # the round's trees on the host, nodes verified

    @property
    def most(self) -> int:
        """Nodes behind the root that a round may send."""
        depth = self.drafter.depth
        return self.auto.most if self.auto else depth if isinstance(self.how.budget, str) else self.how.budget

    @property
    def rows(self) -> int:
        return bucket(self.most + 1)

    def propose(self, batch: Batch, positions: Tensor, reach: int) -> Round:
        """positions [R] of the anchors; reach: a bound on committed rows and this round's together."""
        levels = min(self.drafter.depth, max(batch.left))  # a deeper node would lie behind the last token
        self._drafted = None
        if levels < 1 or self.how.budget == "none":
            return Round(chain(batch.anchors))
        if self.auto and not self.auto.drafts():
            self.auto.plain(1.0)
            return Round(chain(batch.anchors))
        self._take_in()
        noise = noise_for(batch.sampling, positions, self.drafter.depth, self.vocab)
        rescore = noise_aware(batch.sampling, noise) if self.how.noise_aware else None
        budget = min(self.most, levels) if self.how.budget == "chain" else self.most
        line = self.how.builder.spine and budget <= levels  # nothing but the spine, which best tokens make
        width = 1 if line and not self.auto else width_for(budget, self.vocab)
        dist = self.drafter.draft(batch.slots, batch.anchors, reach, width, rescore)
        if self.how.budget == "chain" or (line and dist.scorer is None and not self.auto):
            return Round(self._line(batch, dist, min(budget, levels)), noise)
        tree = build(self.how.builder, batch.anchors, dist, budget, levels)
        if self.auto:
            nodes = self._chosen(self.auto, batch, tree)
            tree = tree.cut(nodes + 1, chain=nodes == 0 or (self.how.builder.spine and nodes <= levels))
        elif line:
            tree = tree.cut(budget + 1, chain=True)
        return Round(self._guarded(batch, dist, tree), noise)

    def _line(self, batch: Batch, dist: DraftDist, nodes: int) -> Tree:
        return chain(batch.anchors, dist.ids[:, :nodes, 0], dist.logp[:, :nodes, 0])

    def _chosen(self, auto: Auto, batch: Batch, tree: Tree) -> int:
        """The measured number of nodes; one copy to the host where the tree lies on a device."""
        packed = torch.cat([tree.parent.double(), tree.depth.double(), tree.logw.double(), tree.n[:, None].double()], 1)
        trees, size = [], tree.nodes
        for row, (line, left) in enumerate(zip(packed.tolist(), batch.left, strict=True)):
            parent, depth = ([int(v) for v in line[i * size : (i + 1) * size]] for i in range(2))
            trees.append((Nodes.of(parent, depth, line[2 * size : -1], int(line[-1]) if left else 1), batch.kinds[row]))
        nodes = auto.choose([t for t, left in zip(trees, batch.left, strict=True) if left], batch.longest)
        self._drafted = trees, nodes
        return min(nodes, tree.nodes - 1)

    def _guarded(self, batch: Batch, dist: DraftDist, tree: Tree) -> Tree:
        """Requests whose logits processors keep state get their chain in place of a tree; then padding."""
        if any(batch.sequential) and not tree.chain:
            line = self._line(batch, dist, min(tree.levels, tree.nodes - 1)).padded(tree.nodes)
            alone = torch.tensor(batch.sequential, device=tree.token.device)
            tree = line.instead_of(tree, alone)
        padded = batch.anchors.is_cuda if self.how.padded is None else self.how.padded
        return tree.padded(bucket(tree.nodes)) if padded and not tree.chain else tree

    def learn(self, taken: Accepted) -> None:
        """What the walk says of the measured choice's promises."""
        if self.auto and self._drafted and self._drafted[1]:
            trees, nodes = self._drafted
            ends = (taken.drafts + 1).tolist()
            paths = [path[:end] for path, end in zip(taken.path.tolist(), ends, strict=True)]
            self.auto.learn(trees, paths, nodes)

    # --- the drafter's context ------------------------------------------------------------------------

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        """Committed rows of the target: features [R, S, F], of which the first counts [R] stay."""
        if self.auto is None or self.auto.drafts():
            self._take_in()
            self.drafter.extend(slots, features, counts, reach)
            return
        last = self._waiting[-1] if self._waiting else None
        # A request without a token in one round has ended: rows of one-row rounds stand gapless side by side.
        if (
            last
            and features.shape[1] == 1
            and isinstance(slots, slice)
            and last.slots == slots
            and last.features[-1].shape[1] == 1
        ):
            last.features.append(features)
            last.counts, last.reach = last.counts + counts, reach
        else:
            self._waiting.append(Waiting(slots, [features], counts, reach))
        if sum(w.rows for w in self._waiting) > WAITING_ROWS:
            self._take_in()

    def _take_in(self) -> None:
        for late in self._waiting:
            self.drafter.extend(late.slots, torch.cat(late.features, 1), late.counts, late.reach)
        self._waiting.clear()

    def drop(self, slots: Slots) -> None:
        """New requests in these slots (an engine gives all its slots at once)."""
        self._waiting.clear()
        self.drafter.drop(slots)
