"""flash-linear-attention's kernels against the plain form, where both are there: outputs, and commits by replay."""

from __future__ import annotations

import pytest
import torch

from draftproof.models import gdn, gdn_kernels

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(not gdn_kernels.available(), reason="flash-linear-attention is not installed"),
]
R, H, D = 3, 4, 128


def draw(count: int, decay: float) -> tuple[gdn.Rows, torch.Tensor]:
    torch.manual_seed(count)
    q, k = (torch.randn(R, count, 2, D, device="cuda") for _ in range(2))
    v, g = torch.randn(R, count, H, D, device="cuda"), -decay * torch.rand(R, count, H, device="cuda")
    rows = gdn.unit_rows(q, k, v, g, torch.rand(R, count, H, device="cuda"))
    return rows, torch.randn(R, H, D, D, device="cuda")


@pytest.mark.parametrize("decay", [0.1, 5.0])
@pytest.mark.parametrize("count", [1, 8, 16, 64, 65, 512])
def test_kernels_equal_the_plain_form(count: int, decay: float) -> None:
    rows, state = draw(count, decay)
    assert gdn_kernels.fits(rows, None)
    wide = gdn.Rows(*(t.double() for t in (rows.q, rows.k, rows.v, rows.g, rows.beta)))
    expected, written = gdn.run(wide, state.double())
    out, replayed = gdn_kernels.run(rows, state)
    limit = 1e-4 if count <= gdn.CHUNK else 2e-2  # chunks multiply in TF32
    assert float((out - expected).abs().max() / expected.abs().max()) < limit
    for counts in ([0, 1, count], [count, count, 0], [count // 2, count, 1]):
        kept = torch.tensor(counts, device="cuda")
        truth = written.added_to(state.double(), kept)
        assert float((replayed.added_to(state, kept) - truth).abs().max() / truth.abs().max()) < limit


@pytest.mark.parametrize("count", [1, 16, 200])
def test_the_plain_form_in_float32_on_a_gpu(count: int) -> None:
    rows, state = draw(count, 1.0)
    wide = gdn.Rows(*(t.double() for t in (rows.q, rows.k, rows.v, rows.g, rows.beta)))
    expected, _ = gdn.run(wide, state.double())
    out, _ = gdn.run(rows, state)
    assert float((out - expected).abs().max() / expected.abs().max()) < 1e-4
