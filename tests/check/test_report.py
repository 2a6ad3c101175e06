"""The command itself: one release, several, JSON, exit codes, and every kind of bad input."""

from __future__ import annotations

import json
import sys

import pytest

from draftproof.check.flags import option_fields
from draftproof.cli import main
from draftproof.errors import UserError
from tests.config.cases import CONFIGS, TARGETS

RELEASES = ("0.20", "0.22", "0.24", "0.25", "0.26", "0.33")
TARGET = TARGETS / "Qwen3.6-27B"


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftproof", "check", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def founding(call, drafter: str) -> tuple[int, dict[str, dict]]:
    engines = [word for release in RELEASES for word in ("--engine", f"vllm=={release}")]
    code, out, _ = call(CONFIGS / drafter, "--target", TARGET, *engines, "--json")
    answer = json.loads(out)
    assert answer["schema"] == "draftproof.check/1" and answer["exit_code"] == code
    return code, {one["release"]: one for one in answer["engines"]}


def verdicts(one: dict) -> dict[str, str]:
    return {link["link"]: link["verdict"] for link in one["links"]}


def test_the_published_config_of_the_founding_case(call) -> None:
    code, told = founding(call, "Qwen3.6-27B-DFlash")
    assert code == 1
    assert verdicts(told["0.20"])["taps"] == verdicts(told["0.20"])["windows"] == "refuted"
    for release in ("0.22", "0.24"):
        assert verdicts(told[release])["taps"] == "proved" and verdicts(told[release])["windows"] == "refuted"
    assert [release for release in RELEASES if not told[release]["starts"]] == ["0.25"]
    assert told["0.26"]["runner"] == told["0.33"]["runner"] == "v2"
    drops = [r for r in RELEASES if any(f["code"] == "vllm-block-drop-hybrid" for f in told[r]["findings"])]
    assert drops == list(RELEASES[:-1])
    assert [told[release]["exit_code"] for release in RELEASES] == [1, 1, 1, 1, 3, 3]


def test_the_guessed_config_starts_everywhere_and_is_never_called_good(call) -> None:
    code, told = founding(call, "Qwen3.6-27B-DFlash-guessed")
    assert code == 1
    for release in RELEASES:
        assert told[release]["starts"] and told[release]["exit_code"] == 1
        assert {"taps", "windows", "mask"} <= {k for k, v in verdicts(told[release]).items() if v == "refuted"}
    _, out, _ = call(CONFIGS / "Qwen3.6-27B-DFlash-guessed", "--target", TARGET, "--engine", "vllm==0.22",
                     "--engine", "vllm==0.33")  # fmt: skip
    rows = [line for line in out.splitlines() if line.startswith(("0.22", "0.33"))]
    assert len(rows) == 2
    assert all(key in row for row in rows for key in ("mask_token_id", "target_layer_ids", "layer_types"))


def test_one_release_shows_every_layer_and_the_memory(call) -> None:
    code, out, _ = call(CONFIGS / "Qwen3.6-27B-DFlash", "--target", TARGET, "--engine", "vllm==0.22",
                        "--gpu-memory", 40, "--tensor-parallel-size", 2, "--max-model-len", 32768)  # fmt: skip
    assert code == 1
    assert "after layers 1 16 31 46 61" in out and "engine indices 2 17 32 47 62" in out
    assert "4 x 2048, full" in out and "5 x full" in out and "drafter weights" in out
    assert "vllm-windows-ignored" in out


def test_a_context_within_the_window_needs_no_window(call) -> None:
    base = (CONFIGS / "Laguna-XS-2.1-DFlash", "--target", TARGET, "--engine", "vllm==0.33", "--json")
    _, out, _ = call(*base, "--max-model-len", 512)
    layers = json.loads(out)["engines"][0]["layers"]
    assert all(layer["window"] is None for layer in layers)
    _, out, _ = call(*base, "--max-model-len", 513)
    assert all(layer["window"] == 512 for layer in json.loads(out)["engines"][0]["layers"])


def test_the_pair_alone(call) -> None:
    assert call(CONFIGS / "Qwen3-8B-DFlash-b16", "--target", TARGETS / "Qwen3-8B")[0] == 0
    assert call(CONFIGS / "Qwen3.6-27B-DFlash", "--target", TARGET)[0] == 3
    assert call(CONFIGS / "Qwen3.6-27B-DFlash-guessed", "--target", TARGET)[0] == 1


