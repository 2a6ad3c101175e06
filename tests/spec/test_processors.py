"""Which texts a logits processor is asked about, and whose logits it may change."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.spec.processors import process
from draftproof.spec.tree import Tree, chain
from tests.spec.forest import forest, forests, path_to

VOCAB = 8
FEW = settings(deadline=None, max_examples=50, derandomize=True, database=None)
Process = Callable[..., Tensor]


class Recorder:
    """Adds a bonus to the token after the text's last one, and writes down every text it is asked about."""

    def __init__(self, stateful: bool = False, bonus: float = 9.0) -> None:
        self.stateful, self.bonus = stateful, bonus
        self.calls: list[list[int]] = []

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        self.calls.append(list(ids))
        scores[(ids[-1] + 1) % VOCAB] += self.bonus
        return scores


class Counter(Recorder):
    """Really keeps state: the bonus depends on how often it was asked."""

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        self.calls.append(list(ids))
        scores[(3 * len(self.calls)) % VOCAB] += self.bonus
        return scores


def logits_for(tree: Tree, seed: int = 0) -> Tensor:
    return torch.randn(*tree.token.shape, VOCAB, generator=torch.Generator().manual_seed(seed))


def texts_of(tree: Tree) -> list[list[int]]:
    """Committed text and the root, of another length in every request."""
    return [[*range(row + 1), int(tree.token[row, 0])] for row in range(len(tree.token))]


def argmax(scores: Tensor, _row: int, _node: int) -> int:
    return int(scores.argmax())


# --- processors of the text alone -------------------------------------------------------------------


def check_stateless(tree: Tree, run: Process = process) -> None:
    """Every second request has two processors."""
    logits, texts = logits_for(tree), texts_of(tree)
    before = logits.clone()
    own = [[Recorder(), Recorder(bonus=1.0)] if row % 2 == 0 else [] for row in range(len(texts))]
    after = run(logits, tree, texts, own, argmax)
    assert torch.equal(logits, before), "the target's own logits were written to"
    for row, (text, mine) in enumerate(zip(texts, own, strict=True)):
        size = int(tree.n[row]) if mine else 0
        paths = [text + tree.token[row, path_to(tree, row, node)[1:]].tolist() for node in range(size)]
        for recorder in mine:
            assert recorder.calls == paths, "asked about other texts"
        wanted = before[row].clone()
        for node, path in enumerate(paths):
            wanted[node, (path[-1] + 1) % VOCAB] += 9.0
            wanted[node, (path[-1] + 1) % VOCAB] += 1.0
        assert torch.equal(after[row], wanted), "wrong logits"


@FEW
@given(forests(max_nodes=8))
def test_every_real_node_is_asked_about_with_its_own_text(tree: Tree) -> None:
    check_stateless(tree)


def changed(**faults: Callable[[Tree], Tensor]) -> Process:
    """`process` that reads some of the tree wrongly."""

    def run(logits: Tensor, tree: Tree, *rest: object) -> Tensor:
        fields = {n: getattr(tree, n) for n in ("token", "parent", "depth", "logw", "n")}
        return process(logits, Tree(**fields | {n: wrong(tree) for n, wrong in faults.items()}), *rest)  # type: ignore[arg-type]

    return run


