"""Promises of a drafter against what the target did."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftproof.spec.budget import MOST_NODES, Auto
from draftproof.spec.costs import Costs
from draftproof.spec.expected import MEMORY, PRIOR, Calibration, Nodes
from tests.spec.forest import nodes_of

FEW = settings(deadline=None, max_examples=60, derandomize=True, database=None)
#   root -> 1 -> 2, 5;  root -> 3 -> 4
FORK = nodes_of([-1, 0, 1, 0, 3, 1], [1, 0.5, 0.8, 0.25, 0.4, 0.1])


def test_nodes_know_chances_and_the_spine() -> None:
    assert FORK.parent == [-1, 0, 1, 0, 3, 1] and FORK.depth == [0, 1, 2, 1, 2, 2]
    assert FORK.chance == pytest.approx([1, 0.5, 0.8, 0.25, 0.4, 0.1])
    assert FORK.spine == [True, True, True, False, False, False]
    assert [FORK.key(node) for node in range(6)] == [0, 1, 2, -1, -1, -1]
    alone = Nodes.of([7, 0], [-1, -2], [0, 0], [0.0, -math.inf], 1)
    assert alone.gains(Calibration()) == [0.0]


def check_gains(tree: Nodes, calibration: Calibration) -> None:
    reach = [math.prod(tree.chance[n] for n in path(tree, node)) for node in range(1, len(tree.parent))]
    assert tree.gains(calibration) == pytest.approx(np.cumsum([0.0, *reach]).tolist())


def path(tree: Nodes, node: int) -> list[int]:
    return [] if node < 0 else [*path(tree, tree.parent[node]), node]


def test_gains_are_the_sums_of_path_probabilities() -> None:
    check_gains(FORK, Calibration())
    assert FORK.gains(Calibration()) == pytest.approx([0, 0.5, 0.9, 1.15, 1.25, 1.30])
    with pytest.raises(AssertionError):  # control: a calibration that is not 1
        check_gains(FORK, Calibration({1: 0.0}, {1: 9.0}))


def test_gains_are_corrected_by_the_parents_depth_and_no_chance_exceeds_one() -> None:
    calibration = Calibration({0: 0.0, -1: 100.0}, {0: PRIOR, -1: 0.0})  # halved behind the root, times 13.5 off it
    assert FORK.gains(calibration) == pytest.approx(np.cumsum([0, 0.25, 0.2, 0.125, 0.125, 0.025]).tolist())


def taught(tree: Nodes, calibration: Calibration, paths: Sequence[list[int]], nodes: int = MOST_NODES) -> Calibration:
    for taken in paths:
        tree.learn(calibration, taken, nodes)
    return calibration


def test_the_factor_moves_from_the_promise_to_what_was_seen() -> None:
    calibration, seen = Calibration(), [1.0]
    for i in range(3000):
        calibration.learn(2, 0.8, i % 5 < 2)  # 40 %
        seen.append(calibration.factor(2))
    assert seen[-1] == pytest.approx(0.5, abs=0.02) and abs(seen[20] - 1) < abs(seen[200] - 1)
    assert calibration.promised[2] == pytest.approx(0.8 * MEMORY, rel=1e-2)  # old branches are forgotten
    assert calibration.factor(3) == 1.0
    for _ in range(2000):
        calibration.learn(2, 0.8, True)
    assert calibration.factor(2) == pytest.approx(1.25, abs=0.02)


def test_expected_gains_come_near_the_truth_of_an_overconfident_drafter() -> None:
    """Promised 0.8 a depth, followed 0.4: from 0.8 + 0.64 + 0.51 to 0.4 + 0.16 + 0.064."""
    line, draw, calibration = nodes_of([-1, 0, 1, 2], [1, 0.8, 0.8, 0.8]), random.Random(0), Calibration()
    truth = np.cumsum([0, 0.4, 0.16, 0.064]).tolist()
    assert line.gains(calibration)[-1] == pytest.approx(1.952)
    for _ in range(1500):
        length = next((i for i in range(3) if draw.random() >= 0.4), 3)
        line.learn(calibration, list(range(length + 1)), 4)
    assert line.gains(calibration) == pytest.approx(truth, abs=0.08)
    blind = Calibration()  # control: what was never taught stays far off
    assert line.gains(blind) != pytest.approx(truth, abs=0.08)


def test_only_parents_that_the_walk_reached_count() -> None:
    rejected = taught(FORK, Calibration(), [[0]])
    assert rejected.as_dict() == {"0": [0.0, pytest.approx(0.75)]}
    spine = taught(FORK, Calibration(), [[0, 1, 2]])  # node 2 has no children in the tree: nothing to learn there
    assert spine.as_dict() == {"0": [1.0, pytest.approx(0.75)], "1": [1.0, pytest.approx(0.9)]}


def test_parents_off_the_spine_count_together() -> None:
    aside = taught(FORK, Calibration(), [[0, 3]])
    assert aside.as_dict() == {"0": [1.0, pytest.approx(0.75)], "-1": [0.0, pytest.approx(0.4)]}
    assert taught(FORK, aside, [[0, 3, 4]]).followed[-1] == pytest.approx(1.0)


def test_only_nodes_that_were_verified_count() -> None:
    """Of 4 nodes, root included, node 4 and 5 were never sent."""
    assert taught(FORK, Calibration(), [[0, 3]], 4).as_dict() == {"0": [1.0, pytest.approx(0.75)]}
    short = taught(FORK, Calibration(), [[0, 1]], 2)
    assert short.as_dict() == {"0": [1.0, pytest.approx(0.5)]}
    auto = Auto(Costs((0, 1), (1,), ((1.0, 1.0),), (0.1,)))
    auto.learn([(FORK, "prose")], [[0, 1]], nodes=1)  # the root is not counted here
    assert auto.calibrations["prose"] == short


@FEW
@given(st.lists(st.sampled_from([[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4], [0, 1, 5]]), max_size=20))
def test_a_calibration_survives_json(paths: list[list[int]]) -> None:
    calibration = taught(FORK, Calibration(), paths)
    again = Calibration.from_dict(json.loads(json.dumps(calibration.as_dict())))
    assert again == calibration and FORK.gains(again) == FORK.gains(calibration)