PAIR = (CONFIGS / "Qwen3-8B-DFlash-b16", "--target", TARGETS / "Qwen3-8B")


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        ((*PAIR, "--engine", "tensorrt==1"), "engine-unknown", ("tensorrt", "vllm")),
        ((*PAIR, "--engine", "vllm==newest"), "bad-option", ("newest",)),
        ((*PAIR, "--engine", "vllm=="), "bad-option", ("vllm",)),
        ((*PAIR, "--engine", "vllm", "--venv", "/nowhere"), "engine-missing", ("/nowhere",)),
        ((*PAIR, "--tensor-parallel-size", 2), "bad-option", ("--engine",)),
        ((*PAIR, "--engine", "vllm==0.33", "--", "--speculative-config", "{'k': 1}"), "bad-option", ("not JSON",)),
        ((*PAIR, "--engine", "vllm==0.33", "--engine", "sglang==0.5.23", "--", "-tp", "2"), "bad-option", ("one",)),
        ((*PAIR, "--engine", "vllm==0.33", "--max-model-len", 64, "--", "--max-model-len", "32"), "flag-conflict", ()),
        ((PAIR[0], "--engine", "vllm==0.33"), "bad-option", ("--target",)),
        (("--target", TARGETS / "Qwen3-8B"), "bad-option", ("--method mtp",)),
        ((PAIR[2], "--target", TARGETS / "Qwen3-8B"), "not-found", ()),
        ((*PAIR[:2], "/nowhere"), "not-found", ("/nowhere",)),
    ],
    ids=str,
)
def test_bad_input_is_one_message(call, words: tuple, code: str, names: tuple[str, ...]) -> None:
    if code == "not-found" and words[0] == PAIR[2]:
        words = ("/no/such/drafter", *words[1:])
    status, out, err = call(*words)
    assert status == 2 and f"[{code}]" in err and "next step:" in err, (status, out, err)
    assert "Traceback" not in err and not out
    assert all(name in err for name in names), err


@pytest.mark.parametrize(
    ("engine", "flags", "fields"),
    [
        ("vllm", ["-tp=2", "--max-model-len", "32K"], {"tensor_parallel": 2, "max_model_len": 32768}),
        ("vllm", ["--max_model_len", "32k"], {"max_model_len": 32000}),
        ("vllm", ["-sc", '{"num-speculative-tokens": 7}'], {"drafts": 7}),
        ("vllm", ["--spec-method", "mtp", "--spec-tokens", "2"], {"method": "mtp", "drafts": 2}),
        ("vllm", ["--no-enable-prefix-caching"], {"prefix_caching": False}),
        ("vllm", ["--unknown", "--port", "1"], {"port": 1}),
        ("sglang", ["--speculative-algorithm", "NEXTN"], {"method": "mtp"}),
        ("sglang", ["--speculative-num-draft-tokens", "16"], {"drafts": 15}),
        ("llama.cpp", ["--spec-type", "draft-dflash", "--draft-max", "7"], {"method": "dflash", "drafts": 7}),
    ],
    ids=str,
)
def test_engine_flags_are_read_as_the_engine_reads_them(engine: str, flags: list[str], fields: dict) -> None:
    assert fields.items() <= option_fields(engine, flags).items()


@pytest.mark.parametrize(
    "flags", [["--max-model-len", "0"], ["--max-model-len", "1.5"], ["-tp"], ["-sc", "[]"]], ids=str
)
def test_malformed_engine_flags_are_refused(flags: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        option_fields("vllm", flags)
    assert caught.value.code == "bad-option" and flags[0] in str(caught.value)


def test_reading_never_imports_torch() -> None:
    import subprocess

    code = "import sys, draftproof.check.session, draftproof.launch.session, draftproof.launch.show; "
    code += "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_explain_knows_every_code_of_a_check(call) -> None:
    from draftproof.config.explain import all_codes

    _, told = founding(call, "Qwen3.6-27B-DFlash")
    seen = {finding["code"] for one in told.values() for finding in one["findings"]}
    assert seen <= set(all_codes())
