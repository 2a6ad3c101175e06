"""The options of draft trees on the command line: what they do on a tiny pair, and what is refused before loading."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import choose as choose_module
from draftproof.engine import calibrate
from draftproof.models.target import Target
from tests import tiny

PROMPT = "w5 w9 w30 w41 w7"
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(call: Call, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Measuring is short."""
    monkeypatch.setattr(calibrate, "REPEATS", 1)
    monkeypatch.setattr(calibrate, "CPU_MOST", 15)
    return call


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> list[object]:
    """Made once: nothing here changes it."""
    drafter = tiny.drafter_folder(tmp_path_factory.mktemp("pair") / "drafter")
    return ["--target", tiny.target_folder("llama"), "--drafter", drafter, "--dtype", "float32"]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    few = tmp_path / "few.jsonl"
    few.write_text('{"prompt": "w5 w6 w9"}\n{"prompt": "w40 w11"}\n')
    return few


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch, pair: list[object]) -> None:
    """Loading weights is an error of the test."""

    def load(*_: Any, **__: Any) -> None:
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(Target, "load", load)


def refused(result: tuple[int, str, str], *names: str) -> None:
    status, out, err = result
    assert status == 2 and not out, (status, out, err)
    assert err.count("draftproof: [bad-option]") == 1 and err.count("next step:") == 1, err
    assert "Traceback" not in err
    for name in names:
        assert name in err, f"{name!r} is not named: {err}"


def done(result: tuple[int, str, str]) -> Any:
    status, out, err = result
    assert status == 0 and "Traceback" not in err, err
    return json.loads(out)


# --- refused before anything is loaded ------------------------------------------------------------------


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("budget", ["0", "-1", "257", "x", "", "1.5", "99999999999", "\u0663", "AUTO"])
def test_an_impossible_budget_is_refused(call: Call, pair: list[object], budget: str) -> None:
    refused(call("run", PROMPT, *pair, "--method", "ddtree", "--budget", budget), "budget", "256")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("option", [["--budget", "8"], ["--budget", "auto"], ["--builder", "siblings"]])
@pytest.mark.parametrize("method", ["dflash", "mtp", "none"])
def test_tree_options_without_trees_are_refused(call: Call, pair: list[object], method: str, option: list[str]) -> None:
    own = pair if method == "dflash" else [*pair[:2], *pair[4:]]
    refused(call("run", PROMPT, *own, "--method", method, *option), option[0], "--method ddtree")


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize(
    ("args", "names"),
    [
        (["--method", "ddtree", "--builder", "oak"], ["oak", "spine-first", "siblings"]),
        (["--method", "ddtree", "-k", "3"], ["-k"]),
        (["--method", "tree"], ["tree", "ddtree"]),
        (["--method", "ddtree", "--budget", "none", "--builder", "siblings"], ["--builder"]),
        (["--method", "ddtree", "--budget", "chain", "--builder", "siblings"], ["--builder"]),
        (["--method", "ddtree", "--budget", "none", "--no-noise-aware", "--temperature", "1"], ["--no-noise-aware"]),
        (["--method", "ddtree", "--budget", "8", "--no-noise-aware"], ["--no-noise-aware", "temperature 0"]),
    ],
)
def test_unknown_and_idle_words_are_refused(call: Call, pair: list[object], args: list[str], names: list[str]) -> None:
    refused(call("run", PROMPT, *pair, *args), *names)


@pytest.mark.usefixtures("unloaded")
@pytest.mark.parametrize("option", [["--no-noise-aware"], ["--show-tree", "2"]])
def test_drafting_options_of_plain_decoding_are_refused(call: Call, pair: list[object], option: list[str]) -> None:
    refused(call("run", PROMPT, *pair[:2], "--method", "none", *option), option[0])


def test_control_these_words_do_load(call: Call, pair: list[object], unloaded: None) -> None:
    with pytest.raises(AssertionError, match="weights were loaded"):
        call("run", PROMPT, *pair, "--method", "ddtree", "--budget", "8", "--builder", "siblings")


