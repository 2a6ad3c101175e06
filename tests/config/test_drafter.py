"""Reading drafters: every packaging, every missing key, every wrong type."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from draftproof.config.drafter import DrafterSpec, LayerSpec, read_drafter
from draftproof.config.finding import Severity
from draftproof.config.keys import DFLASH, HARMLESS, TOP, misspelt
from draftproof.errors import UserError

from .cases import CONFIGS, TARGETS, edited, load

Write = Callable[..., Path]
FULL = LayerSpec(False, None, False)
PLAIN = load(CONFIGS / "Qwen3-8B-DFlash-b16")
MIXED = load(CONFIGS / "Qwen3.6-27B-DFlash")


def codes(spec: DrafterSpec) -> list[str]:
    return [finding.code for finding in spec.findings]


def refusal(folder: Path) -> UserError:
    with pytest.raises(UserError) as caught:
        read_drafter(folder)
    return caught.value


@pytest.mark.parametrize("folder", sorted(p for p in CONFIGS.iterdir() if p.is_dir()), ids=lambda p: p.name)
def test_every_fixture_reads_with_a_source_for_what_it_states(folder: Path) -> None:
    spec = read_drafter(folder)
    assert len(spec.layers) == spec.num_layers
    assert all(finding.severity is not Severity.ERROR for finding in spec.findings)
    for field in ("mask_token_id", "taps", "block_size", "rope.base"):
        assert spec.sources[field].startswith("config.json: ")


def test_at_least_fourteen_published_checkpoints_are_fixtures() -> None:
    from draftproof.config.published import table

    names = {entry["name"] for entry in table()["drafter"]}
    assert len(names & {p.name for p in CONFIGS.iterdir()}) >= 14


@pytest.mark.parametrize("packaging", ["z-lab-old", "modelopt", "torchspec", "speculators"])
def test_one_drafter_in_every_packaging_reads_equal(packaging: str) -> None:
    ours = read_drafter(CONFIGS / "packaging-z-lab-new")
    other = read_drafter(CONFIGS / f"packaging-{packaging}")
    assert other.dialect == ("z-lab" if packaging == "z-lab-old" else packaging)
    assert other.findings == ours.findings == ()
    private = {"path": "", "dialect": "", "architecture": "", "sources": {}, "extras": {}}
    assert replace(other, **private) == replace(ours, **private)


def test_speculators_taps_count_from_one(write: Write) -> None:
    raw = load(CONFIGS / "packaging-speculators")
    assert read_drafter(CONFIGS / "packaging-speculators").taps == (1, 9, 17, 25, 33)
    shifted = edited(raw, aux_hidden_state_layer_ids=[1, 9, 17, 25, 33])
    assert read_drafter(write(shifted)).taps == (0, 8, 16, 24, 32)


def test_speculators_without_draft_vocab_has_the_class_default(write: Write) -> None:
    raw = load(CONFIGS / "packaging-speculators")
    spec = read_drafter(write(edited(raw, draft_vocab_size=...)))
    assert spec.draft_vocab_size == 32000
    with pytest.raises(UserError, match="draft_vocab_size"):
        spec.require_runnable()


def test_block_size_nested_or_top(write: Write) -> None:
    nested = edited(PLAIN, block_size=..., dflash_config__block_size=12)
    assert read_drafter(write(nested)).block_size == 12
    both = read_drafter(write(edited(PLAIN, dflash_config__block_size=12)))
    assert both.block_size == 12
    (finding,) = [f for f in both.findings if f.code == "config-contradicts-itself"]
    assert finding.severity is Severity.ERROR and "16" in finding.seen


def test_a_file_is_as_good_as_its_folder() -> None:
    folder = CONFIGS / "Qwen3-8B-DFlash-b16"
    assert read_drafter(folder / "config.json") == read_drafter(folder) == read_drafter(str(folder))


# Causality and window


@pytest.mark.parametrize(
    ("changes", "causal"),
    [
        ({}, (True, False)),
        ({"is_causal": False}, (False, False)),
        ({"is_causal": True}, (True, True)),
        ({"dflash_config__causal": True}, (True, True)),
        ({"dflash_config__causal": False}, (False, False)),
        ({"is_causal": False, "dflash_config__causal": True}, (False, False)),
    ],
)
def test_causality_precedence(write: Write, changes: dict[str, Any], causal: tuple[bool, bool]) -> None:
    spec = read_drafter(write(edited(MIXED, **changes)))
    assert spec.layers == (LayerSpec(True, 2048, causal[0]),) * 4 + (LayerSpec(False, None, causal[1]),)
    assert ("causality-disagreement" in codes(spec)) == (not changes)
    assert ("config-contradicts-itself" in codes(spec)) == (len(changes) == 2)


def test_silence_is_no_disagreement_when_no_layer_slides() -> None:
    spec = read_drafter(CONFIGS / "Qwen3-8B-DFlash-b16")
    assert spec.layers == (FULL,) * 5
    assert codes(spec) == ["remote-code"]


@pytest.mark.parametrize(
    ("stated", "sliding_causal", "disagreement"),
    [(..., True, True), (False, True, True), (True, False, False)],
)
def test_speculators_causality(write: Write, stated: Any, sliding_causal: bool, disagreement: bool) -> None:
    raw = load(CONFIGS / "packaging-speculators")
    kinds = ["sliding_attention"] * 4 + ["full_attention"]
    spec = read_drafter(
        write(edited(raw, sliding_window_non_causal=stated, transformer_layer_config__layer_types=kinds))
    )
    assert spec.layers == (LayerSpec(True, 2048, sliding_causal),) * 4 + (FULL,)
    assert ("causality-disagreement" in codes(spec)) == disagreement


def test_use_swa_without_layer_types_slides_everywhere_and_is_bidirectional() -> None:
    assert read_drafter(CONFIGS / "MiMo-V2.5-DFlash").layers == (LayerSpec(True, 1024, False),) * 5


def test_sliding_layers_need_a_window(write: Write) -> None:
    assert refusal(write(edited(MIXED, sliding_window=...))).code == "bad-config"


def test_use_sliding_window_false_with_sliding_layers_is_reported(write: Write) -> None:
    assert "use-sliding-window-false" in codes(read_drafter(write(edited(MIXED, use_sliding_window=False))))
    assert "use-sliding-window-false" not in codes(read_drafter(write(MIXED)))


def test_layers_ambiguous_without_layer_types(write: Write) -> None:
    spec = read_drafter(write(edited(MIXED, layer_types=...)))
    assert "layers-ambiguous" in codes(spec) and spec.layers == (FULL,) * 5


# Missing and misspelt


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"dflash_config__mask_token_id": ...}, "mask-id-missing"),
        ({"dflash_config__mask_token_id": None}, "mask-id-missing"),
        ({"dflash_config__target_layer_ids": ...}, "taps-missing"),
        ({"block_size": ...}, "block-size-missing"),
        ({"rope_theta": ...}, "rope-missing"),
        ({"hidden_size": ...}, "bad-config"),
        ({"dflash_config": {}}, "mask-id-missing"),
    ],
)
def test_what_decides_correctness_has_no_default(write: Write, changes: dict[str, Any], code: str) -> None:
    error = refusal(write(edited(PLAIN, **changes)))
    assert error.code == code and error.fix


def test_published_values_do_not_fill_gaps(write: Write) -> None:
    raw = edited(PLAIN, dflash_config__mask_token_id=...)
    assert refusal(write(raw, "Qwen3-8B-DFlash-b16")).code == "mask-id-missing"


def test_layer_ids_alone_is_not_a_list_of_taps(write: Write) -> None:
    raw = edited(PLAIN, dflash_config__target_layer_ids=..., layer_ids=[1, 9])
    error = refusal(write(raw))
    assert error.code == "taps-missing" and "layer_ids" in error.message


def test_engine_ids_that_contradict_the_taps_are_reported(write: Write) -> None:
    good = edited(PLAIN, eagle_aux_hidden_state_layer_ids=[2, 10, 18, 26, 34])
    bad = edited(PLAIN, eagle_aux_hidden_state_layer_ids=[1, 9, 17, 25, 33])
    assert "config-contradicts-itself" not in codes(read_drafter(write(good)))
    assert "config-contradicts-itself" in codes(read_drafter(write(bad)))


@pytest.mark.parametrize(
    ("old", "new", "level"),
    [
        ("mask_token_id", "mask_tokenid", "dflash_config"),
        ("target_layer_ids", "target_layer_idz", "dflash_config"),
        ("sliding_window", "slidng_window", ""),
        ("dflash_config", "dflash_cofig", ""),
        ("layer_types", "layers_types", ""),
    ],
)
def test_misspelt_keys_name_their_neighbour(write: Write, old: str, new: str, level: str) -> None:
    raw = edited(MIXED)
    place = raw[level] if level else raw
    place[new] = place.pop(old)
    error = refusal(write(raw))
    assert error.code == "unknown-key"
    assert new in error.message and old in error.message and old in error.fix


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    key=st.sampled_from(sorted(k for k in TOP | DFLASH if len(k) >= 8)),
    place=st.floats(0, 0.99),
    letter=st.sampled_from("bjkqwxz"),
    how=st.sampled_from(["drop", "replace", "insert", "swap"]),
)
def test_one_wrong_letter_is_caught(key: str, place: float, letter: str, how: str) -> None:
    i = int(place * (len(key) - 1))
    wrong = {
        "drop": key[:i] + key[i + 1 :],
        "replace": key[:i] + letter + key[i + 1 :],
        "insert": key[:i] + letter + key[i:],
        "swap": key[:i] + key[i + 1] + key[i] + key[i + 2 :],
    }[how]
    if wrong in TOP | DFLASH | HARMLESS:
        return
    assert [written for written, _ in misspelt([wrong], TOP | DFLASH)] == [wrong]


@pytest.mark.parametrize("key", ["transformers_version", "num_experts", "v_head_dim", "my_own_remark", "eos_token_id"])
def test_foreign_keys_are_not_misspelt(write: Write, key: str) -> None:
    read_drafter(write(edited(PLAIN, **{key: 1})))


def test_a_key_nobody_reads_is_said_to_do_nothing(write: Write) -> None:
    spec = read_drafter(write(edited(PLAIN, my_own_remark=1, dflash_config__hidden_size=1)))
    unread = {f.where: f.severity for f in spec.findings if f.code == "key-not-read"}
    assert unread == {
        "config.json: my_own_remark": Severity.NOTE,
        "config.json: dflash_config.hidden_size": Severity.WARNING,
    }


# Types, ranges, files


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": True},
        {"hidden_size": 4096.0},
        {"hidden_size": -1},
        {"hidden_size": "4096"},
        {"num_key_value_heads": 5},
        {"layer_types": ["full_attention"] * 4},
        {"layer_types": ["full_attention"] * 4 + ["mamba"]},
        {"layer_types": "full_attention"},
        {"block_size": 0},
        {"dflash_config__mask_token_id": True},
        {"dflash_config__mask_token_id": -1},
        {"dflash_config__target_layer_ids": [1, 1, 9]},
        {"dflash_config__target_layer_ids": []},
        {"dflash_config__target_layer_ids": [1, 9.0]},
        {"dflash_config__target_layer_ids": [-1, 9]},
        {"dflash_config__target_layer_ids": 5},
        {"dflash_config": [1]},
        {"rope_theta": float("nan")},
        {"rope_theta": 0},
        {"rope_parameters": 7},
        {"is_causal": 1},
        {"rms_norm_eps": "1e-6"},
        {"head_dim": ..., "num_attention_heads": 16},
        {"partial_rotary_factor": 1.5},
        {"architectures": "DFlashDraftModel"},
        {"auto_map": "x"},
    ],
    ids=str,
)
def test_wrong_types_and_ranges_are_refused_by_key(write: Write, changes: dict[str, Any]) -> None:
    error = refusal(write(edited(PLAIN, **changes)))
    assert error.code == "bad-config"
    assert next(iter(changes)).split("__")[-1].split("_")[0] in error.message


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "bad-json"),
        ("[]", "bad-json"),
        ('{"hidden_size": 1, "hidden_size": 2}', "bad-json"),
        ("[" * 100_000, "bad-json"),
        ("{}", "not-a-model"),
        ('{"hidden_size": 64}', "dialect-unknown"),
        ('{"speculators_model_type": "eagle3"}', "dialect-unknown"),
    ],
    ids=["cut", "list", "doubled", "deep", "empty", "no-drafter", "eagle3"],
)
def test_bad_files(write: Write, text: str, code: str) -> None:
    assert refusal(write(text)).code == code


def test_bad_paths(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nowhere").code == "not-found"
    assert refusal(tmp_path).code == "not-a-model"
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    assert refusal(tmp_path / "model.gguf").code == "not-a-model"


def test_a_target_given_as_drafter_is_told_where_it_belongs() -> None:
    error = refusal(TARGETS / "Qwen3-8B")
    assert error.code == "dialect-unknown" and "--target" in error.fix


# Families


@pytest.mark.parametrize(
    ("name", "family", "missing"),
    [
        ("Qwen3.8-27B-DFlash2", "dflash2", "candidate selector"),
        ("Laguna-XS-2.1-DFlash", "laguna", "gates"),
        ("MiMo-V2.5-DFlash", "mimo", "sinks"),
        ("Qwen3.6-27B-DSpark", "dspark", "Markov"),
        ("Qwen3-8B-Domino", "domino", "correction head"),
    ],
)
def test_relatives_are_named_and_refused(name: str, family: str, missing: str) -> None:
    spec = read_drafter(CONFIGS / name)
    assert spec.family == family
    with pytest.raises(UserError) as caught:
        spec.require_runnable()
    assert caught.value.code == "family-not-runnable" and missing in caught.value.message


@pytest.mark.parametrize("name", ["Qwen3-8B-DFlash-b16", "Qwen3.6-27B-DFlash", "gemma-4-31B-it-DFlash"])
def test_plain_dflash_is_runnable(name: str) -> None:
    read_drafter(CONFIGS / name).require_runnable()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"dflash_config__projector_type": "novel"}, "novel"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 64.0}}, "yarn"),
        ({"dflash_config__sample_from_anchor": True}, "anchor"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"is_neox_style": False}, "interleaved"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantised"),
    ],
)
def test_what_plain_dflash_cannot_do_is_named(write: Write, changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserError, match=named):
        read_drafter(write(edited(PLAIN, **changes))).require_runnable()
