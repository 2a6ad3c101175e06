"""The MTP head in training: two drafts at every row, with the attention that drafting has.

Row i holds token i + 1 and predicts token i + 2. For the first draft its hidden state is the target's at token i; for
the second it is the head's own output at row i - 1. While drafting, the rows before a second draft are cached from
first drafts, so row i of the second pass sees first-pass rows up to i - 1 and itself. Source: how vLLM 0.32 drafts
(`qwen3_5_mtp.py`: shifted tokens, the target's hidden states; then its own output at the next position).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from draftproof.models.attention import grouped_attention
from draftproof.models.mtp import MTPHead

ATTENTION = "draftproof-mtp-training"  # the key in transformers' attention interface


def _masked(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    visible: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; `visible` bool [1, 1, N, N] comes along as a keyword of the layer's call."""
    assert visible is not None and attention_mask is None
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return grouped_attention(query, key, value, visible, scale).transpose(1, 2).contiguous(), None


def register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION, _masked)


def draft_rows(head: MTPHead, decoder: Any, tokens: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
    """tokens [S, T], hidden [S, T, H] behind the target's final norm -> first and second drafts' rows [S, T, H].

    The gradient ends at `hidden` and at the embedding: the target learns as if it had no head. Rows T - 1 hold no next
    token, row 0 of the second drafts no output before it; `loss.targets` leaves their labels out.
    """
    rows = tokens.shape[1]
    hidden, embedded = hidden.detach(), decoder.embed_tokens(tokens.roll(-1, dims=1)).detach()
    positions = torch.arange(rows, device=tokens.device).expand(3, *tokens.shape)  # time, height, width: all the same
    cos, sin = decoder.rotary_emb(hidden, positions)
    causal = torch.ones(rows, rows, dtype=torch.bool, device=tokens.device).tril()
    first = head(embedded, hidden, (cos, sin), visible=causal[None, None])
    before = torch.cat([first[:, :1], first[:, :-1]], dim=1)
    itself = torch.eye(rows, dtype=torch.bool, device=tokens.device)
    sees = torch.cat([torch.cat([causal, torch.zeros_like(causal)], 1), torch.cat([causal & ~itself, itself], 1)])
    both = head(
        torch.cat([embedded, embedded], 1),
        torch.cat([hidden, before], 1),
        (torch.cat([cos, cos], 1), torch.cat([sin, sin], 1)),
        visible=sees[None, None],
    )
    return first, both[:, rows:]
