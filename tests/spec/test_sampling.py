"""Logits processors against transformers' own, node by node, and the law of what `choose` draws."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor
from transformers import generation

from draftproof.spec import sampling as module
from draftproof.spec.noise import gumbel
from draftproof.spec.sampling import Sampling, choose, keep_likely
from draftproof.spec.tree import NO_PARENT, Tree, chain
from tests.spec.forest import forests, path_to

VOCAB = 16


@dataclass(frozen=True)
class Row:
    """One request's settings and committed text; the last token of the text is the root, not committed yet."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    penalty: float = 1.0
    seed: int = 0
    text: list[int] = field(default_factory=list)
    prompt: int = 0  # tokens of the text, or of text and root, that are the prompt's
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)

    def processors(self) -> list[Callable[[Tensor, Tensor], Tensor]]:
        """transformers' processors in transformers' order, each only when it is switched on; between them OpenAI's."""
        out: list[Callable[[Tensor, Tensor], Tensor]] = [self.biased]
        if self.penalty != 1:
            out.append(generation.RepetitionPenaltyLogitsProcessor(self.penalty))
        out.append(self.lessened)
        if self.temperature > 0:
            if self.temperature != 1:
                out.append(generation.TemperatureLogitsWarper(self.temperature))
            if self.top_k:
                out.append(generation.TopKLogitsWarper(self.top_k))
            if self.top_p < 1:
                out.append(generation.TopPLogitsWarper(self.top_p))
            if self.min_p:
                out.append(generation.MinPLogitsWarper(self.min_p))
        return out

    def process(self, ids: list[int], scores: Tensor) -> Tensor:
        scores = scores[None].clone()
        for processor in self.processors():
            scores = processor(torch.tensor([ids], dtype=torch.long), scores)
        return scores[0]

    def biased(self, _ids: Tensor, scores: Tensor) -> Tensor:
        for token, bias in self.bias.items():
            scores[0, token] += bias
        return scores

    def lessened(self, ids: Tensor, scores: Tensor) -> Tensor:
        """OpenAI's definition: minus c[j] * frequency + float(c[j] > 0) * presence; c[j]: times that the answer so far
        holds token j."""
        answer = ids[0, self.prompt :].tolist()
        for token in set(answer):
            scores[0, token] -= self.frequency * answer.count(token)
            scores[0, token] -= self.presence
        return scores


def batch(rows: list[Row], vocab: int = VOCAB, roots: list[int] | None = None) -> Sampling:
    """roots: the last token of every text, which an answer's counts hold as well."""
    seen = None
    if any(r.penalty != 1 for r in rows):
        seen = torch.zeros(len(rows), vocab, dtype=torch.bool)
        for i, r in enumerate(rows):
            seen[i, r.text] = True
    return Sampling(
        temperature=torch.tensor([r.temperature for r in rows]),
        top_k=torch.tensor([r.top_k for r in rows]),
        top_p=torch.tensor([r.top_p for r in rows]),
        min_p=torch.tensor([r.min_p for r in rows]),
        penalty=torch.tensor([r.penalty for r in rows]),
        seed=torch.tensor([r.seed for r in rows]),
        choice=torch.zeros(len(rows), dtype=torch.long),
        seen=seen,
        sampled=any(r.temperature > 0 for r in rows),
        filtered=any(r.top_k or r.top_p < 1 or r.min_p > 0 for r in rows),
        **added(rows, vocab, roots),
    )


def added(rows: list[Row], vocab: int, roots: list[int] | None) -> dict[str, Tensor]:
    """Bias and OpenAI's penalties, each only where somebody asks for it."""
    out: dict[str, Tensor] = {}
    if any(r.presence or r.frequency for r in rows):
        assert roots
        answers = [[*r.text, root][r.prompt :] for r, root in zip(rows, roots, strict=True)]
        out["counts"] = torch.tensor([[float(a.count(token)) for token in range(vocab)] for a in answers])
        out["presence"] = torch.tensor([r.presence for r in rows])
        out["frequency"] = torch.tensor([r.frequency for r in rows])
    if any(r.bias for r in rows):
        out["bias"] = torch.tensor([[r.bias.get(token, 0.0) for token in range(vocab)] for r in rows])
    return out


def expected(logits: Tensor, tree: Tree, positions: Tensor, rows: list[Row]) -> Tensor:
    """Each root -> node path as a text of its own, transformers' processors on its last logits, then the noise."""
    picks = torch.zeros(logits.shape[:2], dtype=torch.long)
    for r, row in enumerate(rows):
        for n in range(tree.nodes):
            path = path_to(tree, r, n) or [n]
            ids = row.text + tree.token[r, path].tolist()
            scores = row.process(ids, logits[r, n])
            if row.temperature > 0:
                place = torch.tensor([[int(positions[r, n]) + 1]])
                scores = scores + gumbel(torch.tensor([row.seed]), torch.tensor([0]), place, logits.shape[-1])[0, 0]
            picks[r, n] = scores.argmax()
    return picks


