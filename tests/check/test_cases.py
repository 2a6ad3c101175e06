"""The public faults of cases.md: each section's config values go in, its findings must come out."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from draftproof.check.check import Check, check, read_pair
from draftproof.check.deployment import parse_engine
from draftproof.check.merge import merge_options
from draftproof.check.session import CheckAsk, run_check
from draftproof.config.drafter import read_drafter
from draftproof.config.target import read_target
from tests.config.cases import CONFIGS, TARGETS, load

PAGE = Path(__file__).with_name("cases.md")
SECTION = re.compile(r"^## (.+?)\n(.*?)^```toml\n(.*?)^```$", re.MULTILINE | re.DOTALL)
KEYS = {
    "drafter", "target", "rename", "change", "change_target", "engine", "options", "flags", "expect", "absent",
    "links", "starts", "fixed_on", "fixed", "exit",
}  # fmt: skip
CASES = {title: tomllib.loads(block) for title, _, block in SECTION.findall(PAGE.read_text())}


def edit(raw: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """Dotted keys set, or removed; layer lists by word, so that a case need not count layers."""
    raw = json.loads(json.dumps(raw))
    for dotted, value in changes.items():
        *parents, last = dotted.split(".")
        level = raw
        for parent in parents:
            level = level[parent]
        count = level.get("num_hidden_layers", 0)
        full, sliding = ["full_attention"] * count, ["sliding_attention"] * count
        words = {"all full": full, "all sliding": sliding, "last full": [*sliding[:-1], *full[:1]]}
        if value == "remove":
            level.pop(last, None)
        else:
            level[last] = words.get(value, value) if isinstance(value, str) else value
    return raw


def write(folder: Path, raw: dict[str, Any]) -> Path:
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


def folders(case: dict[str, Any], tmp_path: Path) -> tuple[Path | None, Path]:
    drafter = None
    if "drafter" in case:
        raw = edit(load(CONFIGS / case["drafter"]), case.get("change", {}))
        drafter = write(tmp_path / "drafter" / case.get("rename", case["drafter"]), raw)
    name = case.get("target", "Qwen3-8B")
    return drafter, write(tmp_path / "target" / name, edit(load(TARGETS / name), case.get("change_target", {})))


def judge(case: dict[str, Any], engine_text: str, drafter: Path | None, target: Path) -> Check:
    engine, release = parse_engine(engine_text)
    options = merge_options(engine.name, case.get("options", {}), case.get("flags", []), {})
    pair = read_pair(None if drafter is None else read_drafter(drafter), read_target(target))
    return check(pair, engine, release, options)


def codes(result: Check) -> set[str]:
    return {finding.code for finding in (*result.pair.findings, *result.findings)}


@pytest.mark.parametrize("title", CASES)
def test_case(title: str, tmp_path: Path) -> None:
    case = CASES[title]
    assert set(case) <= KEYS, f"unknown keys: {set(case) - KEYS}"
    drafter, target = folders(case, tmp_path)
    if "engine" not in case:
        result = run_check(CheckAsk(drafter, target, (), {}))
        found = {finding.code for finding in result.pair.findings}
        assert set(case["expect"]) <= found, found
        assert result.exit_code == case["exit"]
        return
    checked = judge(case, case["engine"], drafter, target)
    assert set(case.get("expect", ())) <= codes(checked), codes(checked)
    assert not set(case.get("absent", ())) & codes(checked)
    verdicts = {verdict.link.value: verdict.verdict.value for verdict in checked.links}
    assert case.get("links", {}).items() <= verdicts.items(), verdicts
    assert checked.applied.starts == case.get("starts", checked.applied.starts)
    if "exit" in case:
        assert checked.exit_code == case["exit"], [f for f in checked.findings if f.severity != "note"]
    if "fixed_on" in case:
        later = judge(case, f"{checked.deployment.engine.name}=={case['fixed_on']}", drafter, target)
        gone = set(case.get("fixed", case["expect"]))
        assert not gone & codes(later), gone & codes(later)


def test_there_are_enough_cases_and_each_says_what_happened() -> None:
    assert len(CASES) >= 30
    assert len(CASES) == PAGE.read_text().count("\n## "), "a section without a block"
    assert all("expect" in case or "absent" in case for case in CASES.values())
