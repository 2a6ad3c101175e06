"""From a drafter's pass to the tree of a round: how much to draft, with which candidates, in which shape.

`Speculation` is what was asked for; `Proposer` is that for one engine. While the measured budget says that plain
decoding wins, the drafter is not run at all: the committed rows' features wait until it is asked again.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from draftproof.engine.batch import Batch, Drafter
from draftproof.errors import UserError
from draftproof.models.cache import Slots
from draftproof.models.dflash import DraftDist
from draftproof.spec.accept import Accepted
from draftproof.spec.budget import MODES, MOST_NODES, Auto, Nodes
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
class Watched:
    """Trees of the measured choice whose fate is not told yet: the first `nodes` behind the root were verified; with 0
    none was, and the target's plain text goes on to tell which of them it would have followed."""

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
class Proposer:
    """A drafter under one `Speculation`. auto: the measured choice, for the budget "auto"."""

    drafter: Drafter
    how: Speculation
    vocab: int
    auto: Auto | None = None
    _waiting: list[Waiting] = field(default_factory=list)
    _watched: Watched | None = None  # what the measured choice waits to hear of

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
        if levels < 1 or self.how.budget == "none":
            return Round(chain(batch.anchors))
        if self.auto and not self.auto.drafts():
            self.auto.plain(1.0)
            return Round(chain(batch.anchors))
        self._take_in()
        self._told(over=False)
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
        whole = [t.double() for t in (tree.token, tree.parent, tree.depth)]
        packed = torch.cat([*whole, tree.logw.double(), tree.n[:, None].double()], 1)
        trees, size, usual = [], tree.nodes, [not s for s in batch.sequential] or [True] * len(batch.left)
        for row, (line, left) in enumerate(zip(packed.tolist(), batch.left, strict=True)):
            token, parent, depth = ([int(v) for v in line[i * size : (i + 1) * size]] for i in range(3))
            n = int(line[-1]) if left and usual[row] else 1  # a request that drafts a chain of its own teaches nothing
            trees.append((Nodes.of(token, parent, depth, line[3 * size : -1], n), batch.kinds[row]))
        nodes = auto.choose([t for t, left in zip(trees, batch.left, strict=True) if left], batch.longest)
        self._watched = Watched(trees, nodes, [[0] for _ in trees], [bool(n) for n in batch.left])
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
        """What the walk, or in a pause the plain text, says of the measured choice's promises."""
        watched = self._watched
        if self.auto is None or watched is None:
            return
        if watched.nodes:
            ends = (taken.drafts + 1).tolist()
            paths = [path[:end] for path, end in zip(taken.path.tolist(), ends, strict=True)]
            self.auto.learn(watched.trees, paths, watched.nodes)
            self._watched = None
            return
        counts = taken.counts.tolist()
        watched.go_on([tokens[:count] for tokens, count in zip(taken.tokens.tolist(), counts, strict=True)])
        if not any(watched.open):
            self._told(over=True)

    def _told(self, over: bool) -> None:
        """The watched trees' fate is known as far as it will be; unless it is over, their last nodes are still open."""
        if self.auto and self._watched and not self._watched.nodes:
            self.auto.learn(self._watched.trees, self._watched.paths, self.auto.most, over)
        self._watched = None

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
        self._watched = None
        self.drafter.drop(slots)
