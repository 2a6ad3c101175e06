"""`draftproof doctor` on real servers that `draftproof launch` started: a healthy pair, and one fault at a time."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file

from .conftest import VENV
from .pair import BLOCK, LAYERS, make_pair
from .test_launch import draftproof, port  # noqa: F401  (fixtures)

pytestmark = pytest.mark.vllm
full_only = pytest.mark.skipif(os.environ.get("DRAFTPROOF_FULL") != "1", reason="minutes a server: DRAFTPROOF_FULL=1")
CONFIGURATION = ("files", "current", "argv", "config", "taps", "windows", "causality", "rope", "heads", "block")
DRAFT_LAYERS = [f"model.layers.{LAYERS + layer}.self_attn.attn" for layer in range(3)]
EVEN = {"target_layer_ids": [1, 2, 3]}  # as the authors' formula spaces them
STEPS = ("--per-request-spec-decode-metrics", "detailed")
UNLIKE = ("published-difference",)  # a copy of the shipped drafter whose config was changed
# A plugin beside vLLM: context keys normed layer by layer, as docs/vllm_cpu_context_keys.md mends them.
MENDED = """
import torch

def register():
    from vllm import _custom_ops as ops
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def by_layer(self, keys):
        out = torch.empty_like(keys)
        for layer in range(keys.shape[0]):
            ops.rms_norm(out[layer], keys[layer], self._k_norm_weights[layer], self._rms_norm_eps)
        return out

    DFlashQwen3Model._normalize_context_k = by_layer
"""
# Keys of the drafter's config that the server gets wrong, and the hypothesis that has to explain its steps.
FAULTS: dict[str, dict[str, Any]] = {
    "taps-minus-1": {"dflash_config": {"mask_token_id": 16, "target_layer_ids": [0, 7, 13, 19, 26]}},
    "mask-id-0": {"dflash_config": {"mask_token_id": 0, "target_layer_ids": [1, 8, 14, 20, 27]}},
    "rope-base-1e6": {"rope_theta": 1e6},
    "window-ignored": {},
}


class Report(NamedTuple):
    told: dict[str, Any]

    def verdict(self, name: str) -> str:
        return str(self.link(name)["verdict"])

    def link(self, name: str) -> dict[str, Any]:
        return next(link for link in self.told["links"] if link["code"] == f"doctor-{name}")

    @property
    def refuted(self) -> set[str]:
        return {link["code"].removeprefix("doctor-") for link in self.told["links"] if link["verdict"] == "refuted"}

    def unproved(self, names: tuple[str, ...]) -> dict[str, str]:
        return {name: self.link(name)["message"] for name in names if self.verdict(name) != "proved"}


class Served:
    """A server of one pair, and the doctor for it."""

    def __init__(self, call: Any, at: int, runner: str) -> None:
        self.call, self.port, self.runner = call, at, runner

    def launch(
        self, target: Path | str, drafter: Path, *words: object, accept: tuple[str, ...] = (),
        engine: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        ask: list[object] = ["launch", "vllm", "--target", target, "--drafter", drafter, "--runner", self.runner]
        ask += ["--venv", VENV]
        ask += ["--max-num-seqs", 4, "--port", self.port, "--gpu-memory-utilization", 0.3, "--json", *words]
        for code in ("vllm-cpu-context-keys", *accept):
            ask += ["--accept", code]
        done = self.call(*ask, "--", "--enforce-eager", "--dtype", "float32", *engine, runner=self.runner)
        assert done.returncode == 0, done.stderr

    def doctor(self, *words: object) -> Report:
        done = self.call("doctor", f"http://127.0.0.1:{self.port}", "--json", *words)
        assert done.returncode in (0, 1, 3), done.stderr
        told = json.loads(done.stdout)
        assert told["exit_code"] == done.returncode
        return Report(told)

    def stop(self) -> None:
        assert self.call("launch", "stop", f"vllm-{self.port}").returncode == 0


@pytest.fixture
def v1(draftproof: Any, port: int) -> Served:  # noqa: F811
    return Served(draftproof, port, "v1")


@pytest.fixture
def v2(draftproof: Any, port: int) -> Served:  # noqa: F811
    return Served(draftproof, port, "v2")


def test_a_healthy_pair_is_proved_until_a_file_changes(v2: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "mixed", is_causal=False, dflash_config=EVEN)
    v2.launch(target, drafter, "--prove", "--max-model-len", 512)
    report = v2.doctor("--prompts", 8, "--max-tokens", 64)
    assert report.unproved((*CONFIGURATION, "pair", "release", "acceptance", "cache")) == {}
    assert not report.refuted and report.told["exit_code"] == 0
    assert report.told["acceptance"]["kind"] == "steps" and report.told["acceptance"]["observed"] == BLOCK
    assert report.link("windows")["seen"] == report.link("windows")["expected"]

    edit(drafter, dflash_config={"mask_token_id": 3, "target_layer_ids": [0, 2, 4]})
    report = v2.doctor("--prompts", 1, "--max-tokens", 8, "--no-oracle")
    assert report.verdict("current") == "refuted" and report.link("current")["where"] == str(drafter / "config.json")
    assert report.verdict("taps") == "refuted" and report.link("taps")["explained_by"], "and what follows from it"


def test_one_kv_group_overrides_causality(v2: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "mixed")
    accept, engine = ("vllm-causal-per-group",), ("--disable-hybrid-kv-cache-manager",)
    v2.launch(target, drafter, "--prove", "--max-model-len", 512, accept=accept, engine=engine)
    report = v2.doctor("--prompts", 2, "--max-tokens", 16, "--no-oracle")
    found = report.link("causality")
    assert found["verdict"] == "refuted" and found["seen"] != found["expected"]
    assert "KV cache group" in found["message"] and "ran the other one" in found["message"]
    assert "--disable-hybrid-kv-cache-manager" in found["fix"] and DRAFT_LAYERS[0] in found["where"]
    assert report.verdict("windows") == "proved", "windows hold all the same"


def test_weights_of_zeros_and_a_block_too_long(v1: Served, tmp_path: Path) -> None:
    target, drafter = make_pair(tmp_path, "full")
    path = drafter / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"fc.weight": torch.zeros_like(weights["fc.weight"])}, path, metadata={"format": "pt"})
    words = ("--prove", "--max-model-len", 512, "--num-speculative-tokens", 12)
    v1.launch(target, drafter, *words, accept=("k-not-block", "vllm-k-above-block"))
    report = v1.doctor("--prompts", 2, "--max-tokens", 32, "--no-oracle")
    assert report.verdict("heads") == "refuted" and "fc.weight" in report.link("heads")["seen"]
    found = report.link("block")
    assert (found["verdict"], found["expected"], found["seen"]) == ("refuted", f"7 for a block of {BLOCK}", "12")
    assert report.unproved(("files", "current", "argv", "config", "taps", "windows", "causality", "rope")) == {}


def test_synthetic_acceptance_is_no_acceptance(v2: Served, tmp_path: Path) -> None:
    """On V2: V1's CPU kernel asserts "Synthetic acceptance not supported with CPU sampling"."""
    target, drafter = make_pair(tmp_path, "full")
    made_up = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
    engine = ("--speculative-config", json.dumps(made_up))
    v2.launch(target, drafter, "--prove", "--max-model-len", 512, accept=("vllm-rejection-synthetic",), engine=engine)
    report = v2.doctor("--prompts", 2, "--max-tokens", 24, "--no-oracle")
    assert report.verdict("release") == "refuted" and "vllm-rejection-synthetic" in report.link("release")["message"]
    assert report.verdict("acceptance") == "cannot tell" and "synthetic" in report.link("acceptance")["message"]


