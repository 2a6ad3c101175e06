"""How large things are, from configs alone: parameters of a drafter and a dense target, K/V rows, recurrent states."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftproof.config.drafter import DrafterSpec
from draftproof.config.linear import LinearSpec
from draftproof.config.target import TargetSpec

WEIGHT_BYTES: Final = 2  # bfloat16 and float16
# Bytes a K/V value, its scales included: llama.cpp's blocks hold 32 values and a 2-byte scale, some a minimum too.
KV_BYTES: Final = {
    **dict.fromkeys(("auto", "bfloat16", "bf16", "float16", "f16", "half"), 2.0),
    **dict.fromkeys(("float32", "f32", "float"), 4.0),
    "q8_0": 34 / 32,
    "q5_1": 24 / 32,
    "q5_0": 22 / 32,
    "q4_1": 20 / 32,
    **dict.fromkeys(("q4_0", "iq4_nl"), 18 / 32),
}
STATE_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
ATTENTION: Final = ("full", "sliding")
LATENT: Final = ("deepseek", "kimi", "glm_moe_dsa", "glm5", "longcat")  # one latent row a token, not K and V rows
GATED: Final = ("qwen3_5", "qwen3_next")  # model types whose query projection also makes an output gate


def kv_bytes(dtype: str) -> float | None:
    """Bytes of one K or V value; None for a dtype this file does not know."""
    if dtype.startswith(("fp8", "int8")):
        return 1.0
    return KV_BYTES.get(dtype)


@dataclass(frozen=True)
class Parameters:
    """`split` is shared out over the GPUs of a tensor parallel group, `whole` lies on each."""

    split: int
    whole: int


def drafter_parameters(spec: DrafterSpec) -> Parameters:
    """A DFlash drafter as z-lab's: embedding and head are the target's, unless it has a head of its own. vLLM keeps
    `fc` whole on each GPU (ReplicatedLinear)."""
    hidden, width, kv_width = spec.hidden_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    attention = hidden * (2 * width + 2 * kv_width)
    if spec.attention_bias:
        attention += width + 2 * kv_width + hidden
    mlp = 3 * hidden * spec.intermediate_size
    norms = spec.num_layers * (2 * hidden + 2 * spec.head_dim) + 2 * hidden
    fc = len(spec.taps) * spec.target_hidden_size * hidden
    head = (spec.draft_vocab_size or 0) * hidden
    return Parameters(spec.num_layers * (attention + mlp) + head, fc + norms)


def dense_parameters(spec: TargetSpec) -> int | None:
    """Parameters of the language model by its shapes; None for experts, quantised weights and unknown layers."""
    known = set(spec.layer_kinds) <= {*ATTENTION, "linear"} and ("linear" not in spec.layer_kinds or spec.linear)
    if not known or not spec.intermediate_size or spec.experts or spec.quantized or has_latent_rows(spec):
        return None
    width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    gates = 2 if spec.model_type.startswith(GATED) else 1
    attention = spec.hidden_size * ((1 + gates) * width + 2 * kv_width)
    linear = _linear_parameters(spec.linear, spec.hidden_size) if spec.linear else 0
    mixers = sum(attention if kind in ATTENTION else linear for kind in spec.layer_kinds)
    mlps = spec.num_layers * 3 * spec.hidden_size * spec.intermediate_size
    return mixers + mlps + spec.vocab_size * spec.hidden_size * (1 if spec.tie_word_embeddings else 2)


def _linear_parameters(spec: LinearSpec, hidden: int) -> int:
    """Projections to queries, keys, values, output gate and two numbers a head; the convolution; the way back."""
    values = spec.value_heads * spec.value_dim
    inward = hidden * (spec.conv_channels + values + 2 * spec.value_heads)
    return inward + spec.conv_channels * spec.conv_kernel + values * hidden


def has_latent_rows(spec: TargetSpec) -> bool:
    return spec.model_type.startswith(LATENT)


def state_bytes(spec: LinearSpec, drafts: int, tensor_parallel: int) -> int:
    """One state of one linear layer on one GPU, as vLLM lays it out (`gated_delta_net_state_shape` in
    model_executor/layers/mamba/mamba_utils.py of 0.32): the window grows by the drafted tokens."""
    state = spec.value_heads * spec.value_dim * spec.key_dim * STATE_BYTES.get(spec.state_dtype or "float32", 4)
    window = spec.conv_channels * (spec.conv_kernel - 1 + drafts) * WEIGHT_BYTES
    return -(-(state + window) // tensor_parallel)


def file_bytes(folder: Path) -> tuple[int, str] | None:
    """Size of the safetensors that loaders take, and where it comes from; None when there are none to see."""
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    try:
        if index.is_file():
            raw = json.loads(index.read_text(encoding="utf-8"))
            files = [folder / name for name in sorted(set(raw["weight_map"].values()))]
            if all(file.is_file() for file in files):
                return sum(file.stat().st_size for file in files), f"{len(files)} safetensors files"
            return int(raw["metadata"]["total_size"]), f"total_size of {index.name}"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
        return (sum(file.stat().st_size for file in files), f"{len(files)} safetensors files") if files else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
