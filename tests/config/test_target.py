"""Reading targets: wrappers, hybrids, sliding patterns, defaults of the model class."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.config.linear import LinearSpec
from draftproof.config.target import read_target
from draftproof.errors import UserError

from .cases import CONFIGS, TARGETS, load

Write = Callable[..., Path]


def test_a_wrapped_hybrid_with_mtp() -> None:
    spec = read_target(TARGETS / "Qwen3.6-27B")
    assert (spec.hidden_size, spec.num_layers, spec.vocab_size, spec.head_dim) == (5120, 64, 248320, 256)
    assert spec.layer_kinds == ("linear", "linear", "linear", "full") * 16
    assert (spec.multimodal, spec.mtp_layers, spec.partial_rotary_factor, spec.rope_base) == (
        True,
        1,
        0.25,
        1e7,
    )
    assert spec.sources["hidden_size"] == "config.json: text_config.hidden_size"


def test_a_dense_target() -> None:
    spec = read_target(TARGETS / "Llama-3.1-8B-Instruct")
    assert (spec.head_dim, spec.rope_base, spec.multimodal, spec.mtp_layers) == (128, 5e5, False, 0)
    assert spec.sources["head_dim"].startswith("derived")
    assert set(spec.layer_kinds) == {"full"} and spec.sliding_window is None


def test_gemma3_leaves_out_what_its_class_defaults_to() -> None:
    spec = read_target(TARGETS / "gemma-3-4b-it")
    assert (spec.vocab_size, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (262208, 8, 4, 256)
    assert spec.layer_kinds[:6] == ("sliding",) * 5 + ("full",)
    assert (spec.sliding_window, spec.tie_word_embeddings) == (1024, True)
    assert spec.sources["vocab_size"].startswith("default")


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, "full full full full"),
        (
            {"layer_types": ["sliding_attention", "conv", "attention", "full_attention"]},
            "sliding conv full full",
        ),
        ({"full_attention_interval": 2}, "linear full linear full"),
        ({"sliding_window_pattern": 4, "sliding_window": 8}, "sliding sliding sliding full"),
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
            "full full sliding sliding",
        ),
        ({"use_sliding_window": False, "sliding_window": 8, "max_window_layers": 2}, "full full full full"),
        ({"model_type": "mistral", "sliding_window": 8}, "sliding sliding sliding sliding"),
        ({"model_type": "gemma2", "sliding_window": 8}, "sliding full sliding full"),
        ({"hybrid_override_pattern": "M*-E"}, "mamba full mlp moe"),
        ({"linear_attn_config": {"full_attn_layers": [4]}}, "linear linear linear full"),
    ],
    ids=str,
)
def test_layer_kinds(write: Write, changes: dict[str, Any], kinds: str) -> None:
    raw = load(TARGETS / "Qwen3-8B") | {"num_hidden_layers": 4, "use_sliding_window": None} | changes
    spec = read_target(write(raw))
    assert " ".join(spec.layer_kinds) == kinds
    assert (spec.sliding_window == 8) == ("sliding" in kinds and "sliding_window" in changes)


def test_refusals(write: Write, tmp_path: Path) -> None:
    for path, code in (
        (CONFIGS / "Qwen3-8B-DFlash-b16", "not-a-model"),
        (tmp_path / "nowhere", "not-found"),
        (write({"a": 1}, "empty"), "not-a-model"),
        (write({"architectures": ["X"], "hidden_size": 8}, "half"), "bad-config"),
        (write(load(TARGETS / "Qwen3-8B") | {"layer_types": ["full_attention"]}, "short"), "bad-config"),
        (write(load(TARGETS / "Qwen3-8B") | {"num_hidden_layers": "36"}, "text"), "bad-config"),
    ):
        with pytest.raises(UserError) as caught:
            read_target(path)
        assert caught.value.code == code, path


def test_a_misspelt_key_of_a_target_is_a_warning(write: Write) -> None:
    raw = load(TARGETS / "Qwen3-8B")
    assert read_target(write(raw)).findings == ()
    raw["layer_typs"] = ["sliding_attention"] * 36
    assert [f.code for f in read_target(write(raw)).findings] == ["unknown-key"]


def test_the_state_of_linear_layers() -> None:
    spec = read_target(TARGETS / "Qwen3.6-27B")
    assert spec.linear == LinearSpec(key_heads=16, value_heads=48, key_dim=128, value_dim=128, conv_kernel=4)
    assert spec.linear.conv_channels == 2 * 16 * 128 + 48 * 128
    assert spec.sources["linear"] == "config.json: text_config.linear_*"
    assert (spec.intermediate_size, spec.experts, spec.quantized) == (17408, None, False)


def test_a_state_dtype_and_an_incomplete_description(write: Write) -> None:
    raw = load(TARGETS / "Qwen3.6-27B")
    raw["text_config"]["mamba_ssm_dtype"] = "float32"
    linear = read_target(write(raw)).linear
    assert linear is not None and linear.state_dtype == "float32"
    del raw["text_config"]["linear_conv_kernel_dim"]
    spec = read_target(write(raw))
    assert spec.linear is None and spec.sources["linear"].startswith("default")


@pytest.mark.parametrize(
    ("changes", "experts", "quantized", "intermediate"),
    [
        ({}, None, False, 12288),
        ({"num_experts": 128}, 128, False, 12288),
        ({"num_local_experts": 8, "quantization_config": {"quant_method": "fp8"}}, 8, True, 12288),
        ({"n_routed_experts": 64, "quantization_config": None}, 64, False, 12288),
        ({"num_experts": None, "intermediate_size": [8, 16]}, None, False, None),
    ],
)
def test_what_weights_look_like(
    write: Write, changes: dict[str, Any], experts: int | None, quantized: bool, intermediate: int | None
) -> None:
    spec = read_target(write(load(TARGETS / "Qwen3-8B") | changes))
    assert (spec.experts, spec.quantized, spec.intermediate_size) == (experts, quantized, intermediate)
    assert {"experts", "quantized", "intermediate_size", "linear"} <= spec.sources.keys()
