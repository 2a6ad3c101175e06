"""After any number of partial accepts the caches hold exactly what a fresh prefill of the committed text would hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from draftproof.engine.engine import Engine
from draftproof.engine.replay import features_of
from draftproof.models.cache import Slots
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.target import Target, causal_plan
from tests import tiny
from tests.engine.decoding import PROMPTS, Steered, commits_one_more, knowing, requests

ROUNDS = 50
PLAIN = {"llama": "full layers", "gemma3": "sliding layers"}


def next_of_cache(engine: Engine, target: Target, anchor: int, length: int) -> Tensor:
    """Logits after the anchor on the engine's own cache; nothing is committed."""
    plan = causal_plan(engine.cache, slice(0, 1), 1, length + 1)
    return target.forward(torch.tensor([[anchor]]), plan).logits[0, -1]


def fresh_drafts(target: Target, text: list[int], seed: int) -> Tensor:
    """Drafts of a new drafter whose context is a fresh pass over the text without its anchor."""
    drafter, committed = tiny.drafter(target, seed=seed), len(text) - 1
    drafter.allocate(slots=1, capacity=len(text) + 8, chunk=len(text))
    features = features_of(target, text[:-1], drafter.taps)
    drafter.extend(slice(0, 1), features[None], torch.tensor([committed]), committed)
    return drafter.draft(slice(0, 1), torch.tensor(text[-1:]), len(text) + 4, width=tiny.VOCAB).logp[0]


def rounds(
    kind: str, plant: Callable[[Engine, DFlashDrafter], None], every: int = 1, tokens: int = 40
) -> Iterator[tuple[int, float, float]]:
    """Per round: drafts accepted and, at every `every`th length of the text, the errors of the target's next logits
    and of the drafter's next drafts."""
    target = tiny.target(kind)
    asked = requests(PROMPTS[:1], max_tokens=tokens, temperature=1.0, seed=4)
    real, context = tiny.drafter(target, seed=9), 160
    engine = Engine(target, Steered(real, knowing(target, asked, 0.3)), slots=1, context=context)
    text = list(asked[0].prompt_ids)
    for result in engine.generate(asked):
        text += result.tokens
        if result.prefill:
            plant(engine, real)
            continue
        if len(text) % every:
            yield result.accepted, 0.0, 0.0
            continue
        with torch.no_grad():
            truth = tiny.plain_model(kind)(torch.tensor([text])).logits[0, -1]
        logits = next_of_cache(engine, target, text[-1], len(text) - 1)
        drafts = real.draft(slice(0, 1), torch.tensor(text[-1:]), len(text) + 4, width=tiny.VOCAB).logp[0]
        yield (
            result.accepted,
            float((logits - truth).abs().max()),
            float((drafts - fresh_drafts(target, text, 9)).abs().max()),
        )


def nothing(_engine: Engine, _drafter: DFlashDrafter) -> None: ...


@pytest.mark.parametrize("kind", PLAIN)
def test_fifty_rounds_equal_a_fresh_prefill(kind: str) -> None:
    seen = list(zip(range(ROUNDS), rounds(kind, nothing, every=5, tokens=150), strict=False))
    assert len(seen) == ROUNDS
    assert {accepted for _, (accepted, _, _) in seen} >= {0, 1, 2, 3}
    assert max(target for _, (_, target, _) in seen) < 1e-9
    assert max(drafter for _, (_, _, drafter) in seen) < 1e-5  # logp is float32


def test_control_one_row_too_many_in_the_target_cache() -> None:
    errors = [
        error for _, (_, error, _) in zip(range(5), rounds("llama", lambda e, _: commits_one_more(e)), strict=False)
    ]
    assert max(errors) > 1e-3


def test_control_anchor_in_the_drafter_context() -> None:
    """Context one row too long: the drafter keeps the row of a draft that was not accepted."""

    def plant(_engine: Engine, drafter: DFlashDrafter) -> None:
        honest = drafter.extend

        def extend(slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
            honest(slots, features, (counts + 1).clamp(max=features.shape[1]), reach)

        drafter.extend = extend  # type: ignore[method-assign]

    errors = [error for _, (_, _, error) in zip(range(5), rounds("llama", plant), strict=False)]
    assert max(errors) > 1e-2


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_every_token_is_a_draft_or_a_step_of_its_own(wrong: float) -> None:
    """emitted == accepted + steps, but for a last step that the limit cut."""
    target, asked = tiny.target(), requests(max_tokens=33)
    engine = Engine(target, knowing(target, asked, wrong), slots=3, context=64)
    emitted, accepted, steps = [0] * 3, [0] * 3, [0] * 3
    for r in engine.generate(asked):
        if r.prefill:
            assert (r.accepted, len(r.tokens)) == (0, 1)
            continue
        emitted[r.index] += len(r.tokens)
        accepted[r.index] += r.accepted
        steps[r.index] += 1
        assert len(r.tokens) in ({r.accepted, r.accepted + 1} if r.finish else {r.accepted + 1})
    assert emitted == [32] * 3
    assert all(0 <= a + s - e <= 1 for a, s, e in zip(accepted, steps, emitted, strict=True))
    if wrong in (0.0, 1.0):
        assert steps == [8 if wrong == 0.0 else 32] * 3
