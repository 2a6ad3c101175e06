"""What a rule may ask about a deployment: name -> predicate. The names are the closed vocabulary of engines.toml."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Final

from draftproof.check.deployment import Deployment
from draftproof.config.drafter import DrafterSpec
from draftproof.config.families import BY_ARCHITECTURE

Predicate = Callable[[Deployment], bool]


def features(deployment: Deployment) -> frozenset[str]:
    """Every feature that holds, the runner excepted, which rules decide (`check/rules.py`)."""
    return frozenset(name for name, holds in FEATURES.items() if holds(deployment))


def _drafter(holds: Callable[[DrafterSpec], bool]) -> Predicate:
    return lambda d: d.drafter is not None and holds(d.drafter)


def _stated(key: str) -> Predicate:
    """The drafter's config states this key for causality."""
    return _drafter(lambda s: s.sources.get("causality", "").endswith(f": {key}"))


def _top_level(name: str, key: str) -> Predicate:
    """The value was read from this key at the top of a config that is not speculators'."""
    return _drafter(lambda s: s.dialect != "speculators" and s.sources.get(name, "").endswith(f": {key}"))


def _extra(key: str) -> Predicate:
    return _drafter(lambda s: s.extras.get(key) not in (None, False, 0))


def _context(d: Deployment) -> int:
    return d.options.max_model_len or d.target.max_positions or 0


def _drafts(d: Deployment) -> int:
    return 0 if d.drafter is None else d.drafter.block_size - 1


def _uneven(d: Deployment) -> bool:
    """Heads that the tensor-parallel ranks cannot share out."""
    ranks = d.options.tensor_parallel
    if d.drafter is None or ranks == 1:
        return False
    heads = d.drafter.num_kv_heads
    return d.drafter.num_heads % ranks != 0 or (heads % ranks if heads >= ranks else ranks % heads) != 0


def _slots_exceed(d: Deployment) -> bool:
    """The draft slots of all sequences leave no token to schedule (vLLM before 0.28)."""
    batched, seqs = d.options.max_batched_tokens, d.options.max_num_seqs
    return batched is not None and seqs is not None and ((d.options.drafts or _drafts(d)) - 1) * seqs >= batched


def _architecture(*names: str) -> Predicate:
    return lambda d: d.target.architecture in names


def _model_type(*marks: str) -> Predicate:
    return lambda d: any(mark in d.target.model_type for mark in marks)


def _quantized_kv(kv: str | None) -> bool:
    return kv is not None and any(mark in kv for mark in ("fp8", "int8", "int4", "nvfp4", "q8", "q4"))


# Targets whose features vLLM 0.20 and 0.21 hand to a drafter; a model type counts that contains one of these.
LISTED_0_20: Final = (
    *("llama", "qwen", "minicpm", "gpt_oss", "hunyuan_vl", "hunyuan_v1_dense", "afmoe", "nemotron_h"),
    *("deepseek_v2", "deepseek_v3", "kimi_k2", "kimi_k25", "minimax_m2", "gemma4", "laguna"),
)
# Architectures that vLLM gave to its V2 runner before 0.29: those of all of 0.25 to 0.28, and the dense ones of 0.24.
V2_LISTED: Final = ("DeepseekV2ForCausalLM", "Qwen2MoeForCausalLM", "GraniteMoeForCausalLM")
V2_LISTED_0_24: Final = (*V2_LISTED, "Qwen3ForCausalLM", "LlamaForCausalLM", "MistralForCausalLM")
MOE: Final = ("moe", "mixtral", "deepseek", "gpt_oss", "kimi", "minimax")