@pytest.mark.usefixtures("unloaded")
def test_replay_and_bench_walk_no_trees(call: Call, pair: list[object], tmp_path: Path) -> None:
    refused(call("replay", "--texts", tmp_path / "no.json", *pair, "--method", "ddtree"), "ddtree", "dflash")
    refused(call("bench", *pair, "--method", "ddtree"), "draftproof choose")


@pytest.mark.usefixtures("unloaded")
def test_choose_refuses_what_it_does_not_know(call: Call, pair: list[object], prompts: Path) -> None:
    args = ["choose", "--workload", prompts, "--prompts", 2, *pair]
    refused(call(*args, "--way", "nonsense"), "nonsense", "ddtree:NODES")
    refused(call(*args, "--way", "chain", "--way", "chain"), "twice")
    refused(call(*args, "--builder", "oak"), "oak")
    refused(call("choose", "--workload", prompts, "--prompts", 3, *pair), "only 2")


def test_options_that_need_the_models_sizes(call: Call, pair: list[object], prompts: Path) -> None:
    words = " ".join(f"w{5 + i % 50}" for i in range(300))
    refused(call("run", words, *pair, "--method", "ddtree", "--budget", 213, "--max-tokens", 4), "213 nodes", "212")
    assert call("run", words, *pair, "--method", "ddtree", "--budget", 212, "--max-tokens", 4)[0] == 0
    refused(call("calibrate", *pair, "--context", 513), "513", "512")
    args = ["choose", "--workload", prompts, "--prompts", 2, *pair]
    refused(call(*args, "--way", "none", "--way", "chain:4"), "chain:4")


# --- trees ----------------------------------------------------------------------------------------------


def test_trees_are_reported_and_hold_what_was_emitted(call: Call, pair: list[object]) -> None:
    args = ["run", PROMPT, *pair, "--max-tokens", 40, "--temperature", 1, "--seed", 5, "--json"]
    report = done(call(*args, "--method", "ddtree", "--budget", 8, "--show-tree", 2))
    told = report["speculation"]
    assert (told["budget"], told["builder"], told["noise_aware"]) == (8, "spine-first", True)
    assert len(told["nodes"]) == report["acceptance"]["steps"] and max(told["nodes"]) == 8
    assert len(report["trees"]) == 2
    whole = done(call(*args, "--method", "ddtree", "--budget", 8, "--show-tree", 99))
    assert whole["trees"][:2] == report["trees"] and len(whole["trees"]) == len(told["nodes"])
    for trees in (report["trees"], whole["trees"]):
        taken = [tree["token"][node] for tree in trees for node in tree["path"]]
        path = [f"w{token}" for token in taken if token > 3]  # a text shows no special tokens
        assert report["text"].split()[: len(path)] == path
    assert any(len(tree["path"]) > 1 for tree in whole["trees"])  # some draft was taken
    assert [len(tree["token"]) - 1 for tree in whole["trees"]] == told["nodes"]
    without = done(call(*args))
    assert without["text"] == report["text"] and "trees" not in without
    assert without["speculation"]["budget"] == "chain" and max(without["speculation"]["nodes"]) == 3


def test_trees_are_drawn_beside_the_text(call: Call, pair: list[object]) -> None:
    args = ["run", PROMPT, *pair, "--max-tokens", 12, "--method", "ddtree", "--budget", 6]
    code, text, quiet = call(*args)
    assert code == 0 and text.strip() and not quiet
    code, out, err = call(*args, "--show-tree", 2)
    assert code == 0 and out == text
    assert "step 1: 6 nodes" in err and "step 2:" in err and "step 3:" not in err and "\x1b" not in err
    assert sum("\u2500\u2500 " in line for line in err.splitlines()) >= 6  # branches


