"""Stop tokens and limits, wherever in a block they fall; the caches then; finished requests beside running ones."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from draftproof.engine import step as step_module
from draftproof.engine.engine import Engine
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.target import causal_plan
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


def test_a_finished_request_leaves_its_slot_to_the_others_at_once() -> None:
    """Every text is what it is alone, and after a result with a finish nobody holds the slot, nor hears of it again."""
    target, limits = tiny.target("gemma3"), (2, 30, 1, 9)
    prompts = [r.prompt_ids for r in requests(temperature=1.0, seed=5)] + [PROMPT[:4]]
    params = SamplingParams(temperature=1.0, seed=5)
    asked = [Request(p, n, params) for p, n in zip(prompts, limits, strict=True)]
    alone = [texts(decode(target, None, [r]))[0] for r in asked]
    engine = Engine(target, tiny.drafter(target), slots=3, context=48)
    numbers = [engine.add(r) for r in asked]
    tokens: dict[int, list[int]] = {number: [] for number in numbers}
    ended: list[int] = []
    while engine.busy:
        for result in engine.step():
            assert result.index not in ended, "a step for a finished request"
            tokens[result.index] += result.tokens
            ended += [result.index] if result.finish else []
        assert not {one.number for one in engine.table.taken} & {*ended}
        for one in engine.table.taken:
            assert int(engine.cache.lengths[one.slot]) == one.rows == len(one.ids) - 1
            assert committed_equal(engine, one.slot, one.ids[: one.rows])
    assert [*tokens.values()] == alone and len(ended) == 4


def committed_equal(engine: Engine, slot: int, text: list[int], off: int = 0) -> bool:
    """The slot holds this text's rows: those that one causal pass over it writes, in every full layer."""
    fresh = engine.target.new_cache(slots=1, capacity=len(text), chunk=len(text))
    engine.target.forward(torch.tensor([text]), causal_plan(fresh, slice(0, 1), len(text), len(text)), rows=1)
    return all(
        torch.allclose(ours[layer][slot, :, off : len(text)], theirs[layer][0, :, : len(text) - off], rtol=0, atol=1e-9)
        for ours, theirs in ((engine.cache.keys, fresh.keys), (engine.cache.values, fresh.values))
        for layer, window in fresh.windows.items()
        if window is None
    )


def test_control_rows_of_another_place_are_no_texts_own() -> None:
    """The comparison above sees rows that are shifted by one, and those of a text with another token in it."""
    target = tiny.target("gemma3")
    engine = Engine(target, None, context=48)
    engine.add(requests(PROMPTS[:1], 5)[0])
    engine.step(), engine.step()
    one = engine.table.taken[0]
    text = one.ids[: one.rows]
    assert committed_equal(engine, 0, text)
    assert not committed_equal(engine, 0, text, off=1)
    assert not committed_equal(engine, 0, [*text[:3], text[3] ^ 1, *text[4:]])
