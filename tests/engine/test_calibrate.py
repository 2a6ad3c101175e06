"""The measured budget's memories on disk, and the measured choice in the loop: it may cost time, never a token."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.engine import calibrate
from draftproof.engine.backlog import Backlog
from draftproof.engine.calibrate import auto_for, budgets, contexts_for, cost_key, costs_for, measure, remember, table
from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.replay import features_of
from draftproof.engine.request import Request, StepResult
from draftproof.errors import UserError
from draftproof.models.target import Target
from draftproof.spec.budget import FIRST_PAUSE, LONGEST_PAUSE, Auto
from draftproof.spec.builders import BUILDERS
from draftproof.spec.costs import Costs
from tests import tiny
from tests.engine.decoding import PROMPTS, Steered, requests

HOW = Speculation("auto")
LIMITS = (40, 10, 60)  # tokens of the three requests
SETTINGS: dict[str, dict[str, Any]] = {"greedy": {}, "sampled": {"temperature": 1.0, "seed": 4}}
MADE_UP = {"seconds": {"0": 1.0, "1": 1.25, "3": 1.5, "15": 2.0}, "draft": 0.5}


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty cache folder; measuring is short."""
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The contexts that were measured, with made-up results."""
    contexts: list[int] = []

    def measure(*_: Any, context: int, **__: Any) -> dict[str, Any]:
        contexts.append(context)
        return MADE_UP

    monkeypatch.setattr(calibrate, "measure", measure)
    return contexts


def costs(target: Target | None = None, how: Speculation = HOW, **changes: Any) -> Costs:
    target = target or tiny.target()
    asked: dict[str, Any] = {"context": 100, "sampled": False} | changes
    return costs_for(target, tiny.drafter(target), how, **asked)


# --- costs on disk --------------------------------------------------------------------------------------


def test_costs_are_measured_once(measured: list[int], own_cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = costs()
    assert "measuring" in capsys.readouterr().err
    assert costs() == first and measured == [256]
    assert "measuring" not in capsys.readouterr().err  # only what takes time is told
    assert len(list((own_cache / "costs").glob("*.json"))) == 1
    assert first == Costs((0, 1, 3, 15), (256,), ((1.0, 1.25, 1.5, 2.0),), (0.5,))


def test_a_longer_context_measures_what_is_missing(
    measured: list[int], own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibrate, "GRID", (128, 256, 1024))
    costs()
    assert costs(context=512).contexts == (128, 256) and measured == [128, 256]
    assert costs().contexts == (128,) and costs(context=512).contexts == (128, 256)
    assert measured == [128, 256] and len(list((own_cache / "costs").glob("*.json"))) == 1


def test_again_measures_again(measured: list[int]) -> None:
    costs()
    assert costs(again=True) == costs() and measured == [256, 256]


@pytest.mark.parametrize(
    "other",
    [
        {"target": tiny.target("llama", torch.float32)},
        {"target": tiny.target("qwen3")},
        {"slots": 2},
        {"sampled": True},
        {"how": Speculation("auto", BUILDERS["siblings"])},
        {"how": Speculation("auto", noise_aware=False)},
    ],
    ids=["dtype", "target", "slots", "sampled", "builder", "noise_aware"],
)
def test_another_key_measures_again(other: dict[str, Any], measured: list[int], own_cache: Path) -> None:
    costs()
    costs(**other)
    costs(**other)
    assert measured == [256, 256] and len(list((own_cache / "costs").glob("*.json"))) == 2


def test_another_seed_of_the_same_shapes_is_the_same_key() -> None:
    target = tiny.target()
    one, two = (cost_key(target, tiny.drafter(target, seed=s), HOW, sampled=False, slots=1) for s in (1, 2))
    other = cost_key(target, tiny.drafter(target, block_size=6), HOW, sampled=False, slots=1)
    assert one == two != other


DAMAGE: dict[str, str | bytes] = {
    "empty": "",
    "no JSON": "{ what",
    "no text": b"\xff\xfe\x00",
    "a list": "[1, 2]",
    "a number": "3",
    "contexts null": '{"contexts": null}',
    "contexts a list": '{"contexts": [1]}',
    "contexts a text": '{"contexts": "256"}',
    "context null": '{"contexts": {"256": null}}',
    "context a number": '{"contexts": {"256": 3}}',
    "context empty": '{"contexts": {"256": {}}}',
    "no draft": '{"contexts": {"256": {"seconds": {"0": 1.0, "3": 1.0}}}}',
    "seconds null": '{"contexts": {"256": {"seconds": null, "draft": 1.0}}}',
    "seconds empty": '{"contexts": {"256": {"seconds": {}, "draft": 1.0}}}',
    "seconds a text": '{"contexts": {"256": {"seconds": {"0": "1", "3": "x"}, "draft": 1.0}}}',
    "nodes a text": '{"contexts": {"256": {"seconds": {"0": 1.0, "x": 1.0}, "draft": 1.0}}}',
    "draft a text": '{"contexts": {"256": {"seconds": {"0": 1.0, "3": 1.0}, "draft": "x"}}}',
}


def damage(folder: Path, content: str | bytes) -> None:
    (file,) = folder.glob("*.json")
    file.write_bytes(content if isinstance(content, bytes) else content.encode())


@pytest.mark.parametrize("what", DAMAGE)
def test_a_damaged_costs_file_is_an_absent_one(what: str, measured: list[int], own_cache: Path) -> None:
    whole = costs()
    damage(own_cache / "costs", DAMAGE[what])
    assert costs() == whole and measured == [256, 256]
    assert costs() == whole and measured == [256, 256]  # mended for the next time


def test_a_truncated_costs_file_is_an_absent_one(measured: list[int], own_cache: Path) -> None:
    whole = costs()
    (file,) = (own_cache / "costs").glob("*.json")
    file.write_bytes(file.read_bytes()[:-9])
    assert costs() == whole and measured == [256, 256]


def test_an_unwritable_cache_is_one_message(
    measured: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError) as caught:
        costs()
    assert caught.value.code == "disk-full" and not measured
    remember(Auto(FLAT), tiny.drafter(tiny.target()), sampled=False)  # no reason to fail


# --- the table ------------------------------------------------------------------------------------------


def test_the_table_holds_budgets_that_every_context_measured() -> None:
    far = {"seconds": {"0": 2.0, "1": 2.5, "15": 9.0, "31": 12.0}, "draft": 0.75}
    made = table({1024: far, 256: MADE_UP})
    assert made == Costs((0, 1, 15), (256, 1024), ((1.0, 1.25, 2.0), (2.0, 2.5, 9.0)), (0.5, 0.75))


@pytest.mark.parametrize("limit", [40, 64, 300, 512, 2048, 8192, 131072, None])
def test_contexts_stay_a_round_below_the_models(limit: int | None) -> None:
    for context in (1, 40, 100, 128, 300, 512, 2048, 5000, 100_000, 10**7):
        sizes = contexts_for(context, limit)
        assert sizes == sorted(set(sizes)) and sizes[0] >= 1
        if limit is not None:
            assert sizes[-1] <= max(limit - calibrate.CPU_MOST, 1)
    assert contexts_for(100, limit)[0] == min(256, max((limit or 512) - calibrate.CPU_MOST, 1))


def test_contexts_follow_what_is_asked() -> None:
    assert contexts_for(100, None) == [256] and contexts_for(5000, None) == [256, 1024, 4096]
    assert contexts_for(10**7, None)[-1] == calibrate.GRID[-1]
    assert contexts_for(1024, 1024) == [256, 1024 - calibrate.CPU_MOST]


def test_budgets_are_chains_then_trees() -> None:
    assert budgets(3, 63) == [1, 2, 3, 15, 23, 31, 47, 63]
    assert budgets(15, 63) == [1, 2, 3, 4, 6, 8, 11, 15, 23, 31, 47, 63]
    assert budgets(1, 15) == [1, 15] and budgets(3, 255)[-1] == 255
    for depth in (1, 2, 5, 15, 31):
        assert depth in budgets(depth, 63) and max(budgets(depth, 63)) <= 63


@pytest.mark.parametrize(("sampled", "slots"), [(False, 1), (True, 3)])
def test_measuring_times_every_budget(sampled: bool, slots: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "_possible", lambda _target, rounds, _dear: list(rounds))
    target = tiny.target("llama", torch.float32)
    one = measure(target, tiny.drafter(target), HOW, context=256, sampled=sampled, slots=slots)
    options = budgets(3, 63 // slots)
    few = [n for n in options if slots == 1 or n in calibrate.FEW or n == options[-1]]
    assert list(map(int, one["seconds"])) == [0, *few]
    assert one["draft"] > 0 and all(s > 0 for s in one["seconds"].values())


def test_budgets_that_can_never_pay_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """And plain decoding, which is no budget, is kept."""
    spent = {0: 1.0, 1: 2.0, 3: 5.9, 15: 6.1, 23: 1.0}
    last: list[int] = []

    def act(nodes: int) -> Any:
        return lambda: last.append(nodes)

    monkeypatch.setattr(calibrate, "_clock", lambda _target, one: (one(), spent[last[-1]])[1])
    rounds = {nodes: act(nodes) for nodes in spent}
    assert calibrate._possible(tiny.target(), rounds, dear=6.0) == [0, 1, 3]


# --- what was learned, on disk --------------------------------------------------------------------------

FLAT = Costs((0, 1, 3, 8, 15), (256,), ((1.0, 1.0, 1.0, 1.0, 1.0),), (0.1,))


def learned(sampled: bool = False, drafter: Any = None) -> Auto:
    target = tiny.target()
    return auto_for(target, drafter or tiny.drafter(target), HOW, context=100, sampled=sampled)


def keep(pause: int = 64, waiting: float = 40.0, sampled: bool = False) -> Auto:
    auto = Auto(FLAT, pause=pause, waiting=waiting, place=learned(sampled).place)
    auto._calibration("T 0.0").learn(0, 0.9, True)
    auto._calibration("T 0.0").learn(-1, 0.4, False)
    auto._calibration("T 0.7, noise-aware").learn(2, 0.5, True)
    auto.usual["T 0.0"] = {1: 0.5, 3: 0.9}
    remember(auto, tiny.drafter(tiny.target()), sampled)
    return auto


@pytest.mark.usefixtures("measured")
def test_what_was_learned_comes_back() -> None:
    assert learned().calibrations == {}
    kept, back = keep(), learned()
    assert back.calibrations == kept.calibrations and len(back.calibrations) == 2
    assert (back.pause, back.waiting) == (64, 40.0)
    assert back.usual == kept.usual


@pytest.mark.usefixtures("measured")
def test_a_pause_belongs_to_its_machine_and_options_and_acceptance_to_the_drafter() -> None:
    kept = keep()
    target = tiny.target()
    other = auto_for(target, tiny.drafter(target), Speculation("auto", noise_aware=False), context=100, sampled=False)
    assert other.place != kept.place
    assert (other.pause, other.waiting) == (FIRST_PAUSE, 0.0) and other.calibrations == kept.calibrations


@pytest.mark.usefixtures("measured")
def test_what_another_process_learned_meanwhile_is_kept() -> None:
    mine = keep()
    theirs = Auto(FLAT, place="another machine", pause=128)
    theirs._calibration("T 1.0").learn(1, 0.5, True)
    remember(theirs, tiny.drafter(tiny.target()), sampled=False)
    back = learned()
    assert back.calibrations == mine.calibrations | theirs.calibrations and back.pause == mine.pause


@pytest.mark.usefixtures("measured")
def test_sampling_and_other_weights_remember_apart() -> None:
    keep()
    assert learned(sampled=True).calibrations == {}
    assert learned(drafter=tiny.drafter(tiny.target(), seed=2)).calibrations == {}
    assert learned().calibrations


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize(
    ("pause", "waiting", "back"),
    [(10**6, 10.0**6, (LONGEST_PAUSE, LONGEST_PAUSE)), (1, 5.0, (FIRST_PAUSE, 5.0)), (0, 0.0, (FIRST_PAUSE, 0))],
)
def test_pauses_from_disk_are_clamped(pause: int, waiting: float, back: tuple[int, float]) -> None:
    keep(pause, waiting)
    assert (learned().pause, learned().waiting) == back


UNLEARNED: dict[str, str | bytes] = {
    **{k: DAMAGE[k] for k in ("empty", "no JSON", "no text", "a list", "a number")},
    "calibrations null": '{"calibrations": null}',
    "calibrations a list": '{"calibrations": [1]}',
    "calibration a number": '{"calibrations": {"T 0.0": 3}}',
    "depth a text": '{"calibrations": {"T 0.0": {"x": [1, 2]}}}',
    "pair of three": '{"calibrations": {"T 0.0": {"0": [1, 2, 3]}}}',
    "pair of texts": '{"calibrations": {"T 0.0": {"0": ["x", "y"]}}}',
    "pair null": '{"calibrations": {"T 0.0": {"0": null}}}',
    "pause a text": '{"calibrations": {"T 0.0": {"0": [1, 2]}}, "pauses": {"here": ["x", 1]}}',
    "pause null": '{"calibrations": {"T 0.0": {"0": [1, 2]}}, "pauses": {"here": null}}',
    "pause infinite": '{"calibrations": {"T 0.0": {"0": [1, 2]}}, "pauses": {"here": [Infinity, 1]}}',
    "waiting a list": '{"calibrations": {"T 0.0": {"0": [1, 2]}}, "pauses": {"here": [16, []]}}',
    "waiting no number": '{"calibrations": {"T 0.0": {"0": [1, 2]}}, "pauses": {"here": [16, NaN]}}',
    "usual a list": '{"usual": [1]}',
    "usual drafts null": '{"usual": {"T 0.0": {"3": null}}}',
    "usual drafts no number": '{"usual": {"T 0.0": {"3": NaN}}}',
    "followed no number": '{"calibrations": {"T 0.0": {"0": [NaN, 2]}}}',
    "promised below zero": '{"calibrations": {"T 0.0": {"0": [1, -8]}}}',
}


@pytest.mark.usefixtures("measured")
@pytest.mark.parametrize("what", UNLEARNED)
def test_a_damaged_acceptance_file_is_an_absent_one(what: str, own_cache: Path) -> None:
    keep()
    damage(own_cache / "acceptance", UNLEARNED[what])
    back = learned()
    assert (back.calibrations, back.pause, back.waiting) == ({}, FIRST_PAUSE, 0.0)
    keep()
    assert learned().calibrations


@pytest.mark.usefixtures("measured")
def test_a_truncated_acceptance_file_is_an_absent_one(own_cache: Path) -> None:
    keep()
    (file,) = (own_cache / "acceptance").glob("*.json")
    json.loads(file.read_text())
    file.write_bytes(file.read_bytes()[:-5])
    assert learned().calibrations == {}


# --- the measured choice in the loop --------------------------------------------------------------------

NEVER = Costs((0, 1, 3, 8, 15), (256,), ((1.0, 1e6, 1e6, 1e6, 1e6),), (1.0,))
UNUSED = Costs((0, 1, 3, 8, 15), (256,), ((1.0, 9.0, 9.0, 9.0, 9.0),), (0.5,))  # drafts are looked at, never verified
LOSING = Costs((0, 1, 3, 8), (256,), ((1.0, 3.8, 3.9, 4.0),), (9.0,))  # drafts are verified, and then it pauses
COSTS = {"flat": FLAT, "never": NEVER, "unused": UNUSED, "losing": LOSING}


@dataclasses.dataclass
class Drafted:
    """One row of a draft pass of the real drafter: committed rows before it, its anchor, what it said."""

    row: int
    length: int
    anchor: int
    ids: torch.Tensor
    logp: torch.Tensor


class Noted(Steered):
    """The real drafter's passes are kept; a tree that knows the text is proposed."""

    def __init__(self, *both: Any) -> None:
        super().__init__(*both)
        self.passes: list[list[Drafted]] = []

    def draft(self, slots: Any, anchors: Any, reach: int, width: int = 1, rescore: Any = None) -> Any:
        said = self.real.draft(slots, anchors, reach, width)
        lengths = self.real.cache.lengths[slots].tolist()  # type: ignore[union-attr]
        rows = zip(lengths, anchors.tolist(), said.ids.clone(), said.logp.clone(), strict=True)
        self.passes.append([Drafted(i, *row) for i, row in enumerate(rows)])
        return self.guide.draft(slots, anchors, reach, width, rescore)


