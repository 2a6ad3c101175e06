"""Logits processors of one's own, in the loop: evaluated at every node of a draft tree, or along a chain.

A processor that is a function of the text alone is asked at every node, with the committed text and the node's own
ancestors. One that keeps state from call to call (`stateful`) cannot be asked about texts that never come to be: its
request drafts a chain, and it is asked position by position, only as far as the target follows the drafts, which is
exactly when plain decoding would ask it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from draftproof.spec.tree import Tree


class Processor(Protocol):
    """stateful: a call changes what a later call answers."""

    stateful: bool

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        """Token ids of the text so far, scores float32 [V] of the next token -> scores [V]; before penalty and
        temperature. `scores` may be changed in place."""
        ...


def process(
    logits: Tensor,
    tree: Tree,
    texts: Sequence[Sequence[int]],
    processors: Sequence[Sequence[Processor]],
    pick: Callable[[Tensor, int, int], int],
    stops: Sequence[Sequence[int]] = (),
    left: Sequence[int] = (),
) -> Tensor:
    """logits [R, N, V] behind each request's own processors. pick(scores [V], request, node) -> the token that the
    target would choose there: how far to ask a stateful processor. It is not asked behind a token of its request's
    `stops`, nor for more than the `left` tokens of its request. Nodes that cannot be reached keep their logits."""
    if not any(processors):
        return logits
    logits = logits.float().clone()
    tokens, parents, sizes = tree.token.tolist(), tree.parent.tolist(), tree.n.tolist()
    for row, own in enumerate(processors):
        if not own or (left and left[row] == 0):
            continue
        paths: list[list[int]] = [list(texts[row])]
        for node in range(1, sizes[row]):
            paths.append([*paths[parents[row][node]], tokens[row][node]])
        for node, ids in enumerate(paths):
            for processor in own:
                logits[row, node] = processor(ids, logits[row, node])
            if not any(p.stateful for p in own):
                continue
            ended = (
                node + 1 == len(paths)
                or (bool(left) and node + 1 >= left[row])
                or (bool(stops) and tokens[row][node + 1] in stops[row])
            )
            if ended or pick(logits[row, node], row, node) != tokens[row][node + 1]:
                break
    return logits
