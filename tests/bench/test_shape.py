"""`bench --shape` on a shape of one's own: every part is timed, every budget has a speed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.bench import imposed, shape
from draftproof.bench.shape_report import print_shape
from tests import tiny


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(shape, "REPEATS", 2)
    monkeypatch.setattr(shape, "COPY_BYTES", 2**20)
    monkeypatch.setattr(shape, "NODES", (3, 7, 31))
    monkeypatch.setattr(imposed, "ROUNDS", 60)
    for part in ("target", "drafter"):
        (tmp_path / part).mkdir()
    (tmp_path / "target" / "config.json").write_text(tiny.target_config("qwen3_5").to_json_string(use_diff=False))
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(tiny.drafter_config(block_size=16)))
    return tmp_path


def test_every_part_of_every_budget_is_timed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = shape.run_shape(str(folder), contexts=(64,), taus=(3.0,), device="cpu", dtype="float32")
    rounds = [p for p in result["parts"] if p["name"] == "whole round"]
    assert sorted(p["rows"] for p in rounds) == [1, 4, 8, 16, 32]
    assert all(p["eager"] > 0 for p in result["parts"])
    assert [p["rows"] for p in result["parts"] if p["name"] == "build the tree"] == [32]
    assert [row["profile"] for row in result["imposed"]] == [p.name for p in imposed.PROFILES]
    for row in result["imposed"]:
        assert list(row["tau"]) == ["0", "3", "7", "15", "31", "auto"] and row["tau"]["0"] == 1.0
        assert all(rate > 0 for rate in row["tokens_per_second"].values())
    (assumed,) = result["assumed"]
    block = next(p["eager"] for p in rounds if p["rows"] == 16)
    assert assumed["drafted"] == pytest.approx(3.0 * 1e3 / block)
    print_shape(result)
    assert "build the tree" in capsys.readouterr().out