def ask(name: str, rows: slice = slice(None)) -> list[Request]:
    both = zip(requests(**SETTINGS[name]), LIMITS, strict=True)
    return [dataclasses.replace(r, max_tokens=limit) for r, limit in both][rows]


def decode(
    target: Target, drafter: Any, asked: Sequence[Request], how: Speculation | None = None, auto: Auto | None = None
) -> tuple[list[list[int]], list[StepResult]]:
    texts: list[list[int]] = [[] for _ in asked]
    context = max(len(r.prompt_ids) + r.max_tokens for r in asked)
    results = list(Engine(target, drafter, slots=len(asked), context=context, how=how, auto=auto).generate(asked))
    for result in results:
        texts[result.index] += result.tokens
    return texts, [r for r in results if not r.prefill]


@cache
def plain(kind: str, name: str) -> list[list[int]]:
    return decode(tiny.target(kind), None, ask(name))[0]


def noted(kind: str, name: str, rows: slice = slice(None)) -> Noted:
    target, asked = tiny.target(kind), ask(name, rows)
    texts = [[*r.prompt_ids, *t] for r, t in zip(asked, plain(kind, name)[rows], strict=True)]
    return Noted(tiny.drafter(target, seed=9), tiny.KnowingTree(target, texts, wrong=0.5))


