"""Logs: real vLLM start-up lines, metrics lines as printed, edited and cut; SGLang's and llama.cpp's formats."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftproof.doctor.facts.log import read_log
from draftproof.doctor.facts.spec_lines import spec_line

LOGS = Path(__file__).parents[1] / "fixtures" / "logs"
# printed by the real vLLM (shared/reference/vllm_cpu.md, section 5)
REAL = (
    "SpecDecoding metrics: Mean acceptance length: 1.00, Accepted throughput: 0.09 tokens/s, Drafted throughput: "
    "1102.45 tokens/s, Accepted: 1 tokens, Drafted: 12047 tokens, Per-position acceptance rate: 0.001, 0.000, 0.000, "
    "0.000, 0.000, 0.000, 0.000, Avg Draft acceptance rate: 0.0%",
    "SpecDecoding metrics: Mean acceptance length: 8.00, Accepted throughput: 44.80 tokens/s, Drafted throughput: "
    "44.80 tokens/s, Accepted: 448 tokens, Drafted: 448 tokens, Per-position acceptance rate: 1.000, 1.000, 1.000, "
    "1.000, 1.000, 1.000, 1.000, Avg Draft acceptance rate: 100.0%",
    "SpecDecoding metrics: Mean acceptance length: 3.56, Accepted throughput: 13.30 tokens/s, Drafted throughput: "
    "36.40 tokens/s, Accepted: 133 tokens, Drafted: 364 tokens, Per-position acceptance rate: 1.000, 1.000, 0.558, "
    "0.000, 0.000, 0.000, 0.000, Avg Draft acceptance rate: 36.5%",
)


def read(name: str) -> str:
    return (LOGS / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("runner", ["v1", "v2"])
def test_start_up_lines_of_the_real_vllm(runner: str) -> None:
    facts = read_log(read(f"vllm-0.32-{runner}.log"))
    assert (facts.release, facts.runner, facts.method) == ("0.32.0", runner, "dflash")
    assert facts.speculative is not None and facts.speculative["num_speculative_tokens"] == 7
    assert facts.speculative["model"].endswith("drafter-dflash")
    assert facts.speculative["disable_eagle_block_drop"] is True, "what the engine does not print, from the options"
    assert facts.aux_layers == (1, 3, 5) and facts.architecture == "DFlashDraftModel"
    assert len(facts.pids) == 2 and facts.lines and not facts.truncated
    assert all(line.problems == () for line in facts.lines)
    assert any("block dropping is disabled" in line for line in facts.warnings)
    assert facts.backends == (("CPU_ATTN",) if runner == "v2" else ())


def test_colours_prefixes_and_earlier_runs_do_not_matter() -> None:
    plain = read("vllm-0.32-v1.log")
    docker = "\n".join(f"vllm-1  | \x1b[1;36m{line}\x1b[0;0m" for line in plain.splitlines())
    assert read_log(docker) == read_log(plain)
    both = read_log(read("vllm-0.32-v2.log") + plain)
    assert both.runner == "v1" and both.pids == read_log(plain).pids, "the last run"


def test_gpu_lines() -> None:
    text = (LOGS / "vllm-gpu.log").read_text()
    facts = read_log(text)
    assert facts.backends == ("FLASH_ATTN", "FLEX_ATTENTION") and facts.pids == (12, 9)
    assert facts.aux_layers == (2, 18, 33) and len(facts.warnings) == 2
    assert facts.speculative == {} and facts.method is None and facts.release == "0.26.0"


@pytest.mark.parametrize("text", REAL)
def test_real_lines_obey_the_identities(text: str) -> None:
    line = spec_line(text)
    assert line is not None and line.problems == () and len(line.per_position) == 7


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("length: 3.56", "length: 4.56", "add up to 2.558"),
        ("0.558", "0.758", "add up to"),
        ("1.000, 0.558", "0.458, 1.100", "outside 0 and 1"),
        ("1.000, 0.558", "0.558, 1.000", "rise"),
        ("36.5%", "63.5%", "the counts give 36.5%"),
        ("Accepted: 133", "Accepted: 163", "the counts give 44.8%"),
        ("Accepted: 133", "Accepted: 999", "999 accepted of 364"),
        ("Drafted: 364", "Drafted: 728", "mean length of 3.56"),
        ("13.30", "26.60", "not over the same time"),
        ("0.558, 0.000", "0.508, 0.050", "no number of drafts"),
    ],
)
def test_edited_lines_are_noticed(old: str, new: str, problem: str) -> None:
    assert old in REAL[2]
    line = spec_line(REAL[2].replace(old, new))
    assert line is not None and any(problem in one for one in line.problems), line


def test_lines_cut_anywhere_are_tolerated_and_told() -> None:
    for end in range(len("SpecDecoding metrics:"), len(REAL[2]) - 1):
        facts = read_log(REAL[2][:end])
        assert facts.truncated
        assert all(line.problems for line in facts.lines) and len(facts.lines) <= 1
    whole = read("vllm-0.32-v1.log")
    start = whole.index("speculative_config=SpeculativeConfig(")
    cut = read_log(whole[: start + 40])
    assert cut.truncated and cut.method is None and cut.release == "0.32.0"


def test_diffusion_lines_are_another_thing() -> None:
    assert spec_line(REAL[0].replace("SpecDecoding", "DiffusionDecoding")) is None
    assert read_log(REAL[0].replace("SpecDecoding", "DiffusionDecoding")).lines == ()


def test_sglang() -> None:
    facts = read_log(read("sglang.log"))
    assert facts.method == "DFLASH" and facts.backends == ("fa3",) and facts.architecture == "DFlashDraftModel"
    assert facts.speculative is not None and facts.speculative["mask_token_id"] == 151669
    assert (facts.speculative["block_size"], facts.speculative["num_speculative_tokens"]) == (16, 15)
    assert [line.mean_length for line in facts.lines] == [4.0, 5.5] and facts.truncated
    assert facts.lines[0].problems == () and "rate of 0.30" in facts.lines[1].problems[0]
    assert facts.pids == (4711,) and "block size mismatch" in facts.warnings[0]


def test_llamacpp() -> None:
    facts = read_log(read("llamacpp.log"))
    assert facts.release is None, "a build from an archive has no number"
    assert facts.method == "draft-dflash"
    assert facts.speculative is not None and facts.speculative["block_size"] == 8
    assert (facts.speculative["num_speculative_tokens"], facts.speculative["mask_token_id"]) == (7, 16)
    assert facts.aux_layers == (2, 9, 15, 21, 28) and facts.warnings == () and not facts.truncated
    assert [(line.mean_length, line.accepted, line.drafted) for line in facts.lines[::2]] == [
        (1.74, 20, 178),
        (2.56, 28, 122),
    ], "of one request each"
    since_start = facts.lines[-1]
    assert (since_start.accepted, since_start.drafted) == (48, 300) and since_start.mean_length == 1 + 48 / 45
    assert since_start.per_position == (0.556, 0.267, 0.133, 0.067, 0.022, 0.022)
    assert all(line.problems == () for line in facts.lines)


def test_of_several_runs_of_llamacpp_the_last_is_read() -> None:
    text = read("llamacpp.log")
    twice = read_log(text.replace("mask_token_id=16", "mask_token_id=99") + text)
    assert twice.speculative is not None and twice.speculative["mask_token_id"] == 16 and len(twice.lines) == 4


def test_llamacpp_numbers_its_builds_and_cuts_long_blocks() -> None:
    text = """0.00.003.117 I cmn  common_param: common_params_print_info: build 9310 (1a2b3c4d5) with GNU 13.3.0
0.02.188.066 I common_speculative_impl_draft_dflash: - n_max=15, n_min=0, p_min=0.00
0.02.188.070 W common_speculative_impl_draft_dflash: requested draft size (n_max=15, n_min=0) exceeds the trained \
block size 8 -- clamping to 7
"""
    facts = read_log(text)
    assert facts.release == "9310" and facts.speculative is not None
    assert facts.speculative["num_speculative_tokens"] == 7 and "clamping" in facts.warnings[0]
    assert read_log("build: 9310 (1a2b3c4d5) with cc (Ubuntu 13.3.0) 13.3.0 for x86_64-linux-gnu").release == "9310"


def test_a_line_without_mean_length_is_told() -> None:
    facts = read_log(read("ik_llamacpp.log"))
    assert facts.method == "dflash" and facts.lines == () and "no mean length" in facts.warnings[0]


def test_nothing_is_nothing() -> None:
    facts = read_log("hello\n\x00\n")
    assert (facts.release, facts.speculative, facts.lines, facts.truncated) == (None, None, (), False)
