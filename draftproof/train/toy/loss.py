"""What the toy target is trained for and measured by: the next token, and two drafts of its MTP head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from draftproof.train.toy.depths import draft_rows
from draftproof.train.toy.shape import ToyModel

HELD_ROWS = 32


def losses(model: ToyModel, tokens: Tensor) -> Tensor:
    """tokens [S, T] -> [3]: mean cross-entropy (nats) of the next token, the first draft, the second draft."""
    hidden = model.lm.model(input_ids=tokens, use_cache=False).last_hidden_state
    first, second = draft_rows(model.mtp, model.lm.model, tokens, hidden)
    table = model.embedding
    rows = ((hidden, table, 1, 0), (first, table.detach(), 2, 0), (second, table.detach(), 2, 1))
    found = [
        cross_entropy((h @ w.T).flatten(0, 1).float(), targets(tokens, ahead, skip).flatten())
        for h, w, ahead, skip in rows
    ]
    return torch.stack(found)


@torch.no_grad()
def evaluate(model: ToyModel, held: Tensor) -> dict[str, Any]:
    """Held-out cross-entropies, and how often a draft is what the target itself would choose (greedy, on this text)."""
    found: Tensor = losses(model, held)
    hidden = model.lm.model(input_ids=held, use_cache=False).last_hidden_state
    drafts = draft_rows(model.mtp, model.lm.model, held, hidden)
    chosen, *drafted = [(rows @ model.embedding.T).argmax(-1) for rows in (hidden, *drafts)]
    same = [(draft[:, 1:-1] == chosen[:, 2:]).float().mean().item() for draft in drafted]
    return {"held": [round(x, 4) for x in found.tolist()], "agree": [round(x, 4) for x in same]}


def held_rows(ids: Tensor, length: int) -> Tensor:
    """Up to HELD_ROWS rows of the held-out stream, int64 [rows, length]."""
    count = min(HELD_ROWS, len(ids) // length)
    return ids[: count * length].view(count, length).long()


def targets(tokens: Tensor, ahead: int, skip: int = 0) -> Tensor:
    """Labels [S, T]: the token `ahead` rows on, -100 where there is none and in the first `skip` rows."""
    labels = torch.full_like(tokens, -100)
    labels[:, : tokens.shape[1] - ahead] = tokens[:, ahead:]
    labels[:, :skip] = -100
    return labels
