"""Facts from inside the real vLLM: what the plugin of `--prove` says against what is known, on both runners; that it
changes nothing; and the tensors of a draft step, recomputed from the checkpoint."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from draftproof.doctor.facts import InsideFacts
from draftproof.doctor.facts.inside import fetch_inside, read_inside
from draftproof.launch.machine import Local
from draftproof.launch.plan import Plan
from draftproof.launch.prove import with_prove

from .conftest import COMMON, RUNNER, VENV
from .pair import BLOCK, HEAD_DIM, KV_HEADS, LAYERS, make_pair
from .test_launch import FAST, draftproof, port  # noqa: F401  (fixtures)

pytestmark = pytest.mark.vllm
PROMPT = [5 + place % 90 for place in range(100)]
DRAFT_LAYERS = [f"model.layers.{LAYERS + layer}.self_attn.attn" for layer in range(3)]
# Run by vLLM's Python. Several engines one after another in one process: the files of each are taken away.
SCRIPT = """
import gc, json, sys
from pathlib import Path
from vllm import LLM, SamplingParams
from vllm.v1.worker.worker_base import WorkerWrapperBase as Wrapper

def record(worker):
    drafter = getattr(worker.model_runner, "speculator", None) or worker.model_runner.drafter
    original = drafter.propose

    def propose(*args, **kwargs):
        found = original(*args, **kwargs)
        drafts.append(found.tolist())
        return found

    drafter.propose = propose

folder, told = Path(sys.argv[1]), []
for ask in json.loads(sys.argv[2]):
    llm = LLM(
        model=ask["target"], dtype="float32", enforce_eager=True, max_model_len=512, max_num_seqs=4, seed=0,
        **ask["more"],
        speculative_config={"method": "dflash", "model": ask["drafter"], "num_speculative_tokens": ask["drafts"]},
    )
    drafts = []
    llm.collective_rpc(record)
    if ask["steps"]:
        (folder / "bisect.json").write_text(json.dumps({"steps": ask["steps"]}))
    sampling = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    out = llm.generate([{"prompt_token_ids": ask["prompt"]}], sampling, use_tqdm=False)
    layers = llm.llm_engine.vllm_config.compilation_config.static_forward_context.values()
    told.append({
        "ids": list(out[0].outputs[0].token_ids), "drafts": drafts,
        "files": {path.name: path.read_text() for path in folder.glob("inside-*.json")},
        "patched": hasattr(Wrapper.init_device, "_draftproof_prove"),
        "hooked": sum("forward" in vars(layer.impl) for layer in layers),
    })
    (folder / "bisect.json").unlink(missing_ok=True)
    for path in folder.glob("inside-*.json"):
        path.unlink()
    del llm, layers  # the end of an engine must not fall into the life of the next
    gc.collect()
