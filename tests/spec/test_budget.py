"""The measured budget: the option, and the choice itself."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from draftproof.errors import UserError
from draftproof.models.dflash import DraftDist
from draftproof.spec.budget import (
    FIRST_PAUSE,
    HYSTERESIS,
    LONGEST_PAUSE,
    MOST_NODES,
    PROBE,
    Auto,
    Autos,
    parse_budget,
)
from draftproof.spec.builders import SPINE_FIRST, heap
from draftproof.spec.costs import Costs
from draftproof.spec.expected import Calibration, Nodes
from tests.spec.forest import line_of, nodes_of

# --- the option -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "budget"), [("auto", "auto"), ("none", "none"), ("chain", "chain"), ("1", 1), ("64", 64), ("256", 256)]
)
def test_a_budget_is_a_word_or_a_number_of_nodes(text: str, budget: str | int) -> None:
    assert parse_budget(text) == budget


@pytest.mark.parametrize("text", ["0", "-1", str(MOST_NODES + 1), "x", "1.5", "", "Auto", "9" * 5000])
def test_other_budgets_are_refused(text: str) -> None:
    with pytest.raises(UserError) as error:
        parse_budget(text)
    assert error.value.code == "bad-option" and str(MOST_NODES) in error.value.fix


# --- the choice -------------------------------------------------------------------------------------

OPTIONS = (0, 4, 8, 16, 32)


def costs(*seconds: float, draft: float = 0.1, nodes: tuple[int, ...] = OPTIONS) -> Costs:
    return Costs(nodes, (1,), (seconds,), (draft,))


def test_flat_costs_choose_the_largest_budget() -> None:
    auto = Auto(costs(1, 1, 1, 1, 1))
    assert auto.choose([(line_of(32, 0.9), "")], 50) == 32 == auto.last and auto.drafts()
    steep = Auto(costs(1, 5, 9, 17, 33))  # control: the same tree, where every node costs
    assert steep.choose([(line_of(32, 0.9), "")], 50) == 0 == steep.last


def looks(auto: Auto, tree: Nodes, most: int = 12) -> int:
    """Rounds that draft until a pause begins: bounded, and all of them choose no drafts."""
    for look in range(1, most + 1):
        assert auto.drafts() and auto.choose([(tree, "")], 50) == 0
        if not auto.drafts():
            return look
    raise AssertionError("no pause")


def pause(auto: Auto) -> int:
    """Tokens decoded plainly until the drafter is asked again."""
    tokens = 0
    while not auto.drafts():
        auto.plain(1.0)
        tokens += 1
    return tokens


def test_linear_costs_and_low_chances_choose_none_and_pause_ever_longer() -> None:
    auto = Auto(costs(1, 5, 9, 17, 33))
    pauses = []
    for _ in range(7):
        looks(auto, line_of(32, 0.3))
        pauses.append(pause(auto))
    assert pauses == [16, 32, 64, 128, 256, 256, 256]
    assert pauses[0] == FIRST_PAUSE and pauses[-1] == LONGEST_PAUSE
    with pytest.raises(AssertionError):  # control: drafts that pay
        looks(Auto(costs(1, 1, 1, 1, 1)), line_of(32, 0.3))


def test_a_good_look_ends_the_pausing() -> None:
    auto = Auto(costs(1, 2, 3, 4, 5))
    bad, good = line_of(32, 0.1), line_of(32, 0.95)
    for _ in range(3):
        looks(auto, bad)
        pause(auto)
    assert auto.pause == 8 * FIRST_PAUSE
    assert auto.choose([(good, "")], 50) > 0
    assert auto.pause == FIRST_PAUSE and auto.drafts()
    auto.choose([(bad, "")], 50)  # one bad look behind a good one is no reason for a pause
    assert auto.drafts()
    looks(auto, bad)
    assert pause(auto) == FIRST_PAUSE


def test_the_budget_before_a_cliff_is_taken() -> None:
    assert Auto(costs(1, 1.1, 1.1, 1.1, 3)).choose([(line_of(32, 0.85), "")], 50) == 16
    assert Auto(costs(1, 1.1, 1.1, 3, 3)).choose([(line_of(32, 0.85), "")], 50) == 8
    assert Auto(costs(1, 1.1, 3, 3, 3)).choose([(line_of(32, 0.85), "")], 50) == 4


def test_a_tree_smaller_than_an_option_gains_no_more_there() -> None:
    assert Auto(costs(1, 1.1, 1.2, 1.3, 1.4)).choose([(line_of(3, 0.9), "")], 50) == 4


def test_requests_share_a_budget_and_have_their_own_calibrations() -> None:
    """Two requests with equal trees: what one kind learned leaves the other's promises alone."""
    auto = Auto(costs(1, 1.5, 2.2, 3.5, 6))
    tree = line_of(32, 0.9)
    free = auto.choose([(tree, "code"), (tree, "prose")], 50)
    auto.calibrations["prose"] = Calibration(dict.fromkeys(range(32), 0.0), dict.fromkeys(range(32), 400.0))
    gains = [tree.gains(auto.calibrations[name]) for name in ("code", "prose")]
    assert gains[0] == tree.gains(Calibration()) and gains[1][-1] < 0.1
    auto.last = 0
    assert 0 < auto.choose([(tree, "code"), (tree, "prose")], 50) < free


