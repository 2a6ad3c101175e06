"""The MTP head's tensors, read from the target's own safetensors and accounted for one by one."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from draftproof.config.target import TargetSpec
from draftproof.errors import UserError
from draftproof.models.checkpoint import weight_files

PREFIX = "mtp."


def require_head(spec: TargetSpec) -> None:
    if not spec.mtp_layers:
        raise UserError(
            "mtp-missing",
            f"{spec.path}: the config promises no multi-token-prediction layers",
            "use a drafter (--drafter), or a checkpoint that keeps its MTP head",
        )


def load_head(head: nn.Module, folder: Path) -> None:
    """Fill the head from the `mtp.*` tensors of a checkpoint. Errors: mtp-missing, weights-invalid (names, shapes)."""
    given, wanted = _stacked_experts(_read(folder)), head.state_dict()
    if not given:
        raise UserError(
            "mtp-missing",
            f"{folder}: the config promises an MTP head, but no tensor begins with {PREFIX}",
            "fetch a checkpoint whose export kept it, or use a drafter (--drafter)",
        )
    common = wanted.keys() & given.keys()
    parts = {
        "missing": sorted(wanted.keys() - given.keys()),
        "not understood": sorted(given.keys() - wanted.keys()),
        "of another shape": [
            f"{name} {list(given[name].shape)}, the target's width asks for {list(wanted[name].shape)}"
            for name in sorted(common)
            if given[name].shape != wanted[name].shape
        ],
        "with NaN or infinity": [name for name in sorted(common) if not torch.isfinite(given[name]).all()],
    }
    found = "; ".join(f"{kind}: {', '.join(names[:3])}" for kind, names in parts.items() if names)
    if found:
        fix = "use an MTP head that was trained for this target"
        raise UserError("weights-invalid", f"{folder}: MTP head: {found}", fix)
    head.load_state_dict({name: given[name] for name in wanted})


def _read(folder: Path) -> dict[str, Tensor]:
    tensors = {}
    for path in weight_files(folder):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 (no mapping)
                if name.startswith(PREFIX):
                    tensors[name.removeprefix(PREFIX)] = file.get_tensor(name)
    return tensors


def _stacked_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts that a checkpoint stores one by one, joined as transformers' modules hold them."""
    parts: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name in [name for name in tensors if ".experts." in name]:
        place, _, rest = name.partition(".experts.")
        number, _, matrix = rest.partition(".")
        if number.isdecimal():
            parts.setdefault(place, {}).setdefault(int(number), {})[matrix] = tensors.pop(name)
    for place, experts in parts.items():
        order = [experts[number] for number in sorted(experts)]
        both = [torch.cat([expert["gate_proj.weight"], expert["up_proj.weight"]]) for expert in order]
        tensors[f"{place}.experts.gate_up_proj"] = torch.stack(both)
        tensors[f"{place}.experts.down_proj"] = torch.stack([expert["down_proj.weight"] for expert in order])
    return tensors
