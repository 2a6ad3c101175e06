"""A stored profile says what the weights would say; another checkpoint's is refused, other text is left out."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.cli import main
from draftproof.doctor.facts import Answer
from draftproof.doctor.oracle import judge
from draftproof.doctor.profile import (
    Profile,
    checkpoint_hashes,
    consult_profile,
    load_profile,
    make_profile,
    save_profile,
    shared_part,
)
from draftproof.doctor.rank import HEALTHY
from draftproof.errors import UserError
from tests import tiny
from tests.doctor.test_oracle import answer, pair, planted, texts

HASHES = {"target": {"config.json": "a", "model.safetensors": "b"}, "drafter": {"config.json": "c"}}
CHOSEN = slice(0, 3)


def served(name: str) -> list[Answer]:
    return [answer(t, s) for t, s in zip(texts()[CHOSEN], planted(name)[CHOSEN], strict=True)]


@pytest.fixture(scope="module")
def profile() -> Profile:
    drafter = pair()
    return make_profile(drafter.target, drafter, [answer(text) for text in texts()[CHOSEN]], HASHES)


@pytest.mark.parametrize("name", [HEALTHY, "taps-reversed"])
def test_stored_numbers_judge_as_the_weights_do(profile: Profile, tmp_path: Path, name: str) -> None:
    save_profile(profile, tmp_path / "p.json")
    stored = load_profile(tmp_path / "p.json")
    assert stored == profile
    drafter, told = pair(), served(name)
    from_weights, from_file = judge(drafter.target, drafter, told), consult_profile(stored, told, HASHES)
    assert from_file.leaders == from_weights.leaders and name in from_file.leaders
    assert from_file.expected == from_weights.expected and from_file.kind == "steps"
    own = next(fit for fit in from_file.fits if fit.name == name)
    assert own.misses == 0 and own.compared > 5


def test_another_checkpoint_is_refused(profile: Profile) -> None:
    told = served(HEALTHY)
    consult_profile(profile, told, {"target": {"config.json": "a"}, "drafter": {"config.json": "c"}})
    for seen in (
        {**HASHES, "drafter": {"config.json": "x"}},
        {**HASHES, "target": {"config.json": "a", "model.safetensors": "x"}},
        {"target": HASHES["target"]},
        {**HASHES, "drafter": {"other.json": "c"}},
    ):
        with pytest.raises(UserError) as caught:
            consult_profile(profile, told, seen)
        assert caught.value.code == "checksum-mismatch"


def test_text_is_used_up_to_the_first_other_token(profile: Profile) -> None:
    whole = served(HEALTHY)
    swerved = [replace(a, output_ids=(*a.output_ids[:12], 63, *a.output_ids[13:])) for a in whole]
    facts = consult_profile(profile, swerved, HASHES)
    assert facts.leaders[0] == HEALTHY and facts.fits[0].misses == 0
    assert 0 < facts.fits[0].compared < consult_profile(profile, whole, HASHES).fits[0].compared
    other = [replace(a, output_ids=(63, *a.output_ids[1:])) for a in whole]
    for unusable in (other, [replace(a, prompt_ids=(1, 2)) for a in whole]):
        with pytest.raises(UserError) as caught:
            consult_profile(profile, unusable, HASHES)
        assert caught.value.code == "bad-texts"


def test_totals_of_a_cut_answer_are_lost() -> None:
    told = Answer((1,), (2, 3, 4, 5, 6), "", "stop", 0.0, steps=2, accepted=2, per_step=(1, 1))
    assert shared_part(told, (2, 3, 4, 5, 6, 7)) == told
    cut = shared_part(told, (2, 3, 4, 9))
    assert cut is not None and cut.output_ids == (2, 3, 4) and cut.per_step == (1,)
    assert cut.steps is None and cut.accepted is None and cut.finish is None
    assert shared_part(told, (2, 9)) is None


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1, "hashes": {}}'])
def test_damaged_files_are_one_message(text: str, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text(text)
    with pytest.raises(UserError) as caught:
        load_profile(tmp_path / "p.json")
    assert caught.value.code == "bad-json"
    with pytest.raises(UserError) as caught:
        load_profile(tmp_path / "none.json")
    assert caught.value.code == "not-found"


def test_the_command_writes_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target, drafter = tiny.target_folder("llama"), tiny.drafter_folder(tmp_path / "drafter")
    prompts, outputs = [[5, 9, 20], [7, 8, 30, 4]], [[7, 8, 11, 19], [30, 4, 9, 5]]
    (tmp_path / "texts.json").write_text(json.dumps({"prompt_ids": prompts, "continuation_ids": outputs}))
    options: Sequence[object] = ["--texts", tmp_path / "texts.json", "--target", target, "--drafter", drafter]
    called = ["draftproof", "profile", tmp_path / "p.json", *options, "--dtype", "float32"]
    monkeypatch.setattr(sys, "argv", [str(word) for word in called])
    with pytest.raises(SystemExit) as stop:
        main()
    assert stop.value.code == 0 and "2 texts" in capsys.readouterr().out
    made = load_profile(tmp_path / "p.json")
    assert made.prompts == tuple(tuple(p) for p in prompts) and made.hashes["drafter"] == checkpoint_hashes(drafter)
    assert set(made.hashes["target"]) >= {"config.json", "model.safetensors"}
    assert all(len(at) == 3 for table in made.tables.values() for at in table) and HEALTHY in made.tables
