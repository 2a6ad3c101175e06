"""One step of the loop: draft, build the tree, verify it in one target pass, accept, commit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from draftproof.models.cache import Cache, Slots, take_rows
from draftproof.models.dflash import DraftDist
from draftproof.models.target import Tap, Target
from draftproof.spec.accept import Accepted, walk
from draftproof.spec.sampling import Sampling, choose
from draftproof.spec.tree import Tree, chain, visibility


class Drafter(Protocol):
    """What the loop needs of a drafter; it knows none by name."""

    @property
    def taps(self) -> tuple[Tap, ...]: ...  # the target's features that it reads
    @property
    def depth(self) -> int: ...  # drafts per pass

    cache: Cache | None

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None: ...
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None: ...
    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1) -> DraftDist: ...
    def drop(self, slots: Slots) -> None: ...


@dataclass
class Batch:
    """Requests in flight, one a slot. Filled at prefill, advanced by `step`; tensors [R] live on the device."""

    slots: slice
    anchors: Tensor  # last emitted token: not yet in the cache
    budget: Tensor  # tokens still allowed; 0 for a finished request
    stops: Tensor  # [S] token ids that end a text
    sampling: Sampling
    longest: int  # host-side bound on committed rows of any slot


def step(batch: Batch, target: Target, cache: Cache, drafter: Drafter | None) -> Accepted:
    """Advance every request by at least one token. Device tensors only: nothing is copied to the host."""
    nodes = 1 + (drafter.depth if drafter else 0)
    reach = batch.longest + nodes
    tree = propose(batch, drafter, reach)
    plan = cache.plan(batch.slots, tree.depth, visibility(tree), reach, causal=tree.chain)
    out = target.forward(tree.token, plan, taps=drafter.taps if drafter else ())
    picks = choose(out.logits, tree, plan.positions, batch.sampling)
    taken = walk(tree, picks, batch.stops, batch.budget)
    path = None if tree.chain else taken.path
    cache.commit(batch.slots, taken.counts, path)
    if drafter:
        assert out.features is not None
        features = out.features if path is None else take_rows(out.features, path)
        drafter.extend(batch.slots, features, taken.counts, reach)
    advance(batch, taken)
    return taken


def propose(batch: Batch, drafter: Drafter | None, reach: int) -> Tree:
    if drafter is None:
        return chain(batch.anchors)
    dist = drafter.draft(batch.slots, batch.anchors, reach)
    return chain(batch.anchors, dist.ids[..., 0], dist.logp[..., 0])


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
