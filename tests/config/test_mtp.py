"""What `inspect --method mtp` says of a target, its config alone and with the headers of its weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from draftproof.config.mtp import Headers, check_mtp
from draftproof.config.report import inspect_mtp
from draftproof.config.target import read_target

TARGETS = Path(__file__).parents[1] / "fixtures" / "targets"
HYBRID = TARGETS / "Qwen3.6-27B"
HEAD = {"mtp.fc.weight": ("BF16", (5120, 10240)), "mtp.norm.weight": ("BF16", (5120,))}
OTHER: Headers = {"model.norm.weight": ("BF16", (5120,))}


@pytest.mark.parametrize(
    ("headers", "code", "exit_code"),
    [
        (None, None, 0),
        (HEAD | dict(OTHER), "mtp-head", 0),
        (OTHER, "mtp-head-missing", 1),
        (HEAD | {"mtp.fc.weight": ("BF16", (5120, 5120))}, "mtp-head-width", 1),
    ],
)
def test_the_head_of_a_hybrid(headers: Headers | None, code: str | None, exit_code: int) -> None:
    inspection = inspect_mtp(HYBRID, headers)
    assert [f.code for f in inspection.findings if f.code.startswith("mtp-")] == ([code] if code else [])
    assert inspection.exit_code == exit_code and inspection.as_dict()["drafter"] is None


def test_a_target_without_one() -> None:
    (found,) = check_mtp(read_target(TARGETS / "Qwen3-8B"), OTHER)
    assert found.code == "mtp-absent" and found.seen == "0"
    assert not list(check_mtp(replace(read_target(HYBRID), mtp_layers=3)))