FAULTS: dict[str, Process] = {
    "flat order for ancestors": changed(parent=lambda tree: torch.arange(-1, tree.nodes - 1).expand_as(tree.parent)),
    "padding asked too": changed(
        n=lambda tree: torch.full_like(tree.n, tree.nodes), parent=lambda tree: tree.parent.clamp(min=0)
    ),
    "another request's tokens": changed(token=lambda tree: tree.token.roll(1, 0)),
    "the row's neighbour too": lambda logits, tree, texts, own, pick: process(
        logits, tree, texts, [own[0], own[0], *own[2:]], pick
    ),
    "in place": lambda logits, *rest: logits.copy_(process(logits, *rest)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_stateless(fault: str) -> None:
    tree = forest([[-1, 0, 0, 1, 1], [-1, 0, 1], [-1, 0, 0]], [[1, 2, 3, 4, 5], [5, 6, 7], [3, 2, 1]], nodes=6)
    check_stateless(tree)
    with pytest.raises(AssertionError):
        check_stateless(tree, FAULTS[fault])


def test_without_processors_the_same_tensor_comes_back() -> None:
    tree = chain(torch.tensor([1, 2]), torch.tensor([[3], [4]]))
    logits = logits_for(tree).bfloat16()
    assert process(logits, tree, texts_of(tree), [[], []], argmax) is logits
    assert process(logits, tree, texts_of(tree), [], argmax) is logits
    other = process(logits, tree, texts_of(tree), [[], [Recorder()]], argmax)
    assert other is not logits and torch.equal(other[0], logits[0].float())
    assert not torch.equal(other[1], logits[1].float())  # control: a row that has one


# --- processors with state --------------------------------------------------------------------------


def plain(base: Tensor, text: list[int], own: Recorder, count: int) -> list[int]:
    """Plain decoding: `count` tokens, the target's logits a function of the text's last token: base [V, V]."""
    tokens: list[int] = []
    for _ in range(count):
        ids = text + tokens
        tokens.append(int(own(ids, base[ids[-1]].clone()).argmax()))
    return tokens


def check_stateful(base: Tensor, wrong_at: int, run: Process = process, drafts: int = 5, rounds: int = 3) -> None:
    """Rounds of chains that are right up to one draft: calls and tokens are plain decoding's."""
    alone, own = Counter(stateful=True), Counter(stateful=True)
    text = [2, 5]
    expected = plain(base, text, alone, rounds * (drafts + 1))
    made: list[int] = []
    for _ in range(rounds):
        ids = expected[len(made) : len(made) + drafts]
        ids = [(t + 1) % VOCAB if i >= wrong_at else t for i, t in enumerate(ids)]
        so_far = text + made
        line = chain(torch.tensor([so_far[-1]]), torch.tensor([ids]))
        picks = run(base[line.token], line, [so_far], [[own]], argmax)[0].argmax(-1).tolist()
        accepted = next((i for i, t in enumerate(ids) if picks[i] != t), len(ids))
        made += picks[: accepted + 1]
        assert accepted == min(wrong_at, drafts)
    assert made == expected[: len(made)], "another text"
    assert own.calls == alone.calls[: len(made)], "asked about other texts than plain decoding"


@FEW
@given(st.integers(0, 2**32), st.integers(0, 5))
def test_a_processor_with_state_is_asked_just_what_plain_decoding_asks(seed: int, wrong_at: int) -> None:
    check_stateful(torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(seed)), wrong_at)


Texts = Sequence[Sequence[int]]
Own = Sequence[Sequence[Recorder]]


def asks_all(logits: Tensor, tree: Tree, texts: Texts, own: Own, _pick: object) -> Tensor:
    """Picks that seem to follow the drafts to the end, so that every node is asked."""
    return process(logits, tree, texts, own, lambda _scores, row, node: int(tree.token[row, node + 1]))


def stops_early(logits: Tensor, tree: Tree, texts: Texts, own: Own, _pick: object) -> Tensor:
    return process(logits, tree, texts, own, lambda *_: -1)


@pytest.mark.parametrize(("run", "wrong_at"), [(asks_all, 2), (stops_early, 5)])
def test_control_stateful(run: Process, wrong_at: int) -> None:
    base = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
    check_stateful(base, wrong_at)
    with pytest.raises(AssertionError):
        check_stateful(base, wrong_at, run)


def test_control_asking_all_nodes_calls_more() -> None:
    line = chain(torch.tensor([1]), torch.tensor([[0, 0, 0, 0]]))
    logits = -torch.arange(VOCAB).float().expand(1, 5, -1)  # the target wants 0 wherever it is not asked for 9 more
    few, many = Recorder(stateful=True), Recorder(stateful=True)
    process(logits, line, [[1]], [[few]], argmax)
    asks_all(logits, line, [[1]], [[many]], argmax)
    assert few.calls == [[1]] and len(many.calls) == 5


def test_a_stateful_neighbour_does_not_stop_another_request() -> None:
    line = chain(torch.tensor([1, 1]), torch.tensor([[0, 0], [0, 0]]))
    state, other = Recorder(stateful=True), Recorder()
    process(logits_for(line), line, [[1], [1]], [[state], [other]], lambda *_: -1)
    assert state.calls == [[1]] and other.calls == [[1], [1, 0], [1, 0, 0]]


def test_a_stateless_processor_beside_a_stateful_one_is_asked_as_far_as_that_one() -> None:
    line = chain(torch.tensor([1]), torch.tensor([[0, 0]]))
    state, other = Recorder(stateful=True), Recorder()
    process(logits_for(line), line, [[1]], [[other, state]], lambda *_: -1)
    assert other.calls == state.calls == [[1]]


def test_the_pick_hears_the_processed_scores_of_its_own_request_and_node() -> None:
    line = chain(torch.tensor([1, 4]), torch.tensor([[2, 3], [5, 6]]))
    logits, heard = logits_for(line), []

    def pick(scores: Tensor, row: int, node: int) -> int:
        heard.append((row, node, scores.clone()))
        return int(line.token[row, node + 1])

    after = process(logits, line, [[1], [4]], [[], [Recorder(stateful=True)]], pick)
    assert [(row, node) for row, node, _ in heard] == [(1, 0), (1, 1)]
    assert all(torch.equal(scores, after[row, node]) for row, node, scores in heard)