def shipped(folder: Path, *, full: bool, **changes: Any) -> Path:
    """A copy of the shipped drafter, with all layers full if asked: V1 takes no mixed one, and is much faster."""
    from draftproof.models.hub import resolve_drafter

    shutil.copytree(resolve_drafter("smollm2-135m-dflash"), folder)
    if full:
        edit(folder, layer_types=["full_attention"] * 5, use_sliding_window=False, sliding_window=None)
    edit(folder, **changes)
    return folder


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def test_the_fault_of_the_cpu_backend_is_named(v1: Served, tmp_path: Path) -> None:
    drafter = shipped(tmp_path / "drafter-dflash", full=True)
    v1.launch("smollm2-135m", drafter, "--prove", "--bisect", "--max-model-len", 1024, accept=UNLIKE)
    report = v1.doctor("--prompts", 4, "--max-tokens", 40, "--bisect")
    changed = report.unproved(CONFIGURATION)
    assert changed.keys() == {"windows"} and "the engine does what the config says" in changed["windows"]
    check_the_backend(report)


@full_only
def test_the_fault_of_the_cpu_backend_is_named_on_v2(v2: Served, tmp_path: Path) -> None:
    drafter = shipped(tmp_path / "drafter-dflash", full=False)
    v2.launch("smollm2-135m", drafter, "--prove", "--bisect", "--max-model-len", 1024)
    report = v2.doctor("--prompts", 4, "--max-tokens", 40, "--bisect")
    assert report.unproved(CONFIGURATION) == {}
    check_the_backend(report)


def check_the_backend(report: Report) -> None:
    found, oracle = report.link("acceptance"), report.told["acceptance"]
    assert found["verdict"] == "refuted" and "context.1.k" in found["message"]
    assert "context-keys-layer-0" in oracle["leaders"] and "healthy" not in oracle["leaders"]
    assert oracle["observed"] < oracle["expected"]
    assert report.told["bisect"]["first"]["stage"] == "context.1.k"
    print({fit["name"]: f"{fit['misses']:g} of {fit['compared']}" for fit in oracle["fits"][:4]}, oracle["leaders"])


@full_only
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_named_from_the_steps_alone(v1: Served, tmp_path: Path, fault: str) -> None:
    """The server reads an edited config, the doctor the honest one. Without --prove only steps and the log are seen."""
    honest = shipped(tmp_path / "honest" / "drafter-dflash", full=fault != "window-ignored")
    served = shipped(tmp_path / "served" / "drafter-dflash", full=True, **FAULTS[fault])
    mended = lay_plugin(tmp_path / "plugin")
    words = ("--max-model-len", 1024, "--env", f"PYTHONPATH={mended}")
    v1.launch("smollm2-135m", served, *words, accept=UNLIKE, engine=STEPS)
    report = v1.doctor("--prompts", 6, "--max-tokens", 48, "--drafter", honest)
    oracle = report.told["acceptance"]
    print(fault, oracle["leaders"], f"observed {oracle['observed']:.2f} expected {oracle['expected']:.2f}")
    for fit in oracle["fits"][:4]:
        print("   ", fit["name"], fit["misses"], "of", fit["compared"])
    assert report.verdict("acceptance") == "refuted"
    assert fault in oracle["leaders"] and len(oracle["leaders"]) <= 2


def lay_plugin(folder: Path) -> Path:
    about = folder / "mended-1.dist-info"
    about.mkdir(parents=True)
    (folder / "mended.py").write_text(MENDED)
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: mended\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[vllm.general_plugins]\nmended = mended:register\n")
    return folder