OPTIONS: Final[Mapping[str, Predicate]] = {
    "method:dflash": lambda d: d.options.method == "dflash",
    "method:mtp": lambda d: d.options.method == "mtp",
    "platform:cpu": lambda d: d.options.platform == "cpu",
    "platform:cuda": lambda d: d.options.platform == "cuda",
    "platform:rocm": lambda d: d.options.platform == "rocm",
    "forced:v1": lambda d: d.options.runner == "v1",
    "forced:v2": lambda d: d.options.runner == "v2",
    "prefix-caching": lambda d: d.options.prefix_caching,
    "block-drop-disabled": lambda d: d.options.block_drop_disabled,
    "kv-connector": lambda d: d.options.kv_connector,
    "hybrid-manager-off": lambda d: not d.options.hybrid_manager,
    "disaggregated": lambda d: d.options.disaggregated,
    "pipeline-parallel": lambda d: d.options.pipeline_parallel > 1,
    "tensor-parallel": lambda d: d.options.tensor_parallel > 1,
    "tensor-parallel:uneven": _uneven,
    "draft-tp-1": lambda d: d.options.draft_tensor_parallel == 1 and d.options.tensor_parallel > 1,
    "kv:quantized": lambda d: _quantized_kv(d.options.kv_dtype),
    "draft-kv:stated": lambda d: d.options.draft_kv_dtype is not None,
    "draft-kv:quantized": lambda d: _quantized_kv(d.options.draft_kv_dtype or d.options.kv_dtype),
    "draft-backend:stated": lambda d: d.options.draft_attention_backend is not None,
    "backend:forced": lambda d: d.options.attention_backend is not None,
    "rejection:synthetic": lambda d: d.options.rejection == "synthetic",
    "rejection:lossy": lambda d: d.options.rejection == "fly",
    "mamba:no-buffer": lambda d: d.options.mamba_strategy == "no_buffer",
    "mamba:extra-buffer": lambda d: d.options.mamba_strategy == "extra_buffer",
    "mamba:lazy": lambda d: d.options.mamba_strategy == "extra_buffer_lazy",
    "load:fastsafetensors": lambda d: d.options.load_format == "fastsafetensors",
    "split:tensor": lambda d: d.options.split_mode == "tensor",
    "split:graph": lambda d: d.options.split_mode == "graph",
    "k:above-block": lambda d: d.options.drafts is not None and d.options.drafts > _drafts(d) > 0,
    "k:below-block": lambda d: d.options.drafts is not None and d.options.drafts < _drafts(d),
    "k:above-1": lambda d: (d.options.drafts or 0) > 1,
    "k:above-128": lambda d: (d.options.drafts or _drafts(d)) > 128,
    "batch:too-small": lambda d: (
        d.options.max_batched_tokens is not None
        and d.options.max_batched_tokens <= (d.options.drafts or _drafts(d)) + 1
    ),
    "batch:too-small-for-all": _slots_exceed,
}
TARGET: Final[Mapping[str, Predicate]] = {
    "target:hybrid": lambda d: "linear" in d.target.layer_kinds,
    "target:multimodal": lambda d: d.target.multimodal,
    "target:mtp": lambda d: d.target.mtp_layers > 0,
    "target:gemma": lambda d: d.target.model_type.startswith("gemma"),
    "target:moe": lambda d: any(mark in f"{d.target.model_type} {d.target.architecture}".lower() for mark in MOE),
    "target:listed-0.20": _model_type(*LISTED_0_20),
    "target:v2-listed": _architecture(*V2_LISTED),
    "target:v2-listed-0.24": _architecture(*V2_LISTED_0_24),
    "target:v1-on-rocm": _architecture("DeepseekV32ForCausalLM", "DeepseekV4ForCausalLM"),
    "target:relays-features": _architecture("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"),
    "target:qwen3_5": lambda d: d.target.model_type.startswith("qwen3_5"),
    "target:interleaved-rope": lambda d: d.target.model_type.startswith(("deepseek", "glm", "kimi")),
    "target:deepseek": lambda d: d.target.model_type.startswith("deepseek"),
}
DRAFTER: Final[Mapping[str, Predicate]] = {
    "layers:any-sliding": _drafter(lambda s: any(layer.sliding for layer in s.layers)),
    "layers:all-sliding": _drafter(lambda s: all(layer.sliding for layer in s.layers)),
    "layers:single": _drafter(lambda s: s.num_layers == 1),
    "layers:mixed": _drafter(lambda s: len({layer.sliding for layer in s.layers}) == 2),
    "layers:use-swa": _drafter(lambda s: s.sources.get("layers", "").endswith("dflash_config.use_swa")),
    "use-sliding-window:false": _drafter(lambda s: any(f.code == "use-sliding-window-false" for f in s.findings)),
    "use-sliding-window:absent": _drafter(
        lambda s: "sliding_window" in s.extras and s.extras.get("use_sliding_window") is None
    ),
    "causal:any": _drafter(lambda s: any(layer.causal for layer in s.layers)),
    "causal:none": _drafter(lambda s: not any(layer.causal for layer in s.layers)),
    "causal:mixed": _drafter(lambda s: len({layer.causal for layer in s.layers}) == 2),
    "causal:full-layer": _drafter(lambda s: any(layer.causal and not layer.sliding for layer in s.layers)),
    "causal:sliding-bidirectional": _drafter(lambda s: any(layer.sliding and not layer.causal for layer in s.layers)),
    "causal:is_causal": _stated("is_causal"),
    "causal:dflash_config": _stated("dflash_config.causal"),
    "causal:unstated": _drafter(lambda s: s.sources.get("causality", "").startswith("default")),
    "causal:swnc-false": _drafter(
        lambda s: any(f.code == "causality-disagreement" and f.seen == "false" for f in s.findings)
    ),
    "causal:swnc-absent": _drafter(
        lambda s: s.dialect == "speculators" and s.sources.get("causality", "").startswith("default")
    ),
    "taps:unsorted": _drafter(lambda s: list(s.taps) != sorted(set(s.taps))),
    "taps:embedding": _drafter(lambda s: -1 in s.taps),
    "taps:top-level": _top_level("taps", "target_layer_ids"),
    "taps:not-one-per-layer": _drafter(lambda s: len(s.taps) != s.num_layers),
    "taps:engine-ids": _drafter(lambda s: "eagle_aux_hidden_state_layer_ids" in s.extras),
    "taps:last-layer": lambda d: d.drafter is not None and d.target.num_layers - 1 in d.drafter.taps,
    "rope:interleaved": _drafter(lambda s: s.extras.get("is_neox_style") is False),
    "rope:partial": _drafter(lambda s: s.rope.rotary_dim < s.head_dim),
    "rope:scaled": _drafter(lambda s: s.rope.scaling is not None),
    "rope:per-layer": _extra("backbone_rotary_base"),
    "mask:top-level": _top_level("mask_token_id", "mask_token_id"),
    "sample-from-anchor": _extra("sample_from_anchor"),
    "attention:sinks": _extra("attention_sink_bias"),
    "attention:value-scale": _extra("attention_value_scale"),
    "embedding:scaled": _drafter(lambda s: s.input_embedding_scale != 1),
    "head:softcapped": _drafter(lambda s: s.final_logit_softcapping is not None),
    "head:own": _drafter(lambda s: s.draft_vocab_size is not None),
    "vocab:padded": lambda d: d.drafter is not None and 0 < abs(d.drafter.vocab_size - d.target.vocab_size) < 1024,
    "drafter:quantized": _extra("quantization_config"),
    "positions:short": lambda d: (
        d.drafter is not None and d.drafter.max_positions is not None and d.drafter.max_positions < _context(d)
    ),
    "window:below-context": lambda d: (
        d.drafter is not None and any(s.window is not None and s.window < _context(d) for s in d.drafter.layers)
    ),
    "dialect:speculators": _drafter(lambda s: s.dialect == "speculators"),
    **{
        f"family:{name}": _drafter(lambda s, name=name: s.family == name)  # type: ignore[misc]
        for _, name in BY_ARCHITECTURE
    },
}
FEATURES: Final[Mapping[str, Predicate]] = OPTIONS | TARGET | DRAFTER  # type: ignore[operator]
RUNNERS: Final = ("runner:v1", "runner:v2")


def vocabulary() -> frozenset[str]:
    """Every name a rule may use."""
    return frozenset(FEATURES) | set(RUNNERS)
