"""The toy target as modules: transformers' Qwen3.5 text model, fresh, with our MTP head beside it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from draftproof.models.mtp import MTPHead
from draftproof.train.toy.depths import ATTENTION, register


@dataclass(frozen=True)
class Size:
    """Widths. Three gated delta-net layers, then one with attention, and so on. Heads of the delta net are of 128
    because vLLM 0.32 refuses 32."""

    vocabulary: int = 4096
    hidden: int = 256
    intermediate: int = 448
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 128
    linear_key_heads: int = 2
    linear_value_heads: int = 4
    linear_head_dim: int = 128
    positions: int = 4096


def text_config(size: Size) -> dict[str, Any]:
    """config.json of a Qwen3.5 text checkpoint of that size; read by transformers, by vLLM and by `read_target`."""
    rotated = size.head_dim // 4 // 2  # pairs of numbers; a quarter of a head rotates
    section = rotated // 3
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": size.vocabulary,
        "hidden_size": size.hidden,
        "intermediate_size": size.intermediate,
        "num_hidden_layers": size.layers,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": size.positions,
        "initializer_range": 0.02,
        "rms_norm_eps": 1e-6,
        "use_cache": True,
        "tie_word_embeddings": True,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(size.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.linear_head_dim,
        "linear_value_head_dim": size.linear_head_dim,
        "linear_num_key_heads": size.linear_key_heads,
        "linear_num_value_heads": size.linear_value_heads,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_section": [rotated - 2 * section, section, section],
            "mrope_interleaved": True,
        },
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


class ToyModel(nn.Module):
    """`lm`: Qwen3_5ForCausalLM; `mtp`: its MTP head. Parameters are float32."""

    def __init__(self, size: Size, seed: int) -> None:
        from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

        super().__init__()
        given = {k: v for k, v in text_config(size).items() if k not in ("architectures", "model_type", "dtype")}
        config = Qwen3_5TextConfig(**given)
        config._attn_implementation = "sdpa"
        torch.manual_seed(seed)
        self.size = size
        self.lm: Any = Qwen3_5ForCausalLM(config).float()
        self.mtp = MTPHead(self.lm.model, 1).float()
        self.mtp.apply(self.lm._init_weights)
        register()
        for layer in self.mtp.layers:
            layer.self_attn.config._attn_implementation = ATTENTION  # type: ignore[union-attr]
        self._slow_decay()

    def _slow_decay(self) -> None:
        """Delta-net states that forget within 10 to 1000 tokens, as Mamba 2 begins; transformers' own initial values
        forget within one."""
        for module in self.lm.modules():
            if hasattr(module, "dt_bias"):
                heads = len(module.dt_bias)
                step = torch.exp(torch.linspace(math.log(1e-3), math.log(0.1), heads))
                module.dt_bias.data.copy_(step + torch.log(-torch.expm1(-step)))  # softplus of it is `step`
                module.A_log.data.zero_()

    @property
    def embedding(self) -> Any:
        return self.lm.get_input_embeddings().weight

    def trunk(self) -> list[nn.Parameter]:
        return list(self.lm.parameters())
