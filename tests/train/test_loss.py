"""The chunked head loss against a plain autograd implementation, its weights against the formula."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

from draftproof.train import loss as loss_module
from draftproof.train.loss import BlockLabels, block_loss, block_weights
from draftproof.train.recipe import Loss

BLOCKS, DEPTH, HIDDEN, VOCAB = 11, 5, 6, 13
CASES = [Loss(target=t, weights=w, gamma=2.0, alpha=0.4) for t in ("ce", "kd") for w in ("decay", "dpace")]


def name(recipe: Loss) -> str:
    return f"{recipe.target} {recipe.weights}"


def case(seed: int = 0) -> tuple[Tensor, BlockLabels, Tensor]:
    """Random rows, labels of which some tails do not exist, and a head."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=torch.float64)

    length = torch.randint(0, DEPTH + 1, (BLOCKS,), generator=draw)
    length[0], length[1] = DEPTH, 0
    labels = BlockLabels(
        torch.randint(0, VOCAB, (BLOCKS, DEPTH), generator=draw),
        torch.arange(DEPTH) < length[:, None],
        normal(BLOCKS, DEPTH, HIDDEN),
    )
    return normal(BLOCKS, DEPTH, HIDDEN), labels, normal(VOCAB, HIDDEN)


def weights_by_loops(q: list[float], valid: list[bool], recipe: Loss) -> list[float]:
    """dflash.md 5.3: w_j = sum over m >= j of prod over i <= m of the smoothed q_i; decay: exp(-(k - 1) / gamma)."""
    if recipe.weights == "decay":
        return [math.exp(-k / recipe.gamma) if v else 0.0 for k, v in enumerate(valid)]
    end = valid.index(False) if False in valid else len(valid)
    smooth = [(1 - recipe.alpha) * p + recipe.alpha for p in q[:end]]
    return [sum(math.prod(smooth[: m + 1]) for m in range(j, end)) for j in range(end)] + [0.0] * (len(q) - end)


def plain_loss(rows: Tensor, labels: BlockLabels, head: Tensor, recipe: Loss, detach: bool = True) -> Tensor:
    logp = (rows @ head.T).log_softmax(-1)
    true = logp.gather(-1, labels.ids[..., None])[..., 0]
    if detach:
        pairs = zip(true.exp().tolist(), labels.valid.tolist(), strict=True)
        weight = torch.tensor([weights_by_loops(q, v, recipe) for q, v in pairs], dtype=rows.dtype)
    else:
        weight = block_weights(true, labels.valid, recipe)
    if recipe.target == "kd":
        teacher = (labels.final @ head.T / recipe.temperature).softmax(-1)
        each = -(teacher * logp).sum(-1)
    else:
        each = -true
    return (each * weight).sum() / weight.sum()


def gradient(loss: Tensor, rows: Tensor) -> Tensor:
    return torch.autograd.grad(loss, rows)[0]


@pytest.mark.parametrize("chunk", [4096, 15, 1])
@pytest.mark.parametrize("recipe", CASES, ids=name)
def test_value_and_gradient(recipe: Loss, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    rows, labels, head = case()
    rows.requires_grad_()
    ours, _ = block_loss(rows, labels, head, recipe)
    plain = plain_loss(rows, labels, head, recipe)
    assert ours.item() == pytest.approx(plain.item(), rel=1e-5)
    assert torch.allclose(gradient(3 * ours, rows), 3 * gradient(plain, rows), atol=1e-6)  # logits are float32 inside


@pytest.mark.parametrize("recipe", CASES, ids=name)
def test_controls_of_the_comparison(recipe: Loss) -> None:
    rows, labels, head = case()
    rows.requires_grad_()
    ours = gradient(block_loss(rows, labels, head, recipe)[0], rows)
    shifted = BlockLabels(labels.ids.roll(1, 1), labels.valid, labels.final.roll(1, 1))
    assert not torch.allclose(ours, gradient(plain_loss(rows, shifted, head, recipe), rows), atol=1e-4)
    if recipe.weights == "dpace":  # a weight that takes part in the gradient
        attached = plain_loss(rows, labels, head, recipe, detach=False)
        assert not torch.allclose(ours, gradient(attached, rows), atol=1e-4)


@pytest.mark.parametrize("recipe", CASES, ids=name)
def test_invalid_labels_weigh_nothing(recipe: Loss) -> None:
    rows, labels, head = case()
    rows.requires_grad_()
    gone = ~labels.valid
    other = BlockLabels(
        torch.where(gone, (labels.ids + 3) % VOCAB, labels.ids), labels.valid, labels.final + 9.0 * gone[..., None]
    )
    (a, _), (b, _) = block_loss(rows, labels, head, recipe), block_loss(rows, other, head, recipe)
    assert a.item() == b.item()
    assert torch.equal(gradient(a, rows), gradient(b, rows))
    assert float(gradient(block_loss(rows, labels, head, recipe)[0], rows)[gone].abs().max()) == 0.0
    changed = BlockLabels((labels.ids + 3) % VOCAB, labels.valid, labels.final + 9.0)
    assert float(block_loss(rows, changed, head, recipe)[0].detach()) != a.item()  # control


def test_no_label_at_all_is_no_nan() -> None:
    rows, labels, head = case()
    rows.requires_grad_()
    none = BlockLabels(labels.ids, torch.zeros_like(labels.valid), labels.final)
    loss, stats = block_loss(rows, none, head, CASES[3])
    assert loss.item() == 0.0 and float(gradient(loss, rows).abs().max()) == 0.0 and int(stats.blocks) == 0


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.7])
def test_dpace_weights_are_the_formula(alpha: float) -> None:
    recipe = Loss(weights="dpace", alpha=alpha)
    logp = torch.rand(8, DEPTH, generator=torch.Generator().manual_seed(2), dtype=torch.float64).log()
    valid = torch.arange(DEPTH) < torch.tensor([5, 0, 1, 2, 3, 4, 5, 5])[:, None]
    ours = block_weights(logp, valid, recipe)
    loops = [weights_by_loops(q, v, recipe) for q, v in zip(logp.exp().tolist(), valid.tolist(), strict=True)]
    assert torch.allclose(ours, torch.tensor(loops, dtype=torch.float64), atol=1e-12)
    if alpha == 0.0:  # w_1 is then the expected number of accepted drafts
        assert float(ours[0, 0]) == pytest.approx(sum(itertools.accumulate(logp[0].exp().tolist(), float.__mul__)))
    assert not torch.allclose(ours, block_weights(logp, valid, Loss(weights="dpace", alpha=alpha + 0.1)))  # control


def test_counts_of_hits() -> None:
    rows, labels, head = case(4)
    draft = (rows @ head.T).argmax(-1)
    ids = torch.where(torch.rand(draft.shape, generator=torch.Generator().manual_seed(1)) < 0.7, draft, labels.ids)
    labels = BlockLabels(ids, labels.valid, labels.final)
    stats = block_loss(rows, labels, head, CASES[0])[1]
    hits, prefix, blocks = [0] * DEPTH, [0] * DEPTH, 0
    for block in range(BLOCKS):
        if not bool(labels.valid[block].all()):
            continue
        blocks, alive = blocks + 1, True
        for k in range(DEPTH):
            hit = int(draft[block, k]) == int(ids[block, k])
            alive = alive and hit
            hits[k] += hit
            prefix[k] += alive
    assert (stats.hits.tolist(), stats.prefix.tolist(), int(stats.blocks)) == (hits, prefix, blocks)
    assert 0 < prefix[-1] < hits[-1] or hits != prefix
