"""Hybrid targets on our cache: after any sequence of partial accepts it holds what a fresh prefill would hold.

Wholly in float64 (norms and gates included, `tiny.in_double`), so that a comparison at 1e-9 means the algebra; the
modules of transformers compute in float32 inside and are compared one by one, in float32.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from draftproof.errors import UserError
from draftproof.models import gdn
from draftproof.models.cache import Cache
from draftproof.models.deltanet import released
from draftproof.models.target import Target, causal_plan
from draftproof.spec.tree import Tree, chain, visibility
from tests import tiny
from tests.spec.forest import forest, path_to

SLOTS, BLOCK = 3, 5
EXACT: dict[str, float] = {"rtol": 0, "atol": 1e-9}


def ids(rows: int, count: int, seed: int) -> Tensor:
    return torch.randint(4, tiny.VOCAB, (rows, count), generator=torch.Generator().manual_seed(seed))


def fresh(owner: Target, tokens: list[int], chunk: int | None = None) -> Tensor:
    """Logits behind the last token of one prefill."""
    chunk = chunk or len(tokens)
    cache = owner.new_cache(slots=1, capacity=len(tokens), chunk=chunk)
    for begin in range(0, len(tokens), chunk):
        part = torch.tensor([tokens[begin : begin + chunk]])
        out = owner.forward(part, causal_plan(cache, slice(0, 1), part.shape[1], len(tokens)), rows=1)
        cache.commit(slice(0, 1), torch.tensor([part.shape[1]]))
    return out.logits[0, -1]


def trees(seed: int, nodes: int = 9) -> Tree:
    """A random tree a slot, of different sizes; the last node is never the root."""
    draw = Random(seed)
    parents = [[-1, *(draw.randrange(node) for node in range(1, nodes - slot))] for slot in range(SLOTS)]
    return forest(parents, [[draw.randrange(4, tiny.VOCAB) for _ in line] for line in parents])


class Session:
    """Several requests on one cache, and the tokens that each has committed."""

    def __init__(self, owner: Target, lengths: list[int], seed: int) -> None:
        self.owner, self.cache = owner, owner.new_cache(slots=len(lengths), capacity=200, chunk=80)
        self.texts = [ids(1, length, seed + i)[0].tolist() for i, length in enumerate(lengths)]
        for slot, text in enumerate(self.texts):
            plan = causal_plan(self.cache, slice(slot, slot + 1), len(text), 80)
            owner.forward(torch.tensor([text]), plan, rows=1)
            self.cache.commit(slice(slot, slot + 1), torch.tensor([len(text)]))

    def verify(self, tree: Tree) -> Tensor:
        slots = slice(0, len(self.texts))
        plan = self.cache.plan(slots, tree.depth, visibility(tree), 120, causal=tree.chain)
        return self.owner.forward(tree.token, plan).logits

    def commit(self, tree: Tree, paths: list[list[int]]) -> None:
        counts = torch.tensor([len(p) for p in paths])
        padded = torch.tensor([p + [0] * (tree.nodes - len(p)) for p in paths])
        self.cache.commit(slice(0, len(paths)), counts, None if tree.chain else padded)
        for text, path, row in zip(self.texts, paths, tree.token.tolist(), strict=True):
            text += [row[node] for node in path]

    def check(self) -> None:
        """The next logits of every request equal those of a fresh prefill of its text and one token more."""
        nxt = ids(len(self.texts), 1, 99)
        logits = self.verify(chain(nxt[:, 0]))[:, -1]
        for row, text in enumerate(self.texts):
            torch.testing.assert_close(logits[row], fresh(self.owner, [*text, int(nxt[row])]), **EXACT)
        for store in self.cache.states.values():
            store.flight = None  # the look changed nothing


@pytest.mark.parametrize("kind", tiny.HYBRIDS)
@given(st.lists(st.lists(st.integers(0, BLOCK), min_size=SLOTS, max_size=SLOTS), min_size=1, max_size=4))
@settings(max_examples=12, deadline=None)
def test_any_partial_accepts_equal_a_fresh_prefill(kind: str, rounds: list[list[int]]) -> None:
    session = Session(tiny.target(kind), [3, 70, 1], seed=5)
    for number, accepts in enumerate(rounds):
        tokens = ids(SLOTS, BLOCK, 30 + number)
        tree = chain(tokens[:, 0], tokens[:, 1:])
        session.verify(tree)
        session.commit(tree, [list(range(count)) for count in accepts])
    session.check()


@pytest.mark.parametrize("kind", tiny.HYBRIDS)
def test_paths_of_trees_equal_a_fresh_prefill(kind: str) -> None:
    session = Session(tiny.target(kind), [3, 70, 1], seed=7)
    for seed in (1, 2, 3):
        tree = trees(seed)
        logits = session.verify(tree)
        last = [int(tree.n[slot]) - 1 for slot in range(SLOTS)]
        paths = [path_to(tree, slot, node) for slot, node in enumerate(last)]
        for slot, path in enumerate(paths):
            alone = fresh(session.owner, session.texts[slot] + tree.token[slot, path].tolist())
            torch.testing.assert_close(logits[slot, path[-1]], alone, **EXACT)
        session.commit(tree, paths)
    session.check()


@pytest.mark.parametrize("chunk", [1, 3, 4, 64, 65, 150])
@pytest.mark.parametrize("kind", tiny.HYBRIDS)
def test_prefill_does_not_depend_on_its_chunks(kind: str, chunk: int) -> None:
    """Chunk ends fall at every place of the convolution's window, and beyond the rule's own chunk of 64."""
    owner, text = tiny.target(kind), ids(1, 150, 3)[0].tolist()
    torch.testing.assert_close(fresh(owner, text, chunk), fresh(owner, text), **EXACT)


@pytest.mark.parametrize("kind", tiny.HYBRIDS)
def test_a_fork_and_a_dropped_slot(kind: str) -> None:
    session = Session(tiny.target(kind), [9, 4, 6], seed=2)
    session.cache.fork(0, slice(1, 3))
    session.texts[1:] = [list(session.texts[0]), list(session.texts[0])]
    tokens = ids(SLOTS, BLOCK, 8)
    tree = chain(tokens[:, 0], tokens[:, 1:])
    session.verify(tree)
    session.commit(tree, [[0], [0, 1, 2], []])
    session.check()
    session.cache.drop(slice(0, 1))
    session.texts[0] = []
    session.check()


# --- the comparisons must fail on a planted fault -------------------------------------------------------


def rolled_back_late(cache: Cache) -> None:
    """The state keeps every row of the block, whatever was accepted."""
    for store in cache.states.values():
        honest = store.commit

        def commit(slots: Any, counts: Tensor, path: Any, honest: Any = honest, store: Any = store) -> None:
            honest(slots, torch.full_like(counts, store.flight.columns.shape[1]), path)

        store.commit = commit  # type: ignore[method-assign]


def window_off_by_one(cache: Cache) -> None:
    for store in cache.states.values():
        honest = store.commit

        def commit(slots: Any, counts: Tensor, path: Any, honest: Any = honest, store: Any = store) -> None:
            before = store.window[slots].clone()
            columns = store.flight.columns
            honest(slots, counts, path)
            store.window[slots] = gdn.last_columns(columns, before, (counts - 1).clamp(min=0), path)

        store.commit = commit  # type: ignore[method-assign]


@pytest.mark.parametrize("plant", [rolled_back_late, window_off_by_one])
def test_control_faulty_commits(plant: Any) -> None:
    session = Session(tiny.target("qwen3_5"), [3, 70, 1], seed=5)
    plant(session.cache)
    tokens = ids(SLOTS, BLOCK, 30)
    tree = chain(tokens[:, 0], tokens[:, 1:])
    session.verify(tree)
    session.commit(tree, [[0, 1], [0], [0, 1, 2]])
    with pytest.raises(AssertionError, match="not close"):
        session.check()


def test_control_a_tree_taken_for_a_chain() -> None:
    session = Session(tiny.target("qwen3_5"), [3, 70, 1], seed=7)
    tree = trees(1)
    honest = session.verify(tree)
    assert (session.verify(dataclasses.replace(tree, chain=True)) - honest).abs().max() > 1e-3


def test_what_a_hybrid_cache_cannot_do_is_refused() -> None:
    session = Session(tiny.target("qwen3_5"), [3, 4, 5], seed=1)
    with pytest.raises(AssertionError, match="committed before, or dropped"):
        session.cache.commit(slice(0, 3), torch.tensor([1, 1, 1]))
    with pytest.raises(AssertionError, match="cannot go back"):
        session.cache.rewind(slice(0, 3), torch.tensor([1, 1, 1]))


# --- the modules' own forward ---------------------------------------------------------------------------


@pytest.mark.parametrize("rows", [1, 3, 64, 100])
@pytest.mark.parametrize("kind", tiny.HYBRIDS)
def test_a_module_equals_its_own_forward_in_float32(kind: str, rows: int) -> None:
    owner = tiny.target(kind, torch.float32)
    hidden = torch.randn(2, rows, tiny.HIDDEN, generator=torch.Generator().manual_seed(rows))
    cache = owner.new_cache(slots=2, capacity=rows, chunk=rows)
    for driver in owner.deltas.values():
        with torch.no_grad():
            ours = driver.module(hidden, draftproof=causal_plan(cache, slice(0, 2), rows, rows))
            with released(owner.deltas):
                theirs = driver.module(hidden)
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.parametrize("kind", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_multimodal_checkpoint(kind: str, tmp_path: Path) -> None:
    """Published checkpoints wrap the language model beside a vision tower, which is not loaded."""
    import transformers as hf

    text = tiny.target_config(kind)
    name = "Qwen3_5Moe" if kind.endswith("moe") else "Qwen3_5"
    vision = {"depth": 1, "hidden_size": 16, "num_heads": 2, "intermediate_size": 16, "out_hidden_size": tiny.HIDDEN}
    torch.manual_seed(3)
    config = getattr(hf, f"{name}Config")(text_config=text.to_dict(), vision_config=vision)
    whole = getattr(hf, f"{name}ForConditionalGeneration")(config).eval()
    whole.save_pretrained(tmp_path)
    assert any(".visual." in key for key in load_file(tmp_path / "model.safetensors"))
    owner = Target.load(tmp_path, dtype=torch.float32)
    assert not [key for key, _ in owner.model.named_parameters() if "visual" in key] and len(owner.deltas) == 5
    tokens = ids(1, 20, 4)
    with torch.no_grad():
        theirs = whole(input_ids=tokens, use_cache=False).logits[0, -1]
    torch.testing.assert_close(fresh(owner, tokens[0].tolist()), theirs, rtol=0, atol=1e-4)


def test_a_layer_that_keeps_something_of_its_own_is_refused() -> None:
    """A module that remembers tokens outside our cache equals its own forward in one pass, and drifts in the next."""
    owner = tiny.target("qwen3_5", torch.float32)
    embed = owner.embedding.forward

    def with_the_token_before(tokens: Tensor) -> Tensor:
        before = torch.cat([torch.zeros_like(tokens[:, :1]), tokens[:, :-1]], dim=1)
        return embed(tokens) + 0.5 * embed(before)

    owner.self_check()
    owner.embedding.forward = with_the_token_before
    try:
        with pytest.raises(UserError, match="the text in two parts"):
            owner.self_check()
    finally:
        del owner.embedding.forward
