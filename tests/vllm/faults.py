"""Faults to plant in a real vLLM: values of the drafter's config, and patches that a plugin beside vLLM makes.

A patch is a function of this file. `lay_plugin` copies its source into a plugin, so it imports what it needs by itself
and nothing of draftproof. Each is named as the hypothesis of `draftproof/doctor/hypotheses.py` that has to explain it.
"""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftproof.doctor.rank import HEALTHY
from draftproof.models.hub import resolve_drafter

Patch = Callable[[], None]
DRAFTER = "drafter-dflash"  # folder of a copy
TAPS, MASK, WINDOW = [1, 8, 14, 20, 27], 16, 128  # of the shipped drafter


def mended() -> None:
    """Context keys normed layer by layer: docs/vllm_cpu_context_keys.md. Every server but the one of that fault."""
    import torch
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def by_layer(self: Any, keys: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(keys)
        for layer in range(keys.shape[0]):
            ops.rms_norm(out[layer], keys[layer], self._k_norm_weights[layer], self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = by_layer


def reversed_taps() -> None:
    """vLLM collects features in the order of the layers whatever the config says, so the config cannot plant this."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    sound = DFlashQwen3ForCausalLM.combine_hidden_states

    def combine(self: Any, states: torch.Tensor) -> torch.Tensor:
        count = self.model.fc.input_size // self.config.hidden_size
        return sound(self, torch.cat(states.chunk(count, dim=-1)[::-1], dim=-1))

    DFlashQwen3ForCausalLM.combine_hidden_states = combine


def masked_anchor() -> None:
    """The first row of every block is the mask token."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    sound = DFlashQwen3ForCausalLM.forward

    def forward(self: Any, input_ids: torch.Tensor, positions: torch.Tensor, inputs_embeds: Any = None) -> torch.Tensor:
        input_ids = input_ids.clone()
        input_ids[:: self.config.block_size] = self.model.mask_token_id
        return sound(self, input_ids, positions, inputs_embeds)

    DFlashQwen3ForCausalLM.forward = forward


def empty_prompt() -> None:
    """Keys and values of the prompt are zeros. A pass over a prompt is the one that begins at position 0."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    sound = DFlashQwen3ForCausalLM.precompute_and_store_context_kv

    def store(self: Any, states: Any, positions: Any, slots: Any = None) -> None:
        sound(self, states * 0 if int(positions[0]) == 0 else states, positions, slots)

    DFlashQwen3ForCausalLM.precompute_and_store_context_kv = store


def empty_accepted() -> None:
    """Behind the prompt only the anchor's row of each step is kept, those of the accepted drafts are zeros."""
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3ForCausalLM

    sound = DFlashQwen3ForCausalLM.precompute_and_store_context_kv

    def store(self: Any, states: Any, positions: Any, slots: Any = None) -> None:
        if int(positions[0]) > 0:
            states = states.clone()
            states[1:] = 0
        sound(self, states, positions, slots)

    DFlashQwen3ForCausalLM.precompute_and_store_context_kv = store


@dataclass(frozen=True)
class Planted:
    """`config` are keys of the drafter's config that the server gets, `patches` what its plugin does. `name` is the
    hypothesis that has to lead. V1 takes no drafter of sliding and full layers: `all_full` makes the honest one all
    full, too. `long`: probed with texts longer than the window."""

    name: str
    config: Mapping[str, Any] = field(default_factory=dict)
    patches: tuple[Patch, ...] = (mended,)
    all_full: bool = True
    long: bool = False
    runner: str = "v1"


def _nested(**changes: Any) -> dict[str, Any]:
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": TAPS} | changes}


FAULTS = (
    Planted("taps-minus-1", _nested(target_layer_ids=[tap - 1 for tap in TAPS])),
    Planted("taps-plus-1", _nested(target_layer_ids=[tap + 1 for tap in TAPS])),
    Planted("taps-reversed", patches=(mended, reversed_taps)),
    Planted("mask-id-0", _nested(mask_token_id=0)),
    Planted("rope-base-1e6", {"rope_theta": 1e6}),
    Planted("rope-interleaved", {"is_neox_style": False}),
    Planted("window-ignored", all_full=False, long=True),
    Planted("all-causal", {"is_causal": True}),
    Planted("anchor-masked", patches=(mended, masked_anchor)),
    Planted("no-prompt-context", patches=(mended, empty_prompt)),
    Planted("no-accepted-context", patches=(mended, empty_accepted)),
    Planted("context-keys-layer-0", patches=()),  # vLLM's own
)
SOUND = (Planted(HEALTHY), Planted(HEALTHY, all_full=False, runner="v2"))


def shipped(folder: Path, *, full: bool, **changes: Any) -> Path:
    """A copy of the shipped drafter, with all layers full if asked: V1 takes no mixed one, and is much faster."""
    shutil.copytree(resolve_drafter("smollm2-135m-dflash"), folder)
    if full:
        edit(folder, layer_types=["full_attention"] * 5, use_sliding_window=False, sliding_window=None)
    edit(folder, **changes)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def lay_plugin(folder: Path, patches: tuple[Patch, ...]) -> Path:
    """A package of one module that vLLM finds by its entry point once `folder` is on PYTHONPATH."""
    about = folder / "planted-1.dist-info"
    about.mkdir(parents=True)
    calls = [f"    {patch.__name__}()" for patch in patches] or ["    pass"]
    parts = ["from __future__ import annotations", *map(inspect.getsource, patches)]
    (folder / "planted.py").write_text("\n\n".join([*parts, "\n".join(["def register():", *calls])]) + "\n")
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: planted\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nplanted = planted:register\n")
    return folder
