"""Every plan's argument list read by vLLM's own parser; for a pair it can open here, its own speculative config."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from draftproof.launch.plan import Plan
from tests.launch.test_plan import DRAFTER, TARGET, plan

from .conftest import COMMON, RUNNER, VENV
from .pair import BLOCK, make_pair

pytestmark = pytest.mark.vllm


def parsed(plans: list[Plan], runner: str = "v1", config: bool = False) -> list[dict[str, Any]]:
    done = subprocess.run(
        [str(VENV / "bin" / "python"), str(Path(__file__).with_name("parse.py"))],
        input=json.dumps({"argvs": [made.argv for made in plans], "config": config}),
        env={**os.environ, **COMMON, **RUNNER[runner], **plans[0].env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers: list[dict[str, Any]] = json.loads(done.stdout.rpartition("ANSWERS")[2])
    return answers


def test_what_vllm_reads_is_what_the_plan_says(tmp_path: Path) -> None:
    nasty = tmp_path / 'a b\'s "$HOME" {x,y}'
    target, drafter = make_pair(nasty)
    big = {"tensor_parallel": 2, "max_model_len": 32768, "max_num_seqs": 1024}
    plans = [
        plan(),
        plan(named=big, reasoning_parser="qwen3", tool_parser="qwen3_coder", port=8123),
        plan(release="0.32.0", extra=("-sc", '{"attention_backend":"FLASH_ATTN"}', "--enforce-eager")),
        plan(drafter=None, named={"method": "mtp", "drafts": 2}),
        plan(drafter=str(drafter), target=str(target)),
    ]
    read = parsed(plans)
    dflash = {"method": "dflash", "model": str(DRAFTER), "num_speculative_tokens": 15}
    assert [answer["model"] for answer in read] == [str(TARGET)] * 4 + [str(target)]
    assert read[0]["speculative"] == dflash
    assert read[1] | {"speculative": None} == {
        "model": str(TARGET), "speculative": None, "port": 8123, "tensor_parallel_size": 2, "max_model_len": 32768,
        "max_num_batched_tokens": 16384, "reasoning_parser": "qwen3", "tool_call_parser": "qwen3_coder",
    }  # fmt: skip
    assert read[2]["speculative"] == dflash | {"disable_eagle_block_drop": True, "attention_backend": "FLASH_ATTN"}
    assert read[3]["speculative"] == {"method": "mtp", "num_speculative_tokens": 2}
    assert read[4]["speculative"] == {"method": "dflash", "model": str(drafter), "num_speculative_tokens": BLOCK - 1}


@pytest.mark.parametrize(("layout", "runner"), [("mixed", "v2"), ("sliding", "v1"), ("full", "v1")])
def test_vllm_builds_its_own_speculative_config(tmp_path: Path, layout: str, runner: str) -> None:
    target, drafter = make_pair(tmp_path, layout)
    made = plan(
        target=str(target),
        drafter=str(drafter),
        release="0.32.0",
        named={"runner": runner, "max_model_len": 512, "max_num_seqs": 4},
        extra=("--dtype", "float32"),
    )
    (read,) = parsed([made], runner, config=True)
    assert read["config"]["method"] == "dflash" and read["config"]["num_speculative_tokens"] == BLOCK - 1
    assert read["v2"] == (runner == "v2")
