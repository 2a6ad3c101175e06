"""`choose`: which ways there are, what the table says of hand-made times, and that all ways write one text."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench.bridge import Timed
from draftproof.bench.choose import DEFAULT, DEFAULT_MTP, Way, advice, choose, summary
from draftproof.engine import calibrate
from draftproof.engine import step as step_module
from draftproof.engine.pair import Choice, Pair
from draftproof.errors import UserError
from tests import tiny
from tests.engine.decoding import PROMPTS, one_too_many


@pytest.fixture(autouse=True)
def own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "CPU_MOST", 15)


# --- ways -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "kind", "number"),
    [
        ("none", "none", 0), ("chain", "chain", 0), ("auto", "auto", 0), ("chain:1", "chain", 1),
        ("chain:3", "chain", 3), ("ddtree:64", "ddtree", 64), ("ddtree:256", "ddtree", 256), ("mtp:2", "mtp", 2),
    ],
)  # fmt: skip
def test_a_way_is_a_kind_and_its_number(text: str, kind: str, number: int) -> None:
    assert Way.parse(text) == Way(text, kind, number)


def test_the_default_ways_can_be_parsed() -> None:
    assert [Way.parse(text).name for text in (*DEFAULT, *DEFAULT_MTP)] == [*DEFAULT, *DEFAULT_MTP]


@pytest.mark.parametrize(
    "text",
    [
        "", "999", "mtp", "ddtree", "none:3", "auto:1", "chain:", "chain:0", "ddtree:257", "ddtree:9999", "ddtree:-3",
        "ddtree: 3", "ddtree:x", "ddtree:3:4", "ddtree:\u0663", "ddtree:\u00b2", "CHAIN", " chain", ":3", "eagle:3",
    ],
)  # fmt: skip
def test_an_unknown_way_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        Way.parse(text)
    assert caught.value.code == "bad-option" and "ddtree:NODES" in caught.value.fix


# --- the table ------------------------------------------------------------------------------------------

TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13]  # nine tokens, the first of them from the prefill


def timed(*seconds: float, steps: int = 8, nodes: int = 0, ids: Any = TEXT) -> list[Timed]:
    return [Timed(list(ids), s, steps, nodes) for s in seconds]


def made(**ways: list[Timed]) -> dict[str, Any]:
    return summary(ways, 0.0)


def test_the_ratio_is_the_geometric_mean_by_prompt() -> None:
    result = made(none=timed(1.0, 2.0, 4.0), chain=timed(0.5, 2.0, 1.0, steps=4, nodes=12))
    row, over = result["ways"]["chain"], result["ways"]["chain"]["over_none"]
    assert over["mean"] == pytest.approx(2.0) and over["median"] == pytest.approx(2.0)  # of 2, 1 and 4
    half = 4.303 * math.log(2) / math.sqrt(3)
    assert over["interval"] == pytest.approx([2 * math.exp(-half), 2 * math.exp(half)])
    assert row["tokens_per_second"] == pytest.approx(27 / 3.5)
    assert (row["tau"], row["nodes"], row["other_texts"]) == (2.0, 3.0, 0)
    plain = result["ways"]["none"]
    assert plain["tau"] == 1.0 and plain["over_none"]["mean"] == 1.0 and plain["tokens_per_second"] == 27 / 7
    assert (result["fastest"], result["prompts"], result["temperature"]) == ("chain", 3, 0.0)


def test_the_median_is_not_the_mean() -> None:
    over = made(none=timed(1.0, 1.0, 1.0), chain=timed(1.0, 1.0, 0.125))["ways"]["chain"]["over_none"]
    assert over["mean"] == pytest.approx(2.0) and over["median"] == pytest.approx(1.0)


def test_other_texts_are_counted_against_the_first_way() -> None:
    odd = [*timed(1.0), *timed(1.0, ids=[5, 6]), *timed(1.0, ids=[*TEXT[:-1], 60])]
    ways = made(none=timed(1.0, 1.0, 1.0), chain=odd)["ways"]
    assert ways["chain"]["other_texts"] == 2 and ways["none"]["other_texts"] == 0


def test_a_text_of_one_token_has_no_step() -> None:
    row = made(none=timed(1.0, 1.0, steps=0, ids=[5]))["ways"]["none"]
    assert math.isnan(row["tau"]) and math.isnan(row["nodes"]) and row["tokens_per_second"] == 1.0


def test_auto_is_compared_with_the_better_of_plain_and_chain() -> None:
    result = made(none=timed(1.0, 1.0), chain=timed(2.0, 2.0), auto=timed(1.0, 1.0))
    assert result["auto"]["against"] == "none" and result["auto"]["mean"] == pytest.approx(1.0)
    assert result["auto_over_chain"]["mean"] == pytest.approx(2.0)
    result = made(none=timed(1.0, 1.0), chain=timed(0.5, 0.5), auto=timed(0.4, 0.4))
    assert result["auto"]["against"] == "chain" and result["auto"]["mean"] == pytest.approx(1.25)
    assert "auto" not in made(none=timed(1.0, 1.0), chain=timed(1.0, 1.0))
    assert "auto" not in made(auto=timed(1.0, 1.0))


def test_the_advice_names_the_fastest_way() -> None:
    said = advice(made(none=timed(1.0, 1.0, 1.0), chain=timed(0.51, 0.5, 0.49), auto=timed(0.9, 0.9, 0.9)))
    assert said.startswith("T 0: use chain: 2.00 x plain (1.") and "interval" not in said


def test_the_advice_says_when_no_way_wins() -> None:
    said = advice(made(none=timed(1.0, 1.0), chain=timed(1.1, 1.2)))
    assert "decode plainly" in said and "--method none" in said


def test_the_advice_says_when_the_numbers_cannot_tell() -> None:
    said = advice(made(none=timed(1.0, 1.0, 1.0), chain=timed(0.5, 1.1, 0.9)))
    assert "use chain" in said and "the interval holds 1" in said and "--prompts" in said


def test_the_advice_without_plain_decoding() -> None:
    result = made(chain=timed(1.0, 1.0), auto=timed(0.5, 0.5))
    assert result["ways"]["auto"]["over_none"] is None
    assert advice(result) == "T 0: auto is the fastest of these"


# --- a run ----------------------------------------------------------------------------------------------

WAYS = ("none", "chain:2", "chain", "ddtree:5", "ddtree:12", "auto")


def pair() -> Pair:
    target, given = tiny.target(), Choice("given", "by a test")
    return Pair("tiny", target, tiny.drafter(target), tiny.tokenizer(), given, given)


def run(temperature: float, ways: tuple[str, ...] = WAYS, builder: str = "spine-first") -> tuple[dict, list[str]]:
    lines: list[str] = []
    prompts = [(f"p{i}", list(ids)) for i, ids in enumerate(PROMPTS)]
    asked = [Way.parse(text) for text in ways]
    result = choose(
        pair(), asked, prompts, temperature, 10, noise_aware=True, builder=builder, report=lines.append
    )  # fmt: skip
    return result, lines


@pytest.mark.parametrize(("temperature", "builder"), [(0.0, "spine-first"), (1.0, "best-first")])
def test_all_ways_write_the_same_texts(temperature: float, builder: str) -> None:
    result, lines = run(temperature, builder=builder)
    rows = result["ways"]
    assert tuple(rows) == WAYS and {row["other_texts"] for row in rows.values()} == {0}
    assert rows["none"]["nodes"] == 0 and rows["none"]["tau"] == 1.0 and rows["chain"]["tau"] >= 1.0
    assert 0 < rows["chain:2"]["nodes"] <= 2 < rows["chain"]["nodes"] <= 3 < rows["ddtree:5"]["nodes"] <= 5
    assert all(row["tokens_per_second"] > 0 and row["over_none"]["mean"] > 0 for row in rows.values())
    assert len(lines) == 3 and all(way in line for way in WAYS for line in lines) and "p2" in lines[2]


def test_control_a_wrong_acceptance_rule_writes_other_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_module.walk
    monkeypatch.setattr(
        step_module, "walk", lambda tree, *rest: (one_too_many if tree.nodes > 1 else honest)(tree, *rest)
    )
    rows = run(0.0, ("none", "chain"))[0]["ways"]
    assert rows["none"]["other_texts"] == 0 and rows["chain"]["other_texts"] > 0


def test_a_chain_wider_than_the_drafter_drafts_is_refused() -> None:
    with pytest.raises(UserError) as caught:
        run(0.0, ("none", "chain:4"))
    assert caught.value.code == "bad-option" and "chain:4" in caught.value.message and "3" in caught.value.message
    assert tuple(run(0.0, ("none", "chain:3"))[0]["ways"]) == ("none", "chain:3")