def test_an_option_must_promise_more_than_the_hysteresis_to_replace_the_last_one() -> None:
    """A tree of 4 nodes gains as much with 8: only the seconds differ."""
    for more, chosen in ((0.9 * HYSTERESIS, 8), (1.1 * HYSTERESIS, 4)):
        auto = Auto(costs(1, 1.0, 1.0 + more, 9, 9), last=8)
        assert auto.choose([(line_of(4, 0.9), "")], 50) == chosen
        fresh = Auto(costs(1, 1.0, 1.0 + more, 9, 9))  # control: without a last one the best is taken at once
        assert fresh.choose([(line_of(4, 0.9), "")], 50) == 4


# --- 2000 rounds ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class World:
    """Trees of a drafter, and a target that follows a branch with `honest` (off the spine `aside`) of its chance."""

    trees: list[Nodes]
    costs: Costs
    honest: float
    aside: float

    def truth(self, tree: Nodes) -> list[float]:
        """Accepted drafts expected of the first 0, 1, 2, ... nodes."""
        reach, sums = [1.0], [0.0]
        for node in range(1, len(tree.parent)):
            reach.append(reach[tree.parent[node]] * self.chance(tree, node))
            sums.append(sums[-1] + reach[-1])
        return sums

    def chance(self, tree: Nodes, node: int) -> float:
        return tree.chance[node] * (self.honest if tree.spine[tree.parent[node]] else self.aside)

    def walk(self, tree: Nodes, nodes: int, draw: random.Random) -> list[int]:
        taken = [0]
        while True:
            left = draw.random()
            for node in range(1, min(nodes + 1, len(tree.parent))):
                if tree.parent[node] == taken[-1]:
                    left -= self.chance(tree, node)
                    if left < 0:
                        taken.append(node)
                        break
            else:
                return taken

    def fixed(self) -> list[float]:
        """Seconds a token of every option, taken always."""
        sums = [self.truth(tree) for tree in self.trees]
        tokens = [1 + np.mean([s[min(n, len(s) - 1)] for s in sums]) for n in self.costs.nodes]
        return [float(s / t) for s, t in zip(self.costs.at(1), tokens, strict=True)]

    def auto(self, rounds: int = 2000) -> float:
        """Seconds a token of the measured choice, what it learned from walks and what its looks cost included."""
        auto, draw, sums = Auto(self.costs), random.Random(0), [self.truth(tree) for tree in self.trees]
        price = dict(zip(self.costs.nodes, self.costs.at(1), strict=True))
        spent, tokens = 0.0, 0.0
        for _ in range(rounds):
            if not auto.drafts():
                auto.plain(1.0)
                spent, tokens = spent + price[0], tokens + 1
                continue
            which = draw.randrange(len(self.trees))
            tree = [(self.trees[which], "")]
            nodes = auto.choose(tree, 1)
            spent += price[nodes] + (0 if nodes else self.costs.drafting(1))
            tokens += 1 + sums[which][min(nodes, len(sums[which]) - 1)]  # the mean of what a walk emits: no luck
            seen = nodes or auto.most  # unverified drafts are compared with the text that follows
            auto.learn(tree, [self.walk(tree[0][0], seen, draw)], seen)
        return spent / tokens


def drafted_trees(count: int = 12) -> list[Nodes]:
    """Spine-first trees of 32 nodes over 6 depths, some drafts sure and some not."""
    make = torch.Generator().manual_seed(0)
    spread = torch.linspace(2.5, 4.0, count)[:, None, None]
    logits = spread * torch.randn(count, 6, 24, generator=make)
    best, ids = logits.log_softmax(-1).topk(8)
    tree = heap(SPINE_FIRST, torch.zeros(count, dtype=torch.long), DraftDist(ids, best), 32, 6)
    columns = (tree.token.tolist(), tree.parent.tolist(), tree.depth.tolist(), tree.logw.tolist(), tree.n.tolist())
    return [Nodes.of(*line) for line in zip(*columns, strict=True)]


