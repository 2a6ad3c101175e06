"""What the target knows about a batch: tapped features for the drafter, the head's input for soft labels.

Recomputed for every batch: a cache of features costs K * H * 2 bytes a token, the forward costs less than a step.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from draftproof.models.target import FINAL, Target, causal_plan


@dataclass(frozen=True)
class Captured:
    """features [S, T, K * H], final [S, T, H]: the residual stream after the final norm."""

    features: Tensor
    final: Tensor


def capture(target: Target, tokens: Tensor, taps: tuple[int, ...]) -> Captured:
    """One causal pass over padded sequences [S, T]; padding stands right of the text and is seen by no text token."""
    sequences, width = tokens.shape
    cache = target.new_cache(slots=sequences, capacity=width, chunk=width)
    plan = causal_plan(cache, slice(0, sequences), width, width)
    out = target.forward(tokens, plan, taps=(*taps, FINAL), rows=1)
    assert out.features is not None
    hidden = out.features.shape[-1] // (len(taps) + 1)
    features, final = out.features.split([hidden * len(taps), hidden], dim=-1)
    return Captured(features.contiguous(), final.contiguous())


def label_rows(final: Tensor, anchors: Tensor, block: int) -> Tensor:
    """The head's input one position before each label: [S, A, B - 1, H]. Its distribution is the label's."""
    rows = (anchors[:, :, None] + torch.arange(block - 1, device=anchors.device)).clamp(max=final.shape[1] - 1)
    flat = rows.flatten(1)[:, :, None].expand(-1, -1, final.shape[-1])
    return final.gather(1, flat).unflatten(1, rows.shape[1:])