def told(kind: str, name: str, priced: Costs, rows: slice) -> tuple[Noted, list[StepResult], Auto]:
    """Decoded under the measured choice: the text must be plain decoding's."""
    drafter, auto = noted(kind, name, rows), Auto(priced)
    texts, results = decode(tiny.target(kind), drafter, ask(name, rows), HOW, auto)
    assert texts == plain(kind, name)[rows]
    return drafter, results, auto


ALONE, TOGETHER = slice(2, 3), slice(None)
EVERY = [
    ("llama", "greedy", ALONE), ("gemma3", "sampled", TOGETHER), ("qwen3_5", "sampled", ALONE),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "name", "rows"), EVERY)
def test_drafting_always_changes_no_token(kind: str, name: str, rows: slice) -> None:
    _, results, auto = told(kind, name, FLAT, rows)
    assert all(r.nodes for r in results) and max(r.accepted for r in results) > 1
    assert auto.pause == FIRST_PAUSE and auto.calibrations


@pytest.mark.parametrize(("kind", "name", "rows"), EVERY)
def test_never_drafting_is_plain_decoding(kind: str, name: str, rows: slice) -> None:
    drafter, results, _ = told(kind, name, NEVER, rows)
    assert {r.nodes for r in results} == {0} and {len(r.tokens) for r in results} == {1}
    assert 1 < len(drafter.passes) < 6  # asked now and then


