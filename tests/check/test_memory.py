"""Memory by hand arithmetic: Qwen3.6-27B with its drafter, parts that cannot be told, and what the findings say."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from draftproof.check.deployment import Deployment
from draftproof.check.footprint import dense_parameters, drafter_parameters, kv_bytes
from draftproof.check.memory import TARGET, Memory, estimate, memory_findings
from draftproof.check.memory_parts import Part
from draftproof.check.options import Options
from draftproof.config.drafter import read_drafter
from draftproof.config.engines import engines
from draftproof.config.target import read_target
from tests.config.cases import CONFIGS, TARGETS, YARDSTICK

GIB = 2**30
CONTEXT = 32768
STATE = 48 * 128 * 128 * 4  # one layer's state, float32
WINDOW = (2 * 16 * 128 + 48 * 128) * (4 - 1 + 15) * 2  # its convolution's columns, 15 of them for drafts


def deployment(target: str = "Qwen3.6-27B", engine: str = "vllm", mtp: bool = False, **options: Any) -> Deployment:
    drafter = None if mtp else read_drafter(CONFIGS / "Qwen3.6-27B-DFlash")
    chosen = Options(method="mtp" if mtp else "dflash", **{"max_model_len": CONTEXT, **options})
    return Deployment(engines()[engine], None, drafter, read_target(TARGETS / target), chosen)


def parts(memory: Memory) -> dict[str, Part]:
    return {part.name: part for part in memory.parts}


def sizes(**options: Any) -> dict[str, int | None]:
    return {name: part.bytes for name, part in parts(estimate(deployment(**options))).items()}


def test_the_pair_by_hand() -> None:
    attention = 5120 * (2 * 24 * 256 + 2 * 4 * 256) + 24 * 256 * 5120  # queries and gate, keys, values, output
    linear = 5120 * (10240 + 6144 + 2 * 48) + 10240 * 4 + 6144 * 5120
    target = 16 * attention + 48 * linear + 64 * 3 * 5120 * 17408 + 2 * 248320 * 5120
    split = 5 * (5120 * (2 * 4096 + 2 * 1024) + 3 * 5120 * 17408)
    whole = 5 * 5120 * 5120 + 5 * (2 * 5120 + 2 * 128) + 2 * 5120
    assert sizes(max_num_seqs=2) == {
        TARGET: 2 * target,
        "drafter weights": 2 * (split + whole),
        "target K/V rows": 16 * 2 * 4 * 256 * 2 * CONTEXT * 2,
        "draft K/V rows": 2 * 8 * 128 * 2 * CONTEXT * 2,
        "draft K/V rows, sliding": 4 * 2 * 8 * 128 * 2 * (2048 + 2048) * 2,
        "recurrent states": 48 * (STATE + WINDOW) * (2 + 15) * 2,
        "activations, CUDA context and graphs": None,
    }
    assert 26.8e9 < target < 27e9


def test_tensor_parallel_halves_all_but_fc_and_norms() -> None:
    one, two = sizes(), sizes(tensor_parallel=2)
    size = drafter_parameters(read_drafter(CONFIGS / "Qwen3.6-27B-DFlash"))
    for name in (TARGET, "target K/V rows", "draft K/V rows", "draft K/V rows, sliding", "recurrent states"):
        assert two[name] == -(-(one[name] or 0) // 2), name
    assert two["drafter weights"] == size.split + 2 * size.whole
    assert sizes(tensor_parallel=2, draft_tensor_parallel=1)["drafter weights"] == one["drafter weights"]
    assert sizes(tensor_parallel=8)["target K/V rows"] == (one["target K/V rows"] or 0) // 4, "a head is not split"
    assert sizes(pipeline_parallel=2)["target K/V rows"] == (one["target K/V rows"] or 0) // 2


def test_kv_dtypes() -> None:
    one, fp8 = sizes(), sizes(kv_dtype="fp8_e4m3")
    for name in ("target K/V rows", "draft K/V rows", "draft K/V rows, sliding"):
        assert fp8[name] == (one[name] or 0) // 2
    assert fp8["recurrent states"] == one["recurrent states"]
    assert sizes(kv_dtype="fp8", draft_kv_dtype="bfloat16")["draft K/V rows"] == one["draft K/V rows"]
    assert sizes(kv_dtype="strange")["target K/V rows"] is None
    assert (kv_bytes("q8_0"), kv_bytes("float32")) == (34 / 32, 4)


@pytest.mark.parametrize(
    ("options", "count"),
    [({}, 17), ({"prefix_caching": False}, 16), ({"engine": "sglang"}, 16), ({"engine": "llama.cpp"}, 1)],
)
def test_states_of_a_sequence(options: dict[str, Any], count: int) -> None:
    assert sizes(**options)["recurrent states"] == 48 * (STATE + WINDOW) * count


def test_a_stated_state_dtype_counts() -> None:
    made = deployment()
    assert made.target.linear is not None
    target = replace(made.target, linear=replace(made.target.linear, state_dtype="bfloat16"))
    states = parts(estimate(replace(made, target=target)))["recurrent states"]
    assert states.bytes == 48 * (STATE // 2 + WINDOW) * 17 and "bfloat16" in states.how


def test_windows_bound_rows_unless_the_manager_is_off() -> None:
    full = 4 * 2 * 8 * 128 * 2 * CONTEXT
    assert sizes(hybrid_manager=False)["draft K/V rows, sliding"] == full
    assert sizes(max_batched_tokens=10**6)["draft K/V rows, sliding"] == full
    gemma = parts(estimate(deployment("gemma-3-4b-it")))
    assert gemma["target K/V rows, sliding"].bytes == 29 * 2 * 4 * 256 * 2 * (1024 + 2048)
    assert gemma["target K/V rows"].bytes == 5 * 2 * 4 * 256 * 2 * CONTEXT


def test_mtp_has_no_drafter_but_a_layer_more() -> None:
    found = parts(estimate(deployment(mtp=True, drafts=3)))
    assert "drafter weights" not in found
    assert found["target K/V rows"].bytes == 17 * 2 * 4 * 256 * 2 * CONTEXT
    assert " x 5 states" in found["recurrent states"].how


def test_weights_from_files(tmp_path: Path) -> None:
    config = (TARGETS / "Qwen3-8B" / "config.json").read_text()
    (tmp_path / "config.json").write_text(config)
    made = replace(deployment(), target=read_target(tmp_path))
    assert "by shape" in parts(estimate(made))[TARGET].how
    for name, size in (("model-1.safetensors", 1000), ("model-2.safetensors", 24), ("consolidated.safetensors", 9)):
        (tmp_path / name).write_bytes(bytes(size))
    index = {"metadata": {"total_size": 5000}, "weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert parts(estimate(made))[TARGET].bytes == 1024
    (tmp_path / "model-1.safetensors").unlink()
    assert parts(estimate(made))[TARGET].bytes == 5000
    assert parts(estimate(made, target_bytes=77))[TARGET].bytes == 77
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    assert "by shape" in parts(estimate(made))[TARGET].how


@pytest.mark.parametrize(
    "change", [{"experts": 64}, {"quantized": True}, {"intermediate_size": None}, {"linear": None}]
)
def test_weights_that_cannot_be_told(change: dict[str, Any]) -> None:
    made = deployment()
    made = replace(made, target=replace(made.target, **change))
    assert dense_parameters(made.target) is None
    memory = estimate(made, gpu_bytes=80 * GIB)
    assert memory.known_bytes is None and parts(memory)[TARGET].bytes is None
    assert [finding.code for finding in memory_findings(memory)] == ["memory-unknown"]
    assert [finding.code for finding in memory_findings(estimate(made, gpu_bytes=GIB))] == ["memory-exceeds-gpu"]


def test_a_gguf_is_not_the_checkpoint_whose_config_was_read() -> None:
    memory = estimate(deployment(engine="llama.cpp"), gpu_bytes=24 * GIB)
    assert parts(memory)[TARGET].bytes is None and parts(memory)["drafter weights"].bytes is None
    assert [finding.code for finding in memory_findings(memory)] == ["memory-unknown"]
    assert parts(estimate(deployment(engine="llama.cpp"), target_bytes=16 * GIB))[TARGET].bytes == 16 * GIB


def test_what_is_not_described_is_named() -> None:
    made = deployment()
    for change, name in (
        ({"layer_kinds": ("conv",) * 64}, "other layers' state"),
        ({"model_type": "deepseek_v3"}, "target K/V rows"),
        ({"linear": None}, "recurrent states"),
    ):
        part = parts(estimate(replace(made, target=replace(made.target, **change))))[name]
        assert part.bytes is None and part.how.startswith("not estimated")
    unknown = replace(made, target=replace(made.target, max_positions=None), options=Options())
    assert parts(estimate(unknown))["target K/V rows"].bytes is None


def test_findings() -> None:
    small, large, unsized = (
        memory_findings(estimate(deployment(), gpu_bytes=size)) for size in (48 * GIB, 80 * GIB, None)
    )
    assert [(f.code, f.severity) for f in small] == [("memory-exceeds-gpu", "error")]
    assert [(f.code, f.severity) for f in large] == [("memory-estimate", "note")]
    assert [f.code for f in unsized] == ["memory-estimate"]
    crowded = estimate(deployment(max_num_seqs=64), gpu_bytes=80 * GIB)
    assert "fewer than 64 x 32768" in memory_findings(crowded)[0].message
    assert not any(f.severity == "error" for f in memory_findings(crowded)), "engines queue what does not fit"


def test_what_is_left() -> None:
    memory = estimate(deployment(max_num_seqs=2), gpu_bytes=80 * GIB, utilisation=0.9)
    found = sizes(max_num_seqs=2)
    fixed = sum(found[name] or 0 for name in (TARGET, "drafter weights", "recurrent states", "draft K/V rows, sliding"))
    assert memory.rows_bytes == int(80 * GIB * 0.9) - fixed
    assert memory.rows_fit == memory.rows_bytes // (65536 + 4096)
    assert memory.known_bytes is not None and memory.known_bytes < memory.total_bytes
    assert json.loads(json.dumps(memory.as_dict()))["rows_fit"] == memory.rows_fit


def test_shapes_agree_with_real_weights() -> None:
    if not (YARDSTICK / "model.safetensors").exists():
        pytest.skip(f"{YARDSTICK} is not there")
    with (YARDSTICK / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    data = max(entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__")
    size = drafter_parameters(read_drafter(YARDSTICK))
    assert 2 * (size.split + size.whole) == data
