"""Tensor names in the wild, and checkpoints that are refused: each error has its code and names the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from draftproof.errors import UserError
from draftproof.models import weights
from draftproof.models.dflash import DFlashDrafter
from tests import tiny

Tensors = dict[str, Tensor]
UP = "layers.1.mlp.up_proj.weight"


def good(**changes: Any) -> Tensors:
    drafter = tiny.drafter(tiny.target(), **changes)
    return {name: weight.float().clone() for name, weight in drafter.model.state_dict().items()}


def write(folder: Path, tensors: Tensors, **changes: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(tiny.drafter_config(**changes)))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


def check_equal(folder: Path, tensors: Tensors) -> None:
    loaded = DFlashDrafter.load(folder, tiny.target()).model.state_dict()
    assert loaded.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(loaded[name], tensor.double()), name


def refused(code: str, named: str, folder: Path) -> None:
    with pytest.raises(UserError) as caught:
        DFlashDrafter.load(folder, tiny.target())
    assert caught.value.code == code and named in caught.value.message, caught.value


# --- names ------------------------------------------------------------------------------------------


def prefixed(tensors: Tensors) -> Tensors:
    return {f"model.{name}": tensor for name, tensor in tensors.items()}


def fused(tensors: Tensors) -> Tensors:
    out = dict(tensors)
    for layer in range(3):
        at = f"layers.{layer}.self_attn."
        for kind in ("weight", "bias"):
            parts = [out.pop(f"{at}{p}_proj.{kind}", None) for p in "qkv"]
            if parts[0] is not None:
                out[f"{at}qkv_proj.{kind}"] = torch.cat(parts)  # type: ignore[arg-type]
    return out


def muse(tensors: Tensors) -> Tensors:
    names = {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}
    return {names.get(name, name): tensor for name, tensor in tensors.items()}


def all_at_once(tensors: Tensors) -> Tensors:
    return prefixed(fused(muse(tensors)))


@pytest.mark.parametrize("spelling", [dict, prefixed, fused, muse, all_at_once])
@pytest.mark.parametrize("bias", [False, True])
def test_every_spelling_loads_the_same(spelling: Callable[[Tensors], Tensors], bias: bool, tmp_path: Path) -> None:
    tensors = good(attention_bias=bias)
    check_equal(write(tmp_path, spelling(tensors), attention_bias=bias), tensors)


@pytest.mark.parametrize("order", ["kqv", "qvk"])
def test_control_a_fused_tensor_in_another_order(order: str, tmp_path: Path) -> None:
    tensors, at = good(), "layers.0.self_attn."
    wrong = {name: t for name, t in tensors.items() if not (name.startswith(at) and name.endswith("_proj.weight"))}
    wrong[f"{at}o_proj.weight"] = tensors[f"{at}o_proj.weight"]
    wrong[f"{at}qkv_proj.weight"] = torch.cat([tensors[f"{at}{p}_proj.weight"] for p in order])
    with pytest.raises(AssertionError, match=r"layers\.0\.self_attn"):
        check_equal(write(tmp_path, wrong), tensors)


def test_weights_in_bfloat16(tmp_path: Path) -> None:
    tensors = {name: tensor.bfloat16() for name, tensor in good().items()}
    check_equal(write(tmp_path, tensors), tensors)


def test_weights_in_two_shards(tmp_path: Path) -> None:
    tensors = good()
    names = sorted(tensors)
    write(tmp_path, tensors)
    (tmp_path / "model.safetensors").unlink()
    shards = {f"model-{i:05}-of-00002.safetensors": names[i - 1 :: 2] for i in (1, 2)}
    for file, part in shards.items():
        save_file({name: tensors[name] for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    check_equal(tmp_path, tensors)


# --- refusals ---------------------------------------------------------------------------------------


NAMES = ["fc.weight", "hidden_norm.weight", "norm.weight"] + [
    f"layers.2.{part}.weight"
    for part in (
        "input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj",
        *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")),
    )
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_a_missing_tensor(name: str, tmp_path: Path) -> None:
    tensors = good()
    del tensors[name]
    refused("weights-invalid", f"missing {name}", write(tmp_path, tensors))


@pytest.mark.parametrize(
    "name", ["layers.3.mlp.up_proj.weight", "layers.0.self_attn.q_proj.bias", "candidate_selector.x", "d2t"]
)
def test_an_extra_tensor(name: str, tmp_path: Path) -> None:
    refused("weights-invalid", f"unexpected {name}", write(tmp_path, good() | {name: torch.ones(3)}))


def test_missing_and_extra_are_named_together(tmp_path: Path) -> None:
    tensors = good()
    tensors["fc_weight"] = tensors.pop("fc.weight")
    refused("weights-invalid", "missing fc.weight; unexpected fc_weight", write(tmp_path, tensors))


@pytest.mark.parametrize("name", ["fc.weight", UP, "norm.weight", "layers.0.self_attn.k_norm.weight"])
def test_a_misshapen_tensor(name: str, tmp_path: Path) -> None:
    tensors = good()
    tensors[name] = tensors[name][:-1]
    refused("weights-invalid", f"{name} has shape", write(tmp_path, tensors))


def test_a_transposed_tensor(tmp_path: Path) -> None:
    tensors = good()
    tensors[UP] = tensors[UP].T
    refused("weights-invalid", f"{UP} has shape [32, 48], the config asks for [48, 32]", write(tmp_path, tensors))


def test_a_fused_tensor_of_another_width(tmp_path: Path) -> None:
    tensors = fused(good())
    name = "layers.0.self_attn.qkv_proj.weight"
    tensors[name] = tensors[name][:-1]
    refused("weights-invalid", f"unexpected {name}", write(tmp_path, tensors))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_nan_and_infinity(bad: float, tmp_path: Path) -> None:
    tensors = good()
    tensors[UP][3, 5] = bad
    refused("weights-invalid", f"{UP} holds NaN or infinity", write(tmp_path, tensors))


def test_control_without_the_look_for_nan_the_checkpoint_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = good()
    tensors[UP][3, 5] = torch.nan
    monkeypatch.setattr(weights.torch, "isfinite", torch.ones_like)
    DFlashDrafter.load(write(tmp_path, tensors), tiny.target())


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_a_truncated_file(keep: int, tmp_path: Path) -> None:
    file = write(tmp_path, good()) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused("weights-truncated", "model.safetensors", tmp_path)


def test_a_config_without_weights(tmp_path: Path) -> None:
    (write(tmp_path, good()) / "model.safetensors").unlink()
    refused("weights-missing", str(tmp_path), tmp_path)


def test_a_second_file_does_not_replace_tensors(tmp_path: Path) -> None:
    """Without an index, transformers and other readers load model.safetensors alone."""
    tensors = good()
    write(tmp_path, tensors)
    save_file({UP: torch.zeros_like(tensors[UP])}, tmp_path / "old.safetensors")
    check_equal(tmp_path, tensors)


def test_one_tensor_under_two_names(tmp_path: Path) -> None:
    """Which of the two would count depends on the order of the file."""
    both = good() | {"model.norm.weight": torch.zeros(tiny.HIDDEN)}
    refused("weights-invalid", "norm.weight", write(tmp_path, both))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn, torch.bool])
def test_weights_of_a_quantised_type(dtype: torch.dtype, tmp_path: Path) -> None:
    """Without their scales such numbers mean nothing."""
    tensors = good()
    tensors[UP] = tensors[UP].to(dtype)
    refused("weights-invalid", UP, write(tmp_path, tensors))


def test_a_fused_tensor_that_is_a_scalar(tmp_path: Path) -> None:
    name = "layers.0.self_attn.qkv_proj.weight"
    refused("weights-invalid", name, write(tmp_path, good() | {name: torch.tensor(1.0)}))


# --- embedding and head: the target's ---------------------------------------------------------------


def borrowed() -> Tensors:
    owner = tiny.target()
    return {"embed_tokens.weight": owner.embedding.weight.float(), "lm_head.weight": owner.head.weight.float()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("prefix", ["", "model."])
def test_copies_of_the_targets_embedding_and_head_are_dropped(prefix: str, dtype: torch.dtype, tmp_path: Path) -> None:
    copies = {prefix + name: tensor.clone().to(dtype) for name, tensor in borrowed().items()}
    check_equal(write(tmp_path, good() | copies), good())


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
@pytest.mark.parametrize("change", ["one value", "fewer rows", "nan"])
def test_an_own_embedding_or_head_is_refused(name: str, change: str, tmp_path: Path) -> None:
    own = borrowed()[name].clone()
    if change == "fewer rows":
        own = own[:32]
    else:
        own[7, 7] = own[7, 7] + 1 if change == "one value" else torch.nan
    refused("family-not-runnable", name, write(tmp_path, good() | {name: own}))
