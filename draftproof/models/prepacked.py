"""Linear layers on a CPU over weights in oneDNN's own layout.

PyTorch hands a plain row-major weight to the matrix product, whose kernels rearrange all of it in every call. With few
rows, as when a step decodes or verifies, that costs more than the product. oneDNN can keep the rearranged weight; the
two operators are those that PyTorch's own compiler puts into a frozen graph. Measured in docs/log.md, 2026-11-30.

The plain weight is let go where nothing else holds it, so the memory stays what it was; `weight` and `state_dict` give
its values back. There are no gradients through a layer like this.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DTYPES = (torch.float32, torch.bfloat16)
ROWS = 8  # a guess of the rows of a call, for the choice of the layout
CHECKED = {torch.float32: 1e-5, torch.bfloat16: 2e-2}  # relative to the largest value


class Prepacked(nn.Module):
    """y = x W^T + b: x [..., in] -> [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROWS)
        self.packed = nn.Parameter(packed, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")

    @property
    def weight(self) -> Tensor:
        """A plain copy [out, in]; what is written to it is lost."""
        return self.packed.to_dense()

    def __deepcopy__(self, memo: dict[int, Any]) -> Prepacked:
        """Nobody writes to a packed weight, and PyTorch cannot clone it: copies share it."""
        made = self.__class__.__new__(self.__class__)
        memo |= {id(self): made, id(self.packed): self.packed}
        made.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return made

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        """As nn.Linear would."""
        super()._save_to_state_dict(destination, prefix, keep_vars)
        del destination[f"{prefix}packed"]
        destination[f"{prefix}weight"] = self.weight


def can_prepack(device: torch.device, dtype: torch.dtype) -> bool:
    if device.type != "cpu" or dtype not in DTYPES or not torch.backends.mkldnn.is_available():
        return False
    return dtype != torch.bfloat16 or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())


@torch.no_grad()
def prepack(model: nn.Module) -> None:
    """Put a `Prepacked` in the place of every nn.Linear that computes the same by it; others stay as they are."""
    places = [  # without the layers themselves, so that each plain weight can go before the next is packed
        (parent, name)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and can_prepack(child.weight.device, child.weight.dtype)
    ]
    for parent, name in places:
        linear = getattr(parent, name)
        packed = Prepacked(linear)
        if _agree(linear, packed):
            setattr(parent, name, packed)
    _let_go(model)


def _let_go(model: nn.Module) -> None:
    """Weights read from one file share its mapping, which is held as long as one of them lies there. So the few that
    are left get memory of their own; where more is left than was packed they stay, for a mapping costs less."""
    packed = sum(weight.nbytes for weight in model.parameters() if weight.is_mkldnn)
    left = [weight for weight in model.parameters() if not weight.is_mkldnn]
    if sum(weight.nbytes for weight in left) < packed:
        for weight in left:
            weight.data = weight.data.clone()


def is_prepacked(model: nn.Module) -> bool:
    return any(isinstance(part, Prepacked) for part in model.modules())


def _agree(linear: nn.Linear, packed: Prepacked) -> bool:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, linear.in_features, generator=draw).to(linear.weight.dtype)
    theirs, ours = F.linear(x, linear.weight, linear.bias).float(), packed(x).float()
    return bool((ours - theirs).abs().max() <= CHECKED[linear.weight.dtype] * theirs.abs().max())
