"""Drafters with a known fault, made from a sound one whose weights they share. No torch before one is made."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from draftproof.config.drafter import DrafterSpec

if TYPE_CHECKING:
    from torch import Tensor

    from draftproof.engine.batch import Drafter
    from draftproof.models.cache import Cache, Slots
    from draftproof.models.dflash import DFlashDrafter, DraftDist, Rescore

CACHE_BLOCK = 16  # rows of a block of the engine's prefix cache
SAMPLED_FROM = 256  # best tokens of a position that a sampled draft is drawn from


def respecified(spec: DrafterSpec) -> Callable[[DFlashDrafter], Drafter]:
    def make(sound: DFlashDrafter) -> Drafter:
        from draftproof.models.dflash import DFlashDrafter, Rope

        model = copy.copy(sound.model)  # the weights are shared
        model._modules = dict(sound.model._modules)
        model.spec, model.rope = spec, Rope(spec.rope)
        return DFlashDrafter(model, sound.target)

    return make


def interleaved(sound: DFlashDrafter) -> Drafter:
    """Pairs (0, 1), (2, 3) ... rotate as halves would once the rows of q and k stand in that order."""
    import torch

    from draftproof.models.dflash import DFlashDrafter

    model, width, turned = copy.deepcopy(sound.model), sound.spec.head_dim, sound.spec.rope.rotary_dim
    order = torch.cat([torch.arange(0, turned, 2), torch.arange(1, turned, 2), torch.arange(turned, width)])
    for layer in model.blocks:
        for norm in (layer.self_attn.q_norm, layer.self_attn.k_norm):
            norm.weight.data = norm.weight.data[order]
        for name in ("q_proj", "k_proj"):
            part = getattr(layer.self_attn, name)
            rows = torch.arange(part.out_features).reshape(-1, width)[:, order].flatten()
            made = torch.nn.Linear(part.in_features, part.out_features, bias=part.bias is not None)
            made.weight.data = part.weight.data[rows]
            if part.bias is not None:
                made.bias.data = part.bias.data[rows]
            setattr(layer.self_attn, name, made)
    return DFlashDrafter(model, sound.target)


def mask_zero(sound: DFlashDrafter) -> Drafter:
    from draftproof.models.dflash import DFlashDrafter

    own, weight = sound.target, sound.target.embedding.weight.detach().clone()
    weight[sound.spec.mask_token_id] = 0
    lent: Any = SimpleNamespace(
        device=own.device, dtype=own.dtype, head=own.head, embedding=SimpleNamespace(weight=weight), spec=own.spec
    )
    return DFlashDrafter(sound.model, lent)


Context = Callable[["Tensor", "Tensor", bool], "Tensor"]  # features, counts, is it the prompt? -> features


class Wrapped:
    """The sound drafter with changed inputs or outputs. Features of zeros make keys and values of zeros."""

    def __init__(self, sound: DFlashDrafter, context: Context | None = None, anchor: int | None = None) -> None:
        self.sound, self.context, self.anchor = sound, context, anchor
        self.taps, self.depth = sound.taps, sound.depth

    @property
    def model(self) -> Any:
        return self.sound.model

    @property
    def spec(self) -> DrafterSpec:
        return self.sound.spec

    @property
    def target(self) -> Any:
        return self.sound.target

    @property
    def stores(self) -> list[Cache]:
        return self.sound.stores

    @property
    def cache(self) -> Cache | None:
        return self.sound.cache

    @cache.setter
    def cache(self, cache: Cache | None) -> None:
        self.sound.cache = cache

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        self.sound.allocate(slots=slots, capacity=capacity, chunk=chunk)

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        assert self.sound.cache is not None
        if self.context:
            features = self.context(features, counts, int(self.sound.cache.lengths[slots].max()) == 0)
        self.sound.extend(slots, features, counts, reach)

    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist:
        chosen = anchors if self.anchor is None else anchors * 0 + self.anchor
        return self.sound.draft(slots, chosen, reach, width, rescore)

    def drop(self, slots: Slots) -> None:
        self.sound.drop(slots)


def no_prompt(features: Tensor, counts: Tensor, prompt: bool) -> Tensor:
    return features * 0 if prompt else features


def no_output(features: Tensor, counts: Tensor, prompt: bool) -> Tensor:
    return features if prompt else features * 0


def no_prefix(features: Tensor, counts: Tensor, prompt: bool) -> Tensor:
    """Engines cache whole blocks and leave at least one token of the prompt to compute."""
    if not prompt:
        return features
    features = features.clone()
    for row, count in enumerate(counts.tolist()):
        features[row, : (count - 1) // CACHE_BLOCK * CACHE_BLOCK] = 0
    return features


def no_accepted(features: Tensor, counts: Tensor, prompt: bool) -> Tensor:
    if prompt:
        return features
    features = features.clone()
    features[:, 1:] = 0
    return features


class FirstKeyNorm(Wrapped):
    """docs/vllm_cpu_context_keys.md: context rows of every layer with layer 0's k_norm, the block's rows with their
    own."""

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        layers = self.sound.model.blocks
        own = [layer.self_attn.k_norm for layer in layers]
        try:
            for layer in layers:
                layer.self_attn.k_norm = own[0]
            super().extend(slots, features, counts, reach)
        finally:
            for layer, norm in zip(layers, own, strict=True):
                layer.self_attn.k_norm = norm


def first_key_norm(sound: DFlashDrafter) -> Drafter:
    return FirstKeyNorm(sound)


def anchor_masked(sound: DFlashDrafter) -> Drafter:
    return Wrapped(sound, anchor=sound.spec.mask_token_id)


class Constant(Wrapped):
    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist:
        from draftproof.models.dflash import DraftDist

        ids = anchors.new_zeros(len(anchors), self.depth, width)
        return DraftDist(ids, ids.float())


def constant(sound: DFlashDrafter) -> Drafter:
    return Constant(sound)


class Sampled(Wrapped):
    seed = 0  # of the oracle's draw; the server's is not known

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        import torch

        super().allocate(slots=slots, capacity=capacity, chunk=chunk)
        self.draw = torch.Generator().manual_seed(self.seed)

    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist:
        import torch

        from draftproof.models.dflash import DraftDist

        best = self.sound.draft(slots, anchors, reach, min(SAMPLED_FROM, self.sound.target.spec.vocab_size), rescore)
        noise = -torch.log(-torch.log(torch.rand(best.logp.shape, generator=self.draw).clamp(1e-9, 1 - 1e-7)))
        pick = (best.logp + noise.to(best.logp.device)).argmax(-1, keepdim=True)
        return DraftDist(best.ids.gather(-1, pick), best.logp.gather(-1, pick))


def sampled(sound: DFlashDrafter) -> Drafter:
    return Sampled(sound)
