"""The line that matters in logs of engines. Logs named `run` are real vLLM 0.32.0 output, shortened in the middle."""

from __future__ import annotations

import re

import pytest

from draftproof.launch.failures import explain_log, failures, plain

HEAD = """Triton is installed, but doesn't include CPU backend. Disabling Triton.
(APIServer pid=32386) INFO 11-29 23:19:39 [api_utils.py:286] non-default args: {'trust_remote_code': False}
(APIServer pid=32386) WARNING 11-29 23:19:39 [system_utils.py:255] Found ulimit of 20000 and failed to automatically \
increase with error current limit exceeds maximum limit. This can cause fd limit errors like `OSError: [Errno 24] Too \
many open files`. Consider increasing with ulimit -n
(APIServer pid=32386) WARNING 11-29 16:51:28 [vllm.py:725] Model Runner V2 requires Triton; using the V1 model runner \
instead.
Traceback (most recent call last):
  File "/v/bin/vllm", line 10, in <module>
    sys.exit(main())
             ^^^^^^
"""

RUN = {
    "json-mangled": (
        "usage: vllm serve [model_tag] [options]\nvllm serve: error: argument --speculative-config/-sc: Value "
        '\'{"method":"dflash"}\' cannot be converted to <function loads at 0x7fa145089120>.\n',
        'vllm serve: error: argument --speculative-config/-sc: Value \'{"method":"dflash"}\' cannot be converted to'
        " <function loads at 0x7fa145089120>.",
    ),
    "mixed-windows-v1": (
        HEAD + "pydantic_core._pydantic_core.ValidationError: 1 validation error for VllmConfig\n"
        "  Value error, Model Runner V1 does not support: mixed sliding/full dflash drafts [type=value_error, "
        "input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]\n"
        "    For further information visit https://errors.pydantic.dev/2.14/v/value_error\n",
        "Value error, Model Runner V1 does not support: mixed sliding/full dflash drafts [type=value_error, "
        "input_value=ArgsKwargs((), {'model_co... 'shutdown_timeout': 0}), input_type=ArgsKwargs]",
    ),
    "key-unknown": (
        HEAD + "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\n"
        "num_spec_tokens\n  Unexpected keyword argument [type=unexpected_keyword_argument, input_value=7, "
        "input_type=int]\n    For further information visit https://errors.pydantic.dev/2.14/v/\n",
        "num_spec_tokens: Unexpected keyword argument [type=unexpected_keyword_argument, input_value=7, "
        "input_type=int]",
    ),
    "method-unknown": (
        HEAD + "pydantic_core._pydantic_core.ValidationError: 1 validation error for SpeculativeConfig\nmethod\n"
        "  Input should be 'ngram', 'eagle3', 'dflash', 'ngram_gpu' or 'dspark' [type=literal_error, "
        "input_value='dflesh', input_type=str]\n",
        "method: Input should be 'ngram', 'eagle3', 'dflash', 'ngram_gpu' or 'dspark' [type=literal_error, "
        "input_value='dflesh', input_type=str]",
    ),
    "hub-offline": (
        HEAD + '  File "/v/huggingface_hub/_snapshot_download.py", line 382, in snapshot_download\n'
        "    raise LocalEntryNotFoundError(\nhuggingface_hub.errors.LocalEntryNotFoundError: Cannot find an "
        "appropriate cached snapshot folder on the local disk and outgoing traffic has been disabled.\n",
        "huggingface_hub.errors.LocalEntryNotFoundError: Cannot find an "
        "appropriate cached snapshot folder on the local disk and outgoing traffic has been disabled.",
    ),
    "max-len": (
        HEAD + "pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig\n  Value error, "
        "User-specified max_model_len (99999) is greater than the derived max_model_len (max_position_embeddings=4096.0"
        " or model_max_length=None in model's config.json). [type=value_error]\n",
        "Value error, User-specified max_model_len (99999) is greater than the derived max_model_len "
        "(max_position_embeddings=4096.0 or model_max_length=None in model's config.json). [type=value_error]",
    ),
    "tool-parser-missing": (
        HEAD + '  File "/v/cli_args.py", line 524, in validate_parsed_serve_args\n    raise TypeError("Error: '
        '--enable-auto-tool-choice requires --tool-call-parser")\nTypeError: Error: --enable-auto-tool-choice requires '
        "--tool-call-parser\n",
        "TypeError: Error: --enable-auto-tool-choice requires --tool-call-parser",
    ),
}

