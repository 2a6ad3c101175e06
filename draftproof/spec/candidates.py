"""Noise-aware drafting: candidates ranked by what the target will choose by, not by the drafter's probability alone.

At temperature T the target takes argmax(logp / T + noise), and the noise of a position is known before anything is
drafted (`noise.py`). Drafts ranked by the drafter's logp / T plus that same noise, behind the same penalty and filters,
meet it far more often. The output is a function of the target and the seed alone, so it stays exact. The coupling is
that of Daliri et al., arXiv 2408.07978.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.models.dflash import Rescore
from draftproof.spec.noise import gumbel
from draftproof.spec.sampling import GREEDY_BELOW, Sampling, keep_likely

SCALE = 1.2  # of the drafter's error, in units of the noise: measured on two drafters, docs/log.md


def noise_for(sampling: Sampling, anchors: Tensor, depth: int, vocab: int) -> Tensor | None:
    """Noise float32 [R, depth + 1, V] of the tokens behind anchors at positions [R]; None when nobody samples."""
    if not sampling.sampled:
        return None
    after = torch.arange(1, depth + 2, device=anchors.device)
    return gumbel(sampling.seed, sampling.choice, anchors[:, None] + after, vocab)


def noise_aware(sampling: Sampling, noise: Tensor | None) -> Rescore | None:
    """What turns the drafter's logits into scores; None where plain logits are right already."""
    if noise is None and not sampling.shaped:
        return None

    def rescore(logits: Tensor, first: int) -> Tensor:
        """logits float32 [R, n, V] of the depths from `first` on -> scores of the same shape."""
        if sampling.bias is not None:
            logits = logits + sampling.bias[:, None]
        if sampling.seen is not None:
            factor = sampling.penalty[:, None, None]
            penalised = torch.where(logits > 0, logits / factor, logits * factor)
            logits = torch.where(sampling.seen[:, None], penalised, logits)
        if sampling.counts is not None:
            assert sampling.frequency is not None and sampling.presence is not None
            counts = sampling.counts[:, None]
            taken = sampling.frequency[:, None, None] * counts + sampling.presence[:, None, None] * (counts > 0)
            logits = logits - taken
        if noise is None:
            return logits
        hot = (sampling.temperature > GREEDY_BELOW)[:, None, None]
        warm = logits / torch.where(hot, sampling.temperature[:, None, None], 1.0)
        if sampling.filtered:
            warm = keep_likely(warm, sampling.top_k, sampling.top_p, sampling.min_p)
        warm = (warm + noise[:, first : first + logits.shape[1]]) / SCALE
        return torch.where(hot, warm, logits)

    return rescore