print("TOLD" + json.dumps(told))
"""


def ask(folder: Path, layout: str, steps: tuple[int, ...] = (), more: dict[str, Any] | None = None) -> dict[str, Any]:
    target, drafter = make_pair(folder, layout, constant=False)
    asked = {"target": str(target), "drafter": str(drafter), "drafts": BLOCK - 1, "prompt": PROMPT}
    return asked | {"steps": steps, "more": more or {}}


def generate(
    state: Path, runner: str, *asks: dict[str, Any], env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What the script tells, with the files and the environment of `with_prove`; `env` is put over it."""
    plan = with_prove(Plan("vllm", (), {}, "127.0.0.1", 0, ()), None)
    for name, data in plan.files.items():
        path = Path(name.replace("{state}", str(state)))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    folder = state / "inside"
    folder.mkdir(parents=True)
    ours = {name: text.replace("{state}", str(state)) for name, text in plan.env.items()} | (env or {})
    done = subprocess.run(
        [str(VENV / "bin" / "python"), "-c", SCRIPT, str(folder), json.dumps(asks)],
        env={**os.environ, **COMMON, **RUNNER[runner], "VLLM_USE_V2_MODEL_RUNNER": str(int(runner == "v2")), **ours},
        capture_output=True,
        text=True,
        check=False,
        cwd=state,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    told: list[dict[str, Any]] = json.loads(done.stdout.rpartition("TOLD")[2])
    return told


def facts_of(told: dict[str, Any]) -> InsideFacts:
    assert len(told["files"]) == 1
    return read_inside({name: text.encode() for name, text in told["files"].items()})


def change(drafter: Path, nested: dict[str, Any], tensors: dict[str, torch.Tensor]) -> None:
    config = json.loads((drafter / "config.json").read_text())
    config["dflash_config"] |= nested
    (drafter / "config.json").write_text(json.dumps(config))
    path = drafter / "model.safetensors"
    save_file(load_file(path) | tensors, path, metadata={"format": "pt"})


def test_v1_declares_and_executes_what_the_config_says_and_nothing_changes(tmp_path: Path) -> None:
    asked, faulty = ask(tmp_path / "full", "full", steps=(0, 3)), ask(tmp_path / "sliding", "sliding")
    zero = {"fc.weight": torch.zeros_like(load_file(f"{faulty['drafter']}/model.safetensors")["fc.weight"])}
    change(Path(faulty["drafter"]), {"target_layer_ids": [0, 1, 4]}, zero | {"t2d": torch.ones(512, dtype=torch.bool)})
    (plain,) = generate(tmp_path / "without", "v1", asked, env={"DRAFTPROOF_PROVE": ""})
    assert not list((tmp_path / "without" / "inside").glob("bisect-*"))
    assert not plain["patched"] and not plain["files"] and not plain["hooked"]
    full, sliding = generate(tmp_path / "with", "v1", asked, faulty, env={"DRAFTPROOF_PROVE_BISECT": "1"})
    assert full["patched"] and not full["hooked"], "after enough calls the hooks are gone"
    assert full["ids"] == plain["ids"] and full["drafts"] == plain["drafts"] != []

    facts = facts_of(full)
    assert facts.refused is None and (facts.release, facts.runner, facts.method) == ("0.32.0", "v1", "dflash")
    assert (facts.drafter_class, facts.num_speculative_tokens, facts.mask_id) == ("DFlashProposer", BLOCK - 1, 3)
    assert (facts.taps, facts.fc_inputs) == ((1, 3, 5), 384), "the engine counts from the embedding"
    assert [layer.name for layer in facts.layers] == DRAFT_LAYERS and len(facts.kv_groups) == 1
    for layer in facts.layers:
        assert (layer.window, layer.causal, layer.executed_window, layer.executed_causal) == (-1, False, -1, False)
        assert (layer.rope_base, layer.neox, layer.rotary_dim, layer.when) == (1e4, True, HEAD_DIM, "eager")
    assert facts.shares_embedding and facts.shares_head and facts.hybrid_manager is True
    assert (facts.max_model_len, facts.position_rows) == (512, 1024)
    assert not facts.zero_weights and not facts.skipped_weights

    check_steps(tmp_path / "with" / "inside", Path(asked["drafter"]), 0, 3)

    facts = facts_of(sliding)
    assert facts.refused is None and facts.taps == (1, 2, 5)
    assert facts.zero_weights == ("model.fc.weight",) and facts.skipped_weights == ("t2d",)
    for layer in facts.layers:
        assert (layer.window, layer.causal, layer.executed_window, layer.executed_causal) == (64, True, 64, True)


def test_v2_mixed_and_the_silent_override_without_the_hybrid_manager(tmp_path: Path) -> None:
    mixed = ask(tmp_path / "mixed", "mixed", steps=(0, 2))
    without = mixed | {"more": {"disable_hybrid_kv_cache_manager": True}, "steps": ()}
    good, bad = generate(tmp_path / "state", "v2", mixed, without, env={"DRAFTPROOF_PROVE_BISECT": "1"})
    assert good["ids"] == bad["ids"], "the text is verified either way"

    facts = facts_of(good)
    assert facts.refused is None and (facts.runner, facts.drafter_class) == ("v2", "DFlashSpeculator")
    assert [layer.causal for layer in facts.layers] == [True, True, False]
    assert [layer.executed_causal for layer in facts.layers] == [True, True, False]
    assert [layer.executed_window for layer in facts.layers] == [64, 64, -1] == [layer.window for layer in facts.layers]
    groups = [{name for name in group if name in DRAFT_LAYERS} for group in facts.kv_groups]
    assert [group for group in groups if group] == [{DRAFT_LAYERS[2]}, set(DRAFT_LAYERS[:2])]

    facts = facts_of(bad)
    assert facts.refused is None and facts.hybrid_manager is False and len(facts.kv_groups) == 1
    assert [layer.causal for layer in facts.layers] == [True, True, False], "declared"
    assert [layer.executed_causal for layer in facts.layers] == [False, False, False], "executed"
    assert [layer.executed_window for layer in facts.layers] == [64, 64, -1]
    check_steps(tmp_path / "state" / "inside", Path(mixed["drafter"]), 0, 2)


def check_steps(folder: Path, drafter: Path, *steps: int) -> None:
    weights = load_file(drafter / "model.safetensors")
    for step in steps:
        with safe_open(folder / f"bisect-{step}.safetensors", "pt") as file:
            told = json.loads(file.metadata()["draftproof"])
            found = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        assert (told["step"], told["missing"], told["errors"]) == (step, [], []) and told["layers"] == DRAFT_LAYERS
        check_step(found, weights)
        if step == 0:
            assert told["anchor"] == len(found["features"]) == len(PROMPT), "after the prefill all of it is new"


def check_step(found: dict[str, torch.Tensor], weights: dict[str, torch.Tensor]) -> None:
    """From the features on, everything up to the cache is recomputed from the checkpoint; its norms are all ones."""
    new, positions = found["features.positions"].long(), found["block.positions"].long()
    assert torch.equal(new, torch.arange(int(new[0]), int(positions[0]))), "up to the anchor"
    assert torch.equal(positions, torch.arange(BLOCK) + positions[0])
    assert found["block.ids"][1:].tolist() == [3] * (BLOCK - 1)
    projected = norm(found["features"] @ weights["fc.weight"].T)
    torch.testing.assert_close(found["projected"], projected, atol=1e-5, rtol=0)
    for layer in range(3):
        shape = (-1, KV_HEADS, HEAD_DIM)
        k, v = (projected @ weights[f"layers.{layer}.self_attn.{part}_proj.weight"].T for part in "kv")
        cached = found[f"context.{layer}.k"], found[f"context.{layer}.v"]
        assert cached[0].shape == cached[1].shape == (int(positions[0]), KV_HEADS, HEAD_DIM)
        torch.testing.assert_close(cached[0][new], rope(norm(k.view(shape)), new), atol=1e-5, rtol=0)
        torch.testing.assert_close(cached[1][new], v.view(shape), atol=1e-5, rtol=0)
        assert found[f"block.{layer}"].shape == (BLOCK, 128)
    assert torch.equal(found["logits"].argmax(-1), found["drafts"].long())


def norm(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def rope(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    half = HEAD_DIM // 2
    angle = (positions[:, None] * 10000.0 ** (-torch.arange(half) / half))[:, None]
    a, b = x.chunk(2, -1)
    return torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1)


def test_launched_with_prove(draftproof, port: int, tmp_path: Path) -> None:  # noqa: F811
    target, drafter = make_pair(tmp_path, "full")
    asked = ["launch", "vllm", "--target", target, "--drafter", drafter, "--venv", VENV, "--runner", "v1", "--prove"]
    asked += ["--max-model-len", 512, "--max-num-seqs", 4, "--port", port, "--served-model-name", "tiny", "--json"]
    started = draftproof(*asked, *FAST, runner="v1")
    assert started.returncode == 0, started.stderr
    folder = json.loads(started.stdout)["folder"]
    facts = fetch_inside(Local(), folder)
    assert facts is not None and facts.refused is None and facts.taps == (1, 3, 5)
    assert facts.layers[0].when == "not observed", "nothing was drafted yet"
    body = {"model": "tiny", "prompt": "w5 w9", "max_tokens": 32, "temperature": 0}
    answer = httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=60).json()
    assert answer["metrics"]["speculative_decoding"]["per_step_accepted"], "--per-request-spec-decode-metrics"
    facts = fetch_inside(Local(), folder)
    assert facts is not None and facts.refused is None
    assert [(layer.executed_causal, layer.when) for layer in facts.layers] == [(False, "eager")] * 3
