"""Batches: anchors in the response alone, labels that exist, an order that follows the seed; shards on disk."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jinja2 import TemplateError

from draftproof.errors import UserError
from draftproof.train.data import (
    Example,
    TrainBatch,
    answer_jobs,
    batches,
    chat_header,
    keep,
    load_examples,
    make_batch,
    prompt_jobs,
    read_prompts,
    save_examples,
)
from draftproof.train.recipe import Data

sizes = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 40)), min_size=1, max_size=5)


def example(prompt: int, response: int, shift: int = 0) -> Example:
    return Example([10 + i for i in range(prompt)], [100 + shift + i for i in range(response)])


def faults(batch: TrainBatch, examples: list[Example], block: int) -> list[str]:
    """What is wrong with a batch."""
    found = []
    for row, e in enumerate(examples):
        prompt, end = len(e.prompt_ids), len(e.prompt_ids) + len(e.response_ids)
        if batch.tokens[row].tolist()[:end] != e.prompt_ids + e.response_ids:
            found.append("tokens")
        used = [i for i in range(batch.anchors.shape[1]) if bool(batch.labelled[row, i].any())]
        places = batch.anchors[row, used].tolist()
        if len(set(places)) != len(places):
            found.append("an anchor twice")
        if any(not prompt <= p < end - 1 for p in places):
            found.append("an anchor outside the response")
        for i in used:
            for k in range(1, block):
                exists = int(batch.anchors[row, i]) + k < end
                if bool(batch.labelled[row, i, k - 1]) != exists:
                    found.append("a label that does not exist, or one left out")
    return found


@settings(deadline=None, max_examples=60)
@given(sizes, st.integers(1, 50), st.integers(2, 6), st.integers(0, 5))
def test_anchors_and_labels(shapes: list[tuple[int, int]], anchors: int, block: int, seed: int) -> None:
    examples = [example(p, r) for p, r in shapes]
    batch = make_batch(examples, anchors, block, torch.Generator().manual_seed(seed))
    assert faults(batch, examples, block) == []
    for row, e in enumerate(examples):  # as many anchors as there are places for, up to the limit
        assert int(batch.labelled[row].any(-1).sum()) == min(anchors, len(e.response_ids) - 1)


def test_controls_of_the_check() -> None:
    examples = [example(4, 12)]
    good = make_batch(examples, 5, 4, torch.Generator().manual_seed(0))
    in_prompt, twice = good.anchors.clone(), good.anchors.clone()
    in_prompt[0, 0] = 3
    twice[0, 0] = twice[0, 1]
    assert faults(TrainBatch(good.tokens, in_prompt, good.labelled), examples, 4) != []
    assert "an anchor twice" in faults(TrainBatch(good.tokens, twice, good.labelled), examples, 4)
    behind = TrainBatch(good.tokens, good.anchors * 0 + 14, torch.ones_like(good.labelled))
    assert any("label" in f for f in faults(behind, examples, 4))


def test_every_place_is_drawn() -> None:
    seen = set()
    for seed in range(60):
        seen |= set(make_batch([example(3, 6)], 1, 4, torch.Generator().manual_seed(seed)).anchors[0].tolist())
    assert seen == {3, 4, 5, 6, 7}  # 8 is the last token: nothing behind it to learn


def stream(seed: int, start: int = 0, count: int = 9) -> list[TrainBatch]:
    examples = [example(2 + i % 3, 5 + i, shift=i) for i in range(14)]
    return list(itertools.islice(batches(examples, sequences=4, anchors=3, block=4, seed=seed, start=start), count))


def same(a: TrainBatch, b: TrainBatch) -> bool:
    return torch.equal(a.tokens, b.tokens) and torch.equal(a.anchors, b.anchors) and torch.equal(a.labelled, b.labelled)


def test_order_follows_the_seed_and_resumes_anywhere() -> None:
    whole = stream(1)
    assert all(map(same, whole, stream(1)))
    assert all(map(same, whole[5:], stream(1, start=5, count=4)))
    assert not all(map(same, whole, stream(2)))
    assert not all(map(same, whole[5:], stream(1, start=4, count=4)))  # control
    assert not any(same(a, b) for a, b in itertools.combinations(whole, 2))  # fresh anchors in every epoch


def test_fewer_texts_than_a_batch_still_train() -> None:
    few = list(itertools.islice(batches([example(2, 6)], sequences=8, anchors=2, block=4, seed=0), 2))
    assert few[0].tokens.shape[0] == 1


def test_examples_survive_the_disk(tmp_path: Path) -> None:
    examples = [example(3, 5), example(1, 2), Example([7] * 9, [49151])]
    save_examples(tmp_path / "texts.safetensors", examples)
    assert load_examples(tmp_path / "texts.safetensors") == examples
    assert [p.name for p in tmp_path.iterdir()] == ["texts.safetensors"]


def test_loops_and_stubs_are_not_kept() -> None:
    data = Data(drop_loops=0.5)
    assert keep(example(2, 30), data)
    assert not keep(Example([1], [5, 6] * 20), data)
    assert not keep(example(2, 2), data)


def test_jobs_follow_the_seed_and_the_shares() -> None:
    data = Data(greedy=0.25, temperature=0.7, max_prompt=8)
    prompts = [[i % 9] * (1 + i % 10) for i in range(400)]
    jobs = list(answer_jobs(prompts, data, 3))
    assert jobs == list(answer_jobs(prompts, data, 3)) != list(answer_jobs(prompts, data, 4))
    assert all(len(j.prompt_ids) <= 8 for j in jobs) and len(jobs) == 320  # longer prompts are left out
    assert 0.15 < sum(j.temperature == 0 for j in jobs) / len(jobs) < 0.35
    assert {j.temperature for j in jobs} == {0.0, 0.7} and len({j.seed for j in jobs}) == 320
    own = list(prompt_jobs([1, 2], 5, Data(max_prompt=40), 3))
    assert [(j.prompt_ids, j.temperature, j.max_tokens) for j in own] == [([1, 2], 1.0, 30)] * 5


class Letters:
    """A tokenizer of one token a letter, with a chat template."""

    eos_token_id = 2

    def apply_chat_template(self, messages: list[dict[str, str]], **_settings: Any) -> str:
        return "".join(f"<{m['role'][0]}>{m['content']}</>" for m in messages) + "<a>"

    def __call__(self, text: str | list[str], **_settings: Any) -> dict[str, Any]:
        if isinstance(text, list):
            return {"input_ids": [self(t)["input_ids"] for t in text]}
        return {"input_ids": [4 + ord(c) % 60 for c in text]}


def test_chat_header_is_the_template_around_the_words() -> None:
    letters = Letters()
    before, after = chat_header(letters)
    assert [*before, *letters("hi")["input_ids"], *after] == letters("<u>hi</><a>")["input_ids"]


def test_prompts_are_read_by_the_template(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"messages": [{"role": "user", "content": "a\u2028b"}]}, ensure_ascii=False) + "\n\n")
    assert read_prompts(file, Letters()) == [Letters()("<u>a\u2028b</><a>")["input_ids"]]
    file.write_text('{"prompt": "a"}\n')
    assert read_prompts(file, Letters()) == [Letters()("<u>a</><a>")["input_ids"]]


class Templated(Letters):
    """A template given as a function of the messages."""

    def __init__(self, template: Callable[[list[dict[str, str]]], str]) -> None:
        self.template = template

    def apply_chat_template(self, messages: list[dict[str, str]], **_settings: Any) -> str:
        return self.template(messages)


def fails(error: Exception) -> Callable[[list[dict[str, str]]], str]:
    def template(_messages: list[dict[str, str]]) -> str:
        raise error

    return template


@pytest.mark.parametrize(
    "template",
    [
        fails(ValueError("tokenizer.chat_template is not set")),
        fails(TemplateError("System role not supported")),
        lambda messages: messages[0]["content"] * 2,
        lambda messages: "<u>",
    ],
)
def test_training_needs_a_chat_template(template: Callable[[list[dict[str, str]]], str]) -> None:
    with pytest.raises(UserError) as caught:
        chat_header(Templated(template))
    assert caught.value.code == "target-unsupported" and "chat template" in caught.value.message
