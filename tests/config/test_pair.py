"""Pair checks: each fault is found, and the healthy pair beside it is silent about it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof.config.drafter import DrafterSpec, LayerSpec, read_drafter
from draftproof.config.finding import Finding, Severity
from draftproof.config.pair import check_drafter, check_pair, require_pair
from draftproof.config.taps import usual_taps
from draftproof.config.target import TargetSpec, read_target
from draftproof.config.tokens import check_mask_token
from draftproof.errors import UserError

from .cases import CONFIGS, TARGETS, YARDSTICK, edited, load

DRAFTER = read_drafter(CONFIGS / "Qwen3-8B-DFlash-b16")
TARGET = read_target(TARGETS / "Qwen3-8B")


def found(findings: list[Finding]) -> dict[str, Severity]:
    return {finding.code: finding.severity for finding in findings}


def test_a_healthy_pair_has_no_findings() -> None:
    assert check_pair(DRAFTER, TARGET) == []
    assert check_drafter(DRAFTER) == []
    require_pair([])


@pytest.mark.parametrize(
    ("ours", "theirs", "code", "severity"),
    [
        ({"target_hidden_size": 5120}, {}, "target-width", "error"),
        ({}, {"hidden_size": 2560}, "target-width", "error"),
        ({"hidden_size": 2048}, {}, "drafter-width", "error"),
        ({"vocab_size": 248320}, {}, "vocabulary", "error"),
        ({"vocab_size": 152064}, {}, "vocabulary", "warning"),
        ({"draft_vocab_size": 32000}, {}, "draft-vocabulary", "note"),
        ({"draft_vocab_size": 200000}, {}, "draft-vocabulary", "error"),
        ({"mask_token_id": 151936}, {}, "mask-id-out-of-range", "error"),
        ({"taps": (1, 9, 17, 25, 36)}, {}, "taps-out-of-range", "error"),
        ({"taps": (1, 9, 17, 25, 35)}, {}, "taps-late", "warning"),
        ({"taps": (1, 9, 17, 25, 32)}, {}, "taps-unusual", "warning"),
        ({"taps": (9, 1, 17, 25, 33)}, {}, "taps-not-ascending", "warning"),
        ({"block_size": 1}, {}, "block-too-small", "error"),
        ({"layers": (LayerSpec(True, 15, True),) * 5}, {}, "window-below-block", "error"),
        ({"extras": {"sliding_window": 2048}}, {}, "window-unused", "warning"),
        ({"num_target_layers": 32}, {}, "num-target-layers", "error"),
        ({}, {"rope_base": 1e7}, "rope-base", "warning"),
        ({}, {"partial_rotary_factor": 0.25}, "partial-rotary", "note"),
        ({"max_positions": 4096}, {}, "max-positions", "warning"),
        ({}, {"tie_word_embeddings": True}, "tied-heads", "note"),
        ({}, {"model_type": "gemma3"}, "embedding-scale", "warning"),
    ],
    ids=str,
)
def test_each_fault_is_found(ours: dict[str, Any], theirs: dict[str, Any], code: str, severity: str) -> None:
    findings = check_pair(replace(DRAFTER, **ours), replace(TARGET, **theirs))
    assert found(findings)[code] == severity
    fault = next(finding for finding in findings if finding.code == code)
    assert fault.expected and fault.seen and fault.expected != fault.seen
    assert (severity == "error") == _refused(findings)


def _refused(findings: list[Finding]) -> bool:
    try:
        require_pair(findings)
    except UserError as error:
        assert error.code == "pair-mismatch"
        return True
    return False


def test_partly_rotating_drafter_of_another_share_is_a_warning() -> None:
    drafter = replace(DRAFTER, rope=replace(DRAFTER.rope, rotary_dim=64))
    assert found(check_pair(drafter, TARGET))["partial-rotary"] is Severity.WARNING


def test_a_refusal_names_every_error() -> None:
    findings = check_pair(replace(DRAFTER, mask_token_id=999_999, num_target_layers=40), TARGET)
    with pytest.raises(UserError) as caught:
        require_pair(findings)
    assert "999999" in caught.value.message and "40" in caught.value.message


def test_the_wrong_target_is_refused() -> None:
    with pytest.raises(UserError, match="pair-mismatch"):
        require_pair(check_pair(DRAFTER, read_target(TARGETS / "SmolLM2-135M-Instruct")))


def test_without_a_target_num_target_layers_bounds_the_taps() -> None:
    assert found(check_drafter(replace(DRAFTER, taps=(1, 9, 17, 25, 36))))["taps-out-of-range"]
    assert check_drafter(replace(DRAFTER, taps=(1, 9, 17, 25, 36), num_target_layers=None)) == []


def test_taps_counted_from_one_are_recognised() -> None:
    findings = check_pair(replace(DRAFTER, taps=(2, 10, 18, 26, 34)), TARGET)
    assert any("counted from 1" in f.message for f in findings if f.code == "taps-unusual")


@pytest.mark.parametrize(
    ("layers", "count", "start", "taps"),
    [
        (36, 5, 1, "1 9 17 25 33"),
        (61, 6, 1, "1 12 24 35 47 58"),
        (40, 8, 1, "1 6 11 16 22 27 32 37"),
        (64, 5, 5, "5 19 33 47 61"),
        (45, 5, 5, "5 14 24 33 42"),
        (24, 1, 1, "12"),
    ],
)
def test_usual_taps(layers: int, count: int, start: int, taps: str) -> None:
    assert " ".join(map(str, usual_taps(layers, count, start))) == taps


# The tokenizer's word on the mask id


def tokenizer(folder: Path, tokens: dict[str, int], added: list[dict[str, Any]], eos: object = "<eos>") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added, "model": {"vocab": tokens}}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return folder


@pytest.mark.parametrize(
    ("mask", "warned"),
    [(0, False), (1, True), (2, False), (3, True), (4, True), (5, False), (99, False)],
    ids=["reponame", "word", "reserved", "eos", "added-word", "bracketed", "past-the-end"],
)
def test_mask_id_that_is_a_real_token(tmp_path: Path, mask: int, warned: bool) -> None:
    added = [
        {"id": 0, "content": "<reponame>", "special": True},
        {"id": 3, "content": "<eos>", "special": True},
        {"id": 4, "content": "hello", "special": False},
    ]
    folder = tokenizer(tmp_path, {"word": 1, "[unused7]": 2, "<|reserved_5|>": 5}, added)
    assert [f.code for f in check_mask_token(mask, folder, "here")] == ["mask-id-in-use"] * warned


def test_tokenizer_files_of_other_shapes(tmp_path: Path) -> None:
    assert check_mask_token(1, tmp_path, "") == []
    (tmp_path / "added_tokens.json").write_text('{"plain": 7}')
    assert found(check_mask_token(7, tmp_path, "")) == {"mask-id-in-use": Severity.WARNING}
    (tmp_path / "tokenizer.json").write_text('{"model": {"vocab": [["<unk>", 0.0], ["word", -1.0]]}}')
    assert found(check_mask_token(1, tmp_path, "")) == {"mask-id-in-use": Severity.WARNING}
    (tmp_path / "tokenizer.json").write_text("{")
    assert found(check_mask_token(1, tmp_path, "")) == {"tokenizer-unreadable": Severity.NOTE}


def test_check_pair_reads_the_targets_tokenizer(write: Callable[..., Path]) -> None:
    folder = write(load(TARGETS / "Qwen3-8B"))
    tokenizer(folder, {"word": 151669}, [])
    assert "mask-id-in-use" in found(check_pair(DRAFTER, TARGET, target_path=folder))
    assert "mask-id-in-use" in found(check_pair(DRAFTER, TARGET, target_path=folder / "config.json"))
    assert "mask-id-in-use" not in found(check_pair(replace(DRAFTER, mask_token_id=3), TARGET, target_path=folder))


@pytest.mark.skipif(not YARDSTICK.is_dir(), reason="../shared/data with the yardstick drafter is not on this machine")
def test_the_yardstick_pairs_with_its_target() -> None:
    drafter: DrafterSpec = read_drafter(YARDSTICK)
    target: TargetSpec = read_target(TARGETS / "SmolLM2-135M-Instruct")
    assert drafter.layers == (LayerSpec(True, 128, False),) * 4 + (LayerSpec(False, None, False),)
    assert drafter.findings == ()
    findings = check_pair(drafter, target)
    assert Severity.ERROR not in found(findings).values()
    require_pair(findings)
    drafter.require_runnable()


def test_window_left_over_is_only_a_note_when_switched_off(write: Callable[..., Path]) -> None:
    raw = load(CONFIGS / "Qwen3.6-27B-DFlash-guessed")
    assert found(check_drafter(read_drafter(write(raw))))["window-unused"] is Severity.WARNING
    off = read_drafter(write(edited(raw, use_sliding_window=False)))
    assert found(check_drafter(off))["window-unused"] is Severity.NOTE
