"""`draftproof doctor` on the real llama-server: what it reads there, what it proves, and faults planted in the GGUF."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from draftproof.doctor.facts import Answer, Counters
from draftproof.doctor.facts.log import read_log
from draftproof.doctor.facts.metrics import difference, fetch_counters
from draftproof.doctor.facts.probe import read_prompts
from draftproof.doctor.facts.server import identify
from draftproof.engine.pair import load_pair
from draftproof.engine.replay import Text, replay
from draftproof.models.hub import resolve_drafter, resolve_target

from .convert import DRAFTER, TARGET, to_gguf
from .served import Served, alone, answers_of, serving

pytestmark = pytest.mark.llamacpp
PROMPTS = (*read_prompts()[:4], read_prompts()[-1])  # the last is longer than the drafter's window
full_only = pytest.mark.skipif(os.environ.get("DRAFTPROOF_FULL") != "1", reason="minutes a server: DRAFTPROOF_FULL=1")
BLOCK, TAPS, MASK = 8, (1, 8, 14, 20, 27), 16  # of the shipped drafter


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with serving(tmp_path_factory.mktemp("healthy") / "state") as one:
        one.launch()
        yield one


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with alone(tmp_path_factory.mktemp("alone") / "log") as url:
        yield url


@pytest.fixture(scope="module")
def answers(served: Served) -> tuple[tuple[Answer, ...], Counters, Counters]:
    """The server's answers, and its counters before and after them: first of all that it is asked."""
    before, _ = fetch_counters(served.url, engine="llama.cpp")
    told = answers_of(served.url, PROMPTS)
    after, _ = fetch_counters(served.url, engine="llama.cpp")
    assert before is not None and after is not None
    return told, before, after


def test_the_text_is_the_targets_own(answers: tuple[tuple[Answer, ...], Counters, Counters], baseline: str) -> None:
    plain = answers_of(baseline, PROMPTS)
    assert [one.output_ids for one in answers[0]] == [one.output_ids for one in plain]
    assert all(one.steps is None and one.accepted is None for one in plain), "nothing is drafted there"


def test_the_steps_are_those_of_our_own_replay(answers: tuple[tuple[Answer, ...], Counters, Counters]) -> None:
    told = answers[0]
    pair = load_pair(TARGET, DRAFTER, dtype="float32", device="cpu")
    assert pair.drafter is not None
    expected = replay(pair.target, pair.drafter, [Text(list(a.prompt_ids), list(a.output_ids)) for a in told])
    seen = [list(answer.per_step or ()) for answer in told]
    print("llama.cpp", seen, "replay", expected.tau, [text.accepted for text in expected.texts])
    assert [steps[:-1] for steps in seen] == [text.accepted[:-1] for text in expected.texts], "but for the cut last one"


def test_counters_answers_and_log_tell_one_story(
    served: Served, answers: tuple[tuple[Answer, ...], Counters, Counters]
) -> None:
    told, before, after = answers
    delta = difference(before, after, len(told)).delta
    assert delta is not None and before.created == after.created and before.created
    everything = [step for answer in told for step in answer.per_step or ()]
    assert delta.accepted == sum(everything) and delta.drafts and delta.drafts <= len(everything)
    assert len(delta.per_position) == BLOCK - 1 and sum(delta.per_position) == delta.accepted
    lines = read_log(served.log()).lines
    requests, since_start = lines[: 2 * len(told) : 2], lines[2 * len(told) - 1]
    assert sum(line.accepted or 0 for line in requests) == delta.accepted == since_start.accepted
    assert since_start.mean_length == 1 + delta.accepted / delta.drafts
    assert all(line.problems == () and line.mean_length > 1 for line in lines)


def test_what_log_and_props_say_of_the_drafter(served: Served) -> None:
    facts = read_log(served.log())
    assert facts.method == "draft-dflash" and facts.speculative is not None
    assert (facts.speculative["num_speculative_tokens"], facts.speculative["block_size"]) == (BLOCK - 1, BLOCK)
    assert facts.speculative["mask_token_id"] == MASK
    assert facts.aux_layers == tuple(tap + 1 for tap in TAPS)
    server = identify(served.url)
    assert server.engine == "llama.cpp" and server.details is not None
    told = server.details["default_generation_settings"]["params"]["speculative.types"]
    assert told == "none", "of a bare request: no source of what the server does"


def test_a_healthy_pair(served: Served, baseline: str) -> None:
    report = served.doctor("--prompts", 4, "--max-tokens", 48, "--baseline", baseline)
    proved = ("files", "current", "pair", "argv", "config", "taps", "block", "cache", "acceptance", "output")
    assert {name: report.verdict(name) for name in proved} == dict.fromkeys(proved, "proved")
    assert report.refuted <= {"speed"}
    assert report.told["acceptance"]["kind"] == "steps" and "healthy" in report.told["acceptance"]["leaders"]
    for hidden in ("windows", "causality", "rope"):
        assert report.verdict(hidden) == "cannot tell", "nothing looks inside llama.cpp"


QUICK = "taps-minus-1"
FAULTS: Mapping[str, dict[str, Any]] = {
    "taps-minus-1": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}},
    "taps-reversed": {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [*TAPS[::-1]]}},
    "mask-id-0": {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [*TAPS]}},
    "window-ignored": {"use_sliding_window": False},
    "all-causal": {"is_causal": True},
    "rope-base-1e4": {"rope_theta": 10000.0},
}


@pytest.mark.parametrize("fault", [pytest.param(name, marks=() if name == QUICK else full_only) for name in FAULTS])
def test_a_planted_fault_is_named(fault: str, tmp_path: Path) -> None:
    """The GGUF is made of an edited config; the doctor has the honest one."""
    folder = tmp_path / "drafter"
    shutil.copytree(resolve_drafter(DRAFTER), folder)
    config = json.loads((folder / "config.json").read_text()) | FAULTS[fault]
    (folder / "config.json").write_text(json.dumps(config))
    with serving(tmp_path / "state") as one:
        one.launch(to_gguf(folder, tmp_path / "planted.gguf", resolve_target(TARGET)))
        report = one.doctor("--prompts", 4, "--max-tokens", 48)
    told = report.told["acceptance"]
    print(fault, told["observed"], told["expected"], told["leaders"])
    assert report.verdict("acceptance") == "refuted" and fault in told["leaders"]
    assert (report.verdict("taps") == "refuted") == fault.startswith("taps")
    assert (report.verdict("block") == "refuted") == fault.startswith("mask")


@full_only
def test_the_engines_own_default_is_a_shorter_block(tmp_path: Path) -> None:
    """Without --spec-draft-n-max it drafts 3: a block of 4 rows, not the first rows of the trained one."""
    with serving(tmp_path / "state") as one:
        one.launch(None, "--num-speculative-tokens", 3)
        report = one.doctor("--prompts", 4, "--max-tokens", 48)
    told = report.told["acceptance"]
    print(told["observed"], told["expected"], told["leaders"])
    assert report.verdict("block") == "cannot tell" and "shorter than trained" in report.link("block")["message"]
    assert "block-shorter" in told["leaders"]