def test_in_a_pause_the_drafter_is_not_asked() -> None:
    drafter, auto = noted("llama", "greedy", ALONE), Auto(FLAT, waiting=LONGEST_PAUSE)
    texts, results = decode(tiny.target(), drafter, ask("greedy", ALONE), HOW, auto)
    assert texts == plain("llama", "greedy")[ALONE] and not drafter.passes and {r.nodes for r in results} == {0}
    assert auto.waiting == LONGEST_PAUSE - len(results)


def worst(kind: str, name: str, rows: slice, passes: Sequence[list[Drafted]]) -> float:
    """The greatest distance of these draft passes from those of a fresh drafter that saw the whole text at once."""
    target, far = tiny.target(kind), 0.0
    texts = [[*r.prompt_ids, *t] for r, t in zip(ask(name, rows), plain(kind, name)[rows], strict=True)]
    for row in (one for rows in passes for one in rows):
        text = texts[row.row]
        if row.length + 1 >= len(text):
            continue  # it has ended
        assert text[row.length] == row.anchor
        fresh, slot, length = tiny.drafter(target, seed=9), slice(0, 1), row.length
        fresh.allocate(slots=1, capacity=len(text), chunk=len(text))
        fresh.extend(slot, features_of(target, text[:length], fresh.taps)[None], torch.tensor([length]), length)
        said = fresh.draft(slot, torch.tensor([row.anchor]), length + 64, row.ids.shape[-1])
        if not torch.equal(said.ids[0], row.ids):
            return float("inf")
        far = max(far, float((said.logp[0] - row.logp).abs().max()))
    return far


