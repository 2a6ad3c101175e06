"""Rows that earlier requests left: taken up they give the same text, drafts and acceptance; only the rest is run."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.keeper import LAST_STRETCH
from draftproof.engine.prefix import Piece, PrefixCache
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.models import cache as cache_module
from draftproof.models.cache import Cache
from draftproof.models.mtp import Lane
from draftproof.models.target import causal_plan
from tests.engine.company import (
    HOWS,
    SYSTEM,
    Company,
    Outcome,
    Reader,
    at_rest,
    company,
    only,
    owner,
    words,
)

KINDS = ("llama", "gemma3", "qwen3_5", "mtp")
DENSE = ("llama", "qwen2", "gemma3")
HOT = SamplingParams(temperature=1.0, seed=11)
CHUNK, ROOM = 20, 10**9


def known_texts(kind: str, asked: Sequence[Request]) -> list[list[int]]:
    plain = Engine(owner(kind), None, context=160)
    return [[*r.prompt_ids, *only(plain, r).tokens] for r in asked]


def engine_of(kind: str, asked: Sequence[Request], how: str = "tree", **settings: Any) -> Engine:
    drafter = company(kind, known_texts(kind, asked))
    return Engine(owner(kind), drafter, context=160, chunk=CHUNK, how=HOWS[how], **settings)


def one_by_one(engine: Engine, asked: Sequence[Request]) -> list[Outcome]:
    """Each is in the engine alone; requests that are queued together would share the engine's steps."""
    outcomes = []
    for request in asked:
        number, outcome = engine.add(request), Outcome()
        while engine.busy:
            for result in engine.step():
                assert result.index == number
                outcome.add(result, request.max_tokens)
        outcomes.append(outcome)
    at_rest(engine)
    return outcomes


def equal(kind: str, asked: Sequence[Request], how: str = "tree", **settings: Any) -> tuple[Engine, list[Outcome]]:
    """With the prefix cache and without: texts, accepted counts, and what the real drafter says behind every text."""
    plain, kept = engine_of(kind, asked, how), engine_of(kind, asked, how, **({"prefix": ROOM} | settings))
    without, given = one_by_one(plain, asked), one_by_one(kept, asked)
    for a, b in zip(given, without, strict=True):
        assert (a.tokens, a.finish, a.accepted()) == (b.tokens, b.finish, b.accepted())
    assert isinstance(plain.drafter, Company) and isinstance(kept.drafter, Company)
    assert plain.drafter.told.keys() == kept.drafter.told.keys()
    for text, logp in plain.drafter.told.items():
        torch.testing.assert_close(kept.drafter.told[text], logp, rtol=0, atol=1e-5)
    assert kept.state.prompt_tokens + kept.state.hits == kept.state.queries == plain.state.prompt_tokens
    assert kept.state.hits == sum(o.steps[0].cached for o in given) and plain.state.hits == 0
    return kept, given


def run_rows(outcome: Outcome, request: Request) -> int:
    """Rows of the prompt that were run."""
    return len(request.prompt_ids) - outcome.steps[0].cached


# --- what is found --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_the_same_prompt_again(kind: str) -> None:
    """Of a dense target only the last token is run; behind a state, what follows the last one that was kept."""
    asked = [Request(words(1, 45), 6, HOT), Request(words(1, 45), 9)]
    _, given = equal(kind, asked)
    assert run_rows(given[1], asked[1]) == (1 if kind in DENSE else LAST_STRETCH)


@pytest.mark.parametrize("kind", [*KINDS, "qwen2"])
def test_the_next_turn_runs_its_new_tokens(kind: str) -> None:
    """Prompt, answer and more: all but the answer's last token has its rows already."""
    first = Request(words(2, 33), 10, HOT)
    text = known_texts(kind, [first])[0]
    asked = [first, Request([*text, *words(3, 12)], 8, HOT)]
    asked.append(Request([*text, *words(3, 12), *words(4, 4)], 5))
    _, given = equal(kind, asked, "chain")
    assert run_rows(given[1], asked[1]) == 13
    assert run_rows(given[2], asked[2]) <= (4 if kind in DENSE else 4 + LAST_STRETCH)


