"""Attention over our cache, for our drafter and, through transformers' attention interface, for any target.

A target's attention module calls `cached_attention` with its new keys and values; the cache plan of the forward comes
along as the keyword `draftproof` of the model call, never as a global. Every keyword that would change the result and
is not implemented here is refused by name: a soft cap or a sink that is dropped silently is the disease we diagnose.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from draftproof.errors import UserError
from draftproof.models.plan import Plan

FEW_ROWS, LONG_CONTEXT = 128, 1024  # see `_few_rows`
NAME = "draftproof"  # the key in transformers' attention interface

# Keywords that carry nothing we need: bookkeeping of transformers' own caches and masks.
HARMLESS = frozenset(
    {
        "position_ids",
        "position_embeddings",
        "cache_position",
        "past_key_value",
        "past_key_values",
        "use_cache",
        "cache",
        "output_attentions",
        "output_hidden_states",
        "return_dict",
        "logits_to_keep",
        "output_router_logits",
        "is_causal",
    }
)


def grouped_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """softmax(q k^T * scale) v with grouped heads: q [R, H, N, d], k, v [R, KV, L, d], mask [R, 1, N, L] -> as q.

    The query heads of a group become rows of their key head, so no kernel has to repeat keys and values.
    """
    return folded_attention(query, key, value, mask.repeat(1, 1, query.shape[1] // key.shape[1], 1), scale)


def folded_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """The same with a mask that is already repeated for the folded rows (`Plan.folded_mask`), or None: all visible."""
    batch, heads, nodes, width = query.shape
    folded = query.reshape(batch, key.shape[1], heads // key.shape[1] * nodes, width)
    if _few_rows(folded, key):
        out = product_attention(folded, key, value, mask, scale)
    else:
        out = scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=scale)
    return out.reshape(batch, heads, nodes, width)


def _few_rows(query: Tensor, key: Tensor) -> bool:
    """A decoding step over a long context in 16 bits on a GPU. Fused kernels give a row block to one multiprocessor,
    so a few rows leave most of them idle; two plain products use all."""
    few = query.shape[2] <= FEW_ROWS and key.shape[2] >= LONG_CONTEXT
    return few and query.is_cuda and query.dtype in (torch.bfloat16, torch.float16)


def product_attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """softmax(q k^T * scale) v as two products, scores and softmax in float32: q [R, KV, N, d], mask [R, 1, N, L]."""
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    scores = torch.bmm(q, k.transpose(1, 2), out_dtype=torch.float32).unflatten(0, query.shape[:2]) * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    return torch.bmm(scores.softmax(-1).to(value.dtype).flatten(0, 1), v).unflatten(0, query.shape[:2])


def attend(plan: Plan, layer: int, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Write the nodes' new rows into the layer's cache and attend to all that the plan lets them see."""
    keys, values = plan.write(layer, key, value)
    mask = plan.folded_mask(layer, query.shape[1] // key.shape[1])
    return folded_attention(query, keys, values, mask, scale)


def cached_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    draftproof: Plan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature: new q, k, v [R, heads, N, d] -> ([R, N, heads, d], None)."""
    _refuse_unknown(module, dropout, attention_mask, kwargs)
    if draftproof is None:
        raise AssertionError("the model was called without its cache plan (keyword draftproof)")
    layer: int = module.layer_idx  # type: ignore[assignment]
    planned = draftproof.cache.windows[layer]
    if sliding_window != planned:
        raise UserError(
            "target-unsupported",
            f"layer {layer} attends with window {sliding_window}, its config promised {planned}",
            "report the model type: its config.json and its module disagree about sliding windows",
        )
    out = attend(draftproof, layer, query, key, value, query.shape[-1] ** -0.5 if scaling is None else scaling)
    return out.transpose(1, 2).contiguous(), None


def _refuse_unknown(module: nn.Module, dropout: float, mask: Tensor | None, kwargs: dict[str, Any]) -> None:
    unknown = sorted(k for k, v in kwargs.items() if k not in HARMLESS and v is not None)
    if dropout:
        unknown.append("dropout")
    if mask is not None:
        unknown.append("attention_mask")
    if unknown:
        raise UserError(
            "target-unsupported",
            f"{type(module).__name__} asks for attention features that are not implemented: {', '.join(unknown)}",
            "use a target without them; a dropped keyword would change the text without a word",
        )


def register() -> None:
    """Make `attn_implementation="draftproof"` known to transformers (safe to repeat)."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, cached_attention)
