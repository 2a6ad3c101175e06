"""Logits processors, evaluated at every node of a tree, and the choice of one token a node.

Order: logit bias, repetition penalty, frequency and presence penalty, temperature, top-k, top-p, min-p; each means what
it does in transformers, and those of the OpenAI API what they do there. Penalties see the committed text and the node's
own ancestors, so a node's logits are those that plain decoding would have there.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from draftproof.spec.noise import gumbel
from draftproof.spec.tree import Tree, visibility

GREEDY_BELOW = 1e-5  # a smaller temperature would overflow the scores; its draw is the argmax anyway


@dataclass
class Sampling:
    """Settings of R requests as device tensors [R]. `seen` bool [R, V] marks committed tokens, for the repetition
    penalty; `counts` float32 [R, V] says how often the answer holds a token, for the other two; `bias` float32 [R, V].

    Temperature 0 is greedy. top_k 0, top_p 1, min_p 0, penalty 1, presence and frequency 0 switch a filter off. Both
    flags, and what is None, are known on the host, so that a step skips the work that no request of the batch asks for.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    penalty: Tensor
    seed: Tensor
    choice: Tensor
    seen: Tensor | None
    sampled: bool  # some temperature > 0
    filtered: bool  # some top-k, top-p or min-p
    presence: Tensor | None = None
    frequency: Tensor | None = None
    counts: Tensor | None = None
    bias: Tensor | None = None

    def of(self, rows: slice) -> Sampling:
        """The settings of these requests alone."""
        columns = [f.name for f in fields(self) if isinstance(getattr(self, f.name), Tensor)]
        return replace(self, **{name: getattr(self, name)[rows] for name in columns})

    @property
    def shaped(self) -> bool:
        """Some request's logits are changed before temperature and filters."""
        return self.seen is not None or self.counts is not None or self.bias is not None

    def commit(self, tokens: Tensor, kept: Tensor, anchors: Tensor) -> None:
        """tokens [R, K], of which `kept` [R, K] are new in the text; anchors [R] are in it."""
        if self.seen is not None:
            self.seen.scatter_(1, torch.where(kept, tokens, anchors[:, None]), True)
        if self.counts is not None:
            self.counts.scatter_add_(1, tokens, kept.to(self.counts.dtype))


def choose(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Tensor | None = None) -> Tensor:
    """The target's own token after every node: logits [R, N, V], positions [R, N] of the nodes -> int64 [R, N].

    Greedy rows take the argmax; the others take argmax(logp / T + gumbel(seed, choice, position + 1)), which is one
    exact draw from the processed distribution. Nodes of one depth share their noise, which may be given as
    [R, levels + 1 or more, V] by depth (`candidates.noise_for`).
    """
    scores = logits.float()
    if sampling.shaped:
        scores = shape(scores, tree, sampling)
    if not sampling.sampled:
        return scores.argmax(-1)
    hot = sampling.temperature > GREEDY_BELOW
    warm = scores / torch.where(hot, sampling.temperature, 1.0)[:, None, None]
    if sampling.filtered:
        warm = keep_likely(warm, sampling.top_k, sampling.top_p, sampling.min_p)
    if noise is None:
        after = torch.arange(1, tree.levels + 2, device=positions.device)
        noise = gumbel(sampling.seed, sampling.choice, positions[:, :1] + after, logits.shape[-1])
    if tree.chain:
        warm = warm.add_(noise[:, : tree.nodes])
    else:
        warm = warm.add_(noise.gather(1, tree.depth[:, :, None].expand_as(warm)))
    return torch.where(hot[:, None, None], warm, scores).argmax(-1)


def shape(scores: Tensor, tree: Tree, sampling: Sampling) -> Tensor:
    """Bias and penalties: scores float32 [R, N, V] at the tree's nodes."""
    if sampling.bias is not None:
        scores = scores + sampling.bias[:, None]
    if sampling.seen is not None:
        scores = penalise(scores, tree, sampling.seen, sampling.penalty)
    if sampling.counts is not None:
        assert sampling.frequency is not None and sampling.presence is not None
        counts = sampling.counts[:, None].repeat(1, tree.nodes, 1)
        below = visibility(tree).clone()  # the root is committed text: only nodes under it are added
        below[:, :, 0] = False
        ids = tree.token[:, None].expand_as(below)
        counts.scatter_add_(2, ids, below.to(counts.dtype))
        scores = scores - sampling.frequency[:, None, None] * counts - sampling.presence[:, None, None] * (counts > 0)
    return scores


def penalise(scores: Tensor, tree: Tree, seen: Tensor, penalty: Tensor) -> Tensor:
    """Divide positive and multiply negative scores of tokens that the text or the node's ancestors hold."""
    rows, nodes, _ = scores.shape
    marked = seen[:, None].repeat(1, nodes, 1)
    ancestors = visibility(tree)
    ids = tree.token[:, None].expand(rows, nodes, nodes)
    # A node that is no ancestor marks the node's own token instead, which is in the text at that node anyway.
    marked.scatter_(2, torch.where(ancestors, ids, tree.token[:, :, None]), True)
    factor = penalty[:, None, None]
    return torch.where(marked, torch.where(scores > 0, scores / factor, scores * factor), scores)


def keep_likely(scores: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what top-k, then top-p, then min-p drop; at least one token stays."""
    ordered, ids = torch.sort(scores, dim=-1, descending=True, stable=True)
    rank = torch.arange(scores.shape[-1], device=scores.device)
    limit = torch.where(top_k > 0, top_k, scores.shape[-1])[:, None, None]
    # Ties with the k-th score stay, as in transformers.
    kth = ordered.gather(-1, (limit - 1).clamp(max=scores.shape[-1] - 1).expand(-1, scores.shape[1], 1))
    ordered = ordered.masked_fill((ordered < kth) & (rank >= limit), -torch.inf)
    probs = ordered.softmax(-1)
    before = probs.cumsum(-1) - probs
    cut = torch.where(top_p < 1, top_p, torch.inf)[:, None, None]  # top_p 1 is off: the running sum may round up to it
    ordered = ordered.masked_fill((before >= cut) & (rank > 0), -torch.inf)
    probs = ordered.softmax(-1)
    ordered = ordered.masked_fill(probs < min_p[:, None, None] * probs[..., :1], -torch.inf)
    return torch.empty_like(scores).scatter_(-1, ids, ordered)
