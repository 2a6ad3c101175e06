"""`draftproof launch llamacpp` on the real server: the plan is accepted as it is, and what runs is the plan."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from .convert import shipped_drafter
from .served import EXACT, Served, serving

pytestmark = pytest.mark.llamacpp


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "state") as one:
        yield one


def test_the_plan_from_start_to_stop(served: Served) -> None:
    served.launch()
    record = json.loads((Path(served.running["folder"]) / "record.json").read_text())
    printed = json.loads(served.call(*served.ask(shipped_drafter()), "--print", "argv", "--", *EXACT).stdout)["argv"]
    assert record["argv"] == printed, "what is printed is what is started"
    assert record["argv"][record["argv"].index("--spec-draft-n-max") + 1] == "7"
    assert {len(file["sha256"]) for files in record["hashes"].values() for file in files.values()} == {64}

    body = {"messages": [{"role": "user", "content": "Count to ten."}], "max_tokens": 16, "temperature": 0}
    told = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60).json()
    assert told["usage"]["completion_tokens"] == 16 and told["timings"]["draft_n"] > 0
    assert httpx.get(f"{served.url}/metrics", timeout=10).status_code == 200, "the plan opens it"

    assert served.call("launch", "stop", served.running["name"]).returncode == 0
    assert json.loads(served.call("launch", "status", "--json").stdout)[0]["state"] in ("exited", "killed")


def test_a_flag_that_this_build_removed_ends_the_start(served: Served) -> None:
    failed = served.call(*served.ask(shipped_drafter()), "--", "--draft-min", "1")
    assert failed.returncode == 2 and "[launch-failed]" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_drafter_of_an_unknown_architecture_is_explained(served: Served, tmp_path: Path) -> None:
    strange = tmp_path / "strange.gguf"
    data = shipped_drafter().read_bytes()
    strange.write_bytes(data.replace(b"dflash", b"dflosh", 1))
    failed = served.call(*served.ask(strange))
    assert failed.returncode == 2 and "dflosh" in failed.stderr and "cause:" in failed.stderr
