"""The oracle on a tiny pair: what it predicts for an anchor is what the walk of the engine accepts there."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest
import torch

from draftproof.doctor.facts import Answer
from draftproof.doctor.follow import Evidence, accept_at, features_by_tap, follow, leading_drafts
from draftproof.doctor.hypotheses import Hypothesis, hypotheses
from draftproof.doctor.oracle import consult, drafts_of, judge
from draftproof.doctor.rank import HEALTHY, NONE
from draftproof.doctor.told import first_anchor, last_position, walked
from draftproof.engine.replay import Text, features_of, replay
from draftproof.errors import UserError
from draftproof.models.dflash import DFlashDrafter
from draftproof.models.target import Target
from tests import tiny
from tests.train.test_forward import trained_rows


def pair() -> DFlashDrafter:
    return tiny.drafter(tiny.target())


@cache
def texts() -> list[Text]:
    """Texts that continue with the pair's own drafts, some of three, and a foreign token between."""
    drafter, found = pair(), []
    for start in range(6):
        ids = [(start * 11 + i * (start + 3)) % 60 + 4 for i in range(5 + start * 2)]
        prompt = len(ids)
        while len(ids) < prompt + 20:
            rows = trained_rows(drafter, [*ids, 0], [len(ids) - 1])[0]
            ids += (rows[: (len(ids) + start) % 4] @ drafter.target.head.weight.T).argmax(-1).tolist()
            ids.append((ids[-1] * 7 + 11) % 60)
        found.append(Text(ids[:prompt], ids[prompt:]))
    return found


def answer(text: Text, accepted: Sequence[int] | None = None, *, totals: bool = False) -> Answer:
    steps = None if accepted is None else len(accepted)
    told = None if accepted is None or totals else tuple(accepted)
    return Answer(tuple(text.prompt_ids), tuple(text.continuation_ids), "", "length", 0.0, steps=steps, per_step=told)


def listed(drafter: DFlashDrafter) -> dict[str, Hypothesis]:
    return {h.name: h for h in hypotheses(drafter.spec, len(drafter.target.layers))}


@cache
def evidence() -> Evidence:
    drafter, answers = pair(), tuple(answer(text) for text in texts())
    taps = sorted({t for h in listed(drafter).values() for t in h.taps})
    return Evidence(answers, features_by_tap(drafter.target, answers, taps))


@cache
def planted(name: str, seed: int = 1) -> list[list[int]]:
    """Accepted drafts of every step of a faulty engine along the texts."""
    drafter = pair()
    faulty = listed(drafter)[name].make(drafter)
    if name == "drafts-sampled":
        faulty.seed = seed  # type: ignore[attr-defined]
    return [t.accepted for t in replay(drafter.target, faulty, texts()).texts]


NAMES = [h.name for h in hypotheses(pair().spec, len(pair().target.layers))]
SOME = ["taps-plus-1", "taps-reversed", "anchor-masked", "no-accepted-context", "all-causal", "no-prompt-context"]
FIXED = [name for name in NAMES if name not in ("drafts-sampled", "no-accepted-context")]


def test_the_list_holds_what_changes_this_drafter() -> None:
    assert NAMES[0] == HEALTHY and len(set(NAMES)) == len(NAMES) >= 15
    full = tiny.drafter_spec(layer_types=["full_attention"] * 3)
    names = {h.name for h in hypotheses(full, 6)}
    assert not names & {"window-ignored", "sliding-causality", "all-bidirectional", "taps-sorted", "rope-base-1e4"}
    assert {"all-causal", "taps-plus-1", "rope-base-1e6", "block-longer"} <= names
    assert "block-shorter" in {h.name for h in hypotheses(full, 6, drafts=2)}
    unsorted = tiny.drafter_spec(dflash_config={"target_layer_ids": [4, 0, 2]})
    assert "taps-sorted" in {h.name for h in hypotheses(unsorted, 6)}


@pytest.mark.parametrize("name", FIXED)
def test_numbers_of_all_anchors_walk_like_the_engine(name: str) -> None:
    drafter = pair()
    faulty = listed(drafter)[name].make(drafter)
    every = [range(first_anchor(a), last_position(a)) for a in evidence().answers]
    at = accept_at(drafter.target, faulty, evidence(), every)
    steps = [walked(seen, a) for seen, a in zip(at, evidence().answers, strict=True)]
    assert steps == planted(name)
    if name == HEALTHY:
        assert sum(sum(s or ()) for s in steps) > 20
        assert steps != planted("taps-reversed")  # control: another fault walks otherwise


def test_following_a_route_is_replay_and_depends_on_its_steps() -> None:
    drafter, known = pair(), evidence()
    for name in (HEALTHY, "no-accepted-context"):
        seen = follow(drafter.target, listed(drafter)[name].make(drafter), known, [None] * len(known.answers))
        assert [list(s.values()) for s in seen] == planted(name)
    ones = [[1] * (len(a.output_ids) - 1) for a in known.answers]
    every = [range(first_anchor(a), last_position(a)) for a in known.answers]
    sound = accept_at(drafter.target, drafter, known, every)
    assert follow(drafter.target, drafter, known, ones) == sound
    faulty = listed(drafter)["no-accepted-context"].make(drafter)
    assert follow(drafter.target, faulty, known, ones) == sound  # nothing was accepted, so nothing is missing