@pytest.mark.parametrize("kind", KINDS)
def test_a_shared_beginning(kind: str) -> None:
    """Prompts that go on differently behind a system prompt: a dense target runs none of it again, though it ends in
    the middle of a piece; with a state, all that stands behind the last one that was kept in it."""
    asked = [Request([*SYSTEM, *words(n, 20)], 4, HOT) for n in (5, 6, 7)]
    kept, given = equal(kind, asked)
    assert kept.keeper
    stride = kept.keeper.state_rows
    kept_in = len(SYSTEM) // stride * stride
    rows = 20 if kind in DENSE else 20 + len(SYSTEM) - kept_in
    assert [run_rows(o, r) for o, r in zip(given, asked, strict=True)] == [42, rows, rows]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_several_choices_of_one_prompt_at_once(kind: str) -> None:
    """They come together, and yet the prompt is run once: the others look when their turn comes."""
    assert choices_at_once(kind, CHUNK) == CHUNK + 3 * (1 if kind == "llama" else LAST_STRETCH)


@pytest.mark.parametrize("kind", ["llama", "qwen3_5"])
def test_several_choices_of_one_long_prompt_at_once(kind: str) -> None:
    assert choices_at_once(kind, 3 * CHUNK) <= 3 * CHUNK + 3 * LAST_STRETCH


def choices_at_once(kind: str, rows: int) -> int:
    """Prompt rows that four choices of one prompt run; they give the texts that they give alone."""
    asked = [Request(words(8, rows), 4, SamplingParams(temperature=1.0, seed=3, choice=c)) for c in range(4)]
    engine = engine_of(kind, asked, slots=4, prefix=ROOM)
    given = [Outcome() for _ in asked]
    for result in engine.generate(asked):
        given[result.index].add(result, 4)
    assert [[*r.prompt_ids, *o.tokens] for r, o in zip(asked, given, strict=True)] == known_texts(kind, asked)
    return engine.state.prompt_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_cancelled_request_leaves_what_it_ran(kind: str) -> None:
    asked = [Request(words(9, 50), 6, HOT)]
    engine = engine_of(kind, asked, prefix=ROOM, prefill_rows=CHUNK)
    number = engine.add(asked[0])
    engine.step(), engine.step()
    engine.cancel(number)
    assert one_by_one(engine, asked)[0].steps[0].cached == 2 * CHUNK


def test_a_prompt_of_one_token_and_a_beginning_of_what_is_held() -> None:
    asked = [Request(words(1, 30), 4), Request(words(1, 30)[:1], 4), Request(words(1, 30)[:17], 4)]
    _, given = equal("llama", asked)
    assert [o.steps[0].cached for o in given] == [0, 0, 16]


@pytest.mark.parametrize("kind", ["gemma3", "mtp"])
def test_any_texts_in_any_order(kind: str) -> None:
    """Short pieces of few kinds, so that beginnings are shared, split and evicted."""

    @settings(deadline=None, max_examples=3, derandomize=True, database=None)
    @given(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=4), min_size=3, max_size=4),
        st.sampled_from([200_000, ROOM, 40_000]),
    )
    def checked(prompts: list[list[int]], limit: int) -> None:
        asked = [Request([t for part in p for t in words(part, 9)], 3, HOT) for p in prompts]
        kept, _ = equal(kind, asked, prefix=limit)
        assert kept.keeper
        held = kept.keeper.prefix
        assert recounted(held) == held.nbytes <= limit

    checked()


