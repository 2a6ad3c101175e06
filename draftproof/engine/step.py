"""One step of the loop: draft, build the tree, verify it in one target pass, accept, commit."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from draftproof.engine.batch import Batch
from draftproof.engine.propose import Proposer, Round
from draftproof.models.cache import Cache, take_rows
from draftproof.models.target import Target
from draftproof.spec.accept import Accepted, is_stop, walk
from draftproof.spec.processors import process
from draftproof.spec.sampling import choose
from draftproof.spec.tree import Tree, chain, visibility


@dataclasses.dataclass(frozen=True)
class Scores:
    """Log-probabilities of the emitted tokens [R, K], and of the k likeliest in their place: ids, values [R, K, k]."""

    own: Tensor
    ids: Tensor
    values: Tensor


@dataclasses.dataclass(frozen=True)
class Step:
    """What a step verified and what it emitted."""

    tree: Tree
    taken: Accepted
    scores: Scores | None = None


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
    return Step(tree, taken, None if batch.logprobs is None else scores_of(out.logits, taken, batch.logprobs))


def choices(batch: Batch, logits: Tensor, proposed: Round, positions: Tensor) -> Tensor:
    """The target's own token after every node [R, N], behind all processors."""
    tree, noise = proposed.tree, proposed.noise

    def pick(scores: Tensor, row: int, node: int) -> int:
        own = slice(row, row + 1)
        one = batch.sampling.of(own)
        path = chain(tree.token[own, 0], tree.token[own, 1 : node + 1])
        shaped = scores.expand(1, node + 1, -1)
        return int(choose(shaped, path, positions[own, : node + 1], one)[0, -1])

    if any(batch.processors):
        stops = batch.stops.expand(tree.token.shape[0], -1).tolist()
        logits = process(logits, tree, batch.texts, batch.processors, pick, stops, batch.left)
    return choose(logits, tree, positions, batch.sampling, noise)


def advance(batch: Batch, taken: Accepted) -> None:
    """The last emitted token becomes the anchor, a stop token ends the budget, penalties see the new tokens."""
    last = (taken.counts - 1).clamp(min=0)
    token = taken.tokens.gather(1, last[:, None])[:, 0]
    batch.anchors.copy_(torch.where(taken.counts > 0, token, batch.anchors))  # in place: a graph may hold them
    ended = is_stop(batch.anchors[:, None], batch.stops)[:, 0]
    batch.budget.copy_(torch.where(ended, 0, batch.budget - taken.counts))
    if batch.sampling.shaped:
        kept = torch.arange(taken.tokens.shape[1], device=taken.tokens.device) < taken.counts[:, None]
        batch.sampling.commit(taken.tokens, kept, batch.anchors)


def scores_of(logits: Tensor, taken: Accepted, most: int) -> Scores:
    """Of the model itself: logits [R, N, V] before anything changed them, at the nodes of the accepted path."""
    rows = take_rows(logits, taken.path).float().log_softmax(-1)
    values, ids = rows.topk(most, dim=-1) if most else (rows[..., :0], taken.tokens[..., None][..., :0])
    return Scores(rows.gather(2, taken.tokens[..., None])[..., 0], ids, values)