def test_features_of_all_taps_come_from_one_pass() -> None:
    drafter = pair()
    answers = [answer(text) for text in texts()]
    by_tap = features_by_tap(drafter.target, answers, [0, 1, 3])
    for one, text in zip(by_tap, texts(), strict=True):
        assert torch.equal(torch.cat([one[3], one[0]], dim=-1), features_of(drafter.target, text.ids, (3, 0)))


def test_the_head_on_demand_counts_as_the_whole_head() -> None:
    drafter, text = pair(), texts()[-1]
    counts = []
    for whole in (False, True):
        drafter.allocate(slots=1, capacity=len(text.ids) + 8, chunk=len(text.ids))
        features = features_of(drafter.target, text.ids, drafter.taps)
        drafter.extend(slice(0, 1), features[None], torch.tensor([len(text.prompt_ids)]), len(text.ids))
        truth = torch.tensor([text.ids[len(text.prompt_ids) :][: drafter.depth + 1]])
        counts.append(leading_drafts(drafter, slice(0, 1), truth, len(text.ids) + drafter.depth, whole))
    assert counts[0] == counts[1]


def test_a_sound_engine_is_healthy_in_both_kinds() -> None:
    drafter = pair()
    for totals in (False, True):
        answers = [answer(t, s, totals=totals) for t, s in zip(texts(), planted(HEALTHY), strict=True)]
        facts = judge(drafter.target, drafter, answers, names=SOME)
        assert facts.kind == ("totals" if totals else "steps") and facts.leaders[0] == HEALTHY
        assert facts.fits[0].name == HEALTHY and facts.fits[0].misses == 0
        assert facts.expected == pytest.approx(facts.observed) and facts.expected_steps == facts.observed_steps
        assert facts.interval and facts.interval[0] < facts.expected < facts.interval[1]


@pytest.mark.parametrize("name", SOME[:4])
def test_a_planted_fault_leads_and_health_does_not(name: str) -> None:
    drafter = pair()
    answers = [answer(t, s) for t, s in zip(texts(), planted(name), strict=True)]
    lines: list[str] = []
    facts = judge(drafter.target, drafter, answers, say=lines.append, names=SOME)
    assert name in facts.leaders and HEALTHY not in facts.leaders, facts
    assert facts.observed < facts.expected and lines
    assert next(f for f in facts.fits if f.name == name).misses == 0


def test_an_unknown_fault_is_none() -> None:
    drafter = pair()
    wrong = [[(a + 2) % drafter.depth for a in steps] for steps in planted(HEALTHY)]
    answers = []
    for text, steps in zip(texts(), wrong, strict=True):
        fitting, left = list[int](), len(text.continuation_ids) - 1
        for accepted in steps * 9:
            if left <= 0:
                break
            fitting.append(accepted)
            left -= accepted + 1
        answers.append(answer(text, fitting))
    assert judge(drafter.target, drafter, answers, names=[*SOME, "drafts-sampled"]).leaders == (NONE,)


def test_drafts_a_step_as_the_engine_tells_them() -> None:
    one = Answer((1,), (2, 3), "", None, 0.0, steps=4, drafted=28)
    assert drafts_of([one]) == 7
    assert drafts_of([Answer((1,), (2, 3), "", None, 0.0, steps=4, drafted=27)]) is None
    assert drafts_of([Answer((1,), (2, 3), "", None, 0.0)]) is None


def test_consult_loads_folders_and_keeps_to_the_names(tmp_path: Path) -> None:
    target, drafter = tiny.target_folder("llama"), tiny.drafter_folder(tmp_path / "drafter")
    given = Answer((5, 9, 20), (7, 8, 11, 19, 30, 4, 9), "", "length", 0.0, per_step=(0,) * 6)
    facts = consult(str(target), str(drafter), [given], names=["head-zero"])
    assert {fit.name for fit in facts.fits} <= {HEALTHY, "head-zero"} and facts.interval is None
    with pytest.raises(UserError) as caught:
        consult(str(target), str(drafter), [Answer((5,), (7,), "", "stop", 0.0)])
    assert caught.value.code == "bad-texts"


@pytest.mark.parametrize("module", ["oracle", "rank", "hypotheses", "follow", "faulty", "profile"])
def test_import_leaves_torch_alone(module: str) -> None:
    code = f"import sys, draftproof.doctor.{module}; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_prepacked_drafter_gets_the_same_fault() -> None:
    made = []
    for packed in (False, True):
        target = Target.load(tiny.target_folder("llama"), dtype=torch.float32)
        drafter = tiny.drafter(target)
        if packed:
            drafter.prepack()
        made.append((drafter.model, listed(drafter)["rope-interleaved"].make(drafter).model))  # type: ignore[attr-defined]
    x = torch.randn(2, 5, made[0][0].spec.hidden_size, generator=torch.Generator().manual_seed(0))
    (sound, _), *_ = made
    turned = [faulty.blocks[0].self_attn.q_proj(x) for _, faulty in made]
    assert torch.allclose(turned[0], turned[1], atol=1e-5)
    assert not torch.allclose(turned[0], sound.blocks[0].self_attn.q_proj(x), atol=1e-2), "control"
