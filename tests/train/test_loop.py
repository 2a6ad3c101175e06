"""A small real training: tau rises through the features, runs resume exactly, the export serves the same."""

from __future__ import annotations

import dataclasses
import json
import resource
from collections.abc import Callable
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
from draftproof.train.data import save_examples
from draftproof.train.export import drafter_config, export, write_config
from draftproof.train.loop import Run, resume, save_run, start, train
from draftproof.train.parity import trained_acceptance
from draftproof.train.recipe import Recipe
from draftproof.train.run import Stage, held_acceptance, run_training
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


def test_a_run_is_saved_on_the_way_and_when_it_is_interrupted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, batch_loss, steps = tmp_path / "run.pt", loop.batch_loss, []
    whole = new_run(tmp_path, 6)
    train(whole, copying.target(), copying.examples(), save=lambda: steps.append(whole.step), save_every=0.0)
    assert steps == [1, 2, 3, 4, 5, 6, 6]

    def interrupted(*given: Any) -> Any:
        if first.step == 3:
            raise KeyboardInterrupt
        return batch_loss(*given)

    first, second = new_run(tmp_path, 6), new_run(tmp_path, 6)
    monkeypatch.setattr(loop, "batch_loss", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(first, copying.target(), copying.examples(), save=lambda: save_run(first, path))
    monkeypatch.undo()
    resume(second, path)
    assert second.step == 3
    train(second, copying.target(), copying.examples())
    assert equal(weights(second), weights(whole))


def test_a_step_half_done_is_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, saves = new_run(tmp_path, 6), []

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.optimisers[0], "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(run, copying.target(), copying.examples(), save=lambda: saves.append(run.step))
    assert saves == []


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


def small_recipe(**changes: dict[str, object]) -> Recipe:
    data: dict[str, object] = {"max_prompt": 40, "max_response": 16, "drop_loops": 1.0, "self_prompts": 1.0}
    parts: dict[str, dict[str, object]] = {"shape": {"taps": [0, 2, 4]}, "data": data}
    for part, values in changes.items():
        parts[part] = parts[part] | values
    return copying.recipe(**parts)


STAGE = Stage(texts=24, texts_seconds=1e9, steps=8, train_seconds=1e9, slots=12)


def whole_run(out: Path, target: Any, train_seconds: float = 1e9) -> tuple[bool, list[str]]:
    said: list[str] = []
    stage = dataclasses.replace(STAGE, train_seconds=train_seconds)
    return run_training(target, Letters(), small_recipe(), None, out, stage, said.append), said


def refused(out: Path, recipe: Recipe | None = None, target: Any = None, **changes: Any) -> UserError:
    """The error of a run with these changes; `prompts` is one of them."""
    target, prompts = target or tiny.target("llama", torch.float32), changes.pop("prompts", None)
    stage = dataclasses.replace(STAGE, **changes)
    with pytest.raises(UserError) as caught:
        run_training(target, Letters(), recipe or small_recipe(), prompts, out, stage, lambda _: None)
    return caught.value


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def few_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "HELD_OUT", 4)


@pytest.mark.usefixtures("few_held")
def test_a_run_continues_where_it_stopped(tmp_path: Path) -> None:
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
    assert facts["device"] == "cpu" and facts["git"] and facts["recipe"]["seed"] == 3
    drafter = DFlashDrafter.load(tmp_path / "a" / "drafter", target)
    assert drafter.taps == (0, 2, 4)
    before = contents(tmp_path / "a")  # a finished run is left alone
    done, said = whole_run(tmp_path / "a", target)
    assert done and "is finished" in said[0] and contents(tmp_path / "a") == before


