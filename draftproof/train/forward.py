"""The drafter's forward in training: all blocks of all anchors of a sequence in one pass.

The same layer functions as in `models/dflash.py`; what differs is who sees whom. A block of anchor a sees the context
strictly before a (the anchor's own feature does not exist yet when the drafter is served), within the layer's window,
and itself; never another block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.config.drafter import LayerSpec
from draftproof.models.attention import grouped_attention
from draftproof.models.dflash import DFlash, embed
from draftproof.models.target import Target


def block_rows(model: DFlash, target: Target, tokens: Tensor, features: Tensor, anchors: Tensor) -> Tensor:
    """tokens [S, T], features [S, T, K * H], anchors [S, A] -> normed rows 1..B-1 of every block [S, A, B - 1, H]."""
    spec, (sequences, count) = model.spec, anchors.shape
    block = torch.arange(spec.block_size, device=anchors.device)
    positions = (anchors[:, :, None] + block).flatten(1)  # [S, A * B]
    ids = torch.full((sequences, count, spec.block_size), spec.mask_token_id, device=anchors.device)
    ids[:, :, 0] = tokens.gather(1, anchors)
    x = embed(ids.flatten(1), target, spec).to(features.dtype)
    context = model.project(features)
    where = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
    cos_c, sin_c = model.rope(where, features.dtype)
    cos_b, sin_b = model.rope(positions, features.dtype)
    masks = {kind: training_mask(kind, anchors, positions, tokens.shape[1], spec.block_size) for kind in spec.layers}
    for layer, kind in zip(model.blocks, spec.layers, strict=True):
        ck, cv = layer.context_kv(context, cos_c, sin_c)
        q, k, v = layer.block_qkv(x, cos_b, sin_b)
        keys, values = torch.cat([ck, k], dim=2), torch.cat([cv, v], dim=2)
        x = layer.finish(x, grouped_attention(q, keys, values, masks[kind], q.shape[-1] ** -0.5))
    return model.norm(x).unflatten(1, (count, spec.block_size))[:, :, 1:]


def training_mask(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    """bool [S, 1, A * B, T + A * B]."""
    limit = anchors.repeat_interleave(block, dim=1)[:, :, None]
    at = torch.arange(context, device=anchors.device)
    sees_context = at < limit
    if kind.window is not None:
        sees_context = sees_context & (at > positions[:, :, None] - kind.window)
    row = torch.arange(positions.shape[1], device=anchors.device)
    same = row[:, None] // block == row // block
    if kind.causal:
        same = same & (row[:, None] >= row)
    return torch.cat([sees_context, same.expand(anchors.shape[0], -1, -1)], dim=2)[:, None]
