"""What a plan says for each engine, why, and which flags of the user's it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from draftproof.errors import UserError
from draftproof.launch.machine import Local
from draftproof.launch.plan import Plan
from draftproof.launch.session import LaunchAsk, prepare_launch
from tests.config.cases import CONFIGS, TARGETS

DRAFTER, TARGET = CONFIGS / "Qwen3.6-27B-DFlash", TARGETS / "Qwen3.6-27B"


def plan(engine: str = "vllm", extra: tuple[str, ...] = (), named: dict[str, Any] | None = None, **more: Any) -> Plan:
    release = {"vllm": "0.33.0", "sglang": "0.5.23"}.get(engine)
    given: dict[str, Any] = {"drafter": str(DRAFTER), "bind": "127.0.0.1", "port": 8000, "release": release} | more
    ask = LaunchAsk(engine, given.pop("target", str(TARGET)), machine=Local(), named=named or {}, extra=extra, **given)
    return prepare_launch(ask, Path).plan


def value(made: Plan, flag: str) -> str:
    assert made.argv.count(flag) == 1, made.argv
    return made.argv[made.argv.index(flag) + 1]


def speculative(made: Plan) -> dict[str, Any]:
    return dict(json.loads(value(made, "--speculative-config")))


def refused(code: str, *words: str, **asked: Any) -> None:
    with pytest.raises(UserError) as caught:
        plan(**asked)
    assert caught.value.code == code, caught.value
    for word in words:
        assert word in str(caught.value)


def test_vllm_gets_method_path_and_k() -> None:
    made = plan()
    assert made.argv[:3] == ("vllm", "serve", str(TARGET))
    wanted = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15}
    assert speculative(made) == wanted
    assert made.env == {"VLLM_USE_V2_MODEL_RUNNER": "1"}, "a mixed drafter needs V2"
    assert int(value(made, "--max-num-batched-tokens")) >= 8192
    assert set(made.checkpoints) == {str(TARGET), str(DRAFTER)}


def test_every_argument_of_ours_has_its_reason() -> None:
    made = plan(
        named={"tensor_parallel": 2, "max_model_len": 32768}, reasoning_parser="qwen3", tool_parser="qwen3_coder"
    )
    flags = [word for word in made.argv if word.startswith("--")]
    assert set(flags) | {"VLLM_USE_V2_MODEL_RUNNER", "--release"} == {reason.what for reason in made.why}
    assert all(reason.why for reason in made.why)
    assert "--enable-auto-tool-choice" in flags, "vLLM wants it beside a tool parser"


def test_the_last_cached_block_is_kept_where_an_option_can() -> None:
    assert "disable_eagle_block_drop" not in speculative(plan(release="0.29.0"))
    assert speculative(plan(release="0.32.0"))["disable_eagle_block_drop"] is True
    assert "disable_eagle_block_drop" not in speculative(plan(release="0.33.0"))


def test_the_users_own_flags_are_kept_and_his_speculative_keys_merged() -> None:
    extra = ("--speculative-config", '{"attention_backend":"FLASH_ATTN"}', "--quantization", "fp8", "--enforce-eager")
    made = plan(extra=extra)
    assert made.argv[-3:] == ("--quantization", "fp8", "--enforce-eager")
    assert speculative(made)["attention_backend"] == "FLASH_ATTN"
    assert speculative(made)["num_speculative_tokens"] == 15


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"extra": ("--port", "9000")}, ("--port", "9000", "8000")),
        ({"extra": ("-tp", "4"), "named": {"tensor_parallel": 2}}, ("--tensor-parallel-size", "4", "2")),
        ({"extra": ("--model", "x")}, ("--model",)),
        ({"extra": ("--spec-method", "dflash")}, ("--spec-method",)),
        ({"extra": ("--speculative-config", '{"model":"other"}')}, ("model", "other")),
        ({"extra": ("--speculative-config", '{"num_speculative_tokens":7}'), "named": {"drafts": 15}}, ("7", "15")),
        ({"extra": ("--max-num-batched-tokens", "512"), "named": {"max_num_seqs": 64}}, ("1024", "512")),
        ({"env": {"VLLM_USE_V2_MODEL_RUNNER": "0"}, "named": {"runner": "v2"}}, ("v2", "v1")),
        ({"engine": "sglang", "named": {"drafts": 7}}, ("7", "16")),
        ({"engine": "sglang", "extra": ("--speculative-num-steps", "3")}, ("--speculative-num-steps",)),
    ],
    ids=str,
)
def test_contradictions_are_refused_by_name(asked: dict[str, Any], words: tuple[str, ...]) -> None:
    refused("flag-conflict", *words, **asked)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"extra": ("--speculative-config", '\'{"method":"dflash"}\'')}, ("not JSON", "quote character")),
        ({"extra": ("--speculative-config", "{{}")}, ("not JSON",)),
        ({"extra": ("--speculative-config", "[1]")}, ("not a JSON object",)),
        ({"extra": ("--speculative-config",)}, ("no value",)),
        ({"extra": ("--speculative-config", '{"method":"ngram"}')}, ("ngram",)),
        ({"extra": ("--max-model-len", "many")}, ("--max-model-len", "many")),
        ({"extra": ("--speculative-config", '{"num_speculative_tokens":"15"}')}, ("--num-speculative-tokens",)),
        ({"env": {"VLLM_USE_V2_MODEL_RUNNER": "yes"}}, ("yes",)),
        ({"drafter": None}, ("--method mtp",)),
        ({"named": {"method": "mtp"}}, ("leave --drafter out",)),
        ({"accept": ("no-such-code",)}, ("no-such-code",)),
        ({"executable": "/x/vllm", "venv": "/x"}, ("--executable", "--venv")),
        ({"engine": "llama.cpp", "drafter": "x", "target_config": TARGET}, ("--drafter-config",)),
    ],
    ids=str,
)
def test_malformed_values_are_one_clear_error(asked: dict[str, Any], words: tuple[str, ...]) -> None:
    refused("bad-option", *words, **asked)


def test_what_the_check_refutes_is_not_started_unless_accepted_by_code() -> None:
    refused("launch-refuted", "vllm-windows-ignored", "--accept", release="0.22.0")
    refused("launch-refuted", "vllm-causal-never", release="0.22.0", accept=("vllm-windows-ignored",))
    made = plan(release="0.22.0", accept=("vllm-windows-ignored", "vllm-causal-never"))
    assert speculative(made)["method"] == "dflash"
    refused("launch-refuted", "k-not-block", named={"drafts": 16})


def test_the_guessed_config_is_not_started() -> None:
    refused("launch-refuted", "248070", "1 16 31 46 61", drafter=str(CONFIGS / "Qwen3.6-27B-DFlash-guessed"))


def test_sglang_counts_the_anchor_and_a_hybrid_gets_its_spare_state() -> None:
    made = plan("sglang")
    assert value(made, "--speculative-algorithm") == "DFLASH"
    assert value(made, "--speculative-num-draft-tokens") == "16"
    assert value(made, "--mamba-radix-cache-strategy") == "extra_buffer"
    older = plan("sglang", release="0.5.13", accept=("sglang-windows-ignored", "sglang-causal-never"))
    assert value(older, "--mamba-scheduler-strategy") == "extra_buffer"
    off = plan("sglang", named={"prefix_caching": False})
    assert "--disable-radix-cache" in off.argv and "--mamba-radix-cache-strategy" not in off.argv


def test_mtp_uses_the_targets_own_head() -> None:
    made = plan(named={"method": "mtp", "drafts": 2}, drafter=None)
    assert speculative(made) == {"method": "mtp", "num_speculative_tokens": 2}
    made = plan("sglang", named={"method": "mtp"}, drafter=None)
    assert value(made, "--speculative-algorithm") == "NEXTN"
    assert value(made, "--speculative-num-steps") == "3" and value(made, "--speculative-num-draft-tokens") == "4"
    assert value(made, "--speculative-eagle-topk") == "1"
    assert value(made, "--mamba-radix-cache-strategy") == "extra_buffer"


def test_mtp_needs_a_head(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        ask = LaunchAsk(
            "vllm", str(TARGETS / "Qwen3-8B"), None, Local(), {"method": "mtp"}, "127.0.0.1", 8000, release="0.33.0"
        )
        prepare_launch(ask, Path)
    assert caught.value.code == "launch-refuted" and "mtp-absent" in str(caught.value)


def test_a_chat_template_travels_with_the_plan(tmp_path: Path) -> None:
    template = tmp_path / "chat.jinja"
    template.write_bytes("{{ 'é' }}\n".encode())
    made = plan(chat_template=template)
    assert value(made, "--chat-template") == "{state}/chat_template.jinja"
    assert made.files == {"{state}/chat_template.jinja": template.read_bytes()}
    refused("not-found", "nowhere", chat_template=tmp_path / "nowhere")


def test_llamacpp_reads_the_block_from_the_header(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    file = tmp_path / "D.gguf"
    writer = gguf.GGUFWriter(str(file), "dflash")
    writer.add_uint32("dflash.block_size", 16)
    for step in ("write_header_to_file", "write_kv_data_to_file", "write_tensors_to_file", "close"):
        getattr(writer, step)()
    made = plan("llama.cpp", drafter=str(file))
    assert made.argv[0] == "llama-server" and value(made, "--spec-draft-n-max") == "15"
    assert value(made, "--spec-type") == "draft-dflash"
    assert "--metrics" in made.argv and value(made, "-lv") == "4", "what doctor reads"
    own = plan("llama.cpp", drafter=str(file), extra=("--metrics", "--verbosity", "3"))
    assert own.argv.count("--metrics") == 1 and "-lv" not in own.argv
    fork = plan("ik_llama.cpp", drafter=str(file), named={"drafts": 4})
    assert value(fork, "--spec-type") == "dflash:n_max=4" and value(fork, "--model-draft") == str(file)
    assert "-lv" not in fork.argv
    refused("flag-conflict", "16", "15", engine="llama.cpp", drafter=str(file), named={"drafts": 16})
    head = plan("llama.cpp", drafter=None, named={"method": "mtp", "drafts": 2})
    assert value(head, "--spec-type") == "draft-mtp" and value(head, "--spec-draft-n-max") == "2"
    refused("bad-option", "--reasoning-parser", engine="llama.cpp", drafter=str(file), reasoning_parser="qwen3")


def test_a_venv_or_a_program_begins_the_list() -> None:
    assert plan(venv="/opt/v").argv[0] == "/opt/v/bin/vllm"
    assert plan("sglang", venv="/opt/v").argv[:3] == ("/opt/v/bin/python", "-m", "sglang.launch_server")
    assert plan(executable="/opt/my vllm").argv[:2] == ("/opt/my vllm", "serve")
