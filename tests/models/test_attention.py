"""Our attention against torch's and against a float64 softmax by hand, and what it refuses."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from draftproof.errors import UserError
from draftproof.models.attention import HARMLESS, cached_attention, grouped_attention
from draftproof.models.cache import Cache, LayerShape
from draftproof.models.target import causal_plan

Attention = Callable[[Tensor, Tensor, Tensor, Tensor, float], Tensor]


def inputs(heads: int, kv_heads: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(heads)
    q = torch.randn(3, heads, 4, 8, generator=draw, dtype=torch.float64)
    k, v = (torch.randn(3, kv_heads, 9, 8, generator=draw, dtype=torch.float64) for _ in range(2))
    mask = torch.rand(3, 1, 4, 9, generator=draw) < 0.5
    mask[..., 0] = True
    return q, k, v, mask


def by_hand(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for r in range(q.shape[0]):
        for h in range(q.shape[1]):
            for n in range(q.shape[2]):
                seen = mask[r, 0, n].nonzero()[:, 0]
                weights = (k[r, h // group, seen] @ q[r, h, n] * scale).exp()
                out[r, h, n] = weights @ v[r, h // group, seen] / weights.sum()
    return out


def check(heads: int, kv_heads: int, attention: Attention = grouped_attention) -> None:
    q, k, v, mask = inputs(heads, kv_heads)
    ours = attention(q, k, v, mask, 0.3)
    torch.testing.assert_close(ours, by_hand(q, k, v, mask, 0.3))
    theirs = scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1), (6, 2), (1, 1)])
def test_grouped_heads(heads: int, kv_heads: int) -> None:
    check(heads, kv_heads)


def swapped_groups(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Fault: heads dealt out in turn instead of in blocks."""
    group = q.shape[1] // k.shape[1]
    return scaled_dot_product_attention(
        q, k.repeat(1, group, 1, 1), v.repeat(1, group, 1, 1), attn_mask=mask, scale=scale
    )


def mask_in_rows(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Fault: the mask of a node repeated beside itself instead of once a head."""
    return grouped_attention(q, k, v, mask.repeat_interleave(2, 2)[:, :, :4], scale)


@pytest.mark.parametrize("faulty", [swapped_groups, mask_in_rows])
def test_control_grouping(faulty: Attention) -> None:
    with pytest.raises(AssertionError):
        check(4, 2, faulty)


def test_queries_need_not_be_contiguous() -> None:
    q, k, v, mask = inputs(4, 2)
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    torch.testing.assert_close(grouped_attention(turned, k, v, mask, 1.0), grouped_attention(q, k, v, mask, 1.0))


# --- transformers' interface ------------------------------------------------------------------------


class Peculiar(nn.Module):
    layer_idx = 1


def call(**changes: Any) -> Tensor:
    """One call on layer 1, a layer of window 3, as transformers would make it."""
    cache = Cache(
        [LayerShape(2, 8), LayerShape(2, 8, window=3)], slots=1, capacity=9, chunk=9, dtype=torch.float64, device="cpu"
    )  # fmt: skip
    q, k, v, _ = inputs(4, 2)
    arguments = {
        "query": q[:1], "key": k[:1, :, :4], "value": v[:1, :, :4], "attention_mask": None,
        "sliding_window": 3, "draftproof": causal_plan(cache, slice(0, 1), 4, 4),
    }  # fmt: skip
    return cached_attention(Peculiar(), **(arguments | changes))[0]


@pytest.mark.parametrize("scaling", [None, 0.7])
def test_new_rows_are_written_and_attended_to(scaling: float | None) -> None:
    q, k, v, _ = inputs(4, 2)
    causal = torch.ones(4, 4).tril().bool() & ~torch.ones(4, 4).tril(-3).bool()
    expected = by_hand(q[:1], k[:1, :, :4], v[:1, :, :4], causal[None, None], scaling or 8**-0.5)
    torch.testing.assert_close(call(scaling=scaling), expected.transpose(1, 2))


def refused(named: str, **changes: Any) -> None:
    with pytest.raises(UserError) as caught:
        call(**changes)
    assert caught.value.code == "target-unsupported" and named in caught.value.message, caught.value


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias", "head_mask", "block_table", "cache_positions"])
def test_unknown_keywords_are_refused_by_name(name: str) -> None:
    refused(f"Peculiar asks for attention features that are not implemented: {name}", **{name: 30.0})


def test_several_are_named_together() -> None:
    refused("s_aux, softcap, dropout, attention_mask", softcap=1, s_aux=2, dropout=0.1, attention_mask=torch.ones(1))


def test_dropout_and_masks_are_refused() -> None:
    refused("dropout", dropout=0.1)
    refused("attention_mask", attention_mask=torch.zeros(1, 1, 4, 4))


@pytest.mark.parametrize("window", [None, 4])
def test_a_window_that_contradicts_the_cache_is_refused(window: int | None) -> None:
    refused(f"layer 1 attends with window {window}, its config promised 3", sliding_window=window)


def test_absent_features_and_bookkeeping_pass() -> None:
    """A keyword that says None asks for nothing."""
    quiet = dict.fromkeys(HARMLESS, SimpleNamespace())
    assert torch.equal(call(softcap=None, **quiet), call())


def test_control_a_harmless_list_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftproof.models.attention.HARMLESS", HARMLESS | {"softcap"})
    with pytest.raises(pytest.fail.Exception):
        refused("softcap", softcap=30.0)


def test_a_call_without_a_plan_is_our_own_mistake() -> None:
    with pytest.raises(AssertionError, match="cache plan"):
        call(draftproof=None)
