"""An independent judge of the MTP head: the real vLLM drafts with the toy's head and needs as many steps as we do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from draftproof.bench.bridge import score_gap
from draftproof.bench.lossless import TIE
from draftproof.engine.engine import Engine
from draftproof.engine.pair import load_pair
from draftproof.engine.replay import Text, replay
from draftproof.engine.request import Request
from draftproof.engine.text import encode_chat

from .conftest import COMMON, RUNNER, VENV

pytestmark = pytest.mark.vllm
DRAFTS, TOKENS = 3, 32
QUESTIONS = ("Explain why the sky is blue.", "Write a function that reverses a list.")
# vLLM's file of the model imports torchvision, whose operators a CPU build of torch does not have.
OPERATORS = """
_KEPT = torch.library.Library("torchvision", "FRAGMENT")
_KEPT.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_KEPT.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


"""


@pytest.fixture
def torchvision(tmp_path: Path) -> Path:
    """A folder with torchvision that a CPU build of torch can import."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "torchvision==0.28.0", "-d", str(tmp_path)]
    if subprocess.run(command, capture_output=True).returncode:
        pytest.skip("torchvision 0.28.0 cannot be fetched, and vLLM's Qwen3.5 imports it")
    folder = tmp_path / "torchvision-cpu"
    with zipfile.ZipFile(next(tmp_path.glob("torchvision-*.whl"))) as wheel:
        wheel.extractall(folder)
    path = folder / "torchvision" / "_meta_registrations.py"
    before, mark, after = path.read_text().partition('@torch.library.register_fake("torchvision::nms")')
    assert mark, "torchvision has changed"
    path.write_text(before + OPERATORS + mark + after)
    return folder


def test_vllm_needs_as_many_steps(torchvision: Path, tmp_path: Path) -> None:
    """Counters in bfloat16, which its CPU kernels for gated delta nets demand: a near tie may cost a step."""
    pair = load_pair("toy-qwen3.5", None, mtp=DRAFTS, dtype="bfloat16", device="cpu")
    assert pair.drafter is not None
    prompts = [encode_chat(pair.tokenizer, [{"role": "user", "content": words}]) for words in QUESTIONS]
    source, result = tmp_path / "prompts.json", tmp_path / "answers.json"
    source.write_text(json.dumps(prompts))
    script = [f"{VENV}/bin/python", str(Path(__file__).parent / "run_mtp.py"), pair.target.spec.path]
    env = os.environ | COMMON | RUNNER["v2"] | {"PYTHONPATH": str(torchvision), "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    done = subprocess.run(
        [*script, str(DRAFTS), str(source), str(result), str(TOKENS)],
        env=env,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for prompt, told in zip(prompts, json.loads(result.read_text()), strict=True):
        run = replay(pair.target, pair.drafter, [Text(prompt, told["ids"])])
        engine = Engine(pair.target, pair.drafter, context=len(prompt) + TOKENS)
        own = [token for step in engine.generate([Request(prompt, TOKENS)]) for token in step.tokens]
        same = next((i for i, (a, b) in enumerate(zip(own, told["ids"], strict=True)) if a != b), TOKENS)
        print(f"steps: vLLM {told['steps']}, here {run.texts[0].steps}; the same text for {same} of {TOKENS} tokens")
        assert abs(told["steps"] - run.texts[0].steps) <= 1 and told["steps"] < 0.8 * TOKENS
        if same < TOKENS:
            gap = score_gap(pair, prompt + told["ids"][:same], own[same], told["ids"][same], 0.0, 0)
            assert gap < TIE["bfloat16"], f"the texts part at token {same}, by {gap:.2f}"
