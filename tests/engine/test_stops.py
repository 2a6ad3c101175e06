"""Stop tokens and limits, wherever in a block they fall; the caches then; finished requests beside running ones."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from draftproof.engine import step as step_module
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, SamplingParams
from draftproof.spec.accept import Accepted, walk
from draftproof.spec.tree import Tree
from tests import tiny
from tests.engine.decoding import PROMPTS, Steered, decode, requests, texts

PROMPT, BLOCK = PROMPTS[0], 4


@cache
def distinct_seed() -> tuple[int, tuple[int, ...]]:
    """A seed whose first 14 tokens all differ, so that any of them can be the stop token."""
    for begin in range(0, 2000, 100):
        asked = [Request(PROMPT, 14, SamplingParams(temperature=1.5, seed=begin + i)) for i in range(100)]
        for i, text in enumerate(texts(decode(tiny.target(), None, asked))):
            if len(set(text)) == 14:
                return begin + i, tuple(text)
    raise AssertionError("no seed found")


def run(max_tokens: int, stop_ids: tuple[int, ...] = (), drafted: bool = True) -> tuple[list[int], str | None, Engine]:
    """Decode the text by perfect drafts: three accepted and a bonus a block. A real drafter's cache runs along."""
    seed, text = distinct_seed()
    target = tiny.target()
    guide = tiny.KnowingDrafter(target, [[*PROMPT, *text]], wrong=0.0)
    drafter = Steered(tiny.drafter(target), guide) if drafted else None
    engine = Engine(target, drafter, slots=1, context=32)
    request = Request(PROMPT, max_tokens, SamplingParams(temperature=1.5, seed=seed), stop_ids)
    tokens, finish = [], None
    for result in engine.generate([request]):
        assert finish is None, "a step after the finish"
        tokens += result.tokens
        finish = result.finish
    return tokens, finish, engine


def rows(engine: Engine) -> list[int]:
    """Committed rows of the target's cache, the real drafter's, and the guide's."""
    lengths = [int(engine.cache.lengths[0])]
    if isinstance(engine.drafter, Steered):
        lengths += [int(engine.drafter.cache.lengths[0]), int(engine.drafter.guide.lengths[0])]
    return lengths


# Token 0 comes from the prompt's own forward; 1, 2, 3 are drafts; 4 is the bonus; 5 is a draft again, 8 a bonus.
@pytest.mark.parametrize("where", [0, 1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("drafted", [True, False])
def test_stop_token_ends_the_text_and_the_caches(where: int, drafted: bool) -> None:
    text = distinct_seed()[1]
    tokens, finish, engine = run(14, (text[where], 63 if text[where] != 63 else 62), drafted)
    stop = min(i for i, t in enumerate(text) if t in (text[where], 63 if text[where] != 63 else 62))
    assert stop <= where
    assert (tokens, finish) == (list(text[: stop + 1]), "stop")
    assert set(rows(engine)) == {len(PROMPT) + len(tokens) - 1}  # the last token has no row, nothing behind it has one


@pytest.mark.parametrize("limit", [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, BLOCK + 2, 14])
@pytest.mark.parametrize("drafted", [True, False])
def test_max_tokens_ends_the_text_and_the_caches(limit: int, drafted: bool) -> None:
    tokens, finish, engine = run(limit, (), drafted)
    assert (tokens, finish) == (list(distinct_seed()[1][:limit]), "length")
    assert set(rows(engine)) == {len(PROMPT) + limit - 1}


def test_stop_at_the_limit_is_a_stop() -> None:
    text = distinct_seed()[1]
    assert run(3, (text[2],))[:2] == (list(text[:3]), "stop")


def test_control_rows_behind_a_stop_are_seen() -> None:
    """A walk that truncates the text but commits the whole path."""
    text = distinct_seed()[1]

    def plant(engine: Engine) -> None:
        honest = engine.cache.commit
        engine.cache.commit = lambda slots, counts, path=None: honest(slots, counts + 2, path)  # type: ignore[method-assign]

    seed, target = distinct_seed()[0], tiny.target()
    engine = Engine(target, tiny.KnowingDrafter(target, [[*PROMPT, *text]], wrong=0.0), slots=1, context=32)
    asked = [Request(PROMPT, 14, SamplingParams(temperature=1.5, seed=seed), (text[2],))]
    for result in engine.generate(asked):
        if result.prefill:
            plant(engine)
    assert int(engine.cache.lengths[0]) != len(PROMPT) + 3 - 1


def test_control_a_walk_blind_to_stops_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(tree: Tree, picks: Tensor, stops: Tensor, budget: Tensor) -> Accepted:
        return walk(tree, picks, stops[..., :0], budget)

    monkeypatch.setattr(step_module, "walk", blind)
    text = distinct_seed()[1]
    assert run(14, (text[2],))[0] != list(text[:3])


def test_the_mask_id_is_kept_where_the_target_writes_it() -> None:
    seed, text = distinct_seed()
    target = tiny.target()
    drafter = tiny.drafter(target, dflash_config={"mask_token_id": text[5]})
    asked = [Request(PROMPT, 14, SamplingParams(temperature=1.5, seed=seed))]
    assert drafter.spec.mask_token_id == text[5]
    assert texts(decode(target, drafter, asked)) == [list(text)]
    guided = Steered(drafter, tiny.KnowingDrafter(target, [[*PROMPT, *text]], wrong=0.0))
    assert texts(decode(target, guided, asked)) == [list(text)]  # also as an accepted draft


def test_a_finished_request_stays_untouched_beside_running_ones() -> None:
    target, limits = tiny.target("gemma3"), (2, 30, 1)
    asked = [
        Request(r.prompt_ids, n, r.sampling) for r, n in zip(requests(temperature=1.0, seed=5), limits, strict=True)
    ]
    alone = [texts(decode(target, None, [r]))[0] for r in asked]
    engine = Engine(target, tiny.drafter(target), slots=3, context=48)
    ended: dict[int, list[Tensor]] = {}
    tokens: list[list[int]] = [[], [], []]
    for result in engine.generate(asked):
        assert result.index not in ended, "a step for a finished request"
        tokens[result.index] += result.tokens
        if result.finish:
            ended[result.index] = committed(engine, result.index)
    assert tokens == alone
    for index, before in ended.items():
        after = committed(engine, index)
        assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    assert engine.cache.lengths.tolist() == [len(r.prompt_ids) + n - 1 for r, n in zip(asked, limits, strict=True)]


def committed(engine: Engine, slot: int) -> list[Tensor]:
    """Copies of the slot's committed rows in every full layer of the target's cache."""
    cache, length = engine.cache, int(engine.cache.lengths[slot])
    full = [i for i, shape in enumerate(cache.shapes) if shape.window is None]
    return [store[i][slot, :, :length].clone() for store in (cache.keys, cache.values) for i in full]


def test_the_committed_rows_of_a_running_request_do_change() -> None:
    """Control of the comparison above: it sees a slot that goes on."""
    target = tiny.target("gemma3")
    engine = Engine(target, None, slots=1, context=48)
    steps = engine.generate(requests(PROMPTS[:1], 5))
    next(steps), next(steps)
    before = committed(engine, 0)
    next(steps)
    assert committed(engine, 0)[0].shape != before[0].shape
