"""Replay of the yardstick drafter: its own numbers, and the planted faults of its table."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.config.drafter import DrafterSpec
from draftproof.engine import replay as replay_module
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.replay import Text, replay
from draftproof.models.cache import Slots
from draftproof.models.dflash import DFlash, DFlashDrafter
from draftproof.models.target import Target
from draftproof.models.weights import load_drafter_weights

pytestmark = pytest.mark.real

FULL = os.environ.get("DRAFTPROOF_FULL") == "1"
ALWAYS = {"window ignored", "taps reversed", "causal in sliding layers", "mask id 0", "mask in slot 0"}


@pytest.fixture(scope="module", autouse=True)
def remembered_features() -> Iterator[None]:
    """Features depend on target, text and taps alone: the drafters of this file share them."""
    honest, memory = replay_module.features_of, {}

    def features_of(target: Target, ids: Sequence[int], taps: Sequence[int]) -> Tensor:
        key = (id(target), tuple(ids), tuple(taps))
        if key not in memory:
            memory[key] = honest(target, ids, taps)
        return memory[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_module, "features_of", features_of)
        yield


def counts(acceptance: Acceptance) -> list[int]:
    return [acceptance.emitted, acceptance.steps, *acceptance.reached]


def rates(row: Sequence[int]) -> list[float]:
    return [n / row[1] for n in row[2:]]


def table(yardstick: Path) -> dict[str, list[int]]:
    return json.loads((yardstick / "faults.json").read_text())


def test_healthy_pair_gives_the_yardstick_numbers(
    yardstick: Path, target: Target, drafter: DFlashDrafter, texts: list[Text]
) -> None:
    seen, expected = replay(target, drafter, texts), table(yardstick)["healthy"]
    print(f"\nhealthy: {counts(seen)}, the table has {expected}")
    assert len(texts) == 32
    assert abs(seen.steps / expected[1] - 1) < 0.01
    assert seen.per_position == pytest.approx(rates(expected), abs=0.01)
    assert seen.tau == pytest.approx(expected[0] / expected[1], rel=0.01)
    low, high = seen.interval()
    assert low < seen.tau < high


class MaskInSlotZero(DFlashDrafter):
    """The block starts with a mask instead of the anchor."""

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore=None):  # type: ignore[no-untyped-def]
        return super().draft(slots, torch.full_like(anchors, self.spec.mask_token_id), reach, width, rescore)


class EmptyPrompt(DFlashDrafter):
    """Keys and values of the first rows after `allocate`, the prompt's, are zero."""

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        assert self.cache is not None
        prompt = int(self.cache.lengths[slots].max()) == 0
        super().extend(slots, features, counts, reach)
        if prompt:
            for store in (*self.cache.keys.values(), *self.cache.values.values()):
                store.zero_()


def layers(**changes: object) -> Callable[[DrafterSpec], DrafterSpec]:
    return lambda spec: dataclasses.replace(
        spec, layers=tuple(dataclasses.replace(layer, **changes) if layer.sliding else layer for layer in spec.layers)
    )


def shifted(by: int) -> Callable[[DrafterSpec], DrafterSpec]:
    return lambda spec: dataclasses.replace(spec, taps=tuple(t + by for t in spec.taps))


def healthy(spec: DrafterSpec) -> DrafterSpec:
    return spec


def causal_everywhere(spec: DrafterSpec) -> DrafterSpec:
    return dataclasses.replace(spec, layers=tuple(dataclasses.replace(layer, causal=True) for layer in spec.layers))


FAULTS: dict[str, tuple[type[DFlashDrafter], Callable[[DrafterSpec], DrafterSpec]]] = {
    "window ignored": (DFlashDrafter, layers(window=None)),
    "window 64": (DFlashDrafter, layers(window=64)),
    "taps -1": (DFlashDrafter, shifted(-1)),
    "taps +1": (DFlashDrafter, shifted(1)),
    "guessed taps (1 8 15 22 29)": (
        DFlashDrafter,
        lambda spec: dataclasses.replace(spec, taps=(1, 8, 15, 22, 29)),
    ),
    "taps reversed": (DFlashDrafter, lambda spec: dataclasses.replace(spec, taps=spec.taps[::-1])),
    "causal in sliding layers": (DFlashDrafter, layers(causal=True)),
    "causal in all layers": (DFlashDrafter, causal_everywhere),
    "rope base 1e6": (
        DFlashDrafter,
        lambda spec: dataclasses.replace(spec, rope=dataclasses.replace(spec.rope, base=1e6)),
    ),
    "mask id 0": (DFlashDrafter, lambda spec: dataclasses.replace(spec, mask_token_id=0)),
    "mask in slot 0": (MaskInSlotZero, healthy),
    "prompt context K/V zeroed": (EmptyPrompt, healthy),
}


def test_every_row_of_the_table_is_planted(yardstick: Path) -> None:
    assert {"healthy", *FAULTS} == set(table(yardstick))
    assert set(FAULTS) >= ALWAYS


@pytest.mark.parametrize("name", FAULTS)
def test_planted_fault_moves_the_numbers_as_the_table_says(
    name: str, yardstick: Path, target: Target, drafter: DFlashDrafter, texts: list[Text]
) -> None:
    if not FULL and name not in ALWAYS:
        pytest.skip("DRAFTPROOF_FULL=1 runs all twelve")
    kind, change = FAULTS[name]
    model = DFlash(change(drafter.spec))
    load_drafter_weights(model, yardstick, target)
    seen = replay(target, kind(model.to(target.dtype), target), texts)
    expected, sound = table(yardstick)[name], table(yardstick)["healthy"]
    print(f"\n{name}: {counts(seen)}, the table has {expected}")
    assert abs(seen.steps / expected[1] - 1) < 0.015
    assert seen.per_position == pytest.approx(rates(expected), abs=0.012)
    assert seen.steps > 1.02 * sound[1]  # the yardstick test above would fail on this fault
