"""Requests in flight, and what the loop needs of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from draftproof.models.cache import Cache, Slots
from draftproof.models.dflash import DraftDist, Rescore
from draftproof.models.target import Tap
from draftproof.spec.processors import Processor
from draftproof.spec.sampling import Sampling


class Drafter(Protocol):
    """What the loop needs of a drafter; it knows none by name."""

    @property
    def taps(self) -> tuple[Tap, ...]: ...  # the target's features that it reads
    @property
    def depth(self) -> int: ...  # drafts per pass

    cache: Cache | None

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None: ...
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None: ...
    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist: ...
    def drop(self, slots: Slots) -> None: ...


@dataclass
class Batch:
    """One request a slot. Filled at prefill, advanced by `step`; tensors [R] live on the device.

    The host knows a bound on committed rows of any slot (`longest`), the tokens that every request may still emit
    (`left`, 0 for an ended one), and, where logits processors of one's own ask for it, the committed text.
    """

    slots: slice
    anchors: Tensor  # last emitted token: not yet in the cache
    budget: Tensor  # tokens still allowed; 0 for a finished request
    stops: Tensor  # [S] token ids that end a text
    sampling: Sampling
    longest: int
    left: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # what a calibration of acceptance tells apart
    processors: Sequence[Sequence[Processor]] = ()
    texts: list[list[int]] = field(default_factory=list)  # with processors only

    @property
    def sequential(self) -> list[bool]:
        """Requests with a processor that keeps state from call to call."""
        return [any(p.stateful for p in own) for own in self.processors]