LINES = {
    "mixed-windows-025": "NotImplementedError: DFlash does not yet support mixed sliding/full attention via "
    "layer_types; see https://github.com/vllm-project/vllm/issues/40898.",
    "candidate-head-v1": "Value error, Model Runner V1 does not support: DFlash candidate-head drafts",
    "v2-unsupported": "ValueError: Model Runner V2 does not yet support: suffix decoding",
    "v2-needs-triton": "  Value error, Model Runner V2 requires Triton. [type=value_error]",
    "candidate-selector-missing": "ValueError: There is no module or parameter named 'candidate_selector' in DFlash",
    "draft-count-missing": "Value error, num_speculative_tokens must be provided with speculative model unless",
    "draft-tp-key": "Value error, 'tensor_parallel_size' is not a valid argument in the speculative_config.",
    "window-missing": "ValueError: DFlash sliding attention requires a window size configured in dflash_config",
    "feature-width": "(EngineCore pid=9) ERROR 11-29 23:19:39 [core.py:1100] ValueError: DFlash drafter expects 640 "
    "concatenated aux hidden features but received 512.",
    "feature-width-old": "RuntimeError: mat1 and mat2 shapes cannot be multiplied (8192x20480 and 25600x5120)",
    "tap-out-of-range": "ValueError: DFLASH target_layer_ids contains an out-of-range layer id. target_layer_ids=[64]",
    "radix-no-buffer": "ValueError: Speculative decoding for Qwen3_5ForConditionalGeneration is not compatible with "
    "radix cache when using --mamba-scheduler-strategy no_buffer.To use radix cache with speculative decoding",
    "no-backend-non-causal": "ValueError: No valid attention backend found for cuda with AttentionSelectorConfig(x). "
    "Reasons: {FLASH_ATTN: [non-causal attention not supported]}.",
    "no-backend": "ValueError: No valid attention backend found for cuda with X. Reasons: {A: [head_size]}.",
    "fp8-fa2": "AssertionError: fp8 query is not supported in fa2 backend",
    "page-size": "NotImplementedError: Layer a: page size is not divisible by the maximum page size and cannot",
    "embeddings-missing": "Error: missing embedding weight model.embed_tokens.weight",
    "size-mismatch": "RuntimeError: size mismatch, got input (30), mat (30x128), vec (0)",
    "quantised-drafter": "AttributeError: 'QKVParallelLinear' object has no attribute 'weight'",
    "gguf-arch-unknown": "llama_model_load: error loading model: unknown model architecture: 'dflash'",
    "split-axis": "ggml.c:123: GGML_ASSERT(split_state != SPLIT_AXIS_0) failed",
    "gpu-count": "World size (2) is larger than the number of available GPUs (1) in this node.",
    "gpu-busy": "ValueError: Free memory on device cuda:0 (10.0/139.8 GiB) on startup is less than desired",
    "kv-none": "ValueError: No available memory for the cache blocks. Try increasing `gpu_memory_utilization`",
    "kv-too-small": "ValueError: To serve at least one request with the model's max seq len (262144), (8.0 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (2.0 GiB).",
    "cuda-oom": "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.",
    "batched-tokens": "ValueError: max_num_batched_tokens (4) must be greater than or equal to max_num_seqs (8).",
    "parser-unknown": "KeyError: 'invalid reasoning parser: qwen9 (chose from { qwen3 })'",
    "transformers-too-old": "ValueError: The checkpoint you are trying to load has model type `qwen9` but Transformers "
    "does not recognize this architecture.",
    "architecture-unknown": "ValueError: Model architectures ['Foo'] are not supported for now.",
    "metadata-missing": "importlib.metadata.PackageNotFoundError: No package metadata was found for vllm",
    "hub-unknown": "OSError: org/x is not a local folder and is not a valid model identifier ",
    "port-taken": "OSError: [Errno 98] Address already in use",
    "dflash-unknown": "  Input should be 'ngram', 'eagle3' or 'mtp' [type=literal_error, input_value='dflash'",
}