@pytest.mark.parametrize("builder", ["spine-first", "best-first", "siblings"])
def test_builders_and_rankings_write_the_same_text(call: Call, pair: list[object], builder: str) -> None:
    args = ["run", PROMPT, *pair, "--max-tokens", 12, "--temperature", 0.8, "--seed", 3, "--json"]
    tree = ["--method", "ddtree", "--budget", 9, "--builder", builder]
    texts = {done(call(*args, *rest))["text"] for rest in ([], tree, [*tree, "--no-noise-aware"])}
    assert len(texts) == 1


# --- the measured budget --------------------------------------------------------------------------------


def test_the_measured_budget_measures_once(call: Call, pair: list[object], tmp_path: Path) -> None:
    args = ["run", PROMPT, *pair, "--max-tokens", 12]
    code, text, _ = call(*args)
    assert code == 0
    first = call(*args, "--method", "ddtree", "--budget", "auto")
    assert first[:2] == (0, text) and "measuring" in first[2]
    (costs,) = (tmp_path / "cache" / "costs").glob("*.json")
    before = costs.read_bytes()
    again = call(*args, "--method", "ddtree")  # the default
    assert again[:2] == (0, text) and "measuring" not in again[2] and costs.read_bytes() == before
    assert len(list((tmp_path / "cache" / "acceptance").glob("*.json"))) == 1
    report = done(call(*args, "--method", "ddtree", "--json"))
    assert report["speculation"]["budget"] == "auto"


def test_an_unwritable_cache_is_one_message(call: Call, pair: list[object], tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    code, out, err = call("run", PROMPT, *pair, "--max-tokens", 4, "--method", "ddtree")
    assert code == 2 and "[disk-full]" in err and "DRAFTPROOF_CACHE" in err and "Traceback" not in err and not out


def test_calibrate_speaks_json_and_measures_again(call: Call, pair: list[object], tmp_path: Path) -> None:
    report = done(call("calibrate", *pair, "--context", 64, "--context", 300, "--json"))
    assert list(report["rounds"]) == list(report["draft_ms"]) == ["64", "300"]
    for rows in report["rounds"].values():
        assert rows[0]["nodes"] == 0 and rows[0]["ratio"] == 1.0 and all(row["ms"] > 0 for row in rows)
        assert [r["nodes"] for r in rows] == sorted({r["nodes"] for r in rows})
    (costs,) = (tmp_path / "cache" / "costs").glob("*.json")
    before = costs.read_bytes()
    code, out, _ = call("calibrate", *pair)
    assert code == 0 and "tau that pays" in out and costs.read_bytes() != before
    run = call("run", PROMPT, *pair, "--max-tokens", 4, "--method", "ddtree")
    assert run[0] == 0 and "measuring" not in run[2]  # the same key


def test_lossless_proves_trees(call: Call, pair: list[object], prompts: Path) -> None:
    args = ["lossless", "--workload", prompts, "--prompts", 2, *pair[:4], "--dtype", "float64", "--max-tokens", 12]
    report = done(call(*args, "--method", "ddtree", "--budget", 8, "--json"))
    assert not report["bugs"] and report["identical"] == report["compared"] == 8


def test_choose_has_every_way(call: Call, pair: list[object], prompts: Path) -> None:
    args = ["choose", "--workload", prompts, "--prompts", 2, "--max-tokens", 6, *pair[:4], "--dtype", "float64"]
    report = done(call(*args, "--json"))
    (result,) = report["results"]
    assert tuple(result["ways"]) == choose_module.DEFAULT and result["prompts"] == 2 and result["fastest"]
    assert {row["other_texts"] for row in result["ways"].values()} == {0}
    assert result["auto"]["against"] in ("none", "chain") and report["provenance"]["device"]
    code, out, err = call(*args, "--way", "none", "--way", "ddtree:4", "--temperature", 0, "--temperature", 1)
    assert code == 0 and "ddtree:4" in out and "T 0: " in out and "T 1: " in out and "tokens/s" in err
