"""From a step's tensors to results on the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftproof.engine.inflight import InFlight
from draftproof.engine.request import StepResult, StepTree, TokenLogprob
from draftproof.engine.step import Scores, Step


def emit(done: Step, requests: Sequence[InFlight], *, prefill: bool = False) -> list[StepResult]:
    """Requests in the order of the step's rows; their texts grow. One copy to the host, and more only for those that
    want trees or log-probabilities."""
    taken, tree = done.taken, done.tree
    columns = [taken.tokens, *(c[:, None] for c in (taken.counts, taken.drafts, tree.n))]
    wanted = any(one.request.keep_trees for one in requests) and not prefill
    trees = step_trees(done) if wanted else [None] * len(requests)
    told = logprobs(done.scores, taken.counts.tolist()) if done.scores else None
    results = []
    for row, (*tokens, count, drafts, nodes) in enumerate(torch.cat(columns, 1).tolist()):
        one = requests[row]
        emitted = tokens[:count]
        finish = one.take(emitted)
        result = StepResult(
            one.number,
            emitted,
            min(drafts, count),
            finish,
            nodes - 1,
            trees[row] if one.request.keep_trees else None,
            prefill,
            cut(told[row], one.request.logprobs) if told and one.request.logprobs is not None else None,
            one.cached if prefill else 0,
            (one.started or one.arrived) - one.arrived if prefill else 0.0,
        )
        results.append(result)
    return results


def step_trees(done: Step) -> list[StepTree]:
    """The verified trees on the host, without padding."""
    tree, trees = done.tree, []
    columns = [t.tolist() for t in (tree.token, tree.parent, tree.depth, tree.logw, done.taken.path)]
    sizes = zip(tree.n.tolist(), done.taken.drafts.tolist(), strict=True)
    for (n, drafts), *row, path in zip(sizes, *columns, strict=True):
        token, parent, depth, logw = (values[:n] for values in row)
        trees.append(StepTree(token, parent, depth, logw, path[: drafts + 1]))
    return trees


def logprobs(scores: Scores, counts: Sequence[int]) -> list[list[TokenLogprob]]:
    rows = zip(scores.own.tolist(), scores.ids.tolist(), scores.values.tolist(), counts, strict=True)
    return [
        [TokenLogprob(p, list(zip(i, v, strict=True))) for p, i, v in list(zip(own, ids, values, strict=True))[:count]]
        for own, ids, values, count in rows
    ]


def cut(told: list[TokenLogprob], most: int) -> list[TokenLogprob]:
    """A request of a batch may want to see fewer alternatives than another."""
    return [TokenLogprob(t.logprob, t.top[:most]) for t in told]
