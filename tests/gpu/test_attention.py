"""Attention as two products, for a few rows over a long context, against the fused kernel in float32."""

from __future__ import annotations

import pytest
import torch

from draftproof.models.attention import _few_rows, folded_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("nodes", [1, 16])
@pytest.mark.parametrize("masked", [False, True])
def test_two_products_equal_the_fused_kernel(nodes: int, masked: bool) -> None:
    torch.manual_seed(nodes)
    query = torch.randn(2, 12, nodes, 128, device="cuda")
    store = torch.randn(2, 2, 4, 5000, 128, device="cuda")
    mask = torch.rand(2, 1, nodes * 3, 4096, device="cuda") > 0.3 if masked else None
    half = [t.bfloat16() for t in (query, store)]
    sharp = folded_attention(
        half[0].float(), half[1][0, :, :, :4096].float(), half[1][1, :, :, :4096].float(), mask, 0.1
    )
    assert _few_rows(half[0].reshape(2, 4, nodes * 3, 128), half[1][0, :, :, :4096])
    ours = folded_attention(half[0], half[1][0, :, :, :4096], half[1][1, :, :, :4096], mask, 0.1)
    torch.testing.assert_close(ours.float(), sharp, rtol=0, atol=2e-2 * float(sharp.abs().max()))
