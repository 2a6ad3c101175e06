"""The one acceptance rule: walk the tree while a child carries the token that the target chose.

Every emitted token is the target's own choice at the node reached, so the text is plain decoding's text for any tree. A
node is reached only through the target's choices, so the drafter's probabilities play no part.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.spec.tree import Tree


@dataclass(frozen=True)
class Accepted:
    """path int64 [R, K] node indices from the root (K = levels + 1); tokens [R, K] emitted; counts [R]: how many count.

    Emitting token i commits node path[i]: the root and the accepted drafts enter the cache, the last token emitted is
    the next root. drafts [R] counts the accepted drafts among the emitted tokens, before any truncation.
    """

    path: Tensor
    tokens: Tensor
    counts: Tensor
    drafts: Tensor


def walk(tree: Tree, picks: Tensor, stops: Tensor, budget: Tensor) -> Accepted:
    """Accept along `picks` [R, N]; end at the first of `stops` (inclusive) or after `budget` [R] tokens.

    stops: [S] for all, or [R, S], filled up with a number that is no token.

    Truncation happens here, before the commit: the cache never holds a row behind a stop token. Budget 0 (an idle
    slot) emits nothing.
    """
    rows = picks.shape[0]
    node = torch.zeros(rows, dtype=torch.long, device=picks.device)
    alive = torch.ones(rows, dtype=torch.bool, device=picks.device)
    length = torch.zeros_like(node)
    path = [node]
    for _ in range(tree.levels):
        pick = picks.gather(1, node[:, None])
        match = (tree.parent == node[:, None]) & (tree.token == pick)
        alive = alive & match.any(1)
        node = torch.where(alive, match.int().argmax(1), node)
        length = length + alive
        path.append(node)
    route = torch.stack(path, 1)
    tokens = picks.gather(1, route)
    return Accepted(route, tokens, _truncate(tokens, length + 1, stops, budget), length)


def is_stop(tokens: Tensor, stops: Tensor) -> Tensor:
    """bool [R, K] of tokens [R, K]: whether they end their request's text; stops [S] or [R, S]."""
    listed = stops if stops.dim() == 2 else stops[None]
    return (tokens[:, :, None] == listed[:, None]).any(-1)


def _truncate(tokens: Tensor, counts: Tensor, stops: Tensor, budget: Tensor) -> Tensor:
    step = torch.arange(tokens.shape[1], device=tokens.device)
    stop = is_stop(tokens, stops)
    first = torch.where(stop, step, tokens.shape[1]).amin(1)
    return torch.minimum(torch.minimum(counts, first + 1), budget)
