"""Replay along the target's own text is the engine's walk: same steps, same accepted drafts, in any grouping."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import Tensor

from draftproof.engine import replay as replay_module
from draftproof.engine.engine import Engine
from draftproof.engine.replay import Text, load_texts, replay
from draftproof.engine.request import Request
from draftproof.errors import UserError
from draftproof.models.cache import Slots
from draftproof.models.dflash import DFlash, DFlashDrafter
from draftproof.train.export import drafter_config, write_config
from draftproof.train.loop import start, train
from tests import tiny
from tests.train import copying

PROMPTS = [[5, 9, 20], [7, 8, 30, 4, 19], [11, 29, 6, 25], [10, 4, 4, 8, 31, 17]]
NEW = (12, 19, 5, 1)


@cache
def half_trained() -> DFlash:
    """A drafter that is right about half the time, so that steps accept anything from none to all."""
    recipe = copying.recipe()
    config = drafter_config(recipe.shape, copying.target().spec, 48)
    spec = write_config(Path(tempfile.mkdtemp(prefix="draftproof-tiny-")), config)
    run = start(DFlash(spec), recipe, 100)
    train(run, copying.target(), copying.examples(), until=34)
    return run.model


def pair(**changes: object) -> DFlashDrafter:
    """The half-trained drafter in float64; `changes` go into its spec."""
    model = DFlash(dataclasses.replace(half_trained().spec, **changes))
    model.load_state_dict(half_trained().state_dict())
    return DFlashDrafter(model.double(), copying.target(torch.float64))


@cache
def engine_walk() -> tuple[list[Text], list[list[int]]]:
    """The engine's own greedy texts with the drafter, and the drafts accepted in each of its steps."""
    drafter = pair()
    engine = Engine(drafter.target, drafter, slots=len(PROMPTS), context=32)
    written: list[list[int]] = [[] for _ in PROMPTS]
    accepted: list[list[int]] = [[] for _ in PROMPTS]
    for r in engine.generate([Request(p, n) for p, n in zip(PROMPTS, NEW, strict=True)]):
        written[r.index] += r.tokens
        if not r.prefill:
            accepted[r.index].append(r.accepted)
    return [Text(p, w) for p, w in zip(PROMPTS, written, strict=True)], accepted


@pytest.mark.parametrize("group", [1, 2, 3, 32])
def test_replay_is_the_engines_walk(group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay_module, "GROUP", group)
    texts, accepted = engine_walk()
    seen = replay(copying.target(torch.float64), pair(), texts)
    assert [t.accepted for t in seen.texts] == accepted
    assert {a for t in accepted for a in t} >= {0, 1, 3}  # the comparison covers partial and whole blocks
    assert seen.depth == 3 and accepted[3] == []  # a text of one token has nothing to draft


def test_chunks_of_the_target_pass_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    texts, accepted = engine_walk()
    monkeypatch.setattr(replay_module, "CHUNK", 5)
    assert [t.accepted for t in replay(copying.target(torch.float64), pair(), texts).texts] == accepted


class ContextOneTooLong(DFlashDrafter):
    """Planted fault: the anchor's own row is in the context."""

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        super().extend(slots, features, (counts + 1).clamp(max=features.shape[1]), reach)


@pytest.mark.parametrize("fault", ["context one row too long", "half the rotary dimensions", "mask id", "window"])
def test_control_faults_change_the_walk(fault: str) -> None:
    texts, accepted = engine_walk()
    drafter = {
        "context one row too long": lambda: ContextOneTooLong(pair().model, pair().target),
        "half the rotary dimensions": lambda: pair(rope=dataclasses.replace(half_trained().spec.rope, rotary_dim=2)),
        "mask id": lambda: pair(mask_token_id=9),
        "window": lambda: pair(
            layers=tuple(dataclasses.replace(layer, sliding=True, window=2) for layer in half_trained().spec.layers)
        ),
    }[fault]()
    assert [t.accepted for t in replay(drafter.target, drafter, texts).texts] != accepted


def test_texts_that_the_target_cannot_read() -> None:
    target = tiny.target()
    drafter = tiny.drafter(target)
    for ids, code, word in (
        ([4, 64], "bad-texts", "64"),
        ([4] * 513, "prompt-too-long", "513"),
    ):
        with pytest.raises(UserError) as caught:
            replay(target, drafter, [Text([1], [5]), Text(ids[:1], ids[1:])])
        assert caught.value.code == code and word in caught.value.message


def test_load_texts_cuts_the_answer_alone(tmp_path: Path) -> None:
    file = tmp_path / "texts.json"
    file.write_text(json.dumps({"prompt_ids": [[1, 2], [3]], "continuation_ids": [[4, 5, 6], [7]], "note": "x"}))
    assert load_texts(file) == [Text([1, 2], [4, 5, 6]), Text([3], [7])]
    assert load_texts(file, 2) == [Text([1, 2], [4, 5]), Text([3], [7])]


@pytest.mark.parametrize(
    ("content", "word"),
    [
        ("{", "not a readable JSON"),
        ("[]", "lacks prompt_ids or continuation_ids"),
        ('{"prompt_ids": [[1]]}', "lacks prompt_ids or continuation_ids"),
        ('{"prompt_ids": [[1]], "continuation_ids": [[1], [2]]}', "as many"),
        ('{"prompt_ids": [], "continuation_ids": []}', "lists of token ids"),
        ('{"prompt_ids": [[]], "continuation_ids": [[1]]}', "lists of token ids"),
        ('{"prompt_ids": [[1.5]], "continuation_ids": [[1]]}', "lists of token ids"),
        ('{"prompt_ids": [[-1]], "continuation_ids": [[1]]}', "lists of token ids"),
        ('{"prompt_ids": [[true]], "continuation_ids": [[1]]}', "lists of token ids"),
        ('{"prompt_ids": ["ab"], "continuation_ids": [[1]]}', "lists of token ids"),
    ],
)
def test_load_texts_names_the_problem(content: str, word: str, tmp_path: Path) -> None:
    file = tmp_path / "texts.json"
    file.write_text(content)
    with pytest.raises(UserError) as caught:
        load_texts(file)
    assert caught.value.code == "bad-texts"
    assert str(file) in caught.value.message and word in caught.value.message
    assert "prompt_ids" in caught.value.fix


def test_load_texts_without_a_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        load_texts(tmp_path / "none.json")
    assert caught.value.code == "not-found"


def test_load_texts_of_bytes_that_are_no_text(tmp_path: Path) -> None:
    file = tmp_path / "texts.json"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError) as caught:
        load_texts(file)
    assert caught.value.code == "bad-texts"


def test_features_are_those_of_one_plain_forward() -> None:
    """Control of `features_of`: transformers' hidden states, one further than our tap."""
    target, ids = tiny.target("gemma3"), [4 + 7 * i % 50 for i in range(20)]
    with torch.no_grad():
        states = tiny.plain_model("gemma3")(torch.tensor([ids]), output_hidden_states=True).hidden_states
    seen = replay_module.features_of(target, ids, (0, 3))
    assert torch.allclose(seen, torch.cat([states[1][0], states[4][0]], -1), atol=1e-9)
    assert not torch.allclose(seen, torch.cat([states[0][0], states[3][0]], -1), atol=1e-2)
