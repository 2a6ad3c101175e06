"""Requests that decode together, and what the loop needs of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from draftproof.engine.inflight import InFlight
from draftproof.models.cache import Cache, Slots
from draftproof.models.dflash import DraftDist, Rescore
from draftproof.models.target import Tap
from draftproof.spec.processors import Processor
from draftproof.spec.sampling import GREEDY_BELOW, Sampling

NO_TOKEN = -1  # fills rows of stop tokens


class Store(Protocol):
    """What a model keeps of every request, by slot (`models/cache.py`, `models/mtp.py`). Lists of tensors are opaque,
    but for this: in what `save` gives, dimension 1 is the token."""

    @property
    def stateful(self) -> bool: ...
    def drop(self, slots: Slots) -> None: ...
    def fork(self, source: int, slots: Slots, reach: int | None = None) -> None: ...
    def swap(self, one: int, other: int, reach: int) -> None: ...
    def resize(self, slots: int, capacity: int) -> None: ...
    def bytes_a_slot(self, capacity: int) -> int: ...
    def save(self, slot: int, begin: int, end: int) -> list[Tensor]: ...
    def load(self, slot: int, begin: int, saved: Sequence[Tensor]) -> None: ...
    def state(self, slot: int) -> list[Tensor]: ...
    def restore(self, slot: int, length: int, state: Sequence[Tensor]) -> None: ...


class Drafter(Protocol):
    """What the loop needs of a drafter; it knows none by name."""

    @property
    def taps(self) -> tuple[Tap, ...]: ...  # the target's features that it reads
    @property
    def depth(self) -> int: ...  # drafts per pass
    @property
    def stores(self) -> Sequence[Store]: ...

    cache: Cache | None

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None: ...
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None: ...
    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist: ...
    def drop(self, slots: Slots) -> None: ...


@dataclass
class Batch:
    """One request a slot, advanced by `step`; tensors [R] live on the device.

    The host knows a bound on committed rows of any slot (`longest`), the tokens that every request may still emit
    (`left`, 0 for an ended one), the nodes that each may have drafted (`caps`, None: as many as the engine likes), and,
    where logits processors of one's own ask for it, the committed text.
    """

    slots: slice
    anchors: Tensor  # last emitted token: not yet in the cache
    budget: Tensor  # tokens still allowed; 0 for a finished request
    stops: Tensor  # token ids that end a text: [S] for all, or [R, S] filled up with NO_TOKEN
    sampling: Sampling
    longest: int
    left: list[int] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)  # what a calibration of acceptance tells apart
    processors: Sequence[Sequence[Processor]] = ()
    texts: Sequence[list[int]] = ()  # with processors only
    caps: Sequence[str | int | None] = ()
    logprobs: int | None = None  # the most that a request wants to see of every token

    @property
    def sequential(self) -> list[bool]:
        """Requests with a processor that keeps state from call to call."""
        return [any(p.stateful for p in own) for own in self.processors]

    @property
    def lines(self) -> list[bool]:
        """Requests that get a chain in place of a tree."""
        chains = [cap == "chain" for cap in self.caps] or [False] * len(self.left)
        return [a or b for a, b in zip(chains, self.sequential or chains, strict=True)]

    @property
    def undrafted(self) -> bool:
        """Nobody wants a draft."""
        return bool(self.caps) and all(cap in ("none", 0) for cap in self.caps)


def batch_of(requests: Sequence[InFlight], slots: slice, vocab: int, device: torch.device, *, aware: bool) -> Batch:
    """Requests in the order of their slots, at the text they have now. aware: candidates are ranked with the noise."""
    stops = [list(r.request.stop_ids) for r in requests]
    widest = max(map(len, stops))
    own = any(r.request.processors for r in requests)
    caps = [r.request.budget for r in requests]
    return Batch(
        slots=slots,
        anchors=torch.tensor([r.ids[-1] for r in requests], device=device),
        budget=torch.tensor([r.left for r in requests], device=device),
        stops=torch.tensor([s + [NO_TOKEN] * (widest - len(s)) for s in stops], dtype=torch.long, device=device),
        sampling=sampling_of(requests, vocab, device),
        longest=max(len(r.ids) for r in requests),
        left=[r.left for r in requests],
        kinds=[kind_of(r, aware) for r in requests],
        processors=[tuple(r.request.processors) for r in requests] if own else (),
        texts=[r.ids for r in requests] if own else (),
        caps=caps if any(cap is not None for cap in caps) else (),
        logprobs=max((r.request.logprobs for r in requests if r.request.logprobs is not None), default=None),
    )


def kind_of(one: InFlight, aware: bool) -> str:
    """Requests whose drafts are accepted alike: by temperature, and by how candidates are ranked."""
    temperature = one.params.temperature
    return f"T {temperature:.1f}" + (", noise-aware" if aware and temperature > GREEDY_BELOW else "")


def sampling_of(requests: Sequence[InFlight], vocab: int, device: torch.device) -> Sampling:
    params = [r.params for r in requests]

    def column(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.tensor([getattr(p, name) for p in params], dtype=dtype, device=device)

    sampling = Sampling(
        temperature=column("temperature"),
        top_k=column("top_k", torch.long),
        top_p=column("top_p"),
        min_p=column("min_p"),
        penalty=column("repetition_penalty"),
        seed=column("seed", torch.long),
        choice=column("choice", torch.long),
        seen=None,
        sampled=any(p.temperature > GREEDY_BELOW for p in params),
        filtered=any(p.top_k or p.top_p < 1 or p.min_p > 0 for p in params),
    )
    if any(p.repetition_penalty != 1 for p in params):
        sampling.seen = torch.zeros(len(params), vocab, dtype=torch.bool, device=device)
        for row, one in enumerate(requests):
            sampling.seen[row, one.ids] = True
    if any(p.presence_penalty or p.frequency_penalty for p in params):
        sampling.presence, sampling.frequency = column("presence_penalty"), column("frequency_penalty")
        sampling.counts = torch.zeros(len(params), vocab, device=device)
        for row, one in enumerate(requests):
            answer = torch.tensor(one.ids[len(one.request.prompt_ids) :], dtype=torch.long, device=device)
            sampling.counts[row].scatter_add_(0, answer, torch.ones(len(answer), device=device))
    if any(p.logit_bias for p in params):
        sampling.bias = torch.zeros(len(params), vocab, device=device)
        for row, p in enumerate(params):
            for token, bias in p.logit_bias.items():
                sampling.bias[row, token] = bias
    return sampling
