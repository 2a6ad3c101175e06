"""Speed at an imposed acceptance: the measured choice finds the best budget, wherever that lies."""

from __future__ import annotations

from typing import Any

import pytest

from draftproof.bench import imposed
from draftproof.spec.budget import Auto
from draftproof.spec.costs import Costs

NODES, DEPTH, CONTEXT = (0, 1, 3, 7, 15), 5, 256
FLAT = Costs(NODES, (CONTEXT,), ((1.0,) * 5,), (0.2,))
STEEP = Costs(NODES, (CONTEXT,), ((1.0, 9.0, 12.0, 16.0, 20.0),), (0.5,))
MIDDLE = Costs(NODES, (CONTEXT,), ((1.0, 1.2, 1.25, 2.5, 5.0),), (0.2,))  # three nodes are what pays


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 900)


def rates(costs: Costs) -> list[tuple[dict[str, float], float]]:
    """By profile: tokens/s of every fixed budget, and of the measured choice."""
    rows = imposed.table(costs, CONTEXT, DEPTH)
    return [
        ({k: v for k, v in r.items() if k != "auto"}, r["auto"]) for r in (row["tokens_per_second"] for row in rows)
    ]


def best(fixed: dict[str, float]) -> str:
    return max(fixed, key=lambda nodes: fixed[nodes])


def test_a_table_has_every_budget_of_every_profile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 300)
    rows = imposed.table(FLAT, CONTEXT, DEPTH)
    assert [row["profile"] for row in rows] == ["chat", "maths"]
    for row in rows:
        assert list(row["tau"]) == list(row["tokens_per_second"]) == ["0", "1", "3", "7", "15", "auto"]
        assert row["tau"]["0"] == 1.0 and row["tokens_per_second"]["0"] == pytest.approx(1.0)


def test_the_same_seed_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 100)
    one = imposed.table(MIDDLE, CONTEXT, DEPTH)
    assert imposed.table(MIDDLE, CONTEXT, DEPTH) == one
    honest = imposed.Random
    monkeypatch.setattr(imposed, "Random", lambda _: honest(2))
    assert imposed.table(MIDDLE, CONTEXT, DEPTH) != one


def test_tau_never_falls_with_the_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trees of a budget hold those of every smaller one."""
    monkeypatch.setattr(imposed, "ROUNDS", 300)
    for row in imposed.table(FLAT, CONTEXT, DEPTH):
        taus = [row["tau"][str(nodes)] for nodes in NODES]
        assert taus == sorted(taus) and 1 < taus[1] <= 2 and taus[1] < taus[-1] <= DEPTH + 1


def test_easier_text_is_followed_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 300)
    chat, maths = imposed.table(FLAT, CONTEXT, DEPTH)
    assert all(chat["tau"][str(n)] < maths["tau"][str(n)] for n in NODES[1:])


def test_with_flat_costs_the_largest_budget_wins_and_is_found() -> None:
    for fixed, auto in rates(FLAT):
        assert best(fixed) == "15" and auto >= 0.97 * fixed["15"]


def test_with_steep_costs_plain_decoding_wins_and_is_found() -> None:
    for fixed, auto in rates(STEEP):
        assert best(fixed) == "0" and auto >= 0.97 * fixed["0"]


def test_a_budget_in_between_is_found() -> None:
    for fixed, auto in rates(MIDDLE):
        assert best(fixed) in ("1", "3") and auto >= 0.97 * max(fixed.values())


def test_control_a_choice_of_always_the_largest_loses_on_steep_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 100)
    monkeypatch.setattr(Auto, "choose", lambda self, *_: self.most)
    for fixed, auto in rates(STEEP):
        assert auto < 0.5 * fixed["0"]
    for fixed, auto in rates(FLAT):
        assert auto == pytest.approx(fixed["15"])


def test_control_a_choice_without_pauses_loses_on_steep_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imposed, "ROUNDS", 100)
    monkeypatch.setattr(Auto, "_judge", lambda *_: None)
    for fixed, auto in rates(STEEP):
        assert auto < 0.9 * fixed["0"]


@pytest.mark.parametrize("profile", imposed.PROFILES, ids=lambda p: p.name)
def test_drawn_chances_are_chances(profile: Any) -> None:
    draw = imposed.Random(3)
    for _ in range(50):
        for row in profile.drawn(draw, DEPTH):
            assert len(row) == imposed.WIDTH and row == sorted(row, reverse=True)
            assert all(c >= 0 for c in row) and sum(row) <= 1 + 1e-9
