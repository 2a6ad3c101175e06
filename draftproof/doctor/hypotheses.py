"""Known faults of a drafter in an engine, each as a drafter that has it. No torch is imported before one is made.

A fault is a change of the spec, of the weights' order, or of what goes into and out of the sound drafter. One that
changes nothing in this drafter (a window where no layer slides) is not listed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from draftproof.config.drafter import DrafterSpec, LayerSpec
from draftproof.doctor.faulty import (
    Context,
    Wrapped,
    anchor_masked,
    constant,
    first_key_norm,
    interleaved,
    mask_zero,
    no_accepted,
    no_output,
    no_prefix,
    no_prompt,
    respecified,
    sampled,
)
from draftproof.doctor.rank import HEALTHY

if TYPE_CHECKING:
    from draftproof.engine.batch import Drafter
    from draftproof.models.dflash import DFlashDrafter

BASES = {"1e4": 1e4, "1e5": 1e5, "1e6": 1e6, "1e7": 1e7}


@dataclass(frozen=True)
class Hypothesis:
    """`name` is stable. `by_step`: it depends on where steps end, so it has no number for a position as such."""

    name: str
    sentence: str
    taps: tuple[int, ...]
    make: Callable[[DFlashDrafter], Drafter]
    random: bool = False
    by_step: bool = False


def hypotheses(spec: DrafterSpec, target_layers: int, drafts: int | None = None) -> list[Hypothesis]:
    """HEALTHY first. `drafts`: how many the server drafts a step, if it tells."""
    found = [Hypothesis(HEALTHY, "the engine does what the drafter's config demands", spec.taps, lambda d: d)]
    changes = [*_tap_changes(spec, target_layers), *_layer_changes(spec), *_other_changes(spec, drafts)]
    specs = [spec]
    for name, sentence, changed in changes:
        if changed not in specs:
            specs.append(changed)
            found.append(Hypothesis(name, sentence, changed.taps, respecified(changed)))
    return [*found, *_wrapped(spec)]


Change = tuple[str, str, DrafterSpec]


def _tap_changes(spec: DrafterSpec, layers: int) -> Iterator[Change]:
    def taps(*values: int) -> DrafterSpec:
        return dataclasses.replace(spec, taps=values)

    if min(spec.taps) > 0:
        yield "taps-minus-1", "features are taken one layer too early", taps(*(t - 1 for t in spec.taps))
    if max(spec.taps) < layers - 1:
        yield "taps-plus-1", "features are taken one layer too late", taps(*(t + 1 for t in spec.taps))
    yield "taps-sorted", "features are joined in ascending order of their layers", taps(*sorted(spec.taps))
    yield "taps-reversed", "features are joined in reversed order", taps(*spec.taps[::-1])
    count = len(spec.taps)
    if count > 1 and layers > 4:
        guess = [round(1 + i * (layers - 4) / (count - 1)) for i in range(count)]
        yield "taps-by-formula", "layers are those of the authors' formula, not of the config", taps(*guess)


def _layer_changes(spec: DrafterSpec) -> Iterator[Change]:
    def each(change: Callable[[LayerSpec], LayerSpec]) -> DrafterSpec:
        return dataclasses.replace(spec, layers=tuple(change(layer) for layer in spec.layers))

    def causal(flag: bool) -> DrafterSpec:
        return each(lambda layer: dataclasses.replace(layer, causal=flag))

    yield (
        "window-ignored",
        "sliding layers attend to the whole context",
        each(lambda x: LayerSpec(False, None, x.causal)),
    )
    flipped = each(lambda x: dataclasses.replace(x, causal=not x.causal) if x.sliding else x)
    yield "sliding-causality", "sliding layers are causal where they should not be, or the reverse", flipped
    yield "all-causal", "every layer is causal inside the block", causal(True)
    yield "all-bidirectional", "every layer is bidirectional inside the block", causal(False)


def _other_changes(spec: DrafterSpec, drafts: int | None) -> Iterator[Change]:
    for label, base in BASES.items():
        rope = dataclasses.replace(spec.rope, base=base)
        yield f"rope-base-{label}", f"rotary base {label} instead of {spec.rope.base:g}", _with(spec, rope=rope)
    yield "mask-id-0", "the block is filled with token 0 instead of the mask token", _with(spec, mask_token_id=0)
    size = drafts + 1 if drafts and drafts + 1 != spec.block_size else 2 * spec.block_size
    kind = "longer" if size > spec.block_size else "shorter"
    yield f"block-{kind}", f"blocks of {size} rows, trained were {spec.block_size}", _with(spec, block_size=size)


def _with(spec: DrafterSpec, **changes: Any) -> DrafterSpec:
    return dataclasses.replace(spec, **changes)


def _wrapped(spec: DrafterSpec) -> Iterator[Hypothesis]:
    def context(change: Context) -> Callable[[DFlashDrafter], Drafter]:
        return lambda drafter: Wrapped(drafter, context=change)

    def fault(name: str, sentence: str, make: Callable[[DFlashDrafter], Drafter], **more: bool) -> Hypothesis:
        return Hypothesis(name, sentence, spec.taps, make, **more)

    yield fault("rope-interleaved", "rotary pairs are neighbours instead of halves", interleaved)
    yield fault("mask-embedding-zero", "the mask token's embedding is zero", mask_zero)
    yield fault("no-prompt-context", "the drafter sees nothing of the prompt", context(no_prompt))
    yield fault("no-prefix-context", "the drafter sees nothing of full cache blocks of the prompt", context(no_prefix))
    yield fault("no-output-context", "the drafter sees the prompt only", context(no_output))
    text = "context rows of accepted drafts are empty, only those of anchors are there"
    yield fault("no-accepted-context", text, context(no_accepted), by_step=True)
    if spec.num_layers > 1:
        text = "context keys of every layer are normed with the first layer's weight (vLLM on a CPU)"
        yield fault("context-keys-layer-0", text, first_key_norm)
    yield fault("anchor-masked", "the block starts with a mask instead of the anchor", anchor_masked)
    yield fault("head-zero", "every draft is token 0: a head or weights that were never loaded", constant)
    yield fault(
        "drafts-sampled", "drafts are drawn at temperature 1, apart from the target's choice", sampled, random=True
    )