@pytest.mark.usefixtures("few_held")
@pytest.mark.parametrize("where", ["export", "save_run"])
def test_a_mark_that_was_cut_off_is_made_up_for(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed at the last step, before the export or before its mark is saved."""
    target, honest = tiny.target("llama", torch.float32), getattr(run_module, where)

    def killed(*given: Any) -> None:
        path = given[1]
        logged = path.name == "run.pt" and any(entry.get("percent") == 100 for entry in given[0].log)
        if path.name == "drafter" or logged:
            raise KeyboardInterrupt
        honest(*given)

    monkeypatch.setattr(run_module, where, killed)
    with pytest.raises(KeyboardInterrupt):
        whole_run(tmp_path / "a", target)
    monkeypatch.setattr(run_module, where, honest)
    assert whole_run(tmp_path / "a", target)[0] and whole_run(tmp_path / "b", target)[0]
    a, b = (contents(tmp_path / run) for run in "ab")
    assert a["drafter/model.safetensors"] == b["drafter/model.safetensors"]
    for log in (a["log.jsonl"], b["log.jsonl"]):  # every mark once
        assert [e["percent"] for e in map(json.loads, log.splitlines()) if "percent" in e] == [25, 50, 100]
    assert len(json.loads(a["provenance.json"])["acceptance"]) == 3


def test_too_few_texts_is_one_clear_error(tmp_path: Path) -> None:
    error = refused(tmp_path)
    assert error.code == "bad-texts" and "64" in error.message
    assert not (tmp_path / "texts.safetensors").exists()  # the next call writes more


@pytest.mark.usefixtures("few_held")
def test_a_run_refuses_other_settings(tmp_path: Path) -> None:
    """Resuming with other settings would ignore them without a word."""
    whole_run(tmp_path, tiny.target("llama", torch.float32), train_seconds=-1.0)
    before, prompts = contents(tmp_path), tmp_path.parent / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    other = tiny.target("llama", torch.float32, seed=1)
    for name, error in {
        "steps": refused(tmp_path, steps=9),
        "texts": refused(tmp_path, texts=25),
        "recipe": refused(tmp_path, small_recipe(data={"max_response": 17})),
        "prompts": refused(tmp_path, prompts=prompts),
        "target": refused(tmp_path, target=other),
    }.items():
        assert error.code == "bad-option" and error.message.endswith(f"another {name}")
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("code", "word", "changes"),
    [
        ("pair-mismatch", "[99]", {"recipe": small_recipe(shape={"taps": [0, 2, 99]})}),
        ("pair-mismatch", "mask id", {"recipe": small_recipe(shape={"mask_token_id": tiny.VOCAB})}),
        ("bad-config", "max_prompt", {"recipe": small_recipe(data={"max_prompt": 8 + 3})}),  # 3 letters: <u>
        ("not-found", "nowhere", {"prompts": Path("nowhere.jsonl")}),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    code: str, word: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    error = refused(tmp_path / "out", **changes)
    assert error.code == code and word in error.message
    assert not (tmp_path / "out").exists()


def test_targets_that_training_gets_wrong_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused(tmp_path / "out", target=tiny.target("llama", torch.float64)).code == "bad-option"
    target = tiny.target("llama", torch.float32)
    monkeypatch.setattr(target.model.config, "final_logit_softcapping", 30.0, raising=False)
    monkeypatch.setattr(target.model.config, "logits_scaling", 8.0, raising=False)
    monkeypatch.setattr(target.head, "bias", torch.nn.Parameter(torch.zeros(tiny.VOCAB)))
    error = refused(tmp_path / "out")
    assert error.code == "target-unsupported"
    assert all(word in error.message for word in ("final_logit_softcapping", "logits_scaling", "bias"))
    assert not (tmp_path / "out").exists()


# --- disks --------------------------------------------------------------------------------------------


def test_a_full_disk_is_one_clear_error(trained: Run, tmp_path: Path) -> None:
    writers: dict[str, Callable[[], None]] = {
        "run.pt": lambda: save_run(trained, tmp_path / "run.pt"),
        "model.safetensors": lambda: export(trained.model, tmp_path),
        "texts.safetensors": lambda: save_examples(tmp_path / "texts.safetensors", copying.examples()),
        "log.jsonl": lambda: run_module._log(tmp_path, {"step": "x" * 5000}),
    }
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    for name, write in writers.items():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
        try:
            with pytest.raises(UserError) as caught:
                write()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert caught.value.code == "disk-full" and name in caught.value.message
        assert "name another folder" in caught.value.fix
    assert [p.name for p in tmp_path.iterdir()] == ["log.jsonl"]


def test_an_out_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    assert refused(tmp_path / "file").code == refused(tmp_path / "file" / "out").code == "disk-full"
