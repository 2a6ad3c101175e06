"""What of an engine's command line changes how a drafter runs, in words that all engines share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Method = Literal["dflash", "mtp"]
Platform = Literal["cuda", "rocm", "cpu"]


@dataclass(frozen=True)
class Options:
    """`drafts` is the number of drafted tokens a pass (vLLM's K; SGLang's number less one), None when the user
    gave none. Absent values are the engine's own defaults. `launch` and `check` fill it from their options and
    from engine flags (`check/flags.py`)."""

    method: Method = "dflash"
    drafts: int | None = None
    platform: Platform = "cuda"
    runner: Literal["v1", "v2"] | None = None  # forced by the user; None: the release chooses
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    draft_tensor_parallel: int | None = None
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_batched_tokens: int | None = None
    kv_dtype: str = "auto"
    draft_kv_dtype: str | None = None
    attention_backend: str | None = None
    draft_attention_backend: str | None = None
    prefix_caching: bool = True
    block_drop_disabled: bool = False  # vLLM's disable_eagle_block_drop
    hybrid_manager: bool = True  # vLLM's hybrid KV cache manager
    kv_connector: bool = False
    disaggregated: bool = False
    rejection: str = "standard"
    mamba_strategy: str | None = None  # SGLang: no_buffer, extra_buffer, extra_buffer_lazy
    load_format: str | None = None
    split_mode: str | None = None  # llama.cpp
    gpu_share: float | None = None  # of a GPU's memory, for the engine