@pytest.mark.parametrize("priced", ["unused", "losing"])
@pytest.mark.parametrize(("kind", "name", "rows"), EVERY)
def test_after_a_pause_drafts_are_those_of_a_fresh_context(kind: str, name: str, priced: str, rows: slice) -> None:
    drafter, results, auto = told(kind, name, COSTS[priced], rows)
    lengths = [pass_[-1].length for pass_ in drafter.passes]
    pauses = [b - a for a, b in itertools.pairwise(lengths)]
    assert sum(p >= FIRST_PAUSE for p in pauses) >= 2 and auto.pause > FIRST_PAUSE, pauses
    verified = {r.nodes > 0 for r in results}
    assert verified == ({False} if priced == "unused" else {True, False})
    assert worst(kind, name, rows, drafter.passes) < 1e-9


def test_control_features_of_a_pause_that_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Backlog, "take_in", lambda self, slots=None: self.clear())
    drafter, name = noted("llama", "greedy", ALONE), "greedy"
    texts, _ = decode(tiny.target(), drafter, ask(name, ALONE), HOW, Auto(UNUSED))
    assert texts == plain("llama", name)[ALONE]  # a wrong context costs acceptance alone
    spoilt = [
        [dataclasses.replace(one, length=len(PROMPTS[2]) + at) for one in pass_]
        for pass_, at in zip(drafter.passes, (0, 1, 17), strict=False)
    ]
    assert spoilt[-1][0].anchor == texts[0][17]
    assert worst("llama", name, ALONE, spoilt[:1]) < 1e-9 < 1e-3 < worst("llama", name, ALONE, spoilt[-1:])


