"""Noise-aware candidates: a drafter that knows the target's logits proposes just what the target will choose."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from draftproof.models.dflash import DraftDist, likeliest
from draftproof.spec import candidates as module
from draftproof.spec.accept import walk
from draftproof.spec.builders import BUILDERS, frontier, heap
from draftproof.spec.candidates import SCALE, noise_aware, noise_for
from draftproof.spec.noise import gumbel
from draftproof.spec.sampling import GREEDY_BELOW, Sampling, choose, keep_likely
from draftproof.spec.tree import Tree, chain
from tests.spec.forest import forests
from tests.spec.test_sampling import Row, batch

VOCAB, DEPTH, START = 32, 4, 10
FEW = settings(deadline=None, max_examples=40, derandomize=True, database=None)
PLAIN = Row(temperature=1.0, seed=3)
FILTERED = Row(temperature=0.7, top_k=6, top_p=0.9, min_p=0.03, seed=4)
GREEDY = Row(temperature=0.0, top_k=2, seed=5)
MIXED = [GREEDY, PLAIN, FILTERED, Row(temperature=GREEDY_BELOW / 2, seed=6)]


def logits_for(rows: int, depths: int = DEPTH, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(rows, depths, VOCAB, generator=torch.Generator().manual_seed(seed))


def anchors(rows: int) -> Tensor:
    return START + 7 * torch.arange(rows)


def noise_of(sampling: Sampling) -> Tensor:
    noise = noise_for(sampling, anchors(len(sampling.seed)), DEPTH, VOCAB)
    assert noise is not None
    return noise


def drafted(logits: Tensor, sampling: Sampling, width: int) -> DraftDist:
    return likeliest(logits, width, noise_aware(sampling, noise_of(sampling)))


# --- scores -----------------------------------------------------------------------------------------


def check_scores(rows: list[Row]) -> None:
    """The words of the rule, row by row."""
    sampling, logits = batch(rows, VOCAB), logits_for(len(rows))
    rescore = noise_aware(sampling, noise_of(sampling))
    assert rescore is not None
    scores = rescore(logits.clone(), 0)
    for r, row in enumerate(rows):
        if row.temperature <= GREEDY_BELOW:
            assert torch.equal(scores[r], logits[r]), "a greedy row moved"
            continue
        limits = torch.tensor([row.top_k]), torch.tensor([row.top_p]), torch.tensor([row.min_p])
        kept = keep_likely(logits[r : r + 1] / row.temperature, *limits)[0]
        places = START + 7 * r + 1 + torch.arange(DEPTH)
        wanted = kept + gumbel(torch.tensor([row.seed]), torch.tensor([0]), places[None], VOCAB)[0]
        assert torch.allclose(scores[r] * SCALE, wanted, rtol=1e-5, atol=1e-5), "a hot row is scored otherwise"
        assert torch.equal(scores[r].argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("rows", [MIXED, MIXED[::-1], [PLAIN], [GREEDY, FILTERED]])
def test_greedy_rows_keep_their_logits_and_hot_rows_hear_filters_and_noise(rows: list[Row]) -> None:
    check_scores(rows)


FAULTS: dict[str, tuple[str, Callable[..., Tensor] | float, str]] = {
    "all rows are hot": ("GREEDY_BELOW", -1.0, "greedy"),
    "no filters": ("keep_likely", lambda scores, *_: scores, "otherwise"),
    "filters off by one": ("keep_likely", lambda scores, k, *rest: keep_likely(scores, k + 1, *rest), "otherwise"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_control_scores(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, planted, message = FAULTS[fault]
    monkeypatch.setattr(module, name, planted)
    with pytest.raises(AssertionError, match=message):
        check_scores(MIXED)


def test_the_penalty_marks_the_committed_text_even_of_greedy_rows() -> None:
    rows = [Row(temperature=0.0, penalty=1.5, text=[3, 4]), Row(temperature=0.0)]
    sampling, logits = batch(rows, VOCAB), logits_for(2)
    rescore = noise_aware(sampling, None)
    assert rescore is not None and noise_for(sampling, anchors(2), DEPTH, VOCAB) is None
    scores = rescore(logits, 0)
    for depth in range(DEPTH):
        assert torch.equal(scores[0, depth], rows[0].process([3, 4], logits[0, depth]))
    assert torch.equal(scores[1], logits[1]) and not torch.equal(scores[0], logits[0])


def test_nothing_is_rescored_when_nobody_samples_or_penalises() -> None:
    assert noise_aware(batch([GREEDY, GREEDY], VOCAB), None) is None


@pytest.mark.parametrize("first", [0, 1, 3])
def test_depths_that_are_drafted_one_by_one_meet_their_own_noise(first: int) -> None:
    sampling, logits = batch(MIXED, VOCAB), logits_for(len(MIXED))
    rescore = noise_aware(sampling, noise_of(sampling))
    whole = likeliest(logits, 5, rescore)
    alone = likeliest(logits[:, first : first + 1], 5, rescore, first)
    assert torch.equal(alone.ids[:, 0], whole.ids[:, first])
    assert torch.equal(alone.logp[:, 0], whole.logp[:, first])
    if first:  # control: the noise of another depth
        assert not torch.equal(likeliest(logits[:, first : first + 1], 5, rescore).ids, alone.ids)


# --- a drafter that knows the target ----------------------------------------------------------------


def check_total_acceptance(logits: Tensor, sampling: Sampling, dist: DraftDist) -> None:
    """logits [R, DEPTH + 1, V] are the target's, whatever came before: every first candidate is the target's pick."""
    line = chain(torch.zeros(len(logits), dtype=torch.long), dist.ids[:, :, 0], dist.logp[:, :, 0])
    picks = choose(logits, line, anchors(len(logits))[:, None] + line.depth, sampling)
    taken = walk(line, picks, torch.empty(0, dtype=torch.long), torch.full((len(logits),), 99))
    assert taken.drafts.tolist() == [DEPTH] * len(logits)


LIMITS = st.builds(
    Row,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 1.5]),
    top_k=st.sampled_from([0, 1, 3, VOCAB + 5]),
    top_p=st.sampled_from([1.0, 0.93, 0.4]),
    min_p=st.sampled_from([0.0, 0.06, 0.5]),
    seed=st.integers(-(2**63), 2**63 - 1),
)


@FEW
@given(st.lists(LIMITS, min_size=1, max_size=4), st.integers(0, 2**32), st.sampled_from([1, 4]))
def test_the_targets_own_logits_are_accepted_in_full(rows: list[Row], seed: int, width: int) -> None:
    sampling, logits = batch(rows, VOCAB), logits_for(len(rows), DEPTH + 1, seed)
    rescore = noise_aware(sampling, noise_for(sampling, anchors(len(rows)), DEPTH, VOCAB))
    check_total_acceptance(logits, sampling, likeliest(logits[:, :DEPTH], width, rescore))


@pytest.mark.parametrize("fault", ["plain ranking", "noise one position late", "temperature forgotten"])
def test_control_acceptance(fault: str) -> None:
    rows = [Row(temperature=1.5, seed=seed) for seed in range(4)]
    sampling, logits = batch(rows, VOCAB), logits_for(4, DEPTH + 1)
    known, noise = sampling, noise_of(sampling)
    check_total_acceptance(logits, sampling, drafted(logits[:, :DEPTH], sampling, 4))
    if fault == "noise one position late":
        noise = noise.roll(1, 1)
    elif fault == "temperature forgotten":
        known = batch([Row(temperature=0.5, seed=seed) for seed in range(4)], VOCAB)
    rescore = None if fault == "plain ranking" else noise_aware(known, noise)
    with pytest.raises(AssertionError):
        check_total_acceptance(logits, sampling, likeliest(logits[:, :DEPTH], 4, rescore))


# --- the noise itself -------------------------------------------------------------------------------


def check_same_draws(tree: Tree, rows: list[Row], shift: int = 0) -> None:
    count = len(tree.token)
    sampling, logits = batch(rows[:count], VOCAB), logits_for(count, tree.nodes, spread=1.0)
    positions = anchors(count)[:, None] + tree.depth
    noise = noise_for(sampling, positions[:, 0] + shift, tree.levels + 2, VOCAB)
    assert noise is not None and noise.shape == (count, tree.levels + 3, VOCAB)
    assert torch.equal(choose(logits, tree, positions, sampling, noise), choose(logits, tree, positions, sampling))


HOT = [Row(temperature=1.5, seed=1), FILTERED, PLAIN]


@FEW
@given(forests(max_nodes=8))
def test_noise_made_before_the_drafts_is_the_noise_of_the_choice_in_trees(tree: Tree) -> None:
    check_same_draws(tree, HOT)


@pytest.mark.parametrize("drafts", [0, 1, 5])
def test_noise_made_before_the_drafts_is_the_noise_of_the_choice_in_chains(drafts: int) -> None:
    line = chain(torch.tensor([1, 2, 3]), torch.ones(3, drafts, dtype=torch.long))
    check_same_draws(line, HOT)
    for shift in (-1, 1):  # control: one depth off
        with pytest.raises(AssertionError):
            check_same_draws(line, HOT, shift)


# --- likeliest and the filters ----------------------------------------------------------------------


@pytest.mark.parametrize("width", [1, 2, 7, VOCAB])
def test_likeliest_is_the_head_of_the_softmax_over_the_whole_vocabulary(width: int) -> None:
    logits = logits_for(2).bfloat16()
    dist = likeliest(logits, width)
    law = logits.float().log_softmax(-1)
    assert dist.ids.shape == (2, DEPTH, width) and dist.logp.dtype == torch.float32
    assert torch.allclose(dist.logp, law.gather(-1, dist.ids), atol=1e-6)
    assert torch.allclose(dist.logp, law.sort(-1, descending=True).values[..., :width], atol=1e-6)
    total = dist.logp.exp().sum(-1)
    assert torch.allclose(total, torch.ones_like(total)) == (width == VOCAB)  # control: a cut softmax sums to 1


def check_removed(sampling: Sampling, logits: Tensor, dist: DraftDist) -> None:
    """No token that the filters remove has a chance or a node; all that stay have one."""
    kept = keep_likely(
        logits / sampling.temperature[:, None, None], sampling.top_k, sampling.top_p, sampling.min_p
    ).isfinite()
    real = dist.logp > -torch.inf
    assert torch.equal(real, kept.gather(-1, dist.ids)), "a removed token has a chance"
    assert torch.equal(real.sum(-1), kept.sum(-1).clamp(max=dist.ids.shape[-1]))
    for kind in BUILDERS.values():
        for form in (heap, frontier):
            tree = form(kind, torch.zeros(len(logits), dtype=torch.long), dist, 24, DEPTH)
            for row in range(len(logits)):
                for node in range(1, int(tree.n[row])):
                    assert kept[row, int(tree.depth[row, node]) - 1, int(tree.token[row, node])], "a removed node"


TIGHT = [Row(temperature=0.8, top_k=3, seed=1), Row(temperature=1.2, top_p=0.5, seed=2), Row(min_p=0.3, seed=3)]


@pytest.mark.parametrize("width", [1, 3, 12])
def test_tokens_that_the_filters_remove_are_never_proposed(width: int) -> None:
    sampling, logits = batch(TIGHT, VOCAB), logits_for(len(TIGHT))
    check_removed(sampling, logits, drafted(logits, sampling, width))


def test_control_candidates_that_know_no_filters() -> None:
    sampling, logits = batch(TIGHT, VOCAB), logits_for(len(TIGHT))
    sampling.filtered = False
    with pytest.raises(AssertionError, match="has a chance"):
        check_removed(sampling, logits, drafted(logits, sampling, 12))
