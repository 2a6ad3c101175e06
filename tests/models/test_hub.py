"""Names that become folders, checkpoints that are refused, the packed drafter. Nothing uses a network."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftproof.errors import UserError
from draftproof.models import checkpoint, embedded, hub, pack


def write_safetensors(path: Path, header: Any, data: bytes = b"") -> None:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + data)


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused(code: str, folder: Path, named: str = "") -> None:
    with pytest.raises(UserError) as caught:
        checkpoint.check_weights(folder)
    assert caught.value.code == code and named in caught.value.message, caught.value


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"auto_map": {"AutoModel": "evil.Model"}}')
    (folder / "evil.py").write_text("raise SystemExit('executed')")
    tensors = {"a": torch.ones(2, 3), "b": torch.zeros(4, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


# --- names ------------------------------------------------------------------------------------------


def test_local_folders(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hub.resolve_target(str(model)) == model
    monkeypatch.chdir(model.parent)
    assert hub.resolve_drafter("model") == Path("model")


@pytest.mark.parametrize("name", ["nothing", "./no/where", "/no/where", "a/b/c", "../x", "~/no-such-folder"])
def test_a_folder_that_is_not_there(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(UserError) as caught:
        hub.resolve_target(name)
    assert caught.value.code == "not-found" and "smollm2-135m" in caught.value.fix


@pytest.mark.parametrize("name", ["x" * 5000, "org/" + "x" * 5000, "org/na--me", "org/name.", "~nobody-of-that-name/x"])
def test_a_name_that_nothing_can_have(name: str) -> None:
    with pytest.raises(UserError) as caught:
        hub.resolve_target(name)
    assert caught.value.code == "not-found"


def test_not_a_model(model: Path) -> None:
    for path in (model.parent, model / "config.json"):
        with pytest.raises(UserError) as caught:
            hub.resolve_target(str(path))
        assert caught.value.code == "not-a-model"


def test_a_hub_id_without_network(tmp_path: Path) -> None:
    code = "from draftproof.models.hub import resolve_target; resolve_target('some-org/some-model')"
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert "[hub-unreachable]" in done.stderr and "HF_HUB_OFFLINE is set" in done.stderr, done.stderr


def test_a_hub_id_from_the_hubs_cache(tmp_path: Path) -> None:
    commit, repo = "0" * 40, tmp_path / "hub" / "models--some-org--some-model"
    snapshot = repo / "snapshots" / commit
    for folder in (snapshot, repo / "blobs", repo / "refs"):
        folder.mkdir(parents=True)
    (repo / "refs" / "main").write_text(commit)
    (snapshot / "config.json").write_text("{}")
    write_safetensors(repo / "blobs" / "abc", {"a": entry("F32", [1], 0, 4)}, b"0000")
    (snapshot / "model.safetensors").symlink_to("../../blobs/abc")
    code = (
        "from draftproof.models.hub import resolve_target; from draftproof.models.checkpoint import check_weights; "
        "folder = resolve_target('some-org/some-model'); "
        "print(folder, check_weights(folder))"
    )
    env = {**os.environ, "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == f"{snapshot} {{'a': ('F32', (1,))}}", done.stderr


def test_nothing_is_fetched_when_the_converter_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path))
    monkeypatch.setattr(embedded, "find_spec", lambda name: None if name == "gguf" else object())
    with pytest.raises(UserError) as caught:
        hub.resolve_target(hub.EMBEDDED_TARGET)
    assert caught.value.code == "dependency-missing" and "gguf" in caught.value.message
    assert list(tmp_path.iterdir()) == []


# --- weights ----------------------------------------------------------------------------------------


def test_good_weights(model: Path) -> None:
    assert checkpoint.check_weights(model) == {"a": ("F32", (2, 3)), "b": ("BF16", (4,))}


@pytest.mark.parametrize("keep", [0, 5, 8, 40, -1])
def test_truncated_weights(model: Path, keep: int) -> None:
    path = model / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    refused("weights-truncated", model, "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"[1, 2]",
        b"[" * 100_000,
        b"\xff\xfe",
        {"a": entry("F32", [2], 0, 12)},
        {"a": entry("F32", [-1], 0, 8)},
        {"a": entry("F32", [2], -8, 0)},
        {"a": entry("F32", [2], 100, 108)},
        {"a": entry("F99", [2], 0, 8)},
        {"a": {"dtype": "F32"}},
        {"a": None},
        {"a": entry([], [2], 0, 8)},  # type: ignore[arg-type]
    ],
    ids=lambda header: str(header)[:40],
)
def test_impossible_headers(model: Path, header: Any) -> None:
    write_safetensors(model / "model.safetensors", header, b"12345678")
    refused("weights-truncated", model, "model.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        {"a": entry("F32", [1], 0, 4)},
        {"a": entry("F32", [1], 4, 8)},
        {"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 0, 4)},
        {"a": entry("F32", [1], 0, 4), "b": entry("F16", [1], 5, 7)},
        {},
    ],
    ids=["bytes behind", "a gap before", "overlap", "a gap between", "no tensors"],
)
def test_tensors_fill_the_file(model: Path, header: Any) -> None:
    write_safetensors(model / "model.safetensors", header, b"12345678")
    refused("weights-truncated", model, "model.safetensors")
    with pytest.raises(SafetensorError):  # the library's word
        load_file(model / "model.safetensors")


def test_tensors_in_any_order_and_empty_ones_fill_the_file(model: Path) -> None:
    header = {"a": entry("F32", [1], 4, 8), "none": entry("F32", [0], 4, 4), "b": entry("F32", [1], 0, 4)}
    write_safetensors(model / "model.safetensors", header, b"12345678")
    assert set(checkpoint.check_weights(model)) == set(load_file(model / "model.safetensors"))


def test_a_header_length_beyond_reason(model: Path) -> None:
    (model / "model.safetensors").write_bytes(b"\xff" * 8 + b"{}" * 100)
    refused("weights-truncated", model)


def write_index(folder: Path, name: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": name}}))


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../model.safetensors",
        "x/../../m.safetensors",
        "sub/m.safetensors",
        "..\\m.safetensors",
        7,
        "m.bin",
    ],
)
def test_path_tricks_in_the_index(model: Path, name: Any) -> None:
    write_index(model, name)
    refused("weights-unsafe", model, repr(name))


def test_shards(model: Path) -> None:
    write_index(model, "model.safetensors")
    assert set(checkpoint.check_weights(model)) == {"a", "b"}
    write_index(model, "model-00002.safetensors")
    refused("weights-missing", model, "model-00002")
    (model / "model.safetensors.index.json").write_text("[]")
    refused("bad-json", model)


def test_a_link_that_leaves_the_folder(model: Path) -> None:
    outside = model.parent / "outside.safetensors"
    (model / "model.safetensors").rename(outside)
    (model / "model.safetensors").symlink_to(outside)
    refused("weights-unsafe", model, "outside")


def test_a_surplus_file_is_checked_too(model: Path) -> None:
    (model / "other.safetensors").write_bytes(b"12")
    refused("weights-truncated", model, "other.safetensors")


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth", "last.ckpt"])
def test_pickles_are_never_taken(model: Path, name: str) -> None:
    (model / "model.safetensors").rename(model / name)
    refused("weights-unsafe", model, name)


def test_no_weights(model: Path) -> None:
    (model / "model.safetensors").unlink()
    refused("weights-missing", model)


# --- the packed drafter -----------------------------------------------------------------------------


def test_rows_are_quantised_within_half_a_step() -> None:
    weight = torch.randn(64, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-6, 2, 64)[:, None]
    weight[3] = 0
    quantised, scales = pack.quantise_rows(weight)
    restored = quantised.float() * scales[:, None]
    peak = weight.abs().amax(dim=1)
    assert quantised.dtype == torch.int8 and torch.equal(restored[3], weight[3])
    # no clip costs half a step of the plain scale at most; the least-squares clip may cut the peak by 15 %
    assert ((restored - weight).abs().amax(dim=1) <= 0.15 * peak + 1e-30).all()
    plain = (weight / (peak / 127).clamp_min(1e-30)[:, None]).round() * (peak / 127)[:, None]
    ours, theirs = (restored - weight).square().sum(1), (plain - weight).square().sum(1)
    assert (ours <= theirs * (1 + 1e-5)).all() and ours.sum() < theirs.sum()


@pytest.fixture
def drafter(tmp_path: Path) -> Path:
    folder = tmp_path / "drafter"
    folder.mkdir()
    torch.manual_seed(0)
    tensors = {
        "fc.weight": torch.randn(32, 160).to(torch.bfloat16),
        "layers.0.q_proj.weight": torch.randn(64, 32).to(torch.bfloat16),
        "norm.weight": torch.randn(32).to(torch.bfloat16),
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text('{"block_size": 16}')
    (folder / "README.md").write_text("# card\n")
    return folder


def test_pack_and_unpack(drafter: Path, tmp_path: Path) -> None:
    packed = pack.pack(drafter, tmp_path / "packed", {"licence": "Apache-2.0"})
    plain = tmp_path / "plain"
    pack.unpack(packed, plain)
    assert json.loads((plain / "config.json").read_text()) == {"block_size": 16}
    assert (plain / "README.md").read_text() == "# card\n"
    assert json.loads((packed / "model.json").read_text())["card"] == {"licence": "Apache-2.0"}
    before, after = load_file(drafter / "model.safetensors"), load_file(plain / "model.safetensors")
    assert before.keys() == after.keys()
    assert torch.equal(before["norm.weight"], after["norm.weight"])
    for name in ("fc.weight", "layers.0.q_proj.weight"):
        assert after[name].dtype == torch.bfloat16
        error = (after[name].float() - before[name].float()).norm() / before[name].float().norm()
        assert 1e-4 < error < 0.01, (name, error)
    size = (packed / "weights.safetensors").stat().st_size
    assert size < 0.75 * (drafter / "model.safetensors").stat().st_size


def test_a_drafter_with_nan_is_not_packed(drafter: Path, tmp_path: Path) -> None:
    save_file({"fc.weight": torch.full((2, 2), torch.nan)}, drafter / "model.safetensors")
    with pytest.raises(UserError, match=r"fc\.weight holds NaN"):
        pack.pack(drafter, tmp_path / "packed")
    assert not (tmp_path / "packed").exists()


def test_the_embedded_drafter(drafter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTPROOF_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(embedded, "__file__", str(tmp_path / "installed" / "embedded.py"))
    with pytest.raises(UserError, match="lacks"):
        hub.resolve_drafter(hub.EMBEDDED_DRAFTER)
    pack.pack(drafter, tmp_path / "installed" / "shipped" / hub.EMBEDDED_DRAFTER)
    first = hub.resolve_drafter(hub.EMBEDDED_DRAFTER)
    assert checkpoint.check_weights(first)["fc.weight"] == ("BF16", (32, 160))
    assert hub.resolve_drafter(hub.EMBEDDED_DRAFTER) == first
    (drafter / "config.json").write_text('{"block_size": 8}')
    pack.pack(drafter, tmp_path / "installed" / "shipped" / hub.EMBEDDED_DRAFTER)
    second = hub.resolve_drafter(hub.EMBEDDED_DRAFTER)  # other content is another folder
    assert second != first and json.loads((second / "config.json").read_text()) == {"block_size": 8}
