"""The cache against a plain Python history, for random steps of random trees; keys carry who wrote them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.models import cache as module
from draftproof.models.attention import grouped_attention
from draftproof.models.cache import Cache, LayerShape, Slots
from draftproof.models.plan import Plan
from draftproof.models.target import causal_plan
from draftproof.spec.tree import Tree, chain, visibility
from tests.spec.forest import forest, path_to

WINDOWS = (None, 3, 11)  # 3: an ancestor may leave the window of a deep node of the same tree
SLOTS, CHUNK, CAPACITY = 4, 7, 150
Row = tuple[int, int, int]  # slot, position, serial number of the write


def new_cache(windows: tuple[int | None, ...] = WINDOWS, chunk: int = CHUNK, capacity: int = CAPACITY) -> Cache:
    shapes = [LayerShape(kv_heads=2, head_dim=3, window=w) for w in windows]
    return Cache(shapes, slots=SLOTS, capacity=capacity, chunk=chunk, dtype=torch.float64, device="cpu")


class History:
    """A cache and beside it, slot by slot, the list of rows that it ought to hold."""

    def __init__(self, cache: Cache) -> None:
        self.cache, self.serial = cache, 0
        self.rows: list[list[Row]] = [[] for _ in range(SLOTS)]

    def step(self, slots: list[int], tree: Tree, counts: list[int], paths: Tensor | None, gather: bool) -> None:
        """One forward of `tree` on `slots`, checked, then commit."""
        where: Slots = torch.tensor(slots) if gather else slice(slots[0], slots[-1] + 1)
        reach = max(len(self.rows[s]) for s in slots) + tree.nodes
        plan = self.cache.plan(where, tree.depth, visibility(tree), reach)
        nodes = self._write_numbers(slots, tree)
        for layer, shape in enumerate(self.cache.shapes):
            key = torch.tensor(nodes, dtype=torch.float64)[:, None].repeat(1, 2, 1, 1)
            key[:, 1, :, 2] *= -1  # the second head is not a copy of the first
            keys, values = plan.write(layer, key, key + 0.5)
            assert torch.equal(values[..., 0], torch.where(keys.any(-1), keys[..., 0] + 0.5, values[..., 0]))
            mask = plan.mask(layer)
            assert mask.shape == (len(slots), 1, tree.nodes, keys.shape[2])
            for i, slot in enumerate(slots):
                for n in range(tree.nodes):
                    seen = Counter(map(tuple, keys[i, 0, mask[i, 0, n]].int().tolist()))
                    assert seen == self._expected(slot, tree, i, n, nodes[i], shape.window)
                    other = keys[i, 1, mask[i, 0, n], 2]
                    assert Counter((-other).int().tolist()) == Counter(row[2] for row in seen)
        self.cache.commit(where, torch.tensor(counts), paths)
        for i, slot in enumerate(slots):
            path = range(tree.nodes) if paths is None else paths[i].tolist()
            self.rows[slot] += [nodes[i][n] for n in list(path)[: counts[i]]]
        assert self.cache.lengths.tolist() == [len(rows) for rows in self.rows]

    def _write_numbers(self, slots: list[int], tree: Tree) -> list[list[Row]]:
        out = []
        for i, slot in enumerate(slots):
            start, first = len(self.rows[slot]), self.serial + 1
            out.append([(slot, start + int(tree.depth[i, n]), first + n) for n in range(tree.nodes)])
            self.serial += tree.nodes
        return out

    def _expected(self, slot: int, tree: Tree, row: int, node: int, new: list[Row], window: int | None) -> Counter[Row]:
        own = new[node][1]
        path = path_to(tree, row, node) or [node]
        all_rows = self.rows[slot] + [new[n] for n in path]
        return Counter(r for r in all_rows if window is None or r[1] > own - window)

    def drop(self, slots: list[int]) -> None:
        self.cache.drop(torch.tensor(slots))
        for slot in slots:
            self.rows[slot] = []


def random_step(history: History, draw: random.Random, full: bool) -> None:
    """A forward on some slots: a tree each with a path committed, or a plain chunk with its first rows committed."""
    gather = draw.random() < 0.5
    if gather:
        slots = draw.sample(range(SLOTS), draw.randint(1, SLOTS))
    else:
        first = draw.randrange(SLOTS)
        slots = list(range(first, draw.randint(first, SLOTS - 1) + 1))
    if any(len(history.rows[s]) + CHUNK > CAPACITY for s in slots):
        return history.drop(slots)
    nodes = CHUNK if full else draw.randint(1, CHUNK)
    tokens = [[0] * nodes for _ in slots]
    if draw.random() < 0.3:
        tree = chain(torch.zeros(len(slots), dtype=torch.long), torch.zeros(len(slots), nodes - 1, dtype=torch.long))
        counts = [nodes if full else draw.randint(0, nodes) for _ in slots]
        return history.step(slots, tree, counts, None, gather)
    used = [draw.randint(1, nodes) for _ in slots]
    # Parents are recent, so that paths grow long.
    parents = [[-1] + [draw.randint(max(0, i - 3), i - 1) for i in range(1, n)] for n in used]
    tree = forest(parents, tokens, nodes=nodes)
    routes = [path_to(tree, i, draw.randrange(n)) for i, n in enumerate(used)]
    counts = [draw.randint(0 if not full else len(route), len(route)) for route in routes]
    paths = torch.tensor([route + [route[-1]] * (nodes - len(route)) for route in routes])
    return history.step(slots, tree, counts, paths, gather)


def run(seed: int, steps: int, tight: bool, full: bool, cache: Callable[[], Cache] = new_cache) -> None:
    """tight: rings of exactly window - 1 + chunk rows, so that they wrap every few steps."""
    draw = random.Random(seed)
    with patch.object(module, "REACH_STEP", 1 if tight else 64):
        history = History(cache())
        for _ in range(steps):
            random_step(history, draw, full)
            if draw.random() < 0.05:
                history.drop(draw.sample(range(SLOTS), draw.randint(1, 2)))


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.integers(0, 2**32), st.integers(1, 25), st.booleans(), st.booleans())
def test_nodes_see_exactly_the_history(seed: int, steps: int, tight: bool, full: bool) -> None:
    run(seed, steps, tight, full)


def test_long_runs_wrap_every_ring() -> None:
    """150 rows of capacity, rings of 64 rows or less: several times around."""
    for tight in (True, False):
        run(1, 70, tight, full=True)


class ShortRing(Cache):
    def _rows(self, shape: LayerShape, capacity: int) -> int:
        return super()._rows(shape, capacity) - (shape.window is not None)


class NoCompaction(Cache):
    def _compact(self, slots: Slots, path: Tensor, counts: Tensor) -> None:
        pass


class CommitsAll(Cache):
    def commit(self, slots: Slots, counts: Tensor, path: Tensor | None = None) -> None:
        super().commit(slots, (counts + 1).clamp(max=self.chunk), path)


class DropsNothing(Cache):
    def drop(self, slots: Slots) -> None:
        self.lengths[slots] -= self.lengths[slots].clamp(max=1)


class WideWindow(Cache):
    def plan(self, *args: object) -> Plan:
        plan = super().plan(*args)  # type: ignore[arg-type]
        build = plan._build_mask
        plan._build_mask = lambda window, *rest: build(window and window + 1, *rest)  # type: ignore[method-assign]
        return plan


class WindowByIndex(Cache):
    """Siblings take the position of their place in the tree instead of their depth."""

    def plan(self, slots: Slots, depth: Tensor, visible: Tensor, reach: int) -> Plan:
        plan = super().plan(slots, depth, visible, reach)
        plan.positions = plan._flat
        return plan


class SiblingsSeen(Cache):
    def plan(self, slots: Slots, depth: Tensor, visible: Tensor, reach: int) -> Plan:
        return super().plan(slots, depth, torch.ones_like(visible).tril(), reach)


FAULTS = [ShortRing, NoCompaction, CommitsAll, DropsNothing, WideWindow, WindowByIndex, SiblingsSeen]


@pytest.mark.parametrize("faulty", FAULTS)
def test_control_faulty_caches(faulty: type[Cache], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{__name__}.Cache", faulty)
    with pytest.raises(AssertionError):
        run(1, 70, tight=True, full=True)


# --- single properties ------------------------------------------------------------------------------


def fill(cache: Cache, slots: Slots, rows: Tensor, tree: Tree | None = None) -> Plan:
    """Write rows [R, N, 3] to every layer, as a tree or as a plain chunk."""
    reach = int(cache.lengths.max()) + rows.shape[1]
    plan = (
        causal_plan(cache, slots, rows.shape[1], reach)
        if tree is None
        else cache.plan(slots, tree.depth, visibility(tree), reach)
    )
    for layer in range(len(cache.shapes)):
        plan.write(layer, rows[:, None].repeat(1, 2, 1, 1), -rows[:, None].repeat(1, 2, 1, 1))
    return plan


@pytest.mark.parametrize("before", [0, 3, 62, 75])
@pytest.mark.parametrize("path", [[0, 2, 5], [0, 1, 3], [0, 4], [0]])
def test_a_committed_path_equals_rows_written_in_order(before: int, path: list[int]) -> None:
    """Whatever stood between the path's nodes is gone, also where the ring's end runs through the path."""
    tree = forest([[-1, 0, 0, 1, 0, 2]], [[0] * 6])
    rows = torch.randn(1, 6, 3, dtype=torch.float64)
    trees, lines = new_cache(), new_cache()
    for cache in (trees, lines):
        for begin in range(before):
            fill(cache, slice(2, 3), torch.full((1, 1, 3), float(begin), dtype=torch.float64))
            cache.commit(slice(2, 3), torch.tensor([1]))
    fill(trees, slice(2, 3), rows, tree)
    trees.commit(slice(2, 3), torch.tensor([len(path)]), torch.tensor([path + [0] * (6 - len(path))]))
    fill(lines, slice(2, 3), rows[:, path])
    lines.commit(slice(2, 3), torch.tensor([len(path)]))
    assert torch.equal(trees.lengths, lines.lengths)
    for layer, count in enumerate(trees.rows):
        kept = [i % count for i in range(max(0, before + len(path) - count + CHUNK), before + len(path))]
        assert torch.equal(trees.keys[layer][2, :, kept], lines.keys[layer][2, :, kept])
        assert torch.equal(trees.values[layer][2, :, kept], lines.values[layer][2, :, kept])


def test_other_slots_are_not_touched() -> None:
    cache = new_cache()
    fill(cache, torch.tensor([3, 1]), torch.ones(2, 4, 3, dtype=torch.float64))
    cache.commit(torch.tensor([3, 1]), torch.tensor([4, 2]), torch.tensor([[0, 1, 2, 3]] * 2))
    assert cache.lengths.tolist() == [0, 2, 0, 4]
    assert all(not store[[0, 2]].any() for store in (*cache.keys.values(), *cache.values.values()))


def attend(cache: Cache) -> Tensor:
    """Two nodes, with every row of the storage in reach: on a GPU the attended length is rounded up."""
    order = torch.arange(2)
    plan = cache.plan(slice(0, 1), order[None], (order[:, None] >= order)[None], cache.capacity)
    keys, values = plan.write(0, *(torch.ones(1, 2, 2, 3, dtype=torch.float64) for _ in range(2)))
    return grouped_attention(torch.ones(1, 4, 2, 3, dtype=torch.float64), keys, values, plan.mask(0), 1.0)


def test_rows_never_written_do_not_poison_attention() -> None:
    """A masked row still enters as 0 * value, so storage may not start as garbage."""
    cache = new_cache()
    assert torch.isfinite(attend(cache)).all()
    for store in (*cache.keys.values(), *cache.values.values()):  # control: the check sees garbage
        store.fill_(torch.nan)
    assert not torch.isfinite(attend(cache)).all()


def test_a_forward_beyond_the_chunk_is_refused() -> None:
    """A sliding ring holds window - 1 rows and one chunk: more would overwrite rows that are still seen."""
    cache = new_cache()
    causal_plan(cache, slice(0, 1), CHUNK, CHUNK)
    with pytest.raises(AssertionError, match="8 nodes in one forward, the cache was made for 7"):
        causal_plan(cache, slice(0, 1), CHUNK + 1, CHUNK + 1)


def test_sliding_layers_hold_their_window_and_one_chunk_only() -> None:
    cache = new_cache(windows=(None, 33), chunk=32, capacity=4000)
    assert cache.rows == {0: 4032, 1: 64}
    assert cache.nbytes == 2 * 8 * SLOTS * 2 * 3 * (4032 + 64)
