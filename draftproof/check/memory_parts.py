"""The parts of a deployment's memory on one GPU, each with how it was computed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftproof.check.deployment import Deployment
from draftproof.check.footprint import (
    WEIGHT_BYTES,
    dense_parameters,
    drafter_parameters,
    file_bytes,
    has_latent_rows,
    kv_bytes,
    state_bytes,
)

GIB: Final = 2**30
TARGET: Final = "target weights"
BATCH: Final = 2048  # vLLM's default of max_num_batched_tokens for a server on a GPU below 70 GiB
GGUF: Final = ("llama.cpp", "ik_llama.cpp")  # engines that load another file than the one whose config was read
KNOWN_KINDS: Final = frozenset({"full", "sliding", "linear", "mlp", "moe"})


@dataclass(frozen=True)
class Part:
    """`bytes` lie on each GPU, None when they cannot be told; `how` says how they were computed. `a_sequence`: they
    are for all sequences together and would be a part of that for one. `a_token`: bytes a further token costs."""

    name: str
    bytes: int | None
    how: str
    a_sequence: bool = False
    a_token: int = 0


def target_weights(deployment: Deployment, stated: int | None) -> Part:
    target, options = deployment.target, deployment.options
    if stated is None and deployment.engine.name in GGUF:
        return Part(TARGET, None, "cannot tell: the size of the GGUF was not stated")
    gpus = options.tensor_parallel * options.pipeline_parallel
    seen = (stated, "as stated") if stated is not None else file_bytes(Path(target.path))
    parameters = dense_parameters(target)
    if seen is None and parameters is not None:
        left_out = " without vision tower and MTP layer" if target.multimodal or target.mtp_layers else ""
        seen = parameters * WEIGHT_BYTES, f"about {parameters / 1e9:.1f} G parameters by shape{left_out} x 2 B"
    if seen is None:
        why = "experts" if target.experts else "quantised" if target.quantized else "shapes not described"
        return Part(TARGET, None, f"cannot tell: no weight files in its folder ({why})")
    return Part(TARGET, -(-seen[0] // gpus), seen[1] + _over(gpus))


def drafter_weights(deployment: Deployment) -> list[Part]:
    drafter = deployment.drafter
    if drafter is None:
        return []
    if deployment.engine.name in GGUF:
        return [Part("drafter weights", None, "not estimated: a GGUF may be quantised")]
    parallel = deployment.options.draft_tensor_parallel or deployment.options.tensor_parallel
    plain = drafter.family == "dflash" and "quantization_config" not in drafter.extras
    files = None if plain else file_bytes(Path(drafter.path))
    if files is not None:
        return [Part("drafter weights", -(-files[0] // parallel), files[1] + _over(parallel))]
    size = drafter_parameters(drafter)
    amount = (size.split // parallel + size.whole) * WEIGHT_BYTES
    rest = "" if plain else f"; what a {drafter.family} drafter has more, or its quantisation, is not counted"
    how = f"{(size.split + size.whole) / 1e9:.2f} G parameters by shape x 2 B{_over(parallel)}, fc whole on each"
    return [Part("drafter weights", amount, f"{how}; embedding and head are the target's{rest}")]


def target_rows(deployment: Deployment) -> list[Part]:
    target, options = deployment.target, deployment.options
    if has_latent_rows(target):
        return [Part("target K/V rows", None, "not estimated: latent attention keeps other rows")]
    shape = (target.num_kv_heads, target.head_dim, options.tensor_parallel, options.kv_dtype)
    full = -(-target.layer_kinds.count("full") // options.pipeline_parallel)
    full += target.mtp_layers if options.method == "mtp" else 0
    sliding = -(-target.layer_kinds.count("sliding") // options.pipeline_parallel)
    found = _rows(deployment, "target K/V rows", full, None, *shape)
    found += _rows(deployment, "target K/V rows, sliding", sliding, target.sliding_window, *shape)
    if foreign := sorted(set(target.layer_kinds) - KNOWN_KINDS):
        found.append(Part("other layers' state", None, f"not estimated: {', '.join(foreign)}"))
    return found


def draft_rows(deployment: Deployment) -> list[Part]:
    drafter, options = deployment.drafter, deployment.options
    if drafter is None:
        return []
    parallel = options.draft_tensor_parallel or options.tensor_parallel
    shape = (drafter.num_kv_heads, drafter.head_dim, parallel, options.draft_kv_dtype or options.kv_dtype)
    windows = [layer.window for layer in drafter.layers if layer.window is not None]
    found = _rows(deployment, "draft K/V rows", drafter.num_layers - len(windows), None, *shape)
    return found + _rows(deployment, "draft K/V rows, sliding", len(windows), max(windows, default=None), *shape)


def _rows(
    deployment: Deployment, name: str, layers: int, window: int | None, heads: int, dim: int, parallel: int, dtype: str
) -> list[Part]:
    """K/V of `layers` layers for every sequence; a sliding layer keeps its window and the batch in flight."""
    if not layers:
        return []
    element, context, sequences = kv_bytes(dtype), context_length(deployment), sequence_count(deployment)
    if element is None or context is None:
        why = f"K/V dtype {dtype} is not known" if element is None else "the context length is not known"
        return [Part(name, None, f"not estimated: {why}")]
    local = max(1, -(-heads // parallel))
    token = int(2 * layers * local * dim * element)
    bounded = window is not None and deployment.options.hybrid_manager
    kept = min(context, (window or 0) + (deployment.options.max_batched_tokens or BATCH)) if bounded else context
    how = f"{layers} layers x 2 x {local} heads x {dim} x {element:g} B x {kept} tokens x {sequences} sequences"
    if window is not None and kept < context:
        how += f"; an engine that allocates them as full layers takes {gib(token * context * sequences)}"
    return [Part(name, token * kept * sequences, how, True, 0 if bounded else token)]


def states(deployment: Deployment) -> list[Part]:
    target, options = deployment.target, deployment.options
    layers = -(-target.layer_kinds.count("linear") // options.pipeline_parallel)
    if not layers:
        return []
    if target.linear is None:
        return [Part("recurrent states", None, "not estimated: the config does not describe the linear layers")]
    drafts, sequences = _drafts(deployment), sequence_count(deployment)
    one = state_bytes(target.linear, drafts, options.tensor_parallel)
    count, why = _state_count(deployment, drafts)
    dtype = target.linear.state_dtype or "float32, which the config does not state"
    how = f"{layers} layers x {one} B (state {dtype}) x {count} states ({why}) x {sequences} sequences"
    return [Part("recurrent states", layers * one * count * sequences, how, True)]


def _state_count(deployment: Deployment, drafts: int) -> tuple[int, str]:
    """States a running sequence holds. vLLM: `MambaSpec.max_memory_usage_bytes` of 0.32 (v1/kv_cache_interface.py)."""
    name = deployment.engine.name
    if name == "vllm" and deployment.options.prefix_caching:
        return 2 + drafts, "2 with prefix caching, and one a drafted token"
    if name in ("vllm", "sglang"):
        return 1 + drafts, "1, and one a drafted token" + ("" if name == "vllm" else ", as in vLLM")
    return 1, "1; snapshots for rolling back are not counted"


def context_length(deployment: Deployment) -> int | None:
    return deployment.options.max_model_len or deployment.target.max_positions


def sequence_count(deployment: Deployment) -> int:
    return deployment.options.max_num_seqs or 1


def _drafts(deployment: Deployment) -> int:
    stated, drafter = deployment.options.drafts, deployment.drafter
    return stated if stated is not None else drafter.block_size - 1 if drafter else 1


def _over(gpus: int) -> str:
    return f" / {gpus} GPUs" if gpus > 1 else ""


def gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"