def check(tree: Tree, rows: list[Row], seed: int) -> None:
    logits = 3 * torch.randn(*tree.token.shape, VOCAB, generator=torch.Generator().manual_seed(seed))
    positions = 10 + tree.depth
    sampling, real = batch(rows, roots=tree.token[:, 0].tolist()), tree.parent != NO_PARENT  # padding stands nowhere
    assert torch.equal(choose(logits, tree, positions, sampling)[real], expected(logits, tree, positions, rows)[real])


@st.composite
def settings_of(draw: st.DrawFn) -> Row:
    text = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=6))
    return Row(
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 1, 3, VOCAB, VOCAB + 5])),
        top_p=draw(st.sampled_from([1.0, 0.93, 0.51, 0.07])),
        min_p=draw(st.sampled_from([0.0, 0.06, 0.52, 1.0])),
        penalty=draw(st.sampled_from([1.0, 1.3, 0.7])),
        seed=draw(st.integers(-(2**63), 2**63 - 1)),
        text=text,
        prompt=draw(st.integers(0, len(text) + 1)),
        presence=draw(st.sampled_from([0.0, 1.5, -2.0, 0.5])),
        frequency=draw(st.sampled_from([0.0, 0.0, 1.0, -0.5, 2.0])),
        bias=draw(st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -1.5, 2.0, 6.0]), max_size=3)),
    )


@settings(deadline=None, max_examples=120, derandomize=True, database=None)
@given(forests(max_nodes=6), st.lists(settings_of(), min_size=3, max_size=3), st.integers(0, 2**32))
def test_choices_equal_transformers_processors_on_every_path(tree: Tree, rows: list[Row], seed: int) -> None:
    """Different settings a row, in one batch; the penalty sees the text and the node's own ancestors only."""
    check(tree, rows[: tree.token.shape[0]], seed)


HOT = Row(temperature=1.5, top_k=9, top_p=0.93, min_p=0.06, penalty=1.3, seed=4, text=[1, 2])
FAULTS = ["penalty sees siblings", "noise of the node's own position", "min-p before temperature", "no penalty"]