@pytest.mark.parametrize(("chunk", "nodes"), [(40, 32), (24, 8), (8, 4)])
def test_what_is_kept_of_an_answer_is_its_own_in_every_layer(chunk: int, nodes: int) -> None:
    """A window's ring is short, and a tree's nodes take its place: rows are kept before they are overwritten."""
    asked = Request(words(7, 12), 70, SamplingParams(temperature=1.0, seed=2))
    with patch.object(cache_module, "REACH_STEP", 8):
        drafter = company("gemma3", known_texts("gemma3", [asked]))
        engine = Engine(owner("gemma3"), drafter, context=100, chunk=chunk, how=Speculation(nodes), prefix=ROOM)
        text = [*asked.prompt_ids, *one_by_one(engine, [asked])[0].tokens][:-1]
    fresh = owner("gemma3").new_cache(slots=1, capacity=len(text), chunk=len(text))
    owner("gemma3").forward(torch.tensor([text]), causal_plan(fresh, slice(0, 1), len(text), len(text)), rows=1)
    wanted = fresh.save(0, 0, len(text))
    assert engine.keeper
    hit = engine.keeper.prefix.match([*text, 9])
    assert hit.length == len(text) and len(hit.stretches) > 2
    for begin, rows in hit.stretches:
        for ours, whole in zip(rows[0], wanted, strict=True):
            torch.testing.assert_close(ours, whole[:, begin : begin + ours.shape[1]], rtol=0, atol=1e-9)


# --- controls -------------------------------------------------------------------------------------------


def other_rows(honest: Callable[..., Any]) -> Callable[..., Any]:
    """The rows of another token in the place of one."""
    return lambda self, slot, begin, saved: honest(self, slot, begin, [t.roll(1, dims=1) for t in saved])


def no_state(honest: Callable[..., Any]) -> Callable[..., Any]:
    """Zeros, and nothing that waits."""
    return lambda *given: [torch.zeros_like(t) for t in honest(*given)]


