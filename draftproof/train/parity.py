"""Trained acceptance = served acceptance: the same walk, once with drafts of the training forward, once as served.

The training forward drafts at every anchor of a text in one masked pass; `engine/replay.py` drafts anchor by anchor
on the cache. If the two disagree, what was trained is not what is served.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftproof.engine.acceptance import Acceptance, TextAcceptance
from draftproof.engine.replay import Text
from draftproof.models.dflash import DFlash, head_logits
from draftproof.models.target import Target
from draftproof.train.capture import capture
from draftproof.train.forward import block_rows


@torch.no_grad()
def trained_acceptance(model: DFlash, target: Target, texts: Sequence[Text]) -> Acceptance:
    """Walk the texts with the drafts of the training forward."""
    return Acceptance([_walk(model, target, text) for text in texts], model.spec.block_size - 1)


def _walk(model: DFlash, target: Target, text: Text) -> TextAcceptance:
    tokens = torch.tensor([text.ids], device=target.device)
    first, last = len(text.prompt_ids), len(text.ids) - 1
    anchors = torch.arange(first, last, device=target.device)[None]
    known = capture(target, tokens, model.spec.taps)
    rows = block_rows(model, target, tokens, known.features, anchors)
    drafts = head_logits(rows, target, model.spec).argmax(-1)[0].tolist()
    result, at = TextAcceptance(), first
    while at < last:
        truth = text.ids[at + 1 : at + model.spec.block_size]
        accepted = 0
        while accepted < len(truth) and drafts[at - first][accepted] == truth[accepted]:
            accepted += 1
        result.accepted.append(accepted)
        at += accepted + 1
    return result
