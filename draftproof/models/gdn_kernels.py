"""The gated delta rule by flash-linear-attention's Triton kernels, with the signature of `gdn.run`, where they can run.

Kernels give outputs and a last state, not what each row writes; so a commit replays the accepted rows with the same
kernel, the other rows' decay and rate set to 0, which leaves a state as it is. Trees go the plain way.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from draftproof.models import gdn


@cache
def available() -> bool:
    """The package is installed; its kernels are compiled for the GPU when they are first used."""
    return find_spec("fla") is not None and find_spec("triton") is not None


def fits(rows: gdn.Rows, seen: Tensor | None) -> bool:
    """Causal rows in float32 on a GPU; float64 and trees have the plain form alone."""
    return seen is None and rows.q.is_cuda and rows.q.dtype == torch.float32 and available()


@dataclass(frozen=True)
class Replayed:
    """The rows of a forward, kept until it is known how many of them count."""

    rows: gdn.Rows

    def added_to(self, state: Tensor, counts: Tensor | None = None, path: Tensor | None = None) -> Tensor:
        """The state after `counts` [R] rows; see `gdn.Written.added_to`."""
        rows = self.rows if path is None else self.rows.at(path)
        if counts is not None:
            kept = torch.arange(rows.g.shape[2], device=counts.device) < counts[:, None, None]
            rows = gdn.Rows(rows.q, rows.k, rows.v, rows.g * kept, rows.beta * kept)
        return _kernel(rows, state, last=True)[1]


def run(rows: gdn.Rows, state: Tensor) -> tuple[Tensor, Replayed]:
    """`gdn.run` for a causal pass."""
    return _kernel(rows, state, last=False)[0], Replayed(rows)


def _kernel(rows: gdn.Rows, state: Tensor, last: bool) -> tuple[Tensor, Any]:
    """Rows are normed and scaled already. The kernels want [R, N, H, d]; chunks pay from their own length on."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule

    call = fused_recurrent_gated_delta_rule if rows.g.shape[2] <= gdn.CHUNK else chunk_gated_delta_rule
    q, k, v, g, beta = (t.transpose(1, 2).contiguous() for t in (rows.q, rows.k, rows.v, rows.g, rows.beta))
    out, after = call(
        q, k, v, g=g, beta=beta, scale=1.0, initial_state=state.contiguous(), output_final_state=last,
        use_qk_l2norm_in_kernel=False,
    )  # fmt: skip
    return out.transpose(1, 2), after
