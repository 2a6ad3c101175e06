"""Prompt files are checked line by line, without torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.errors import UserError
from draftproof.train.prompts_file import read_chats, read_rows

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi\u2028there"}]


def test_chats_and_single_prompts(tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    rows = [{"prompt": "One", "category": "chat"}, {"messages": CHAT, "source": "maths", "id": 7}]
    path.write_text("\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows), encoding="utf-8")
    assert read_chats(path) == [[{"role": "user", "content": "One"}], CHAT]
    assert [(number, row.get("id"), row.get("category")) for number, row in read_rows(path)] == [
        (1, None, "chat"),
        (3, 7, None),
    ]


@pytest.mark.parametrize(
    "line",
    [
        "no json",
        "[" * 100_000,
        "[]",
        '{"text": 1}',
        '{"prompt": "a", "messages": []}',
        '{"prompt": " "}',
        '{"prompt": "a", "promt": "b"}',
        '{"messages": []}',
        '{"messages": "a"}',
        '{"messages": [{"role": "user"}]}',
        '{"messages": [{"role": "user", "content": null}]}',
        '{"messages": [{"role": "robot", "content": "a"}]}',
        '{"messages": ["a"]}',
    ],
    ids=lambda line: line[:40],
)
def test_a_bad_line_is_named(line: str, tmp_path: Path) -> None:
    path = tmp_path / "mine.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(UserError) as caught:
        read_chats(path)
    assert caught.value.code == "bad-texts" and "line 2" in caught.value.message


def test_files_that_are_none(tmp_path: Path) -> None:
    for code, content in {"bad-texts": b"\n\n", "not-found": None}.items():
        path = tmp_path / code
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(UserError) as caught:
            read_chats(path)
        assert caught.value.code == code
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(UserError, match="UTF-8"):
        read_chats(tmp_path / "latin")


def test_no_torch() -> None:
    code = "import sys, draftproof.train.prompts_file, draftproof.train.loops; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
