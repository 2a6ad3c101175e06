"""Drives the gated-delta-net modules of a transformers model on our cache, with their own weights.

The forward of each `linear_attn` instance is replaced; the class stays as it is, and `released` puts its own forward
back for the start-up comparison. The cache plan arrives as the keyword `draftproof`, as in attention layers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftproof.errors import UserError
from draftproof.models import gdn, gdn_kernels
from draftproof.models.plan import Plan
from draftproof.models.recurrent import Flight, StateShape, Written

NEEDED = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv1d", "A_log", "dt_bias", "norm", "out_proj")
Projected = tuple[Tensor, Tensor, Tensor, Tensor]  # columns [R, N, C]; z [R, N, H, value_dim]; b, a [R, N, H]


def project_split(module: Any, hidden: Tensor) -> Projected:
    """qwen3_5: one projection each for queries, keys and values, for z, for b and for a."""
    z = module.in_proj_z(hidden).unflatten(-1, (-1, module.head_v_dim))
    return module.in_proj_qkv(hidden), z, module.in_proj_b(hidden), module.in_proj_a(hidden)


def project_grouped(module: Any, hidden: Tensor) -> Projected:
    """qwen3_next: everything of one key head stands together, in the order q, k, its values, its z; b before a."""
    groups, serves = module.num_k_heads, module.num_v_heads // module.num_k_heads
    key, value = module.head_k_dim, serves * module.head_v_dim
    joined = module.in_proj_qkvz(hidden).unflatten(-1, (groups, -1))
    q, k, v, z = (part.flatten(-2) for part in joined.split([key, key, value, value], dim=-1))
    b, a = (part.flatten(-2) for part in module.in_proj_ba(hidden).unflatten(-1, (groups, -1)).split(serves, dim=-1))
    return torch.cat([q, k, v], dim=-1), z.unflatten(-1, (-1, module.head_v_dim)), b, a


PROJECTIONS: dict[tuple[str, ...], Callable[[Any, Tensor], Projected]] = {
    ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a"): project_split,
    ("in_proj_qkvz", "in_proj_ba"): project_grouped,
}


class DeltaNet:
    """One driven module. `module` is the transformers instance, whose weights and gated norm are used."""

    def __init__(self, module: Any, layer: int) -> None:
        self.module, self.layer, self.project = module, layer, _projection(module, layer)
        self.kernel = int(module.conv1d.weight.shape[-1])
        self.shape = StateShape(
            heads=module.num_v_heads,
            key_dim=module.head_k_dim,
            value_dim=module.head_v_dim,
            channels=int(module.conv1d.weight.shape[0]),
            kernel=self.kernel,
        )

    def __call__(self, hidden_states: Tensor, draftproof: Plan | None = None, **kwargs: Any) -> Tensor:
        """hidden_states [R, N, hidden] -> the same shape; what the rows add waits in the cache for its commit."""
        if draftproof is None:
            raise AssertionError("the model was called without its cache plan (keyword draftproof)")
        if kwargs.get("attention_mask") is not None:
            raise AssertionError("a padding mask for a recurrent layer: rows are left out by `counts` instead")
        module, wide = self.module, torch.promote_types(hidden_states.dtype, torch.float32)
        columns, z, b, a = self.project(module, hidden_states)
        state, window = draftproof.recurrent(self.layer)
        weight = module.conv1d.weight.squeeze(1)
        mixed = gdn.convolve(columns, window, weight, module.conv1d.bias, draftproof.ancestors(self.kernel))
        key = module.num_k_heads * module.head_k_dim
        q, k, v = mixed.split([key, key, mixed.shape[-1] - 2 * key], dim=-1)
        g = -module.A_log.to(wide).exp() * F.softplus(a.to(wide) + module.dt_bias)
        q, k = (t.unflatten(-1, (-1, module.head_k_dim)) for t in (q, k))
        rows = gdn.unit_rows(q, k, v.unflatten(-1, (-1, module.head_v_dim)), g, b.sigmoid())
        out, written = run_rows(rows, state, draftproof.seen)
        draftproof.stage(self.layer, Flight(written, columns))
        out = out.transpose(1, 2).to(hidden_states.dtype)
        normed = module.norm(out.reshape(-1, module.head_v_dim), z.reshape(-1, module.head_v_dim))
        return module.out_proj(normed.reshape(*hidden_states.shape[:2], -1))


def run_rows(rows: gdn.Rows, state: Tensor, seen: Tensor | None) -> tuple[Tensor, Written]:
    """The rule by kernels where they fit, else in plain torch."""
    return gdn_kernels.run(rows, state) if gdn_kernels.fits(rows, seen) else gdn.run(rows, state, seen)


def drive(layers: Sequence[Any]) -> dict[int, DeltaNet]:
    """Take over every `linear_attn` below the decoder layers; the drivers by layer."""
    drivers = {i: DeltaNet(layer.linear_attn, i) for i, layer in enumerate(layers) if hasattr(layer, "linear_attn")}
    for driver in drivers.values():
        driver.module.forward = driver
    return drivers


@contextlib.contextmanager
def released(drivers: dict[int, DeltaNet]) -> Iterator[None]:
    """The modules' own forwards, while the block runs."""
    for driver in drivers.values():
        del driver.module.forward
    try:
        yield
    finally:
        for driver in drivers.values():
            driver.module.forward = driver


def _projection(module: nn.Module, layer: int) -> Callable[[Any, Tensor], Projected]:
    lacks = [name for name in NEEDED if not hasattr(module, name)]
    found = [project for names, project in PROJECTIONS.items() if all(hasattr(module, n) for n in names)]
    activation = getattr(module, "activation", "silu")
    if lacks or not found or activation != "silu":
        why = (
            f"lacks {', '.join(lacks)}" if lacks else f"has activation {activation}" if found else "projects otherwise"
        )
        raise UserError(
            "target-unsupported",
            f"layer {layer}: {type(module).__name__} {why}; only those of Qwen3-Next and Qwen3.5 run here",
            "serve this target with vLLM or SGLang",
        )
    return found[0]
