"""Chi-square of the engine's sampled text against the exact probabilities of a plain forward, drafter on.

The drafter proposes the target's most likely token, so that many drafts are accepted: a rule that accepts the
likely too often is then far off. Seeds are fixed, so the outcome is.
"""

from __future__ import annotations

import tempfile
from functools import cache
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

from draftproof.engine import step as step_module
from draftproof.engine.engine import Engine
from draftproof.engine.inflight import InFlight
from draftproof.engine.request import Request, SamplingParams
from draftproof.models.cache import Slots
from draftproof.models.dflash import DraftDist
from draftproof.models.target import Target
from draftproof.spec.sampling import Sampling, choose
from draftproof.spec.tree import Tree
from tests import tiny

VOCAB, DRAWS, PROMPT = 12, 4000, [5, 9, 3]
SETTINGS: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 0.7, top-k 7, top-p 0.95, min-p 0.01": {"temperature": 0.7, "top_k": 7, "top_p": 0.95, "min_p": 0.01},
    "T 1.5, penalty 1.3": {"temperature": 1.5, "repetition_penalty": 1.3},
}


@cache
def small_target() -> tuple[Target, Any]:
    """Two layers, 12 tokens, a flat enough distribution: our target and the plain transformers model."""
    import transformers as hf

    config = tiny.target_config("llama")
    config.num_hidden_layers, config.vocab_size, config.initializer_range = 2, VOCAB, 0.15
    torch.manual_seed(5)
    folder = tempfile.mkdtemp(prefix="draftproof-tiny-")
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    plain = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    return Target.load(folder, dtype=torch.float64), plain.eval()


def probabilities(ids: list[list[int]], settings: dict[str, Any]) -> Tensor:
    """Exact next-token distribution behind each of `ids` by transformers' own forward and processors."""
    from transformers import generation as g

    tokens = torch.tensor(ids)
    with torch.no_grad():
        scores = small_target()[1](tokens).logits[:, -1]
    steps: list[Any] = []
    if "repetition_penalty" in settings:
        steps.append(g.RepetitionPenaltyLogitsProcessor(settings["repetition_penalty"]))
    steps.append(g.TemperatureLogitsWarper(settings["temperature"]))
    if "top_k" in settings:
        steps += [g.TopKLogitsWarper(settings["top_k"]), g.TopPLogitsWarper(settings["top_p"])]
        steps.append(g.MinPLogitsWarper(settings["min_p"]))
    for process in steps:
        scores = process(tokens, scores)
    return scores.softmax(-1)


def joint(settings: dict[str, Any]) -> Tensor:
    """Exact probabilities of the first two tokens [V, V]."""
    first = probabilities([PROMPT], settings)[0]
    second = probabilities([[*PROMPT, t] for t in range(VOCAB)], settings)
    return first[:, None] * second


class Likeliest:
    """Drafts the most likely token behind the anchor (a second one too, which is right by chance)."""

    def __init__(self) -> None:
        self.taps, self.depth, self.cache = (0,), 2, None
        plain = {"temperature": 1.0}
        self.best = probabilities([[*PROMPT, t] for t in range(VOCAB)], plain).argmax(-1)

    def allocate(self, **sizes: int) -> None: ...
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None: ...
    def drop(self, slots: Slots) -> None: ...

    @property
    def stores(self) -> tuple[()]:
        return ()

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        first = self.best[anchors]
        return DraftDist(torch.stack([first, self.best[first]], 1)[..., None], torch.zeros(len(anchors), 2, 1))


class ForkingEngine(Engine):
    """Every request has the same prompt: the first one's rows are copied to the other slots."""

    def run_prompt(self, one: InFlight, most: int) -> Tensor | None:
        if one.slot == 0:
            self.first = super().run_prompt(one, most)
            for store in (*self.cache.keys.values(), *self.cache.values.values()):
                store[1:] = store[:1]
            self.cache.lengths[1:] = self.cache.lengths[0]
        one.rows = one.goal
        return self.first


def draws(settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Counts of the first two tokens [V, V] over DRAWS seeds, and the share of accepted first drafts."""
    counts, accepted = torch.zeros(VOCAB, VOCAB), 0
    engine = ForkingEngine(small_target()[0], Likeliest(), slots=DRAWS, context=8)
    firsts = [0] * DRAWS
    asked = [Request(PROMPT, 3, SamplingParams(seed=s, **settings)) for s in range(DRAWS)]
    counted: set[int] = set()
    for result in engine.generate(asked):
        if result.prefill:
            firsts[result.index] = result.tokens[0]
        elif result.index not in counted:
            counted.add(result.index)
            counts[firsts[result.index], result.tokens[0]] += 1
            accepted += result.accepted
    return counts, accepted / DRAWS


def p_value(counts: Tensor, exact: Tensor) -> float:
    """Cells expected below 5 are pooled; a draw that cannot occur is a failure at once."""
    expected, seen = exact.flatten() * counts.sum(), counts.flatten().double()
    if bool((seen[expected == 0] > 0).any()):
        return 0.0
    rare = expected < 5
    pooled_seen = torch.cat([seen[~rare], seen[rare].sum()[None]])
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]])
    keep = pooled > 0
    return float(chisquare(pooled_seen[keep].numpy(), pooled[keep].numpy()).pvalue)


@pytest.mark.parametrize("name", SETTINGS)
def test_sampled_text_has_the_exact_distribution(name: str) -> None:
    counts, accepted = draws(SETTINGS[name])
    assert p_value(counts, joint(SETTINGS[name])) > 1e-3
    assert accepted > 0.15  # drafts did decide part of the text


def test_control_wrong_settings_are_seen() -> None:
    counts, _ = draws(SETTINGS["T 1"])
    assert p_value(counts, joint({"temperature": 0.8})) < 1e-3


def test_control_sampling_the_bonus_alone_is_biased(monkeypatch: pytest.MonkeyPatch) -> None:
    """A draft that is the argmax is accepted without a draw, only the token behind it is sampled."""

    def bonus_only(logits: Tensor, tree: Tree, positions: Tensor, sampling: Sampling, noise: Any) -> Tensor:
        picks, best = choose(logits, tree, positions, sampling), logits.argmax(-1)
        agreed = tree.token[:, 1:] == best[:, :-1]
        return torch.cat([torch.where(agreed, best[:, :-1], picks[:, :-1]), picks[:, -1:]], dim=1)

    monkeypatch.setattr(step_module, "choose", bonus_only)
    counts, _ = draws(SETTINGS["T 1"])
    assert p_value(counts, joint(SETTINGS["T 1"])) < 1e-9