def one_less(honest: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, ids: shorter(honest(self, ids))


def shorter(hit: Any) -> Any:
    """The state of a text for one with a token less."""
    stretches = [(begin, [[t[:, :-1] for t in store] for store in rows]) for begin, rows in hit.stretches[-1:]]
    return type(hit)(max(0, hit.length - 1), [*hit.stretches[:-1], *stretches], hit.state) if hit.length else hit


FAULTS: dict[str, tuple[str, type, str, Callable[[Any], Callable[..., Any]]]] = {
    "rows of other tokens": ("llama", Cache, "load", other_rows),
    "a text of other tokens": ("llama", Reader, "load", other_rows),
    "a window's rows of other tokens": ("gemma3", Cache, "load", other_rows),
    "a head's rows of other tokens": ("mtp", Lane, "load", other_rows),
    "a state of nobody": ("qwen3_5", Cache, "state", no_state),
    "a head that waits for nothing": ("mtp", Lane, "state", no_state),
    "a state one token on": ("qwen3_5", PrefixCache, "match", one_less),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_control_a_fault_is_seen(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, owning, name, planted = FAULTS[fault]
    first = Request(words(1, 45), 6, HOT)
    asked = [first, Request([*known_texts(kind, [first])[0], *words(2, 3)], 6, HOT)]
    monkeypatch.setattr(owning, name, planted(getattr(owning, name)))
    with pytest.raises(AssertionError):
        equal(kind, asked)


# --- the tree of pieces ---------------------------------------------------------------------------------


def pieces(prefix: PrefixCache) -> list[Piece]:
    found, todo = [], list(prefix._root.children.values())
    while todo:
        piece = todo.pop()
        found.append(piece)
        todo += piece.children.values()
        assert all(child.parent is piece and child.tokens[0] == key for key, child in piece.children.items())
    assert {p for p in found if not p.children} == prefix._leaves
    return found


def recounted(prefix: PrefixCache) -> int:
    return sum(t.nbytes for p in pieces(prefix) for store in (*p.rows, *(p.state or ())) for t in store)


class Held:
    """A prefix cache, and beside it every text that was given to it. Rows say what they are of: text and place."""

    def __init__(self, limit: int, *, stateful: bool) -> None:
        self.prefix, self.stateful = PrefixCache(limit, stateful=stateful), stateful

    def rows(self, ids: Sequence[int], begin: int, end: int) -> list[list[Tensor]]:
        """Two stores of two and one tensors [heads, tokens]: a hash of the text up to there."""
        told = [hash(tuple(ids[: at + 1])) % 10_007 for at in range(begin, end)]
        row = torch.tensor(told, dtype=torch.float64)
        return [[row.expand(2, -1).clone(), -row[None]], [row[None] + 0.5]]

    def state(self, ids: Sequence[int]) -> list[list[Tensor]]:
        return [[torch.tensor([float(hash(tuple(ids)) % 10_007)])], []]

    def add(self, ids: Sequence[int], begin: int) -> None:
        self.prefix.add(ids, begin, self.rows(ids, begin, len(ids)), self.state(ids) if self.stateful else None)

    def look(self, ids: Sequence[int]) -> int:
        """How much of the text is held; what is must be its own."""
        hit = self.prefix.match(ids)
        assert hit.length < len(ids)
        at = 0
        for begin, rows in hit.stretches:
            count = rows[0][0].shape[1]
            assert begin == at
            for store, wanted in zip(rows, self.rows(ids, begin, begin + count), strict=True):
                assert all(torch.equal(a, b) for a, b in zip(store, wanted, strict=True))
            at += count
        assert at == hit.length
        if self.stateful and hit.length:
            assert hit.state == self.state(ids[: hit.length])
        return hit.length


texts = st.lists(st.integers(0, 2), min_size=1, max_size=9)


@settings(deadline=None, max_examples=60, derandomize=True, database=None)
@given(st.lists(st.tuples(texts, st.booleans()), max_size=14), st.booleans(), st.sampled_from([10**6, 500, 1200, 90]))
def test_what_is_held_is_the_texts_own(asked: list[tuple[list[int], bool]], stateful: bool, limit: int) -> None:
    """Texts as the engine gives them: what is found is taken up, the rest is added in one part or in two."""
    held = Held(limit, stateful=stateful)
    before: list[list[int]] = []
    for ids, parts in asked:
        begin = held.look([*ids, 9])
        if limit == 10**6 and not stateful:
            ends = [len(list(itertools.takewhile(lambda p: p[0] == p[1], zip(ids, e, strict=False)))) for e in before]
            assert begin == max(ends, default=0)
        middle = begin + (len(ids) - begin) // 2
        if parts and begin < middle < len(ids):
            held.add(ids[:middle], begin)
            begin = middle
        if begin < len(ids):
            held.add(ids, begin)
        before.append(ids)
        assert recounted(held.prefix) == held.prefix.nbytes <= limit
        if limit == 10**6:
            assert held.look([*ids, 9]) == len(ids)


def test_what_was_unused_for_longest_goes_first() -> None:
    one = 8 * 4 * 10  # bytes of a text of ten tokens: four rows of float64
    held = Held(3 * one, stateful=False)
    lines = [list(range(n, n + 10)) for n in (10, 20, 30, 40)]
    for line in lines[:3]:
        held.add(line, 0)
    held.look([*lines[0], 9])
    held.add(lines[3], 0)
    assert [held.look([*line, 9]) for line in lines] == [10, 0, 10, 10]
    held.add([*lines[0], *range(50, 60)], 10)  # hangs behind the first, so that one stays
    assert [held.look([*line, 9]) for line in lines] == [10, 0, 0, 10]


def test_a_text_larger_than_the_memory_is_not_kept() -> None:
    held = Held(100, stateful=False)
    held.add(words(1, 10), 0)
    assert held.prefix.nbytes == 0 and not pieces(held.prefix) and held.look(words(1, 10)) == 0


def test_rows_behind_what_was_evicted_are_not_kept() -> None:
    """Without what stands before, they could never be taken up."""
    held = Held(10**6, stateful=False)
    held.add(words(1, 10), 4)
    assert held.prefix.nbytes == 0
    held.add(words(1, 10), 0)
    assert held.look([*words(1, 10), 9]) == 10
    held.prefix.clear()
    assert held.prefix.nbytes == 0 and held.look([*words(1, 10), 9]) == 0


def test_control_bytes_that_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Piece, "nbytes", property(lambda self: 8 * len(self.tokens)))
    held = Held(10**6, stateful=False)
    held.add(words(1, 10), 0)
    assert recounted(held.prefix) != held.prefix.nbytes