def test_the_table_is_complete_and_its_patterns_compile() -> None:
    table = failures()
    assert len(table) >= 25 and len({one.code for one in table}) == len(table)
    for one in table:
        assert one.cause.endswith(".") and one.fix.endswith((".", ")")) and one.evidence, one.code
        assert not one.pattern.search("") and isinstance(one.pattern, re.Pattern)


@pytest.mark.parametrize("code", RUN)
def test_real_logs(code: str) -> None:
    text, line = RUN[code]
    told = explain_log(text)
    assert told is not None and (told.code, told.line) == (code, line) and told.cause and told.fix


@pytest.mark.parametrize("code", LINES)
def test_known_lines(code: str) -> None:
    told = explain_log(
        HEAD + LINES[code] + "\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    )
    assert told is not None and told.code == code and plain(LINES[code]) == told.line


def test_a_bare_assertion_is_known_by_its_source_line() -> None:
    text = (
        HEAD
        + '  File "/v/kv_cache_utils.py", line 1352, in unify\n    assert new_spec.page_size_bytes == max_page_size\n'
    )
    told = explain_log(text + "           ^^^^^\nAssertionError\n")
    assert told is not None and told.code == "page-size"


def test_an_unknown_exception_is_the_last_of_the_traceback() -> None:
    core = "(EngineCore pid=7) ERROR 11-29 23:19:39 [core.py:1100] "
    text = (
        HEAD + f'{core}Traceback (most recent call last):\n{core}  File "/v/x.py", line 3, in f\n{core}    g()\n'
        f"{core}KeyError: 'layers.9.weird'\n(APIServer pid=1) Traceback (most recent call last):\n"
        "(APIServer pid=1) RuntimeError: Engine core initialization failed. See root cause above. Failed {}\n"
        "nanobind: leaked 2 instances!\n"
    )
    told = explain_log(text)
    assert told is not None and (told.line, told.code) == ("KeyError: 'layers.9.weird'", "")


def test_what_shutdown_prints_is_no_cause() -> None:
    text = (
        "INFO: loading\nthe last thing it did\n(APIServer pid=1) INFO 11-29 23:19:39 [core.py:1] [shutdown] start\n"
        "vllm.v1.engine.exceptions.EngineDeadError: EngineCore encountered an issue.\nnanobind: leaked 2 instances!\n"
        "RuntimeError: CUDA out of memory\n"
    )
    told = explain_log(text)
    assert told is not None and told.line == "the last thing it did"


def test_warnings_and_arguments_explain_nothing() -> None:
    told = explain_log(
        HEAD.split("Traceback")[0] + "[2026-11-29 12:00:00] server_args=ServerArgs(trust_remote_code=True)\n"
    )
    assert told is not None and told.code == ""


def test_usage_errors_and_empty_logs() -> None:
    usage = explain_log("usage: llama-server [options]\nerror: argument --foo: expected one argument\n\n")
    assert usage is not None and usage.line == "error: argument --foo: expected one argument"
    assert explain_log("") is None and explain_log("\n \r\n") is None
    only = explain_log("(APIServer pid=1) INFO 11-29 23:19:39 [x.py:1] Loading weights\n")
    assert only is not None and only.line == "Loading weights"
