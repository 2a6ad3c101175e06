"""Draft trees in the loop: plain decoding's text for any builder, budget and padding; the caches behind any path."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.engine import propose as propose_module
from draftproof.engine import step as step_module
from draftproof.engine.backlog import Backlog
from draftproof.engine.batch import Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.propose import Proposer, Speculation
from draftproof.engine.replay import features_of
from draftproof.engine.request import Request, SamplingParams, StepResult, StepTree
from draftproof.errors import UserError
from draftproof.models.cache import Cache
from draftproof.models.target import Target, causal_plan
from draftproof.spec.builders import BUILDERS
from draftproof.spec.processors import process
from draftproof.spec.tree import BUCKETS, Tree, bucket, chain, visibility
from tests import tiny
from tests.engine.decoding import PROMPTS, Answer, Steered, requests, texts
from tests.engine.test_stops import distinct_seed

KINDS = ("llama", "gemma3", "qwen3_5")
LIMITS = (9, 5, 13)  # tokens of the three requests
BLOCK = 6  # five drafts a pass
SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T 0.7, top-k, top-p": {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "seed": 3},
    "T 1, penalty": {"temperature": 1.0, "repetition_penalty": 1.3, "seed": 4},
}
PAIRS = [*zip(KINDS, SETTINGS, strict=True), ("llama", "T 1, penalty"), ("qwen3_5", "greedy")]  # no need of all nine


def ask(name: str) -> list[Request]:
    both = zip(requests(**SETTINGS[name]), LIMITS, strict=True)
    return [dataclasses.replace(r, max_tokens=limit) for r, limit in both]


def drawn(asked: Sequence[Request]) -> list[Request]:
    """The same, with their trees."""
    return [dataclasses.replace(r, keep_trees=True) for r in asked]


def decode(target: Target, drafter: Drafter | None, asked: Sequence[Request], how: Speculation) -> list[Answer]:
    answers = [Answer() for _ in asked]
    context = max(len(r.prompt_ids) + r.max_tokens for r in asked)
    for result in Engine(target, drafter, slots=len(asked), context=context, how=how).generate(drawn(asked)):
        answers[result.index].tokens += result.tokens
        answers[result.index].steps.append(result)
    return answers


@cache
def plain(kind: str, name: str) -> list[list[int]]:
    return texts(decode(tiny.target(kind), None, ask(name), Speculation()))


def known(asked: Sequence[Request], answers: Sequence[list[int]]) -> list[list[int]]:
    return [[*r.prompt_ids, *t] for r, t in zip(asked, answers, strict=True)]


def guide(kind: str, name: str, **settings: Any) -> tiny.KnowingTree:
    settings = {"depth": BLOCK - 1, "wrong": 0.1} | settings
    return tiny.KnowingTree(tiny.target(kind), known(ask(name), plain(kind, name)), **settings)


def steered(kind: str, name: str, **settings: Any) -> Any:
    """A real drafter that runs along, with the proposals of a tree that knows the text."""
    return Steered(tiny.drafter(tiny.target(kind), block_size=BLOCK), guide(kind, name, **settings))


def trees(answers: Sequence[Answer]) -> Iterator[StepResult]:
    return (s for a in answers for s in a.steps if not s.prefill)


def off_spine(result: StepResult) -> bool:
    """The path took some node that is not its parent's first child."""
    assert result.tree
    parent, path = result.tree.parent, result.tree.path
    return any(parent.index(parent[node]) != node for node in path[1:])


# --- the text -------------------------------------------------------------------------------------------

BUDGETS = (0, 1, 3, 8, 16, 64, 256)
HOWS = [
    Speculation(budget, builder, noise_aware=(i + j) % 2 == 0, padded=(i + j) % 3 > 0)
    for i, builder in enumerate(BUILDERS.values())
    for j, budget in enumerate(BUDGETS)
]


