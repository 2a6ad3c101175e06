"""`draftproof launch` on the command line: printed forms, dry run, and bad input as one message."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pytest

from draftproof.cli import main
from tests.config.cases import CONFIGS, TARGETS

PAIR = ("--target", TARGETS / "Qwen3.6-27B", "--drafter", CONFIGS / "Qwen3.6-27B-DFlash", "--release", "0.33.0")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["draftproof", "launch", *map(str, words)])
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = int(stop.code or 0)
        out = capsys.readouterr()
        return code, out.out, out.err

    return run


def test_the_shell_form_reads_back_to_the_plan(call) -> None:
    code, text, _ = call("vllm", *PAIR, "--print", "shell", "--tensor-parallel-size", 2)
    plan = json.loads(call("vllm", *PAIR, "--print", "argv", "--tensor-parallel-size", 2)[1])
    words = shlex.split(text.replace("\\\n", ""), comments=True)
    assert code == 0 and words[: 1 + len(plan["env"])] == ["env", *(f"{k}={v}" for k, v in plan["env"].items())]
    assert words[1 + len(plan["env"]) :] == plan["argv"]


def test_a_dry_run_says_why_and_starts_nothing(call, tmp_path: Path) -> None:
    code, text, _ = call("vllm", *PAIR, "--dry-run", "--reasoning-parser", "qwen3", "--tool-call-parser", "qwen3_coder")
    assert code == 0 and "--enable-auto-tool-choice" in text and "K = 15" in text
    assert not (tmp_path / "state").exists()
    assert call("status")[1].startswith("no launches")


@pytest.mark.parametrize(
    ("words", "code", "names"),
    [
        (("vllm", *PAIR, "--print", "toml"), "bad-option", ("toml", "compose")),
        (("vllm", *PAIR, "--print", "compose"), "bad-option", ("--image",)),
        (("vllm", *PAIR, "--print", "shell", "--image", "x"), "bad-option", ("--image",)),
        (("vllm", *PAIR, "--env", "1X=2", "--dry-run"), "bad-option", ("1X=2",)),
        (("vllm", *PAIR, "--env", "A=1", "--env", "A=2", "--dry-run"), "flag-conflict", ("A",)),
        (("vllm", *PAIR, "--ssh-option", "-v", "--dry-run"), "bad-option", ("--host",)),
        (("vllm", *PAIR, "--host", "-oProxyCommand=x", "--dry-run"), "bad-option", ("ProxyCommand",)),
        (("vllm", *PAIR, "--ik", "--dry-run"), "bad-option", ("--ik",)),
        (("sglang", *PAIR[:4], "--release", "0.5.23", "--runner", "v2", "--dry-run"), "bad-option", ("--runner",)),
        (("vllm", *PAIR, "--dry-run", "--", "--port", "9"), "flag-conflict", ("--port",)),
        (("vllm", *PAIR[:4], "--release", "0.22", "--dry-run"), "launch-refuted", ("vllm-windows-ignored",)),
        (("vllm", *PAIR, "--executable", "/nowhere/vllm"), "launch-failed", ("/nowhere/vllm",)),
        (("vllm", *PAIR, "--name", "../up", "--executable", "/bin/sleep"), "bad-option", ("../up",)),
        (("stop", "never-started"), "launch-unknown", ("never-started",)),
        (("logs", "never-started"), "launch-unknown", ("never-started",)),
    ],
    ids=str,
)
def test_bad_input_is_one_message(call, words: tuple, code: str, names: tuple[str, ...]) -> None:
    status, out, err = call(*words)
    assert status == 2 and f"draftproof: [{code}]" in err and "next step:" in err, (status, out, err)
    assert "Traceback" not in err
    assert all(name in err for name in names), err


def test_an_engine_that_dies_is_explained_by_its_own_line(call, tmp_path: Path) -> None:
    """`false` in the engine's place: it ends at once, and the message says how."""
    status, _, err = call("vllm", *PAIR, "--executable", "/bin/false", "--port", 8765)
    assert status == 2 and "[launch-failed]" in err and "exit code 1" in err
    assert json.loads(call("status", "--json")[1])[0]["state"] == "exited"