@pytest.mark.parametrize("fault", FAULTS)
def test_control_choices(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if fault == "penalty sees siblings":
        monkeypatch.setattr(module, "visibility", lambda tree: torch.ones(*tree.parent.shape, tree.nodes).bool())
    elif fault == "noise of the node's own position":
        monkeypatch.setattr(module, "gumbel", lambda s, c, position, vocab: gumbel(s, c, position - 1, vocab))
    elif fault == "min-p before temperature":
        monkeypatch.setattr(module, "keep_likely", lambda scores, k, p, m: keep_likely(scores * 1.5, k, p, m) / 1.5)
    else:
        monkeypatch.setattr(module, "penalise", lambda scores, *_: scores)
    bushy = Tree(
        token=torch.tensor([[2, 5, 6, 7, 8, 9]]), parent=torch.tensor([[-1, 0, 0, 0, 1, 1]]),
        depth=torch.tensor([[0, 1, 1, 1, 2, 2]]), logw=torch.zeros(1, 6), n=torch.tensor([6]),
    )  # fmt: skip
    with pytest.raises(AssertionError):
        for seed in range(40):
            check(bushy, [HOT], seed)


OPENAI = Row(presence=1.5, frequency=0.75, text=[5, 1, 6, 8, 8], prompt=2, seed=3)
WRONG: dict[str, Callable[[Row], Row]] = {
    "the prompt is counted": lambda row: replace(row, prompt=0),
    "a count behind the answer's first token": lambda row: replace(row, prompt=3),
    "presence for every time": lambda row: replace(row, presence=0.0, frequency=row.frequency + row.presence),
    "frequency once": lambda row: replace(row, presence=row.frequency + row.presence, frequency=0.0),
    "no bias": lambda row: replace(row, bias={}),
}


@pytest.mark.parametrize("fault", [*WRONG, "siblings are counted", "the root is counted twice"])
def test_control_penalties_of_openai(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees every part of the definition, at the nodes of a tree whose tokens repeat the text's."""
    right = replace(OPENAI, bias={3: 2.0, 8: -1.0})
    bushy = Tree(
        token=torch.tensor([[6, 5, 6, 8, 8, 5, 6]]), parent=torch.tensor([[-1, 0, 0, 0, 1, 2, 4]]),
        depth=torch.tensor([[0, 1, 1, 1, 2, 2, 3]]), logw=torch.zeros(1, 7), n=torch.tensor([7]),
    )  # fmt: skip
    for seed in range(10):
        check(bushy, [right], seed)
    if fault in WRONG:
        wrong = WRONG[fault](right)
        monkeypatch.setattr(Row, "process", lambda self, ids, s, honest=Row.process: honest(wrong, ids, s))
    elif fault == "siblings are counted":
        monkeypatch.setattr(module, "visibility", lambda tree: torch.ones(*tree.parent.shape, tree.nodes).bool())
    else:
        monkeypatch.setattr(
            Row, "lessened", lambda self, ids, s, honest=Row.lessened: honest(self, torch.cat([ids, ids[:, 5:6]], 1), s)
        )
    with pytest.raises(AssertionError):
        for seed in range(40):
            check(bushy, [right], seed)


@settings(deadline=None, max_examples=40, derandomize=True, database=None)
@given(st.lists(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4), min_size=1, max_size=6))
def test_what_a_step_emits_is_counted_and_marked(steps: list[list[int]]) -> None:
    """Beside a request of other tokens that emits at most one: rows behind the kept ones count for nobody."""
    rows = [Row(penalty=1.2, frequency=1.0, text=[1], prompt=1), Row(presence=1.0, text=[2, 2], prompt=0)]
    sampling, texts = batch(rows, roots=[4, 5]), [[1, 4], [2, 2, 5]]
    for tokens in steps:
        both = torch.tensor([tokens, [(t + 3) % VOCAB for t in tokens]])
        kept = torch.arange(len(tokens)) < torch.tensor([[len(tokens)], [1]])
        texts = [text + line[mark].tolist() for text, line, mark in zip(texts, both, kept, strict=True)]
        sampling.commit(both, kept, torch.tensor([text[-1] for text in texts]))
    assert sampling.counts is not None and sampling.seen is not None
    for row, (own, text) in enumerate(zip(rows, texts, strict=True)):
        assert sampling.counts[row].tolist() == [text[own.prompt :].count(token) for token in range(VOCAB)]
    assert sampling.seen[0].nonzero()[:, 0].tolist() == sorted({1, *texts[0][2:]})  # a root is marked by its tree


# --- filters alone, in float64, score by score ------------------------------------------------------


def check_filter(scores: Tensor, rows: list[Row]) -> None:
    kept = keep_likely(
        scores,
        torch.tensor([r.top_k for r in rows]),
        torch.tensor([r.top_p for r in rows], dtype=torch.float64),
        torch.tensor([r.min_p for r in rows], dtype=torch.float64),
    )
    for r, row in enumerate(rows):
        for n in range(scores.shape[1]):
            assert torch.equal(kept[r, n], row.process([0], scores[r, n]))


filters = st.builds(
    Row,
    top_k=st.integers(0, 30),
    top_p=st.floats(0.01, 0.999),
    min_p=st.floats(0, 1),
)


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(st.lists(filters, min_size=1, max_size=4), st.integers(0, 2**32), st.floats(0.1, 8))
def test_filters_keep_what_transformers_keeps(rows: list[Row], seed: int, spread: float) -> None:
    draw = torch.Generator().manual_seed(seed)
    check_filter(spread * torch.randn(len(rows), 3, 25, generator=draw, dtype=torch.float64), rows)


@pytest.mark.parametrize("wrong", [Row(top_k=4), Row(top_p=0.6), Row(min_p=0.2)], ids=["top-k", "top-p", "min-p"])
def test_control_filters(wrong: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison sees a limit that is a little off."""
    off = Row(top_k=wrong.top_k and 5, top_p=wrong.top_p * 1.2, min_p=wrong.min_p * 1.5)
    scores = torch.linspace(2, -2, 25, dtype=torch.float64).expand(1, 1, 25)
    check_filter(scores, [wrong])
    monkeypatch.setattr(Row, "process", lambda self, ids, s, right=Row.process: right(off, ids, s))
    with pytest.raises(AssertionError):
        check_filter(scores, [wrong])


def test_ties_with_the_kth_score_stay() -> None:
    """As in transformers: top-k 2 of 3, 2, 2, 1 keeps three."""
    check_filter(torch.tensor([[[3.0, 2.0, 2.0, 1.0]]], dtype=torch.float64), [Row(top_k=2)])


@pytest.mark.parametrize("row", [Row(top_p=1e-6), Row(min_p=1.0), Row(top_k=1)])
def test_at_least_one_token_stays(row: Row) -> None:
    scores = torch.full((1, 1, 9), 0.5)
    kept = keep_likely(scores, torch.tensor([row.top_k]), torch.tensor([row.top_p]), torch.tensor([row.min_p]))
    assert torch.isfinite(kept).any() and not torch.isnan(kept.softmax(-1)).any()


def test_a_row_without_filters_keeps_every_token_beside_a_filtered_one() -> None:
    """top_p 1 is off. Rounding of the running sum must not drop the tail because a neighbour asks for top-k."""
    scores = torch.linspace(0, -60, 5000).expand(2, 1, -1)
    kept = keep_likely(scores, torch.tensor([0, 5]), torch.tensor([1.0, 1.0]), torch.tensor([0.0, 0.0]))
    assert torch.equal(kept[0], scores[0])


# --- greedy rows ------------------------------------------------------------------------------------


def check_greedy(rows: list[Row]) -> None:
    logits = torch.randn(2, 5, VOCAB, generator=torch.Generator().manual_seed(0))
    tree = chain(torch.tensor([1, 1]), torch.ones(2, 4, dtype=torch.long))
    picks = choose(logits, tree, tree.depth, batch(rows))
    assert torch.equal(picks[0], logits[0].argmax(-1)), "the greedy row moved"


@pytest.mark.parametrize("other", [Row(), Row(top_k=2, top_p=0.5, min_p=0.1)])
def test_noise_does_not_touch_a_greedy_row(other: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [Row(temperature=0.0), other]
    check_greedy(rows)
    monkeypatch.setattr(module, "gumbel", lambda s, c, p, vocab: -1e4 * torch.arange(vocab).expand(*p.shape, vocab))
    check_greedy(rows)
    with pytest.raises(AssertionError, match="moved"):  # control: a row that is not greedy
        check_greedy([Row(), other])


# --- the law of the draws ---------------------------------------------------------------------------

LAW = torch.tensor([1.0, 0.6, 0.1, -0.3, -1.2, -2.0])


def draws(row: Row, seeds: int = 300, positions: int = 100) -> Tensor:
    """[seeds, positions] tokens drawn from the same logits everywhere."""
    tree = chain(torch.zeros(seeds, dtype=torch.long), torch.zeros(seeds, positions - 1, dtype=torch.long))
    rows = [Row(row.temperature, row.top_k, row.top_p, row.min_p, seed=seed) for seed in range(seeds)]
    return choose(LAW.expand(seeds, positions, -1), tree, tree.depth, batch(rows, len(LAW)))


def check_law(tokens: Tensor, row: Row) -> None:
    """Chi-square of pairs of neighbouring draws against the product law: wrong marginals and dependence both fail."""
    p = row.process([0], LAW.double()).softmax(-1).numpy()
    pairs = np.zeros((len(p), len(p)))
    np.add.at(pairs, (tokens[:, 0::2].flatten().numpy(), tokens[:, 1::2].flatten().numpy()), 1)
    wanted = np.outer(p, p) * pairs.sum()
    assert not pairs[wanted == 0].any(), "a dropped token was drawn"
    big = wanted >= 5
    rare = [a[~big].sum() for a in (pairs, wanted)]
    seen, law = ([*a[big], r] if rare[1] > 5 else a[big] for a, r in zip((pairs, wanted), rare, strict=True))
    law = np.asarray(law) * (np.sum(seen) / np.sum(law))
    assert len(law) == 1 or stats.chisquare(seen, law).pvalue > 1e-3


LIMITS = [{}, {"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.2}, {"top_k": 4, "top_p": 0.9}]


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.5])
@pytest.mark.parametrize("limits", LIMITS)
def test_draws_follow_the_processed_softmax(temperature: float, limits: dict[str, float]) -> None:
    row = Row(temperature=temperature, **limits)  # type: ignore[arg-type]
    check_law(draws(row), row)


def test_control_noise_shared_between_two_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Right marginals, but neighbours repeat each other."""
    monkeypatch.setattr(module, "gumbel", lambda s, c, position, vocab: gumbel(s, c, (position - 1) // 2, vocab))
    with pytest.raises(AssertionError):
        check_law(draws(Row()), Row())


def test_control_temperature_a_little_off() -> None:
    with pytest.raises(AssertionError):
        check_law(draws(Row(temperature=1.1)), Row())


def test_control_ratio_rule_on_deterministic_drafts() -> None:
    """min(1, p/q) with the drafter's argmax as draft is biased (ddtree.md 5.2, 35): the test must see it."""
    p, q = LAW.double().softmax(-1), (1.3 * LAW.double()).softmax(-1)
    draft, draw = int(q.argmax()), torch.Generator().manual_seed(0)
    accept = torch.rand(300, 100, generator=draw) < min(1.0, float(p[draft] / q[draft]))
    rest = (p - q).clamp(min=0)
    other = torch.multinomial(rest, 30_000, replacement=True, generator=draw).view(300, 100)
    with pytest.raises(AssertionError):
        check_law(torch.where(accept, draft, other), Row())
