"""A small real training: tau rises through the features, runs resume exactly, the export serves the same."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine import replay as replay_module
from draftproof.engine.acceptance import Acceptance
from draftproof.engine.replay import Text, replay
from draftproof.errors import UserError
from draftproof.models.dflash import DFlash, DFlashDrafter
from draftproof.train import loop
from draftproof.train import run as run_module
from draftproof.train.capture import Captured
from draftproof.train.export import drafter_config, export, write_config
from draftproof.train.loop import Run, resume, save_run, start, train
from draftproof.train.parity import trained_acceptance
from draftproof.train.run import Stage, _same_run, held_acceptance, run_training
from tests import tiny
from tests.train import copying
from tests.train.test_data import Letters

HELD = 16


def new_run(folder: Path, total: int, **changes: dict[str, object]) -> Run:
    recipe = copying.recipe(**changes)
    spec = write_config(folder, drafter_config(recipe.shape, copying.target().spec, 48))
    return start(DFlash(spec), recipe, total)


def held(run: Run) -> Acceptance:
    return held_acceptance(run.model, copying.target(), copying.examples()[:HELD])


def learn(run: Run, until: int) -> None:
    train(run, copying.target(), copying.examples()[HELD:], until=until)


def shuffled(features: Tensor) -> Tensor:
    """The rows of every text in another order: the same numbers, without the knowledge."""
    return features[..., torch.randperm(features.shape[-2], generator=torch.Generator().manual_seed(0)), :]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Run:
    run = new_run(tmp_path_factory.mktemp("trained"), 100)
    learn(run, 100)
    return run


def test_training_raises_tau(trained: Run, tmp_path: Path) -> None:
    untrained, seen = held(new_run(tmp_path, 100)), held(trained)
    assert untrained.tau < 1.2
    assert seen.tau > 2.5  # 3 drafts a step: 4 is the most
    assert seen.interval()[0] > 2.0
    assert trained.log[-1]["step"] == 100 and trained.log[-1]["loss"] < trained.log[0]["loss"]
    assert trained.log[-1]["expected"] == pytest.approx(1 + sum(trained.log[-1]["prefix"]), abs=1e-3)


def test_control_shuffled_features_teach_little(trained: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    capture, features_of = loop.capture, replay_module.features_of

    def shuffled_capture(*given: Any) -> Captured:
        known = capture(*given)
        return Captured(shuffled(known.features), known.final)

    monkeypatch.setattr(loop, "capture", shuffled_capture)
    monkeypatch.setattr(replay_module, "features_of", lambda *given: shuffled(features_of(*given)))
    run = new_run(tmp_path, 100)
    learn(run, 100)
    blind = held(run).tau
    monkeypatch.undo()
    assert blind < 1.8 and held(trained).tau > blind + 1


def test_trained_acceptance_is_served_acceptance(trained: Run) -> None:
    target = copying.target(torch.float64)
    model = DFlash(trained.model.spec)
    model.load_state_dict(trained.model.state_dict())
    texts = [Text(e.prompt_ids, e.response_ids) for e in copying.examples()[:HELD]]
    served = replay(target, DFlashDrafter(model.double(), target), texts)
    assert [t.accepted for t in trained_acceptance(model, target, texts).texts] == [t.accepted for t in served.texts]
    assert served.tau > 2.5


def test_export_serves_what_was_trained(trained: Run, tmp_path: Path) -> None:
    target, texts = copying.target(), [Text(e.prompt_ids, e.response_ids) for e in copying.examples()[:HELD]]
    write_config(tmp_path, drafter_config(trained.recipe.shape, target.spec, 48))
    export(trained.model, tmp_path)
    loaded = DFlashDrafter.load(tmp_path, target)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    rounded = DFlash(trained.model.spec)
    rounded.load_state_dict({k: w.bfloat16().float() for k, w in trained.model.state_dict().items()})
    seen = replay(target, loaded, texts)
    assert [t.accepted for t in seen.texts] == [
        t.accepted for t in replay(target, DFlashDrafter(rounded, target), texts).texts
    ]
    assert seen.tau == pytest.approx(held(trained).tau, rel=0.05)  # bf16 rounding
    wrong = DFlash(dataclasses.replace(trained.model.spec, mask_token_id=9))  # control
    wrong.load_state_dict(rounded.state_dict())
    assert replay(target, DFlashDrafter(wrong, target), texts).tau < seen.tau - 0.5


def test_a_target_without_rope_base_cannot_be_exported_for() -> None:
    spec = dataclasses.replace(copying.target().spec, rope_base=None)
    with pytest.raises(UserError) as caught:
        drafter_config(copying.recipe().shape, spec, 48)
    assert caught.value.code == "bad-config"


# --- resuming -----------------------------------------------------------------------------------


def weights(run: Run) -> dict[str, Tensor]:
    return {k: w.clone() for k, w in run.model.state_dict().items()}


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[k], b[k]) for k in a)


@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_resumed_run_gives_the_identical_weights(optimiser: str, tmp_path: Path) -> None:
    def fresh() -> Run:
        return new_run(tmp_path, 12, optimiser={"name": optimiser}, loss={"target": "kd", "weights": "dpace"})

    whole = fresh()
    learn(whole, 12)
    first = fresh()
    learn(first, 5)
    save_run(first, tmp_path / "run.pt")
    second = fresh()
    resume(second, tmp_path / "run.pt")
    assert second.step == 5
    learn(second, 12)
    assert equal(weights(second), weights(whole))
    for forget in ("optimisers", "step"):  # controls: what a resume must not lose
        third = fresh()
        resume(third, tmp_path / "run.pt")
        if forget == "optimisers":
            third.optimisers = fresh_optimisers(third)
        else:
            third.step = 4
        learn(third, 12)
        assert not equal(weights(third), weights(whole))


def fresh_optimisers(run: Run) -> list[torch.optim.Optimizer]:
    return loop.make_optimisers(run.model, run.recipe.optimiser)


def test_seed_decides_the_weights(tmp_path: Path) -> None:
    runs = [new_run(tmp_path, 4), new_run(tmp_path, 4)]
    for run in runs:
        learn(run, 4)
    assert equal(weights(runs[0]), weights(runs[1]))
    other = Run(runs[0].model, [], runs[0].recipe.model_copy(update={"seed": 9}), 4)
    before = weights(other)
    loop.initialise(other.model, 9)
    assert not equal(weights(other), before)


def test_the_rate_warms_up_and_ends_at_zero(tmp_path: Path) -> None:
    run, rates = new_run(tmp_path, 40), []
    for run.step in range(40):
        loop.set_rate(run)
        rates.append(run.optimisers[0].param_groups[0]["lr"])
    top = run.recipe.optimiser.lr
    assert rates[0] == top / 2 and rates[1] == rates[2] == top  # 5 % of 40 steps
    assert rates[2:] == sorted(rates[2:], reverse=True) and 0 < rates[-1] < 0.01 * top


# --- the whole run in a folder ------------------------------------------------------------------------


def whole_run(out: Path, target: Any, train_seconds: float = 1e9) -> tuple[bool, list[str]]:
    recipe = copying.recipe(
        shape={"taps": [0, 2, 4]}, data={"max_prompt": 40, "max_response": 16, "drop_loops": 1.0, "self_prompts": 1.0}
    )
    said: list[str] = []
    stage = Stage(texts=24, texts_seconds=1e9, steps=8, train_seconds=train_seconds, slots=12)
    return run_training(target, Letters(), recipe, None, out, stage, said.append), said


def test_a_run_continues_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "HELD_OUT", 4)
    target = tiny.target("llama", torch.float32)
    done, said = whole_run(tmp_path / "a", target, train_seconds=-1.0)
    assert not done and "the same command continues" in said[-1]
    assert not (tmp_path / "a" / "drafter" / "model.safetensors").exists()
    done, said = whole_run(tmp_path / "a", target)
    assert done and said[0].startswith("resumed at step 0 of 8")
    assert whole_run(tmp_path / "b", target)[0]
    for name in ("drafter-25", "drafter-50", "drafter"):
        a, b = (tmp_path / run / name / "model.safetensors" for run in "ab")
        assert a.read_bytes() == b.read_bytes()
    facts = json.loads((tmp_path / "a" / "provenance.json").read_text())
    assert [entry["percent"] for entry in facts["acceptance"]] == [25, 50, 100] and facts["steps"] == 8
    drafter = DFlashDrafter.load(tmp_path / "a" / "drafter", target)
    assert drafter.taps == (0, 2, 4)


def test_too_few_texts_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        whole_run(tmp_path, tiny.target("llama", torch.float32))
    assert caught.value.code == "bad-texts" and "64" in caught.value.message


def test_a_run_refuses_other_steps_and_another_recipe(tmp_path: Path) -> None:
    """Resuming with other settings would ignore them without a word."""
    stage, recipe = Stage(texts=24, texts_seconds=1e9, steps=8, train_seconds=0, slots=12), copying.recipe()
    _same_run(tmp_path, recipe, stage)
    _same_run(tmp_path, recipe, stage)
    reseeded = recipe.model_copy(update={"seed": recipe.seed + 1})
    for other_recipe, other, word in ((recipe, replace(stage, steps=9), "steps"), (reseeded, stage, "recipe")):
        with pytest.raises(UserError) as error:
            _same_run(tmp_path, other_recipe, other)
        assert error.value.code == "bad-option" and f"another {word}" in error.value.message
