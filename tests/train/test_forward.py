"""What is trained is what is served: the one masked pass of training equals drafting anchor by anchor on the cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.config.drafter import LayerSpec
from draftproof.engine.replay import Text, features_of, replay
from draftproof.models.dflash import DFlashDrafter
from draftproof.train import forward
from draftproof.train.capture import capture, label_rows
from draftproof.train.data import Example, make_batch
from draftproof.train.forward import block_rows
from draftproof.train.loop import batch_loss
from draftproof.train.parity import trained_acceptance
from tests import tiny
from tests.train import copying

SHAPES: dict[str, dict[str, Any]] = {
    "sliding and full, bidirectional": {},
    "all causal": {"is_causal": True},
    "sliding layers causal": {},
    "block as wide as the window": {"block_size": 6},
}
IDS = [int(i) for i in torch.randint(4, tiny.VOCAB, (26,), generator=torch.Generator().manual_seed(3))]
ANCHORS = [1, 4, 9, 15, 16, 24]


def drafter(shape: str, kind: str = "llama") -> DFlashDrafter:
    pair = tiny.drafter(tiny.target(kind), **SHAPES[shape])
    if shape == "sliding layers causal":
        layers = tuple(dataclasses.replace(layer, causal=layer.sliding) for layer in pair.spec.layers)
        pair.model.spec = pair.spec = dataclasses.replace(pair.spec, layers=layers)
    return pair


def served_rows(drafter: DFlashDrafter, ids: list[int], anchor: int) -> Tensor:
    """Normed rows 1..B-1 as the cached drafter computes them for one anchor [B - 1, H], in full precision."""
    drafter.allocate(slots=1, capacity=len(ids) + 8, chunk=len(ids))
    features = features_of(drafter.target, ids, drafter.taps)[:anchor]
    drafter.extend(slice(0, 1), features[None], torch.tensor([anchor]), anchor)
    seen: list[Tensor] = []
    handle = drafter.model.norm.register_forward_hook(lambda _module, _args, output: seen.append(output))
    drafter.draft(slice(0, 1), torch.tensor([ids[anchor]]), anchor + drafter.depth + 1)
    handle.remove()
    return seen[0][0]


def trained_rows(drafter: DFlashDrafter, ids: list[int], anchors: list[int]) -> Tensor:
    tokens = torch.tensor([ids])
    known = capture(drafter.target, tokens, drafter.taps)
    return block_rows(drafter.model, drafter.target, tokens, known.features, torch.tensor([anchors]))[0]


def worst(drafter: DFlashDrafter) -> float:
    trained = trained_rows(drafter, IDS, ANCHORS)
    served = torch.stack([served_rows(drafter, IDS, a) for a in ANCHORS])
    return float((trained - served).abs().max())


@pytest.mark.parametrize("shape", SHAPES)
def test_training_rows_equal_served_rows(shape: str) -> None:
    assert worst(drafter(shape)) < 1e-10


@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_on_targets_with_sliding_layers(kind: str) -> None:
    assert worst(drafter("sliding and full, bidirectional", kind)) < 1e-10


Mask = Callable[[LayerSpec, Tensor, Tensor, int, int], Tensor]
honest = forward.training_mask


def anchor_seen(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    return honest(kind, anchors + 1, positions, context, block)


def other_blocks_seen(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    mask = honest(kind, anchors, positions, context, block).clone()
    mask[..., context:] = True
    return mask


def window_ignored(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    return honest(LayerSpec(False, None, kind.causal), anchors, positions, context, block)


def causality_flipped(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    return honest(LayerSpec(kind.sliding, kind.window, not kind.causal), anchors, positions, context, block)


def window_off_by_one(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
    return honest(
        LayerSpec(kind.sliding, kind.window and kind.window + 1, kind.causal), anchors, positions, context, block
    )


PLANTED = [anchor_seen, other_blocks_seen, window_ignored, causality_flipped, window_off_by_one]


@pytest.mark.parametrize("fault", PLANTED, ids=lambda f: f.__name__)
def test_control_planted_masks_are_seen(fault: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forward, "training_mask", fault)
    assert worst(drafter("sliding and full, bidirectional")) > 1e-3


def written_texts() -> list[Text]:
    return [Text(e.prompt_ids, e.response_ids) for e in copying.examples()[:6]]


def random_texts() -> list[Text]:
    draw = torch.Generator().manual_seed(8)
    rows = [torch.randint(4, 32, (n,), generator=draw).tolist() for n in (12, 30, 21)]
    return [Text(r[:4], r[4:]) for r in rows]


def test_trained_acceptance_is_served_acceptance() -> None:
    """On random weights, and along texts that some of the drafts hit: the drafts of the pair themselves."""
    target = tiny.target()
    pair = tiny.drafter(target)
    texts = [*random_texts(), lucky_text(pair)]
    trained, served = trained_acceptance(pair.model, target, texts), replay(target, pair, texts)
    assert [t.accepted for t in trained.texts] == [t.accepted for t in served.texts]
    assert trained.depth == served.depth and served.tau > 1.2


def lucky_text(pair: DFlashDrafter, length: int = 40) -> Text:
    """A text that continues with the pair's own drafts, two of three, and a foreign token between."""
    ids = [5, 9, 11, 20, 33]
    while len(ids) < length:
        rows = trained_rows(pair, [*ids, 0], [len(ids) - 1])[0]
        ids += (rows[: len(ids) % 3 + 1] @ pair.target.head.weight.T).argmax(-1).tolist()
        ids.append((ids[-1] * 7 + 11) % 60)
    return Text(ids[:5], ids[5:])


