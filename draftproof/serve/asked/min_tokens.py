"""The logits processor of `min_tokens`: no stop token before so many tokens have come."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor


class MinTokens:
    """prompt: its tokens; least: tokens of the answer, the stop token not counted."""

    stateful = False

    def __init__(self, prompt: int, least: int, stop_ids: Sequence[int]) -> None:
        self.until, self.stop_ids = prompt + least, list(stop_ids)

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        if len(ids) < self.until:
            scores[self.stop_ids] = -math.inf
        return scores
