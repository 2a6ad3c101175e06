"""A tiny pair that the real vLLM accepts: Qwen3 target of 6 layers, head size 32, and a DFlash drafter of 3.

Random drafts are almost never right, so the target is made constant: every embedding row leans to one direction; the
head's row of one token is that direction. Target and drafter share both matrices, so both always say that token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FFN, LAYERS, BLOCK = 512, 128, 4, 2, 32, 256, 6, 8
ALWAYS = 77
LAYOUTS = {
    "full": ["full_attention"] * 3,
    "sliding": ["sliding_attention"] * 3,
    "mixed": ["sliding_attention", "sliding_attention", "full_attention"],
}


def make_pair(folder: Path, layout: str = "mixed", *, constant: bool = True, **changes: Any) -> tuple[Path, Path]:
    """(target, drafter) under `folder`; `changes` go into the drafter's config, dflash_config by key."""
    target, drafter = folder / "target", folder / "drafter-dflash"
    _target(target, constant)
    _drafter(drafter, layout, changes)
    return target, drafter


def _target(folder: Path, constant: bool) -> None:
    import transformers as hf

    torch.manual_seed(0)
    config = hf.Qwen3Config(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=FFN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, max_position_embeddings=1024,
        initializer_range=0.1, bos_token_id=1, eos_token_id=2, pad_token_id=0, tie_word_embeddings=False,
    )  # fmt: skip
    model = hf.AutoModelForCausalLM.from_config(config)
    if constant:
        direction = torch.nn.functional.normalize(torch.randn(HIDDEN), dim=0)
        with torch.no_grad():
            model.model.embed_tokens.weight += 3 * direction
            model.lm_head.weight[ALWAYS] = 8 * direction
            for layer in model.model.layers:  # so that no layer turns the stream away from it
                layer.self_attn.o_proj.weight *= 0.05
                layer.mlp.down_proj.weight *= 0.05
    model.save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    import transformers as hf
    from tokenizers import Tokenizer, models, pre_tokenizers

    special = ["<pad>", "<bos>", "<eos>", "<mask>"]
    words = {word: i for i, word in enumerate([*special, *(f"w{i}" for i in range(4, VOCAB))])}
    raw = Tokenizer(models.WordLevel(words, unk_token="w4"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=raw,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        mask_token="<mask>",
        chat_template="{% for m in messages %}{{ m['content'] }} {% endfor %}",
    )


def _drafter(folder: Path, layout: str, changes: dict[str, Any]) -> None:
    nested = {"mask_token_id": 3, "target_layer_ids": [0, 2, 4]} | changes.pop("dflash_config", {})
    config = {
        "architectures": ["DFlashDraftModel"], "model_type": "qwen3", "hidden_size": HIDDEN,
        "intermediate_size": FFN, "num_hidden_layers": 3, "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "hidden_act": "silu", "rms_norm_eps": 1e-6,
        "vocab_size": VOCAB, "rope_theta": 10000.0, "max_position_embeddings": 1024,
        "layer_types": LAYOUTS[layout], "sliding_window": 64, "use_sliding_window": layout != "full",
        "attention_bias": False, "tie_word_embeddings": False, "block_size": BLOCK, "num_target_layers": LAYERS,
        "dflash_config": nested,
    }  # fmt: skip
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config | changes, indent=1))
    save_file(_weights(len(nested["target_layer_ids"])), folder / "model.safetensors", metadata={"format": "pt"})


def _weights(taps: int) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw) * 0.05

    found = {"fc.weight": random(HIDDEN, HIDDEN * taps)}
    found |= {name: torch.ones(HIDDEN) for name in ("norm.weight", "hidden_norm.weight")}
    shapes = {
        "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
        "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN), "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
        "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN),
    }  # fmt: skip
    for layer in range(3):
        found |= {f"layers.{layer}.{name}.weight": random(*shape) for name, shape in shapes.items()}
        norms = {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        norms |= {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        found |= {f"layers.{layer}.{name}.weight": torch.ones(size) for name, size in norms.items()}
    return found