SIZES = (0, 3, 6, 16, 32)
TREES = drafted_trees()
WORLDS = {  # and the best fixed option: every drafter promises more than the target follows
    "flat": (World(TREES, costs(1, 1.25, 1.27, 1.3, 1.32, draft=0.2, nodes=SIZES), 0.5, 0.3), 32),
    "a cliff behind the chain": (World(TREES, costs(1, 1.3, 1.32, 3, 3.2, draft=0.2, nodes=SIZES), 0.7, 0.4), 6),
    "every node costs": (World(TREES, costs(1, 2.2, 3.5, 7, 13, draft=0.2, nodes=SIZES), 0.5, 0.3), 0),
}


def check_choice(world: World) -> None:
    assert world.auto() <= 1.03 * min(world.fixed())


@pytest.mark.parametrize("name", WORLDS)
def test_the_measured_choice_is_as_fast_as_the_best_fixed_one(name: str) -> None:
    world, best = WORLDS[name]
    fixed = world.fixed()
    assert SIZES[fixed.index(min(fixed))] == best, "the table is not about this option"
    check_choice(world)


def test_control_a_choice_that_believes_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    world, _ = WORLDS["every node costs"]
    calibrated = world.auto()
    monkeypatch.setattr(Calibration, "factor", lambda self, depth: 1.0)
    assert world.auto() > 1.03 * calibrated
    with pytest.raises(AssertionError):
        check_choice(world)


def rounds_drafted(learns_in_pauses: bool) -> int:
    """A target that first follows little of what is promised, then more than that: rounds with drafts afterwards."""
    world = World([TREES[0]], costs(1, 1.6, 2, 3, 5, draft=0.1, nodes=SIZES), 0.05, 0.05)
    auto, draw, drafted = Auto(world.costs), random.Random(0), 0
    for number in range(4000):
        if number == 400:
            world = World(world.trees, world.costs, 1.0, 1.0)
        if not auto.drafts():
            auto.plain(1.0)
            continue
        tree = [(world.trees[0], "")]
        nodes = auto.choose(tree, 1)
        drafted += nodes > 0 and number >= 400
        seen = nodes or auto.most
        if nodes or learns_in_pauses:
            auto.learn(tree, [world.walk(tree[0][0], seen, draw)], seen)
    return drafted


def test_a_measured_choice_that_gave_up_comes_back_when_drafts_are_followed_again() -> None:
    assert rounds_drafted(learns_in_pauses=True) > 2000


def test_control_without_learning_from_unverified_drafts_it_never_comes_back() -> None:
    assert rounds_drafted(learns_in_pauses=False) == 0


def test_a_factor_that_kept_itself_from_being_tested_comes_back() -> None:
    """Deep drafts fail for a while; then all are right, but the short chain that is drafted meanwhile cannot tell."""
    line = nodes_of([-1, 0, 1, 2, 3, 4, 5, 6], [1, *[0.8] * 7])
    chains = (0, 1, 3, 5, 7)
    auto = Auto(costs(*(1.15 + 0.06 * n if n else 1.0 for n in chains), draft=0.1, nodes=chains))

    def rounds(count: int, right: int) -> list[int]:
        chosen = []
        for _ in range(count):
            nodes = auto.choose([(line, "")], 1)
            chosen.append(nodes)
            auto.learn([(line, "")], [list(range(min(right, nodes) + 1))], nodes)
        return chosen

    assert rounds(100, 7)[-1] == 7
    assert Counter(rounds(500, 3)[-200:]).most_common(1)[0][0] == 3  # longer ones are tried now and then
    assert rounds(2000, 7)[-1] == 7


# --- the first look among more requests -------------------------------------------------------------------


def company(chance: float, *drafted: float) -> tuple[Auto, Auto]:
    """A choice for one request that has seen trees of such chances, and one for four, whose rounds take `drafted`."""
    alone, many = Auto(costs(1, 1.2, 1.3, 1.5, 2)), Auto(costs(1, *drafted))
    Autos({(1, False): alone, (4, False): many})
    for _ in range(30):
        alone.choose([(line_of(32, chance), "prose")], 50)
    return alone, many


@pytest.mark.parametrize(("drafted", "waits"), [((3.1, 4, 6, 9), LONGEST_PAUSE), ((1.2, 1.3, 1.5, 2), 0)])
def test_where_usual_drafts_cannot_pay_the_first_look_waits(drafted: tuple[float, ...], waits: int) -> None:
    _, many = company(0.6, *drafted)
    many.open(["prose"] * 4, 50)
    assert pause(many) == waits
    if waits:
        many.open(["prose"] * 4, 50)
        assert many.drafts(), "it waits once"


