"""The writer's texts are plain decoding's texts, whichever slot they came from and whatever sat there before."""

from __future__ import annotations

import pytest
import torch

from draftproof.engine.request import Request, SamplingParams
from draftproof.models.cache import Cache
from draftproof.train.loops import repeated_4grams
from draftproof.train.regen import Job, Writer
from tests import tiny
from tests.engine.decoding import decode, texts

STOPS = (2, 7, 19, 33, 41)


def jobs() -> list[Job]:
    draw = torch.Generator().manual_seed(6)
    out = []
    for i in range(11):
        size = [1, 9, 4, 12, 2][i % 5]
        prompt = torch.randint(4, tiny.VOCAB, (size,), generator=draw).tolist()
        out.append(Job(prompt, [0.0, 1.0, 0.7][i % 3], 50 + i, [3, 20, 33][i % 3]))
    return out


def written(kind: str, slots: int, todo: list[Job], stops: tuple[int, ...] = STOPS) -> dict[int, list[int]]:
    writer = Writer(tiny.target(kind), slots=slots, max_prompt=12, max_tokens=33, stops=stops)
    return {job.seed: ids for job, ids in writer.write(todo)}


def decoded(kind: str, todo: list[Job], stops: tuple[int, ...] = STOPS) -> dict[int, list[int]]:
    asked = [
        Request(j.prompt_ids, j.max_tokens, SamplingParams(temperature=j.temperature, seed=j.seed), stops) for j in todo
    ]
    return dict(zip([j.seed for j in todo], texts(decode(tiny.target(kind), None, asked)), strict=True))


@pytest.mark.parametrize(("kind", "slots"), [("llama", 3), ("gemma3", 2), ("qwen2", 16)])
def test_refilled_slots_give_the_same_text(kind: str, slots: int) -> None:
    ours, plain = written(kind, slots, jobs()), decoded(kind, jobs())
    assert ours == plain
    for job in jobs():
        ids = ours[job.seed]
        assert not set(ids[:-1]) & set(STOPS)  # a response ends at its first stop token
        assert ids[-1] in STOPS or len(ids) == job.max_tokens


def test_both_ends_occur() -> None:
    ends = [ids[-1] in STOPS for ids in written("llama", 16, jobs()).values()]
    assert {True, False} == set(ends)


def test_control_a_slot_that_keeps_its_old_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    short = [job for job in jobs() if job.max_tokens < 33][:6]
    plain = decoded("llama", short, ())
    assert written("llama", 2, short, ()) == plain
    monkeypatch.setattr(Cache, "drop", lambda self, slots: None)
    assert written("llama", 2, short, ()) != plain


def test_no_time_no_texts_and_a_report() -> None:
    writer = Writer(tiny.target(), slots=2, max_prompt=12, max_tokens=33, stops=STOPS)
    assert list(writer.write(jobs(), seconds=-1.0)) == []
    seen: list[tuple[int, int]] = []
    done = list(writer.write(jobs()[:3], report=lambda tokens, rows: seen.append((tokens, rows))))
    assert len(done) == 3 and seen[-1] == (sum(len(ids) for _, ids in done), 0)


def test_repeated_4grams() -> None:
    assert repeated_4grams([1, 2, 3]) == 0.0
    assert repeated_4grams(list(range(50))) == 0.0
    assert repeated_4grams([1, 2] * 25) == 1 - 2 / 47
