"""One step of the loop: draft, build the tree, verify it in one target pass, accept, commit."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from draftproof.engine.batch import Batch
from draftproof.engine.propose import Proposer, Round
from draftproof.models.cache import Cache, take_rows
from draftproof.models.target import Target
from draftproof.spec.accept import Accepted, walk
from draftproof.spec.processors import process
from draftproof.spec.sampling import choose
from draftproof.spec.tree import Tree, chain, visibility


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step verified and what it emitted."""

    tree: Tree
    taken: Accepted


def step(batch: Batch, target: Target, cache: Cache, proposer: Proposer | None) -> Step:
    """Advance every request by at least one token. Without logits processors of one's own and without a measured budget
    nothing is copied to the host."""
    reach = batch.longest + (proposer.rows if proposer else 1)
    proposed = Round(chain(batch.anchors))
    if proposer:
        proposed = proposer.propose(batch, cache.lengths[batch.slots], reach)
    tree = proposed.tree
    plan = cache.plan(batch.slots, tree.depth, visibility(tree), reach, causal=tree.chain)
    out = target.forward(tree.token, plan, taps=proposer.drafter.taps if proposer else ())
    picks = choices(batch, out.logits, proposed, plan.positions)
    taken = walk(tree, picks, batch.stops, batch.budget)
    path = None if tree.chain else taken.path
    cache.commit(batch.slots, taken.counts, path)
    if proposer:
        assert out.features is not None
        features = out.features if path is None else take_rows(out.features, path)
        proposer.extend(batch.slots, features, taken.counts, reach)
        proposer.learn(taken)
    advance(batch, taken)
    return Step(tree, taken)


def choices(batch: Batch, logits: Tensor, proposed: Round, positions: Tensor) -> Tensor:
    """The target's own token after every node [R, N], behind all processors."""
    tree, noise = proposed.tree, proposed.noise

    def pick(scores: Tensor, row: int, node: int) -> int:
        own = slice(row, row + 1)
        one = batch.sampling.of(own)
        path = chain(tree.token[own, 0], tree.token[own, 1 : node + 1])
        shaped = scores.expand(1, node + 1, -1)
        return int(choose(shaped, path, positions[own, : node + 1], one)[0, -1])

    stops = batch.stops.tolist() if any(batch.processors) else []
    logits = process(logits, tree, batch.texts, batch.processors, pick, stops, batch.left)
    return choose(logits, tree, positions, batch.sampling, noise)


def advance(batch: Batch, taken: Accepted) -> None:
    """The last emitted token becomes the anchor, a stop token ends the budget, the text's tokens are marked as seen."""
    last = (taken.counts - 1).clamp(min=0)
    token = taken.tokens.gather(1, last[:, None])[:, 0]
    batch.anchors.copy_(torch.where(taken.counts > 0, token, batch.anchors))  # in place: a graph may hold them
    ended = (batch.anchors[:, None] == batch.stops).any(1)
    batch.budget.copy_(torch.where(ended, 0, batch.budget - taken.counts))
    seen = batch.sampling.seen
    if seen is not None:
        kept = torch.arange(taken.tokens.shape[1], device=seen.device) < taken.counts[:, None]
        # Tokens past the count point at the anchor, which is marked anyway.
        seen.scatter_(1, torch.where(kept, taken.tokens, batch.anchors[:, None]), True)
