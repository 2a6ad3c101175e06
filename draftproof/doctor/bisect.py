"""Bisection: the tensors of one draft step as the engine has them beside the oracle's own, stage by stage.

The plugin (`plugins/vllm_bisect.py`) hands out the engine's; this file computes the same from the weights on the same
text and names the first stage that differs beyond rounding. Nothing here knows a fault by name. It bridges to the
engine package; torch is imported inside functions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from draftproof.doctor.facts import BisectFacts, StageDifference
from draftproof.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.target import Target

SCHEMA: Final = "draftproof.bisect/1"
REQUEST: Final = "bisect.json"  # in the plugin's folder
# Of the largest number of a stage: what rounding may add up to. Engines fuse and reorder sums.
ALLOWED: Final = {"float32": 2e-3, "bfloat16": 6e-2, "float16": 2e-2}
Tensors = Mapping[str, "Tensor"]


@dataclass(frozen=True)
class Dump:
    """One step: `tensors` by the names of `plugins/vllm_bisect.py`; `anchor` is the position of its first row."""

    step: int
    anchor: int
    tensors: Tensors
    missing: tuple[str, ...]


def read_dump(data: bytes) -> Dump:
    """UserError bad-texts for a file of another schema."""
    import struct

    from safetensors.torch import load

    size = struct.unpack("<Q", data[:8])[0]
    told: Any = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["draftproof"])
    if told["schema"] != SCHEMA or told["anchor"] is None:
        fix = "launch with the same draftproof that examines"
        raise UserError("bad-texts", f"a dump of schema {told['schema']}, anchor {told['anchor']}", fix)
    return Dump(told["step"], told["anchor"], load(data), tuple(told["missing"]))


def compare(
    dumps: Sequence[Dump], ids: Sequence[int], target: Target, drafter: DFlashDrafter, dtype: str
) -> BisectFacts:
    """`ids`: prompt and answer of the dumped request. The earliest stage of the first step that differs."""
    compared: list[str] = []
    for dump in sorted(dumps, key=lambda one: one.step):
        own = stages(ids, dump.anchor, target, drafter)
        for name in order(drafter.spec.num_layers):
            if name not in dump.tensors or name not in own:
                continue
            compared.append(name)
            seen, difference = largest(dump, name, own)
            allowed = ALLOWED[dtype] * seen
            if difference > allowed:
                layer = int(name.split(".")[1]) if name.split(".")[-2:-1] and name.split(".")[1].isdigit() else None
                stage = StageDifference(name, layer, difference, allowed, dump.step)
                return BisectFacts(tuple(dict.fromkeys(compared)), stage)
    return BisectFacts(tuple(dict.fromkeys(compared)), None)


def order(layers: int) -> list[str]:
    """Stages as a value travels; the context of all layers comes before the block."""
    context = [f"context.{layer}.{part}" for layer in range(layers) for part in ("k", "v")]
    return ["features", "projected", *context, "block.ids", *(f"block.{layer}" for layer in range(layers)), "logits"]


def largest(dump: Dump, name: str, own: Tensors) -> tuple[float, float]:
    """(largest number, largest difference) of one stage, over rows both have; what was given away (NaN) is left out."""
    seen, ours = dump.tensors[name].float(), own[name].float()
    if name in ("features", "projected"):  # the engine shows the new rows only
        ours = ours[dump.tensors["features.positions"].long()]
    there = seen.isfinite()
    difference = (seen - ours)[there].abs()
    return float(ours.abs().max()), float(difference.max()) if difference.numel() else 0.0


def stages(ids: Sequence[int], anchor: int, target: Target, drafter: DFlashDrafter) -> Tensors:
    """The oracle's own tensors of a step whose anchor is `ids[anchor]`. Sliding layers show their whole context here,
    as it is before the window cuts it."""
    import torch

    from draftproof.engine.replay import features_of

    model, device = drafter.model, target.device
    features = features_of(target, list(ids[:anchor]), drafter.taps)
    context = model.project(features)
    cos, sin = model.rope(torch.arange(anchor, device=device)[None], context.dtype)
    found: dict[str, Tensor] = {"features": features, "projected": context}
    for index, layer in enumerate(model.blocks):
        k, v = layer.context_kv(context[None], cos, sin)
        found[f"context.{index}.k"], found[f"context.{index}.v"] = (part[0].transpose(0, 1) for part in (k, v))
    return {name: tensor.detach().cpu() for name, tensor in (found | _block(ids[anchor], features, drafter)).items()}


def _block(anchor_id: int, features: Tensor, drafter: DFlashDrafter) -> dict[str, Tensor]:
    """The residual stream after each layer, listened to at each layer's `finish`, and the logits."""
    import torch

    rows = len(features)
    drafter.allocate(slots=1, capacity=rows + drafter.depth + 1, chunk=rows)
    slots, counts = slice(0, 1), torch.tensor([rows], device=features.device)
    drafter.extend(slots, features[None], counts, rows)
    found: dict[str, Tensor] = {}
    ends = [_listen(layer, found, f"block.{index}") for index, layer in enumerate(drafter.model.blocks)]
    ends.append(_listen(drafter.model.norm, found, "normed", "forward"))
    try:
        drafter.draft(slots, torch.tensor([anchor_id], device=features.device), rows + drafter.depth + 1)
    finally:
        for end in ends:
            end()
    from draftproof.models.dflash import head_logits

    asked = [anchor_id, *[drafter.spec.mask_token_id] * drafter.depth]
    found["block.ids"] = torch.tensor(asked, dtype=torch.float32)
    found["logits"] = head_logits(found.pop("normed"), drafter.target, drafter.spec)
    return found


def _listen(module: Any, found: dict[str, Tensor], name: str, method: str = "finish") -> Callable[[], None]:
    original = getattr(module, method)

    def heard(*args: Any) -> Any:
        result = original(*args)
        found[name] = result[0].detach()
        return result

    object.__setattr__(module, method, heard)
    return lambda: module.__dict__.pop(method, None)


def ask_for(steps: Sequence[int]) -> bytes:
    """The request file that the plugin looks for."""
    return json.dumps({"steps": list(steps)}).encode()