@pytest.mark.parametrize("kind", KINDS)
def test_the_text_is_plain_decodings_for_every_tree(kind: str) -> None:
    """Every builder with every budget, at one of the nine combinations or more; both paddings and both rankings."""
    lengths, left = set(), 0
    for number, name in enumerate(SETTINGS):
        part = (3 * KINDS.index(kind) + number) % 8
        for seed, how in enumerate(HOWS[part::8]):
            answers = decode(tiny.target(kind), steered(kind, name, seed=seed), ask(name), how)
            assert texts(answers) == plain(kind, name), how
            lengths |= {s.accepted for s in trees(answers)}
            left += sum(off_spine(s) for s in trees(answers))
    assert len(lengths) > 4 and left > 5  # of six


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_budget_above_the_possible_nodes_takes_what_there_is(builder: str) -> None:
    """Three candidates are left at each of two depths."""
    name, how = "T 0.7, top-k, top-p", Speculation(256, BUILDERS[builder], padded=True)
    answers = decode(tiny.target(), guide("llama", name, depth=2), ask(name), how)
    assert texts(answers) == plain("llama", name)
    assert 2 < max(s.nodes for s in trees(answers)) <= 3 + (9 if how.builder.deep else 3)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_drafters_own_trees_change_no_text(kind: str, name: str) -> None:
    aware = (KINDS.index(kind) + list(SETTINGS).index(name)) % 2 == 0
    drafter = tiny.drafter(tiny.target(kind), block_size=BLOCK)
    answers = decode(tiny.target(kind), drafter, ask(name), Speculation(64, noise_aware=aware))
    assert texts(answers) == plain(kind, name)


