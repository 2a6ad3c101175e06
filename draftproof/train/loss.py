"""The loss of a block pass: cross-entropy through the frozen head, weighted along the block.

Against the text (`ce`) or against the target's own distribution at the label (`kd`, the same expectation with less
variance). Weights: static decay exp(-(k - 1) / gamma) (DFlash paper), or D-PACE (arXiv 2605.18810):
w_j = sum_{m >= j} prod_{i <= m} q_i with q_i the smoothed probability of the true token, which follows the expected
accepted length. Rows x vocabulary never exists as a whole: value and gradient are made chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftproof.train.recipe import Loss

CHUNK_ROWS = 4096  # head rows at a time


@dataclass(frozen=True)
class BlockLabels:
    """ids int64 [blocks, B - 1]; valid bool, same shape; final [blocks, B - 1, H]: the target head's input there."""

    ids: Tensor
    valid: Tensor
    final: Tensor


@dataclass(frozen=True)
class BlockStats:
    """Per depth: hits (draft equals text) and prefix hits (all up to here), with the number of blocks. Sums."""

    hits: Tensor
    prefix: Tensor
    blocks: Tensor


def block_loss(rows: Tensor, labels: BlockLabels, head: Tensor, recipe: Loss) -> tuple[Tensor, BlockStats]:
    """rows [blocks, B - 1, H] -> scalar loss (mean over weights) and acceptance counts."""
    loss, hits = _HeadLoss.apply(rows, labels, head, recipe)
    prefix = hits.int().cumprod(1)
    whole = labels.valid.all(1, keepdim=True)  # expected length is only defined on whole blocks
    return loss, BlockStats((hits & whole).sum(0), (prefix * whole).sum(0), whole.sum())


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, labels: BlockLabels, head: Tensor, recipe: Loss) -> tuple[Tensor, Tensor]:
        blocks, depth, _ = rows.shape
        grad = torch.empty_like(rows)
        hits = torch.empty(blocks, depth, dtype=torch.bool, device=rows.device)
        wide = torch.promote_types(rows.dtype, torch.float32)
        total, weight_sum = rows.new_zeros((), dtype=wide), rows.new_zeros((), dtype=wide)
        size = max(1, CHUNK_ROWS // depth)
        for at in range(0, blocks, size):
            part = slice(at, at + size)
            logits = rows[part] @ head.T
            ids, valid = labels.ids[part], labels.valid[part]
            hits[part] = (logits.argmax(-1) == ids) & valid
            logp = logits.log_softmax(-1, dtype=wide)
            true = logp.gather(-1, ids[..., None])[..., 0]
            weight = block_weights(true, valid, recipe)
            if recipe.target == "kd":
                teacher = ((labels.final[part] / recipe.temperature) @ head.T).softmax(-1, dtype=wide)
                loss = -(teacher * logp).sum(-1)
                slope = logp.exp_().sub_(teacher)
            else:
                loss = -true
                slope = logp.exp_().scatter_add_(-1, ids[..., None], torch.full_like(true, -1.0)[..., None])
            total += (loss * weight).sum()
            weight_sum += weight.sum()
            grad[part] = slope.mul_(weight[..., None]).to(rows.dtype) @ head
        scale = weight_sum.clamp(min=1e-6)
        ctx.save_for_backward(grad / scale.to(grad.dtype))
        ctx.mark_non_differentiable(hits)
        return total / scale, hits

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, _hits: Tensor) -> tuple[Tensor, None, None, None]:
        (grad,) = ctx.saved_tensors
        return grad * grad_loss.to(grad.dtype), None, None, None


def block_weights(true_logp: Tensor, valid: Tensor, recipe: Loss) -> Tensor:
    """Weight of every depth [blocks, B - 1]; labels that do not exist weigh nothing."""
    if recipe.weights == "decay":
        depth = torch.arange(true_logp.shape[1], device=true_logp.device)
        return torch.exp(-depth / recipe.gamma) * valid
    smooth = ((1 - recipe.alpha) * true_logp.exp() + recipe.alpha) * valid
    reach = smooth.cumprod(1)
    return reach.flip(1).cumsum(1).flip(1) * valid