def test_a_measured_choice_goes_on_with_the_next_requests() -> None:
    """One engine, one Auto: what waits from a request that has ended never reaches the next one."""
    kind, name = "llama", "sampled"
    drafter: Any = noted(kind, name)
    auto = Auto(LOSING)
    engine = Engine(tiny.target(kind), drafter, slots=3, context=130, how=HOW, auto=auto)
    for _ in range(2):
        texts: list[list[int]] = [[], [], []]
        begun = len(drafter.passes)
        for result in engine.generate(ask(name)):
            texts[result.index] += result.tokens
        assert texts == plain(kind, name)
        assert worst(kind, name, TOGETHER, drafter.passes[begun:]) < 1e-9


@pytest.mark.parametrize("name", SETTINGS)
def test_measuring_leaves_nothing_behind(name: str) -> None:
    """With costs that really were measured, on the drafter that then decodes."""
    target, rows = tiny.target(), TOGETHER if name == "sampled" else slice(1, 2)
    drafter, asked = tiny.drafter(target), ask(name, rows)
    auto = auto_for(target, drafter, HOW, context=100, sampled=name == "sampled", slots=len(asked))
    for auto_or_none, how in ((auto, HOW), (None, Speculation("chain"))):
        texts, _ = decode(target, drafter, asked, how, auto_or_none)
        assert texts == plain("llama", name)[rows]


def test_when_no_budget_can_pay_it_decodes_plainly() -> None:
    """A table of plain decoding alone: every budget was left out when it was measured."""
    alone = table({256: {"seconds": {"0": 1.0}, "draft": 0.5}})
    _, results, _ = told("llama", "greedy", alone, ALONE)
    assert {r.nodes for r in results} == {0}