@pytest.mark.parametrize("rows", BUCKETS[2:])
def test_the_text_is_the_same_in_every_bucket(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind, name = KINDS[BUCKETS.index(rows) % 3], "T 1, penalty"
    monkeypatch.setattr(propose_module, "bucket", lambda _rows: rows)
    seen: list[int] = []

    def watched(tree: Tree) -> Tensor:
        seen.append(tree.nodes)
        return visibility(tree)

    monkeypatch.setattr(step_module, "visibility", watched)
    answers = decode(tiny.target(kind), guide(kind, name), ask(name), Speculation(14, padded=True))
    assert texts(answers) == plain(kind, name)
    assert set(seen) == {rows}


def test_control_padding_that_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_seen(tree: Tree) -> Tensor:
        return visibility(tree) | (tree.parent == -2)[:, None]

    monkeypatch.setattr(step_module, "visibility", all_seen)
    name, how = "T 1, penalty", Speculation(14, padded=True)
    assert texts(decode(tiny.target(), guide("llama", name), ask(name), how)) != plain("llama", name)


@pytest.mark.parametrize("kind", KINDS)
def test_control_a_commit_that_ignores_the_path_changes_the_text(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.commit
    monkeypatch.setattr(Cache, "commit", lambda self, slots, counts, path=None: honest(self, slots, counts))
    name = "T 1, penalty"
    assert texts(decode(tiny.target(kind), guide(kind, name), ask(name), Speculation(16))) != plain(kind, name)


# --- a chain is a tree ----------------------------------------------------------------------------------


def held(engine: Engine) -> list[Tensor]:
    """All that target's and drafter's caches hold of the three texts."""
    caches = [engine.cache] + ([engine.drafter.cache] if engine.drafter and engine.drafter.cache else [])
    rows = [cached_rows(c, n, slot) for c in caches for n in c.rows for slot in range(3)]
    return [*rows, *(t for c in caches for s in c.states.values() for t in (s.state, s.window))]


def run_line(kind: str, name: str, remade: Callable[[Tree], Tree], monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The target's choices of every step, and at the end all that the caches hold."""
    honest_line, honest_walk, walks = Proposer._line, step_module.walk, []
    with monkeypatch.context() as patch:
        patch.setattr(Proposer, "_line", lambda *given: remade(honest_line(*given)))

        def walk(tree: Tree, picks: Tensor, stops: Tensor, budget: Tensor) -> Any:
            walks.append(picks)
            return honest_walk(tree, picks, stops, budget)

        patch.setattr(step_module, "walk", walk)
        engine = Engine(tiny.target(kind), steered(kind, name, beside=0.2), slots=3, context=30, how=Speculation())
        for _ in engine.generate(ask(name)):
            pass
    return [*walks, *held(engine)]


def forked(tree: Tree) -> Tree:
    """Planted fault: the second draft hangs at the root."""
    parent = tree.parent.clone()
    parent[:, 2:3] = 0
    return dataclasses.replace(tree, chain=False, parent=parent)


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_chain_through_the_tree_path_is_the_chain(kind: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Choices, caches of target and drafter after all rounds: bitwise, but for sums in another order in hybrids."""
    one = run_line(kind, name, lambda tree: tree, monkeypatch)
    two = run_line(kind, name, lambda tree: dataclasses.replace(tree, chain=False), monkeypatch)
    for a, b in zip(one, two, strict=True):
        if kind in tiny.HYBRIDS and a.is_floating_point():
            torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
        else:
            assert torch.equal(a, b)


def test_control_a_chain_that_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    one = run_line("llama", "greedy", lambda tree: tree, monkeypatch)
    two = run_line("llama", "greedy", forked, monkeypatch)
    assert len(one) != len(two) or any(not torch.equal(a, b) for a, b in zip(one, two, strict=True))


# --- what a step accepts and reports --------------------------------------------------------------------


def longest_prefix(result: StepResult, truth: Sequence[int]) -> int:
    """How many tokens of the true text lie on a path of the tree."""
    assert result.tree
    below = {(p, t): i for i, (p, t) in enumerate(zip(result.tree.parent, result.tree.token, strict=True)) if i}
    node, length = 0, 0
    while length < len(truth) and (node, truth[length]) in below:
        node, length = below[node, truth[length]], length + 1
    return length


def rounds_of(kind: str, name: str, how: Speculation, **settings: Any) -> Iterator[tuple[StepResult, list[int], int]]:
    """Every step with the true text from its place on, and what the chain would accept there."""
    asked, drafter = ask(name), guide(kind, name, **settings)
    at = [len(r.prompt_ids) for r in asked]
    full = known(asked, plain(kind, name))
    for result in Engine(tiny.target(kind), drafter, slots=3, context=30, how=how).generate(drawn(asked)):
        row = result.index
        truth = full[row][at[row] :]
        if not result.prefill:
            spine = drafter.logits(row, at[row]).argmax(-1).tolist()
            pairs = zip(spine, truth, strict=False)
            yield result, truth, len(list(itertools.takewhile(lambda pair: pair[0] == pair[1], pairs)))
        at[row] += len(result.tokens)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("budget", [1, 5, 24])
def test_a_step_accepts_the_longest_prefix_in_its_tree(builder: str, budget: int) -> None:
    how, paths = Speculation(budget, BUILDERS[builder], noise_aware=False), set()
    for result, truth, _ in rounds_of("gemma3", "T 1, penalty", how):
        assert result.tree
        path = result.tree.path
        assert [result.tree.token[n] for n in path[1:]][: len(truth)] == truth[: len(path) - 1]
        assert min(len(path) - 1, len(truth)) == longest_prefix(result, truth)
        assert result.accepted == min(longest_prefix(result, truth), len(result.tokens))
        paths.add(len(path))
    assert len(paths) > (1 if budget == 1 else 2)


@pytest.mark.parametrize("name", SETTINGS)
def test_spine_first_accepts_what_the_chain_does_or_more(name: str) -> None:
    """On the same committed text, round by round."""
    gains = []
    for budget in (8, 24):
        for result, truth, chained in rounds_of("llama", name, Speculation(budget, noise_aware=False)):
            levels = max(t.max_tokens for t in ask(name))
            gains.append(longest_prefix(result, truth) - min(chained, levels, len(truth)))
    assert min(gains) >= 0 and max(gains) > 1


def test_control_best_first_may_accept_less_than_the_chain() -> None:
    how = Speculation(8, BUILDERS["best-first"], noise_aware=False)
    gains = [longest_prefix(r, truth) - chained for r, truth, chained in rounds_of("llama", "greedy", how)]
    assert min(gains) < 0


def check_report(result: StepResult, before: int, budget: int) -> None:
    """before: the last token emitted before this step."""
    tree = result.tree
    assert tree
    assert len(tree.token) == len(tree.parent) == len(tree.depth) == len(tree.logw) == result.nodes + 1 <= budget + 1
    assert (tree.token[0], tree.parent[0], tree.depth[0], tree.logw[0]) == (before, -1, 0, 0.0)
    for node, above in enumerate(tree.parent[1:], 1):
        assert 0 <= above < node and tree.depth[node] == tree.depth[above] + 1
        assert -1e9 < tree.logw[node] <= tree.logw[above]
    assert tree.path[0] == 0 and all(tree.parent[b] == a for a, b in itertools.pairwise(tree.path))
    drafted = [tree.token[node] for node in tree.path[1:]]
    assert result.tokens[: result.accepted] == drafted[: result.accepted]
    if result.finish is None:
        assert (result.accepted, len(result.tokens)) == (len(drafted), len(drafted) + 1)


def check_reports(how: Speculation) -> None:
    name = "T 0.7, top-k, top-p"
    for answer in decode(tiny.target(), guide("llama", name), ask(name), how):
        assert answer.steps[0].prefill and (answer.steps[0].tree, answer.steps[0].nodes) == (None, 0)
        last = answer.steps[0].tokens[-1]
        for result in answer.steps[1:]:
            assert isinstance(how.budget, int)
            check_report(result, last, how.budget)
            last = result.tokens[-1]


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("budget", [0, 4, 17, 100])
def test_nodes_and_tree_are_what_was_verified(builder: str, budget: int) -> None:
    check_reports(Speculation(budget, BUILDERS[builder], padded=True))


def test_control_padding_that_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Tree.padded

    def padded(self: Tree, rows: int) -> Tree:
        tree = honest(self, rows)
        return dataclasses.replace(tree, n=torch.full_like(tree.n, tree.nodes))

    monkeypatch.setattr(Tree, "padded", padded)
    with pytest.raises(AssertionError):
        check_reports(Speculation(17, padded=True))


def test_trees_are_kept_only_if_asked() -> None:
    engine = Engine(tiny.target(), guide("llama", "greedy"), slots=3, context=30, how=Speculation(8))
    results = [r for r in engine.generate(ask("greedy")) if not r.prefill]
    assert all(r.tree is None for r in results) and {r.nodes for r in results} == {8}


# --- stops, limits, the mask id -------------------------------------------------------------------------

PROMPT = PROMPTS[0]


def stopped(max_tokens: int, stop: int | None, **drafting: Any) -> tuple[list[StepResult], Engine]:
    seed, text = distinct_seed()
    target = tiny.target()
    told = tiny.KnowingTree(target, [[*PROMPT, *text]], wrong=0.0)
    drafter: Any = Steered(tiny.drafter(target, **drafting), told)
    engine = Engine(target, drafter, slots=1, context=32, how=Speculation(32, padded=True))
    params = SamplingParams(temperature=1.5, seed=seed)
    request = Request(PROMPT, max_tokens, params, () if stop is None else (stop,), keep_trees=True)
    return list(engine.generate([request])), engine


def check_end(results: list[StepResult], engine: Engine, text: Sequence[int], finish: str) -> bool:
    """The text and the caches end where they should; whether that was inside a path."""
    assert [t for r in results for t in r.tokens] == list(text)
    assert [r.finish for r in results] == [None] * (len(results) - 1) + [finish]
    rows = {int(engine.cache.lengths[0])}
    if isinstance(engine.drafter, Steered):
        rows |= {int(engine.drafter.cache.lengths[0]), int(engine.drafter.guide.lengths[0])}
    assert rows == {len(PROMPT) + len(text) - 1}
    tree = results[-1].tree
    return tree is not None and len(tree.path) > len(results[-1].tokens)


def test_a_stop_token_inside_a_path_ends_text_and_caches() -> None:
    text = distinct_seed()[1]
    inside = [check_end(*stopped(14, text[at]), text[: at + 1], "stop") for at in range(13)]
    assert sum(inside) >= 5


def test_the_limit_inside_a_path_ends_text_and_caches() -> None:
    text = distinct_seed()[1]
    inside = [check_end(*stopped(limit, None), text[:limit], "length") for limit in range(1, 14)]
    assert sum(inside) >= 5


def test_control_a_walk_that_ends_late(monkeypatch: pytest.MonkeyPatch) -> None:
    text, honest = distinct_seed()[1], step_module.walk
    monkeypatch.setattr(step_module, "walk", lambda tree, picks, _, budget: honest(tree, picks, picks[0, :0], budget))
    seen = [[t for r in stopped(14, text[at])[0] for t in r.tokens] == list(text[: at + 1]) for at in range(1, 8)]
    assert not all(seen)


def test_the_mask_id_inside_a_path_is_kept() -> None:
    text = distinct_seed()[1]
    kept = 0
    for at in range(1, 13):
        results, _ = stopped(14, None, dflash_config={"mask_token_id": text[at]})
        assert [t for r in results for t in r.tokens] == list(text)
        kept += any(text[at] in r.tokens[: r.accepted] for r in results)
    assert kept >= 5  # as an accepted draft


# --- continuity -----------------------------------------------------------------------------------------


def cached_rows(cache: Cache, layer: int, slot: int = 0) -> Tensor:
    """Keys and values that a later forward can see, oldest first."""
    window, length = cache.windows[layer], int(cache.lengths[slot])
    first = 0 if window is None else max(0, length - window + 1)
    where = torch.arange(first, length) % cache.rows[layer]
    return torch.stack([store[layer][slot][:, where] for store in (cache.keys, cache.values)])


def distance(ours: Cache, fresh: Cache, length: int) -> float:
    assert int(ours.lengths[0]) == int(fresh.lengths[0]) == length
    pairs = [(cached_rows(ours, n), cached_rows(fresh, n)) for n in ours.rows]
    for n, store in ours.states.items():
        pairs += [(store.state[0], fresh.states[n].state[0]), (store.window[0], fresh.states[n].window[0])]
    return max(float((a - b).abs().max()) for a, b in pairs)


def errors(kind: str, every: int, tokens: int, rounds: int) -> tuple[float, float, list[StepResult]]:
    """After `rounds` rounds of trees: the greatest distance of the target's and of the drafter's cache from a fresh
    prefill of the text, seen every few rounds."""
    target = tiny.target(kind)
    params: dict[str, Any] = {"temperature": 1.0, "seed": 4}
    asked = requests(PROMPTS[:1], tokens, **params)
    full = known(asked, texts(decode(target, None, asked, Speculation())))
    real, worst, results = tiny.drafter(target, seed=9), [0.0, 0.0], []
    drafter: Any = Steered(real, tiny.KnowingTree(target, full, wrong=0.3))
    engine = Engine(target, drafter, slots=1, context=tokens + 7, how=Speculation(12, noise_aware=False))
    text = list(asked[0].prompt_ids)
    for result in itertools.islice(engine.generate(drawn(asked)), rounds + 1):
        text += result.tokens
        results.append(result)
        if result.prefill or len(results) % every:
            continue
        length = len(text) - 1
        cache = target.new_cache(slots=1, capacity=length, chunk=length)
        target.forward(torch.tensor([text[:-1]]), causal_plan(cache, slice(0, 1), length, length), rows=1)
        cache.commit(slice(0, 1), torch.tensor([length]))
        new = tiny.drafter(target, seed=9)
        new.allocate(slots=1, capacity=length, chunk=length)
        new.extend(slice(0, 1), features_of(target, text[:-1], new.taps)[None], torch.tensor([length]), length)
        assert real.cache and new.cache
        for i, pair in enumerate(((engine.cache, cache), (real.cache, new.cache))):
            worst[i] = max(worst[i], distance(*pair, length))
    return worst[0], worst[1], results[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_fifty_rounds_of_trees_equal_a_fresh_prefill(kind: str) -> None:
    target, drafter, results = errors(kind, every=13, tokens=150, rounds=50)
    assert max(target, drafter) < 1e-9
    assert len(results) == 50 and {r.accepted for r in results} == {0, 1, 2, 3}
    assert sum(map(off_spine, results)) > 10


@pytest.mark.parametrize("kind", KINDS)
def test_control_first_nodes_kept_instead_of_the_path(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = Cache.commit
    monkeypatch.setattr(Cache, "commit", lambda self, slots, counts, path=None: honest(self, slots, counts))
    assert errors(kind, every=1, tokens=30, rounds=4)[0] > 1e-3


def test_control_features_of_the_first_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_module, "take_rows", lambda rows, index: rows[:, : index.shape[1]])
    target, drafter, _ = errors("llama", every=1, tokens=30, rounds=4)
    assert target < 1e-9 and drafter > 1e-3


# --- budgets that do not fit ----------------------------------------------------------------------------


def test_a_budget_beyond_the_models_context_is_refused() -> None:
    target = tiny.target()
    asked = [Request([5 + i % 50 for i in range(300)], 3)]
    truth = texts(decode(target, None, asked, Speculation()))
    drafter = tiny.KnowingTree(target, known(asked, truth))
    limit = target.spec.max_positions
    assert limit == 512
    with pytest.raises(UserError) as caught:
        decode(target, drafter, asked, Speculation(limit - 300 + 1))
    assert caught.value.code == "bad-option" and "213 nodes" in caught.value.message
    assert texts(decode(target, drafter, asked, Speculation(limit - 300))) == truth
    assert texts(decode(target, drafter, asked, Speculation("chain"))) == truth


# --- logits processors of one's own ---------------------------------------------------------------------


class Turns:
    """Favours another token at every call: what it says depends on how often it was asked."""

    stateful = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        self.calls += 1
        scores[(17 * self.calls) % tiny.VOCAB] += 4.0
        return scores


class Unstated(Turns):
    """Planted fault: keeps state and does not say so."""

    stateful = False


class NoThird:
    """Bans what the text holds twice: a function of the text."""

    stateful = False

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        twice = sorted({t for t in ids if ids.count(t) >= 2})
        return scores.index_fill(0, torch.tensor(twice, dtype=torch.long), -torch.inf)


def with_processors(name: str, *each: Any) -> list[Request]:
    made = zip(ask(name), each, strict=True)
    return [dataclasses.replace(r, processors=(own(),) if own else ()) for r, own in made]


def processed(
    kind: str, name: str, how: Speculation, *each: Any
) -> tuple[list[Answer], list[list[int]], list[Request]]:
    """With trees; plain decoding's text; the requests decoded with trees."""
    target, before = tiny.target(kind), with_processors(name, *each)
    truth = texts(decode(target, None, before, Speculation()))
    drafter = tiny.KnowingTree(target, known(before, truth), wrong=0.1, beside=0.3, depth=BLOCK - 1)
    asked = with_processors(name, *each)
    return decode(target, drafter, asked, how), truth, asked


@pytest.mark.parametrize(("kind", "name"), PAIRS)
def test_a_stateful_processor_gets_a_chain_and_its_neighbour_a_tree(kind: str, name: str) -> None:
    how = Speculation(16, noise_aware=False, padded=kind == "llama")
    with pytest.warns(UserWarning, match="keeps state"):
        answers, truth, _ = processed(kind, name, how, Turns, None, NoThird)
    assert texts(answers) == truth != plain(kind, name)
    branching = [
        {any(p != i for i, p in enumerate(s.tree.parent[1:])) for s in a.steps if s.tree and s.nodes > 1}
        for a in answers
    ]
    assert branching[0] == {False} and True in branching[1] and True in branching[2]
    assert max(s.accepted for s in answers[0].steps) > 1


@pytest.mark.parametrize("builder", BUILDERS)
def test_a_stateful_processor_is_asked_once_a_token(builder: str) -> None:
    how = Speculation(16, BUILDERS[builder], noise_aware=False)
    with pytest.warns(UserWarning, match="keeps state"):
        answers, truth, asked = processed("llama", "greedy", how, None, None, Turns)  # the longest of the three
    assert texts(answers) == truth
    assert asked[2].processors[0].calls == LIMITS[2]


def test_control_a_stateful_processor_asked_at_every_node() -> None:
    answers, truth, _ = processed("llama", "greedy", Speculation(16), Unstated, None, NoThird)
    assert texts(answers)[0] != truth[0] and texts(answers)[1:] == truth[1:]


@pytest.mark.parametrize("kind", KINDS)
def test_a_chain_needs_no_warning_for_state(kind: str) -> None:
    answers, truth, _ = processed(kind, "T 1, penalty", Speculation("chain"), Turns, None, NoThird)
    assert texts(answers) == truth


@pytest.mark.parametrize(("name", "builder"), [*zip(SETTINGS, BUILDERS, strict=True)])
def test_a_processor_of_the_text_is_asked_at_every_node(name: str, builder: str) -> None:
    kind = KINDS[list(BUILDERS).index(builder)]
    answers, truth, _ = processed(kind, name, Speculation(16, BUILDERS[builder]), NoThird, NoThird, None)
    assert texts(answers) == truth
    assert any(map(off_spine, trees(answers)))


def test_control_a_processor_that_sees_the_committed_text_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def blind(logits: Tensor, tree: Tree, committed: Any, processors: Any, pick: Any, *_: Any) -> Tensor:
        alone = [
            process(logits[:, n : n + 1], chain(tree.token[:, n]), committed, processors, pick)
            for n in range(tree.nodes)
        ]
        return torch.cat(alone, 1)

    class Alternating:
        """No token of the parity of the one before."""

        stateful = False

        def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
            scores[ids[-1] % 2 :: 2] = -torch.inf
            return scores

    answers, truth, _ = processed("llama", "greedy", Speculation(16), Alternating, None, None)
    assert texts(answers) == truth
    monkeypatch.setattr(step_module, "process", blind)
    answers, truth, _ = processed("llama", "greedy", Speculation(16), Alternating, None, None)
    assert texts(answers) != truth


# --- a budget changes what is verified, never what is drafted -------------------------------------------


def first_tree(how: Speculation) -> StepTree:
    """What the first step drafts, behind a prompt that makes the rows' end fall inside the drafter's block of 16."""
    target = tiny.target("llama")
    engine = Engine(target, tiny.drafter(target, block_size=16), context=80, how=how)
    steps = engine.generate([Request([5, 9, 11, 20, 33], 40, keep_trees=True)])
    return next(r.tree for r in steps if r.tree is not None)


def test_a_small_budget_drafts_what_the_whole_block_would() -> None:
    whole, short = first_tree(Speculation()), first_tree(Speculation(3))
    assert short.token == whole.token[:4]
    assert short.logw == pytest.approx(whole.logw[:4], abs=1e-6)


def test_control_a_block_that_is_cut_at_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = first_tree(Speculation())
    monkeypatch.setattr(Proposer, "rows", property(lambda self: bucket(self.most + 1)))
    short = first_tree(Speculation(3))
    assert short.logw != pytest.approx(whole.logw[:4], abs=1e-6)


def test_features_that_wait_long_are_taken_in_by_pieces() -> None:
    target = tiny.target("llama")
    drafter = tiny.drafter(target)
    drafter.allocate(slots=2, capacity=700, chunk=256)
    backlog, row = Backlog(drafter, 256), torch.randn(2, 1, 3 * tiny.HIDDEN, dtype=torch.float64)
    for round_ in range(600):
        count = 2 if round_ < 10 else 1
        backlog.hold(slice(0, count), row[:count], 700)
    backlog.take_in()
    assert drafter.cache is not None and drafter.cache.lengths.tolist() == [600, 10]


def test_a_measured_budget_and_its_measured_choice_come_together() -> None:
    target = tiny.target("llama")
    with pytest.raises(AssertionError, match="auto"):
        Engine(target, tiny.drafter(target), context=40, how=Speculation("auto"))
