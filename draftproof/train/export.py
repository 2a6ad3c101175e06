"""A trained drafter as a plain z-lab folder: config.json and bf16 safetensors, loadable by any engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from draftproof.config.drafter import DrafterSpec, read_drafter
from draftproof.config.target import TargetSpec
from draftproof.errors import UserError
from draftproof.fetch import write_atomically
from draftproof.models.dflash import DFlash
from draftproof.train.recipe import Shape


def drafter_config(shape: Shape, target: TargetSpec, intermediate: int) -> dict[str, Any]:
    """config.json of a drafter of this shape for this target. Every value that decides correctness is written out."""
    sliding = shape.layers - shape.full_layers
    if target.rope_base is None or target.max_positions is None:
        raise UserError("bad-config", f"{target.path} names no rope base or context", "add them to its config.json")
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": target.hidden_size,
        "intermediate_size": intermediate,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": target.num_heads,
        "num_key_value_heads": target.num_kv_heads,
        "head_dim": target.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "vocab_size": target.vocab_size,
        "rope_theta": target.rope_base,
        "max_position_embeddings": target.max_positions,
        "layer_types": ["sliding_attention"] * sliding + ["full_attention"] * shape.full_layers,
        "sliding_window": shape.window,
        "use_sliding_window": sliding > 0,
        "max_window_layers": shape.layers,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "tie_word_embeddings": False,
        "block_size": shape.block_size,
        "num_target_layers": target.num_layers,
        "is_causal": shape.causal,
        "dflash_config": {"mask_token_id": shape.mask_token_id, "target_layer_ids": list(shape.taps)},
        "dtype": "bfloat16",
    }


def write_config(folder: Path, config: dict[str, Any]) -> DrafterSpec:
    write_atomically(folder / "config.json", iter([(json.dumps(config, indent=2) + "\n").encode()]))
    return read_drafter(folder)


def export(model: DFlash, folder: Path) -> None:
    """Weights beside an existing config.json; written whole or not at all."""
    import torch
    from safetensors.torch import save

    tensors = {name: w.detach().to("cpu", torch.bfloat16).contiguous() for name, w in model.state_dict().items()}
    write_atomically(folder / "model.safetensors", iter([save(tensors, metadata={"format": "pt"})]))
