"""Training prompts: the same for the same seed, in the promised shares, free of evaluation templates."""

from __future__ import annotations

import json
from collections import Counter
from importlib.util import find_spec
from pathlib import Path
from random import Random

import pytest

from draftproof.errors import UserError
from draftproof.train import docstrings, prompts, puzzles

needs_gym = pytest.mark.skipif(find_spec("reasoning_gym") is None, reason="reasoning-gym is in the train extra")

SOURCE = '''
import os
raise SystemExit("executed")

def area(width: int, height: int = 2) -> int:
    """Return the area of a rectangle with the given width and height.

    Both are whole numbers.
    """
    return width * height

def _private():
    """Return something that nobody outside of this module should ever see."""

def short():
    """Too short."""

class Box:
    def method(self):
        """Return something that only makes sense inside of its own class here."""
'''


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """reasoning-gym, CodeI/O and large packages are slow to read; one test uses them."""
    monkeypatch.setattr(docstrings, "PACKAGES", ())
    monkeypatch.setattr(prompts, "_require_reasoning_gym", lambda: Path())
    monkeypatch.setattr(prompts, "_reasoning_gym", lambda rng: iter(f"What is {n}?" for n in range(10**6)))
    monkeypatch.setattr(prompts, "_codeio", lambda rng: iter(f"Compute {n}." for n in range(10**6)))


def test_functions_are_read_and_not_run(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    (function,) = docstrings.functions_of(path)
    assert function.call == "area(width: int, height: int=2)"
    assert function.doc == "Return the area of a rectangle with the given width and height."
    assert function.stub.startswith('def area(width: int, height: int=2) -> int:\n    """Return the area')
    assert function.source == "def area(width: int, height: int=2) -> int:\n    return width * height"
    compile(function.stub, "stub", "exec")
    path.write_text("def broken(:")
    assert docstrings.functions_of(path) == []


def test_shares_and_seed(quick: None) -> None:
    rows = prompts.build_prompts(200, 7)
    assert rows == prompts.build_prompts(200, 7)
    assert rows != prompts.build_prompts(200, 8)
    assert Counter(row["source"] for row in rows) == {name: 200 * share for name, share in prompts.MIX.items()}
    texts = [row["messages"][0]["content"] for row in rows]
    assert len(set(texts)) == 200
    assert max(map(prompts.rough_tokens, texts)) <= prompts.MAX_TOKENS
    assert all(row["messages"][0]["role"] == "user" and "{" not in row["source"] for row in rows)


def test_a_source_that_runs_dry_is_made_up_for(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "coding_prompts", lambda rng: iter(["one", "two", "two"]))
    rows = prompts.build_prompts(100, 0)
    assert len(rows) == 100
    assert Counter(row["source"] for row in rows)["python"] <= 3


def test_every_template_can_be_filled() -> None:
    rng = Random(0)
    for template in (*puzzles.WORD_PROBLEMS, *puzzles.LOGIC, *puzzles.RECORDS):
        text = puzzles.fill(template, rng)
        assert "{" not in text and prompts.rough_tokens(text) <= prompts.MAX_TOKENS
    assert "{" not in "".join(puzzles.small_function(rng) for _ in range(500))
    chat = prompts._chat(rng)
    assert all("{" not in next(chat) for _ in range(2000))


def test_gsm8k_templates_stay_out() -> None:
    assert "gsm_symbolic" not in prompts.GENERATORS


@needs_gym
def test_the_real_sources(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    prompts.write_prompts(path, 60, 0)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line]
    assert len(rows) == 60 and {row["source"] for row in rows} == set(prompts.MIX)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.jsonl"]


def test_without_reasoning_gym(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompts, "find_spec", lambda name: None)
    with pytest.raises(UserError) as caught:
        prompts.build_prompts(20, 0)
    assert caught.value.code == "dependency-missing"


def test_no_prompts_asked_for() -> None:
    with pytest.raises(UserError, match="0 prompts"):
        prompts.build_prompts(0, 0)
