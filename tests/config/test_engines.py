"""The data on engine releases: well formed, ordered, and every rule can hold on some deployment."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from draftproof.check.deployment import Deployment
from draftproof.check.features import RUNNERS, features, vocabulary
from draftproof.check.options import Options
from draftproof.config.drafter import DrafterSpec, read_drafter
from draftproof.config.engines import Engine, Link, Rule, covers, engines
from draftproof.config.finding import Severity, warning
from draftproof.config.layers import LayerSpec
from draftproof.config.target import TargetSpec, read_target
from tests.config.cases import CONFIGS, TARGETS

RULES = [(engine, rule) for engine in engines().values() for rule in engine.rules]
IDS = [rule.code for _, rule in RULES]
PREFIXES = {"vllm": "vllm-", "sglang": "sglang-", "llama.cpp": "llamacpp-", "ik_llama.cpp": "ikllama-"}
HYBRID = "Qwen3.6-27B"  # has linear layers, a vision part and an MTP layer

# What makes a feature hold, by the part of the deployment it changes. The base has none of the options, a drafter
# of full bidirectional layers and a plain Qwen3 target.
OPTIONS: dict[str, dict[str, Any]] = {
    "method:mtp": {"method": "mtp"},
    "platform:cpu": {"platform": "cpu"},
    "platform:rocm": {"platform": "rocm"},
    "forced:v1": {"runner": "v1"},
    "forced:v2": {"runner": "v2"},
    "block-drop-disabled": {"block_drop_disabled": True},
    "kv-connector": {"kv_connector": True},
    "hybrid-manager-off": {"hybrid_manager": False},
    "disaggregated": {"disaggregated": True},
    "pipeline-parallel": {"pipeline_parallel": 2},
    "tensor-parallel": {"tensor_parallel": 2},
    "tensor-parallel:uneven": {"tensor_parallel": 7},
    "draft-tp-1": {"tensor_parallel": 2, "draft_tensor_parallel": 1},
    "kv:quantized": {"kv_dtype": "fp8_e4m3"},
    "draft-kv:stated": {"draft_kv_dtype": "bfloat16"},
    "draft-kv:quantized": {"draft_kv_dtype": "fp8"},
    "draft-backend:stated": {"draft_attention_backend": "TRITON_ATTN"},
    "backend:forced": {"attention_backend": "FLASHINFER"},
    "rejection:synthetic": {"rejection": "synthetic"},
    "rejection:lossy": {"rejection": "fly"},
    "mamba:no-buffer": {"mamba_strategy": "no_buffer"},
    "mamba:extra-buffer": {"mamba_strategy": "extra_buffer"},
    "mamba:lazy": {"mamba_strategy": "extra_buffer_lazy"},
    "load:fastsafetensors": {"load_format": "fastsafetensors"},
    "split:tensor": {"split_mode": "tensor"},
    "split:graph": {"split_mode": "graph"},
    "k:above-block": {"drafts": 16},
    "k:below-block": {"drafts": 4},
    "k:above-1": {"drafts": 3},
    "k:above-128": {"drafts": 200},
    "batch:too-small": {"max_batched_tokens": 16},
    "batch:too-small-for-all": {"max_batched_tokens": 2048, "max_num_seqs": 256},
    "positions:short": {"max_model_len": 1_000_000},
    "window:below-context": {"max_model_len": 1_000_000},
}
TARGET: dict[str, dict[str, Any]] = {
    "target:gemma": {"model_type": "gemma3", "architecture": "Gemma3ForCausalLM"},
    "target:moe": {"model_type": "qwen3_moe", "architecture": "Qwen3MoeForCausalLM"},
    "target:v2-listed": {"model_type": "qwen2_moe", "architecture": "Qwen2MoeForCausalLM"},
    "target:v1-on-rocm": {"model_type": "deepseek_v32", "architecture": "DeepseekV32ForCausalLM"},
    "target:interleaved-rope": {"model_type": "deepseek_v3", "architecture": "DeepseekV3ForCausalLM"},
    "target:deepseek": {"model_type": "deepseek_v3", "architecture": "DeepseekV3ForCausalLM"},
    "target:qwen3_5": {"model_type": "qwen3_5", "architecture": "Qwen3_5ForConditionalGeneration"},
    "!target:listed-0.20": {"model_type": "glm4", "architecture": "Glm4ForCausalLM"},
    "!target:v2-listed-0.24": {"architecture": "Qwen3MoeForCausalLM"},
    "!target:relays-features": {"architecture": "Glm4ForCausalLM"},
}
HYBRID_FEATURES = ("target:hybrid", "target:multimodal", "target:mtp")
DRAFTER: dict[str, Callable[[DrafterSpec, TargetSpec], dict[str, Any]]] = {
    "taps:unsorted": lambda s, t: {"taps": s.taps[::-1]},
    "taps:embedding": lambda s, t: {"taps": (-1, *s.taps[1:])},
    "taps:last-layer": lambda s, t: {"taps": (*s.taps[:-1], t.num_layers - 1)},
    "taps:not-one-per-layer": lambda s, t: {"taps": s.taps[1:]},
    "taps:top-level": lambda s, t: {"sources": {**s.sources, "taps": "config.json: target_layer_ids"}},
    "mask:top-level": lambda s, t: {"sources": {**s.sources, "mask_token_id": "config.json: mask_token_id"}},
    "rope:partial": lambda s, t: {"rope": replace(s.rope, rotary_dim=s.head_dim // 4)},
    "rope:scaled": lambda s, t: {"rope": replace(s.rope, scaling={"rope_type": "yarn", "factor": 4.0})},
    "embedding:scaled": lambda s, t: {"input_embedding_scale": 2.5},
    "head:softcapped": lambda s, t: {"final_logit_softcapping": 30.0},
    "head:own": lambda s, t: {"draft_vocab_size": 32000},
    "vocab:padded": lambda s, t: {"vocab_size": t.vocab_size + 512},
    "positions:short": lambda s, t: {"max_positions": 32768},
    "dialect:speculators": lambda s, t: {"dialect": "speculators"},
    "causal:swnc-absent": lambda s, t: {"dialect": "speculators"},
    "causal:swnc-false": lambda s, t: {
        "dialect": "speculators",
        "findings": (warning("causality-disagreement", "one flag", "bidirectional", "false", "config.json", "replay"),),
    },
    "use-sliding-window:false": lambda s, t: {
        "findings": (warning("use-sliding-window-false", "no window", "true", "false", "config.json", "set it"),),
    },
}
EXTRAS: dict[str, dict[str, Any]] = {
    "taps:engine-ids": {"eagle_aux_hidden_state_layer_ids": [2, 10, 18, 26, 34]},
    "rope:interleaved": {"is_neox_style": False},
    "rope:per-layer": {"backbone_rotary_base": 10000},
    "sample-from-anchor": {"sample_from_anchor": True},
    "attention:sinks": {"attention_sink_bias": True},
    "attention:value-scale": {"attention_value_scale": 0.5},
    "drafter:quantized": {"quantization_config": {"quant_method": "fp8"}},
    "use-sliding-window:absent": {"sliding_window": 2048, "use_sliding_window": None},
}
CAUSALITY_SOURCES = {
    "causal:is_causal": "config.json: is_causal",
    "causal:dflash_config": "config.json: dflash_config.causal",
    "causal:unstated": "default: sliding layers causal",
    "causal:swnc-absent": "default: sliding layers causal, full ones bidirectional, as speculators trains",
}


def deployment(engine: Engine, when: tuple[str, ...]) -> Deployment:
    """A deployment made to have these features ("!": not to have them)."""
    hybrid = any(name in when for name in HYBRID_FEATURES)
    target = read_target(TARGETS / (HYBRID if hybrid else "Qwen3-8B"))
    drafter = read_drafter(CONFIGS / ("Qwen3.5-27B-DFlash" if hybrid else "Qwen3-8B-DFlash-b16"))
    options = Options()
    extras = dict(drafter.extras)
    drafter = replace(drafter, layers=layers(when, drafter.num_layers))
    for name in when:
        options = replace(options, **OPTIONS.get(name, {}))
        target = replace(target, **TARGET.get(name, {}))
        extras |= EXTRAS.get(name, {})
        if name.startswith("family:"):
            drafter = replace(drafter, family=name.removeprefix("family:"))
    for name in when:
        if name in DRAFTER:
            drafter = replace(drafter, **DRAFTER[name](drafter, target))
        if name in CAUSALITY_SOURCES:
            drafter = replace(drafter, sources={**drafter.sources, "causality": CAUSALITY_SOURCES[name]})
        if name == "layers:use-swa":
            drafter = replace(drafter, sources={**drafter.sources, "layers": "config.json: dflash_config.use_swa"})
    drafter = replace(drafter, extras=extras)
    release = next((text for text in engine.releases[::-1]), None)
    return Deployment(engine, release, None if options.method == "mtp" else drafter, target, options)


def missing(when: tuple[str, ...], held: frozenset[str]) -> list[str]:
    """The conditions that do not hold."""
    return [name for name in when if (name.removeprefix("!") in held) is name.startswith("!")]


def layers(when: tuple[str, ...], count: int) -> tuple[LayerSpec, ...]:
    mixed = "layers:mixed" in when or "causal:mixed" in when
    slides = ("layers:any-sliding", "layers:all-sliding", "layers:use-swa", "window:below-context")
    sliding = [mixed or any(name in when for name in (*slides, "causal:sliding-bidirectional"))] * count
    if mixed:
        sliding[-1] = False
    causal = [False] * count
    if "causal:mixed" in when:
        causal = list(sliding)
    elif "causal:any" in when or "causal:full-layer" in when:
        causal = [True] * count
    return tuple(LayerSpec(s, 2048 if s else None, c) for s, c in zip(sliding, causal, strict=True))


def test_the_data_is_read_once() -> None:
    assert engines() is engines()
    assert list(engines()) == list(PREFIXES)


def test_codes_are_unique_and_carry_the_engine() -> None:
    assert [code for code, count in Counter(IDS).items() if count > 1] == []
    for engine, rule in RULES:
        assert rule.code.startswith(PREFIXES[engine.name])


@pytest.mark.parametrize("engine", engines().values(), ids=list(engines()))
def test_rules_follow_the_order_of_the_links(engine: Engine) -> None:
    order = list(Link)
    positions = [order.index(rule.link) for rule in engine.rules]
    assert positions == sorted(positions)
    assert all(covers(engine.known, release) for release in engine.releases)
    assert not engine.releases or engine.newest == engine.releases[-1]


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=IDS)
def test_rule_is_well_formed(engine: Engine, rule: Rule) -> None:
    names = [name.removeprefix("!") for name in rule.when]
    assert set(names) <= vocabulary()
    assert len(set(names)) == len(names)
    if engine.releases:
        assert any(covers(rule.releases, release) for release in engine.releases)
    if rule.effect.starts is False:
        assert rule.severity is Severity.ERROR
    if rule.effect.runner:
        assert rule.link is Link.RUNNER
        assert rule.severity is Severity.NOTE
        assert not any(name in RUNNERS for name in names)


@pytest.mark.parametrize(("engine", "rule"), RULES, ids=IDS)
def test_rule_is_reachable(engine: Engine, rule: Rule) -> None:
    held = features(deployment(engine, rule.when))
    assert missing(rule.when, held | set(RUNNERS)) == []


def test_every_feature_serves_a_rule() -> None:
    used = {name.removeprefix("!") for _, rule in RULES for name in rule.when}
    assert vocabulary() - used == set()


def test_runner_is_named_for_every_release() -> None:
    """Whatever the target, some rule with an effect gives vLLM's runner."""
    vllm = engines()["vllm"]
    for release in vllm.releases:
        for when in ((), ("target:hybrid",), ("target:moe",), ("target:v2-listed",), ("platform:cpu",)):
            held = features(deployment(vllm, when))
            chosen = [
                rule.effect.runner
                for rule in vllm.rules
                if rule.effect.runner and covers(rule.releases, release) and missing(rule.when, held) == []
            ]
            assert chosen, (release, when)


@pytest.mark.parametrize(
    ("releases", "release", "expected"),
    [
        (">=0.32,<0.33", "0.32.0+cpu", True),
        ("<0.25", "0.24.0+cu130.git1234", True),
        (">=0.32", "0.33.0rc1", True),
        (">=0.5.14,<0.5.18", "0.5.15.post1", True),
        (">=9235", "9300", True),
        ("", "0.1", True),
        ("<0.20", "0.20.0", False),
    ],
)
def test_covers(releases: str, release: str, expected: bool) -> None:
    assert covers(releases, release) is expected


@pytest.mark.parametrize(
    "change",
    [
        {"releases": "from 0.20"},
        {"code": "Upper"},
        {"severity": "fatal"},
        {"evidence": ()},
        {"effect": {"windows": "none"}},
        {"does": "short"},
        {"unknown": 1},
    ],
)
def test_schema_refuses(change: dict[str, Any]) -> None:
    good = RULES[0][1].model_dump()
    assert Rule.model_validate(good) == RULES[0][1]
    with pytest.raises(ValidationError):
        Rule.model_validate(good | change)
