"""Comparison with published values, by name and by shape, with the founding case of a guessed config."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.config.drafter import read_drafter
from draftproof.config.finding import Finding, Severity, Verdict
from draftproof.config.published import FIELDS, compare_published, find_matches, pattern, table
from draftproof.config.target import read_target

from .cases import CONFIGS, TARGETS, edited, load

Write = Callable[..., Path]
GUESSED = load(CONFIGS / "Qwen3.6-27B-DFlash-guessed")
GENUINE = load(CONFIGS / "Qwen3.6-27B-DFlash")
FAULTS = {
    "mask_token_id": ("248070", "248064"),
    "target_layer_ids": ("1 16 31 46 61", "1 17 33 49 63"),
    "layer_types": ("4S+1F", "5F"),
}
PUBLISHED = {str(entry["name"]) for entry in table()["drafter"]}


def differences(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    return {f.message.split()[0]: (f.expected, f.seen) for f in findings if f.code == "published-difference"}


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("name", ["Qwen3.6-27B-DFlash", "qwen3.6-27b-dflash", "Qwen3.6-27B-DFlash-guessed", "mine"])
def test_the_guessed_config_has_three_faults(write: Write, name: str, with_target: bool) -> None:
    target = read_target(TARGETS / "Qwen3.6-27B") if with_target else None
    findings = compare_published(read_drafter(write(GUESSED, name)), target)
    assert differences(findings) == FAULTS
    faults = [f for f in findings if f.code == "published-difference"]
    assert {f.severity for f in faults} == {Severity.ERROR}
    exact = name.lower() == "qwen3.6-27b-dflash"
    assert {f.verdict for f in faults} == {Verdict.REFUTED if exact else Verdict.CANNOT_TELL}
    assert "Qwen3.6-27B-DFlash" in findings[0].message and findings[0].severity is Severity.NOTE


@pytest.mark.parametrize("with_target", [False, True])
@pytest.mark.parametrize("name", ["Qwen3.6-27B-DFlash", "mine"])
def test_the_published_config_has_none(write: Write, name: str, with_target: bool) -> None:
    target = read_target(TARGETS / "Qwen3.6-27B") if with_target else None
    findings = compare_published(read_drafter(write(GENUINE, name)), target)
    assert [f.code for f in findings] == ["published-match"]
    assert "every known value agrees" in findings[0].message


def test_a_guess_that_lost_its_window_too_is_still_told_of_the_other_candidate(write: Write) -> None:
    raw = edited(GUESSED, sliding_window=..., use_sliding_window=...)
    findings = compare_published(read_drafter(write(raw, "mine")))
    assert set(differences(findings)) == {"mask_token_id", "target_layer_ids"}
    (layers,) = [f for f in findings if f.code == "published-ambiguous" and f.message.startswith("layer_types")]
    assert "Qwen3.6-27B-DFlash: 4S+1F" in layers.expected
    named = compare_published(read_drafter(write(raw, "mine")), read_target(TARGETS / "Qwen3.6-27B"))
    assert set(differences(named)) == {*FAULTS, "sliding_window"}


def test_the_config_names_its_origin_in_a_renamed_folder(write: Write) -> None:
    spec = read_drafter(write(GUESSED | {"_name_or_path": "z-lab/Qwen3.6-27B-DFlash"}, "mine"))
    (match,) = find_matches(spec)
    assert match.exact


def test_a_hub_cache_folder_is_a_name(tmp_path: Path) -> None:
    folder = tmp_path / "models--z-lab--Qwen3.6-27B-DFlash" / "snapshots" / "0a1b"
    folder.mkdir(parents=True)
    shutil.copy(CONFIGS / "Qwen3.6-27B-DFlash-guessed" / "config.json", folder)
    assert differences(compare_published(read_drafter(folder))) == FAULTS


@pytest.mark.parametrize("name", sorted(PUBLISHED & {p.name for p in CONFIGS.iterdir()}))
def test_fixtures_agree_with_the_table_under_their_name_and_renamed(write: Write, name: str) -> None:
    for folder in (CONFIGS / name, write(load(CONFIGS / name), "renamed")):
        findings = compare_published(read_drafter(folder))
        assert [f.code for f in findings] == ["published-match"], folder
        assert name in findings[0].message


EDITS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 4096}, "hidden_size"),
    ({"intermediate_size": 16384}, "intermediate_size"),
    ({"num_key_value_heads": 4}, "num_key_value_heads"),
    ({"head_dim": 64}, "head_dim"),
    ({"vocab_size": 248000}, "vocab_size"),
    ({"num_target_layers": 62}, "num_target_layers"),
    ({"dflash_config__block_size": 8}, "block_size"),
    ({"dflash_config__mask_token_id": 248077}, "mask_token_id"),
    ({"dflash_config__target_layer_ids": [16, 1, 31, 46, 61]}, "target_layer_ids"),
    ({"sliding_window": 4096}, "sliding_window"),
    ({"rope_parameters__rope_theta": 1e6}, "rope_theta"),
    ({"rope_scaling": {"rope_type": "yarn"}}, ""),
]


@pytest.mark.parametrize(("changes", "field"), EDITS, ids=str)
def test_one_edited_field_is_the_one_that_is_reported(write: Write, changes: dict[str, Any], field: str) -> None:
    findings = compare_published(read_drafter(write(edited(GENUINE, **changes), "Qwen3.6-27B-DFlash")))
    assert set(differences(findings)) == ({field} if field else set())


def test_original_and_retrain_share_a_name_and_the_nearest_is_compared(write: Write) -> None:
    raw = load(CONFIGS / "Qwen3.5-4B-DFlash")
    assert "(retrain)" in compare_published(read_drafter(write(raw, "Qwen3.5-4B-DFlash")))[0].message
    original = edited(
        raw,
        num_hidden_layers=5,
        layer_types=["full_attention"] * 5,
        sliding_window=...,
        dflash_config__mask_token_id=248070,
        dflash_config__target_layer_ids=[1, 8, 15, 22, 28],
    )
    findings = compare_published(read_drafter(write(original, "Qwen3.5-4B-DFlash")))
    assert "(original)" in findings[0].message
    assert differences(findings) == {"target_layer_ids": ("1 8 15 22 29", "1 8 15 22 28")}


def test_a_shape_nobody_published_matches_nothing(write: Write) -> None:
    (finding,) = compare_published(read_drafter(write(edited(GENUINE, vocab_size=50000), "mine")))
    assert (finding.code, finding.severity) == ("published-unknown", Severity.NOTE)


def test_another_family_of_the_same_shape_is_not_compared(write: Write) -> None:
    folder = CONFIGS / "Qwen3-8B-Domino"
    assert [f.code for f in compare_published(read_drafter(folder))] == ["published-unknown"]


def test_another_body_for_the_same_target_only_warns(write: Write) -> None:
    raw = edited(GENUINE, num_hidden_layers=1, layer_types=["full_attention"], dflash_config__mask_token_id=1)
    findings = compare_published(read_drafter(write(raw, "mine")))
    assert differences(findings) and Severity.ERROR not in {f.severity for f in findings}


def test_the_target_gives_the_depth_the_config_leaves_out(write: Write) -> None:
    raw = edited(GUESSED, num_target_layers=...)
    spec = read_drafter(write(raw, "mine"))
    assert find_matches(spec, read_target(TARGETS / "Qwen3.6-27B"))
    assert not find_matches(spec, read_target(TARGETS / "Qwen3-8B"))


def test_the_table_is_well_formed() -> None:
    allowed = {"name", "publisher", "variant", "target_names", "uncertain", *FIELDS}
    seen = set()
    for entry in table()["drafter"]:
        assert set(entry) <= allowed, entry["name"]
        assert set(entry.get("uncertain", ())) <= set(entry)
        seen.add((entry["name"], entry.get("variant")))
        if "layers" in entry and "num_layers" in entry:
            assert sum(int(run[:-1]) for run in entry["layers"].split("+")) == entry["num_layers"]
        assert ("window" in entry) <= ("S" in entry.get("layers", "S"))
    assert len(seen) == len(table()["drafter"]) >= 25


def test_pattern() -> None:
    assert pattern(read_drafter(CONFIGS / "Qwen3.6-27B-DFlash").layers) == "4S+1F"
    assert pattern(read_drafter(CONFIGS / "Qwen3-8B-DFlash-b16").layers) == "5F"