@pytest.mark.parametrize("fault", [anchor_seen, window_ignored, causality_flipped], ids=lambda f: f.__name__)
def test_control_parity_sees_a_planted_mask(fault: Mask, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tiny.target()
    pair = tiny.drafter(target)
    text = lucky_text(pair)
    monkeypatch.setattr(forward, "training_mask", fault)
    trained, served = trained_acceptance(pair.model, target, [text]), replay(target, pair, [text])
    assert [t.accepted for t in trained.texts] != [t.accepted for t in served.texts]


def test_padding_and_neighbours_are_invisible() -> None:
    pair, texts = drafter("sliding and full, bidirectional", "gemma3"), [IDS[:11], IDS[3:24], IDS[2:9]]
    width = 32
    tokens = torch.tensor([ids + [0] * (width - len(ids)) for ids in texts])
    anchors = torch.tensor([[3, 7], [5, 12], [2, 4]])
    known = capture(pair.target, tokens, pair.taps)
    together = block_rows(pair.model, pair.target, tokens, known.features, anchors)
    for row, ids in enumerate(texts):
        alone = trained_rows(pair, ids, anchors[row].tolist())
        assert float((together[row] - alone).abs().max()) < 1e-10
        assert (
            float(
                (known.final[row, : len(ids)] - capture(pair.target, torch.tensor([ids]), pair.taps).final[0])
                .abs()
                .max()
            )
            < 1e-10
        )
    changed = tokens.clone()
    changed[0, 20:], changed[1] = 17, 9  # padding of the first, the whole second text
    other = block_rows(pair.model, pair.target, changed, capture(pair.target, changed, pair.taps).features, anchors)
    assert torch.equal(other[0], together[0]) and torch.equal(other[2], together[2])
    assert not torch.allclose(other[1], together[1], atol=1e-3)  # control: a change in a text itself is seen


def test_control_a_mask_that_shows_the_future_sees_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    def everything(kind: LayerSpec, anchors: Tensor, positions: Tensor, context: int, block: int) -> Tensor:
        return torch.ones_like(honest(kind, anchors, positions, context, block))

    monkeypatch.setattr(forward, "training_mask", everything)
    pair = drafter("sliding and full, bidirectional")
    assert not torch.allclose(trained_rows(pair, IDS[:11] + [0] * 5, [3]), trained_rows(pair, IDS[:11], [3]), atol=1e-3)


def test_labels_stand_at_anchor_plus_k_and_soft_labels_one_before() -> None:
    """batch_loss against a loop: the row behind anchor a + k - 1 of the target, the token at a + k of the text."""
    pair = tiny.drafter(tiny.target())
    examples = [Example(IDS[:5], IDS[5:20]), Example(IDS[3:6], IDS[6:12])]
    recipe = copying.recipe(loss={"target": "ce", "weights": "decay", "gamma": 2.0})
    batch = make_batch(examples, 4, 4, torch.Generator().manual_seed(1))
    total = weights = 0.0
    finals = capture(pair.target, batch.tokens, pair.taps).final
    soft = label_rows(finals, batch.anchors, 4)
    for row in range(2):
        anchors = batch.anchors[row].tolist()
        rows = trained_rows(pair, batch.tokens[row].tolist(), anchors)
        logp = (rows @ pair.target.head.weight.T).log_softmax(-1)
        for i, anchor in enumerate(anchors):
            for k in range(1, 4):
                if not bool(batch.labelled[row, i, k - 1]):
                    continue
                weight = 2.718281828 ** (-(k - 1) / 2.0)
                total -= weight * float(logp[i, k - 1, int(batch.tokens[row, anchor + k])])
                weights += weight
                assert torch.equal(soft[row, i, k - 1], finals[row, anchor + k - 1])
    loss, _ = batch_loss(pair.model, pair.target, batch, recipe)
    assert float(loss) == pytest.approx(total / weights, rel=1e-5)
