"""The text is plain decoding's text: for any drafter, any neighbours in the batch, and by transformers' generate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine import step as step_module
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.target import Target
from draftproof.spec.accept import walk
from draftproof.spec.sampling import Sampling, choose
from draftproof.spec.tree import Tree, chain
from tests import tiny
from tests.engine.decoding import (
    PROMPTS,
    commits_one_more,
    decode,
    knowing,
    one_too_many,
    requests,
    texts,
)

EOS = 2
SAMPLED = [
    SamplingParams(temperature=0.7, seed=11),
    SamplingParams(temperature=1.0, top_k=8, seed=12),
    SamplingParams(temperature=1.5, top_p=0.8, seed=-13),
    SamplingParams(temperature=1.0, min_p=0.05, seed=14),
    SamplingParams(temperature=1.0, repetition_penalty=1.4, seed=15),
    SamplingParams(temperature=1.5, top_k=20, top_p=0.95, min_p=0.01, repetition_penalty=0.8, seed=2**40 + 16),
    SamplingParams(temperature=0.7, seed=11, choice=3),
]


def hf_greedy(kind: str, request: Request, **settings: object) -> list[int]:
    """transformers' own generate on the same weights with its own attention and cache."""
    ids = torch.tensor([list(request.prompt_ids)])
    out = tiny.plain_model(kind).generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=request.max_tokens,
        do_sample=False,
        pad_token_id=0,
        eos_token_id=list(request.stop_ids) or -1,
        **settings,
    )
    return out[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("kind", (*tiny.KINDS, *tiny.HYBRIDS))
def test_greedy_equals_generate_for_every_drafter(kind: str) -> None:
    target, asked = tiny.target(kind), requests(stop_ids=[EOS])
    theirs = [hf_greedy(kind, r) for r in asked]
    assert texts(decode(target, None, asked)) == theirs
    assert texts(decode(target, tiny.drafter(target), asked)) == theirs
    known = [[*r.prompt_ids, *t] for r, t in zip(asked, theirs, strict=True)]
    taus = []
    for wrong in (0.0, 0.3, 1.0):
        answers = decode(target, tiny.KnowingDrafter(target, known, wrong=wrong), asked)
        assert texts(answers) == theirs
        steps = [s for a in answers for s in a.steps if not s.prefill]
        taus.append(sum(len(s.tokens) for s in steps) / len(steps))
    assert taus[0] > taus[1] > taus[2] == 1.0  # the three rates did exercise full, partial and no acceptance


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_repetition_penalty_equals_generate(kind: str) -> None:
    target, asked = tiny.target(kind), requests(repetition_penalty=1.5)
    theirs = [hf_greedy(kind, r, repetition_penalty=1.5) for r in asked]
    assert texts(decode(target, knowing(target, asked, 0.3), asked)) == theirs
    assert theirs != [hf_greedy(kind, r) for r in asked]


@pytest.mark.parametrize("kind", (*tiny.KINDS, *tiny.HYBRIDS))
def test_sampled_text_is_the_same_with_and_without_drafter(kind: str) -> None:
    target = tiny.target(kind)
    asked = [Request(list(PROMPTS[i % 3]), 14, params) for i, params in enumerate(SAMPLED)]
    plain = texts(decode(target, None, asked))
    assert texts(decode(target, tiny.drafter(target), asked)) == plain
    known = [[*r.prompt_ids, *t] for r, t in zip(asked, plain, strict=True)]
    for wrong in (0.0, 0.3, 1.0):
        assert texts(decode(target, tiny.KnowingDrafter(target, known, wrong=wrong), asked)) == plain


@pytest.mark.parametrize("wrong", [None, 0.3])
def test_requests_side_by_side_equal_each_alone(wrong: float | None) -> None:
    target = tiny.target("gemma3")
    asked = [
        Request(list(PROMPTS[i % 3]), 5 + 7 * (i % 4), params) for i, params in enumerate([*SAMPLED, SamplingParams()])
    ]
    drafter = None if wrong is None else knowing(target, asked, wrong)
    together = texts(decode(target, drafter, asked))
    assert together == [texts(decode(target, None, [r]))[0] for r in asked]
    assert [len(t) for t in together] == [r.max_tokens for r in asked]


def test_seed_and_choice_decide_the_text() -> None:
    target = tiny.target()

    def draw(seed: int, choice: int = 0) -> list[int]:
        return texts(decode(target, None, requests(PROMPTS[:1], temperature=1.0, seed=seed, choice=choice)))[0]

    assert draw(1) == draw(1)
    assert len({tuple(draw(s, c)) for s in (1, 2, 2**62, -1) for c in (0, 1)}) == 8


def test_a_missing_seed_is_drawn_and_reported() -> None:
    params = [SamplingParams(temperature=1.0).seeded() for _ in range(20)]
    assert len({p.seed for p in params}) == 20
    assert all(p.seed is not None and p.seeded() is p for p in params)
    target, asked = tiny.target(), requests(PROMPTS[:1], temperature=1.0)
    fresh = [texts(decode(target, None, asked))[0] for _ in range(3)]
    assert len(set(map(tuple, fresh))) == 3


# --- the same comparisons must fail on a planted fault ---------------------------------------------


def differs(target: Target, asked: Sequence[Request], wrong: float = 0.3) -> bool:
    return texts(decode(target, knowing(target, asked, wrong), asked)) != texts(decode(target, None, asked))


def test_control_one_draft_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = tiny.target(), requests()
    assert not differs(target, asked)
    drafter, plain = knowing(target, asked, 0.3), texts(decode(target, None, asked))
    monkeypatch.setattr(step_module, "walk", one_too_many)
    assert texts(decode(target, drafter, asked)) != plain


def test_control_one_row_too_many_in_the_cache() -> None:
    target, asked = tiny.target(), requests()
    drafter, plain = knowing(target, asked, 0.3), texts(decode(target, None, asked))
    assert texts(decode(target, drafter, asked, after_prefill=commits_one_more)) != plain


def test_control_penalty_blind_to_the_drafted_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = tiny.target(), requests(temperature=1.0, repetition_penalty=0.4, seed=1)
    drafter, plain = knowing(target, asked, 0.0), texts(decode(target, None, asked))

    def blind(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
        nodes = [chain(tree.token[:, i]) for i in range(tree.nodes)]
        parts = [choose(logits[:, i : i + 1], n, positions[:, i : i + 1], sampling) for i, n in enumerate(nodes)]
        return torch.cat(parts, dim=1)

    monkeypatch.setattr(step_module, "choose", blind)
    assert texts(decode(target, drafter, asked)) != plain


def test_control_noise_keyed_by_the_node_instead_of_the_position(monkeypatch: pytest.MonkeyPatch) -> None:
    target, asked = tiny.target(), requests(temperature=1.0, seed=3)
    drafter, plain = knowing(target, asked, 0.3), texts(decode(target, None, asked))

    def by_node(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
        return choose(logits, tree, tree.depth, sampling)

    monkeypatch.setattr(step_module, "choose", by_node)
    assert texts(decode(target, drafter, asked)) != plain


def test_the_planted_walk_is_the_real_one_but_for_the_fault() -> None:
    tree = chain(torch.tensor([1]), torch.tensor([[4, 5, 6]]))
    picks, none = torch.tensor([[4, 9, 6, 7]]), torch.tensor([], dtype=torch.long)
    budget = torch.tensor([8])
    honest, faulty = walk(tree, picks, none, budget), one_too_many(tree, picks, none, budget)
    assert honest.tokens[0, : honest.counts[0]].tolist() == [4, 9]
    assert faulty.tokens[0, : faulty.counts[0]].tolist() == [4, 5, 6]