def test_a_near_miss_is_looked_at_soon() -> None:
    _, many = company(0.6, 2.4, 4, 6, 9)  # four nodes give 1.3 drafts: 2.3 tokens
    many.open(["prose"] * 4, 50)
    assert pause(many) == FIRST_PAUSE


def test_with_nothing_known_it_is_looked_at_once() -> None:
    _, many = company(0.6, 3.1, 4, 6, 9)
    many.open(["code"], 50)
    assert many.drafts()
    fresh = Auto(costs(1, 3, 4, 6, 9))
    fresh.open(["prose"], 50)
    assert fresh.drafts()


def test_what_is_usual_follows_what_is_expected_lately() -> None:
    auto = Auto(costs(1, 1.2, 1.3, 1.5, 2))
    auto.choose([(line_of(32, 0.9), "prose")], 50)
    first = auto.usual["prose"][4]
    assert first == pytest.approx(sum(0.9**d for d in range(1, 5)))
    for _ in range(200):
        auto.choose([(line_of(32, 0.3), "prose")], 50)
    assert auto.usual["prose"][4] == pytest.approx(sum(0.3**d for d in range(1, 5)), rel=0.01)


def test_many_trees_of_one_round_decide_as_much_as_many_rounds() -> None:
    one, many = Auto(costs(1, 5, 9, 17, 33)), Auto(costs(1, 5, 9, 17, 33))
    for _ in range(2):
        one.choose([(line_of(32, 0.85), "")], 50)
    many.choose([(line_of(32, 0.85), "")] * 2, 50)
    assert one.ratio == pytest.approx(many.ratio)


# --- rounds in service -----------------------------------------------------------------------------------


def busy(slower: float, rounds: int, *, live: bool = True) -> tuple[Auto, list[int]]:
    """A machine on which drafted rounds take `slower` times what was measured, and plain ones exactly that."""
    auto, chosen = Auto(costs(1, 1.2, 1.2, 1.3, 3), live=live), []
    for _ in range(rounds):
        nodes = 0
        if auto.drafts():
            nodes = auto.choose([(line_of(32, 0.7), "")], 50)
        else:
            auto.plain(1.0)
        spent = auto.costs.at(50)[auto.costs.nodes.index(nodes)]
        if live:
            auto.felt(nodes, spent * (slower if nodes else 1.0), 50)
        chosen.append(nodes)
    return auto, chosen


def test_drafting_ends_where_service_makes_it_dearer_than_it_was_measured() -> None:
    assert sum(n > 0 for n in busy(1.0, 400)[1]) > 380  # it pays, as measured
    drafted = sum(n > 0 for n in busy(4.0, 400)[1])
    assert drafted < 60, drafted
    assert sum(n > 0 for n in busy(4.0, 400, live=False)[1]) == 400  # control: nobody tells it


def test_a_plain_round_now_and_then_tells_how_long_it_takes() -> None:
    _, chosen = busy(1.0, 400)
    gaps = [i for i, n in enumerate(chosen) if n == 0]
    assert gaps and max(b - a for a, b in itertools.pairwise([0, *gaps])) <= PROBE + 1


def test_one_hiccup_of_the_machine_decides_nothing() -> None:
    auto, _ = busy(1.0, 100)
    auto.felt(auto.last, 1000.0, 50)
    assert auto.drafts() and auto.choose([(line_of(32, 0.7), "")], 50) > 0


def in_company(chance: float, *, live: bool) -> float:
    """Tokens a second of 32 requests over plain decoding, where service is slower than the measurement in the way that
    was seen on an H200: plain rounds 29 -> 72 ms, drafted ones 62 -> 200 ms."""
    plain, drafted, look, tree = 0.072, 0.200, 0.035, line_of(32, chance)
    auto = Auto(Costs((0, 8), (1,), ((0.029, 0.062),), (look,)), live=live)
    gains, spent, made = tree.gains(Calibration()), 0.0, 0.0
    while made < 384:
        nodes, seconds = 0, plain
        if not auto.drafts():
            auto.plain(1.0)
        elif nodes := auto.choose([(tree, "")] * 32, 1):
            seconds = drafted
        else:
            seconds = plain + look
        spent, made = spent + seconds, made + 1 + gains[nodes]
        if live and (nodes or seconds == plain):  # a look that drafts in vain tells nothing
            auto.felt(nodes, seconds, 1)
    return made / spent * plain


@pytest.mark.parametrize("chance", [0.3, 0.55, 0.6])
def test_many_requests_on_a_gpu_lose_next_to_nothing(chance: float) -> None:
    assert in_company(chance, live=True) > 0.97


def test_control_a_measurement_that_service_does_not_correct() -> None:
    assert in_company(0.55, live=False) < 0.85
    assert in_company(0.7, live=True) > 1.1, "where drafts pay they go on"
