"""`inspect`: what a person and a program get to see, and what stays unimported."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from draftproof.config.report import SCHEMA, Inspection, inspect, render

from .cases import CONFIGS, TARGETS, edited, load


def shown(inspection: Inspection) -> str:
    console = Console(file=io.StringIO(), width=200)
    render(inspection, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("target", [None, TARGETS / "Qwen3.6-27B"], ids=["alone", "with-target"])
def test_the_founding_case(target: Path | None) -> None:
    wrong = inspect(CONFIGS / "Qwen3.6-27B-DFlash-guessed", target)
    right = inspect(CONFIGS / "Qwen3.6-27B-DFlash", target)
    assert (wrong.exit_code, right.exit_code) == (1, 0)
    text = shown(wrong)
    for value in ("248064", "248070", "1 17 33 49 63", "1 16 31 46 61", "4S+1F", "5F"):
        assert value in text
    assert "causality-disagreement" in shown(right)


def test_values_are_shown_with_their_sources_and_layers_one_by_one() -> None:
    text = shown(inspect(CONFIGS / "Qwen3.6-27B-DFlash", TARGETS / "Qwen3.6-27B"))
    assert "config.json: dflash_config.mask_token_id" in text
    assert "config.json: text_config.hidden_size" in text
    assert sum("sliding  " in line and "causal" in line for line in text.splitlines()) == 4


def test_json_is_complete_and_serialisable() -> None:
    result = json.loads(json.dumps(inspect(CONFIGS / "MiMo-V2.5-DFlash").as_dict()))
    assert result["schema"] == SCHEMA
    assert result["drafter"]["layers"][0] == {"sliding": True, "window": 1024, "causal": False}
    assert result["drafter"]["missing_parts"] and result["target"] is None
    assert sum(result["counts"].values()) == len(result["findings"])
    order = [finding["severity"] for finding in result["findings"]]
    assert order == sorted(order, key=["error", "warning", "note"].index)


@pytest.mark.parametrize("folder", sorted(p for p in CONFIGS.iterdir() if p.is_dir()), ids=lambda p: p.name)
def test_every_fixture_renders(folder: Path) -> None:
    inspection = inspect(folder)
    assert shown(inspection)
    json.dumps(inspection.as_dict())


def test_a_checkpoint_cannot_write_to_the_terminal(write: Callable[..., Path]) -> None:
    raw = edited(load(CONFIGS / "Qwen3-8B-DFlash-b16"), architectures=["[red]DFlash\x1b]0;owned\x07\n"])
    text = shown(inspect(write(raw)))
    assert "[red]DFlash" in text and "\x1b" not in text and "\x07" not in text


def test_remote_code_is_named_and_not_run(write: Callable[..., Path]) -> None:
    raw = edited(load(CONFIGS / "Qwen3-8B-DFlash-b16"), auto_map={"AutoModel": "boom.Model"})
    folder = write(raw)
    (folder / "boom.py").write_text("raise SystemExit('ran')")
    assert "boom.Model" in shown(inspect(folder))
    assert "boom" not in sys.modules


def test_no_torch() -> None:
    modules = sorted(p.stem for p in Path(inspect.__code__.co_filename).parent.glob("*.py") if p.stem != "__init__")
    code = f"import sys, importlib\nfor m in {modules!r}: importlib.import_module('draftproof.config.' + m)\n"
    code += "print([m for m in ('torch', 'transformers', 'numpy', 'safetensors') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]" and len(modules) >= 8
