"""The MTP head as a drafter: what it predicts, what it keeps, lossless for every k, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.engine.replay import features_of
from draftproof.engine.request import Request, SamplingParams
from draftproof.errors import UserError
from draftproof.models.mtp import MTPDrafter, MTPHead
from draftproof.models.target import Target, decoder_of
from tests import tiny
from tests.engine.decoding import PROMPTS, decode, requests, texts

KINDS = tiny.HYBRIDS


def with_head(kind: str, to: Path, layers: int = 1, change: Callable[[dict[str, Tensor]], None] | None = None) -> Path:
    """A copy of a tiny hybrid with a random MTP head in its own safetensors."""
    folder = to / "model"
    shutil.copytree(tiny.target_folder(kind), folder)
    config = json.loads((folder / "config.json").read_text()) | {"mtp_num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    draw = torch.Generator().manual_seed(layers)
    tensors = load_file(folder / "model.safetensors")
    head = MTPHead(decoder_of(tiny.target(kind, torch.float32).model), layers)
    for name, weight in head.state_dict().items():
        tensors[f"mtp.{name}"] = torch.randn(weight.shape, generator=draw) * (0.1 if weight.dim() == 1 else 0.3)
    if change:
        change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def load(folder: Path, drafts: int = 3, dtype: torch.dtype = torch.float64) -> tuple[Target, MTPDrafter]:
    target = Target.load(folder, dtype=dtype)
    drafter = MTPDrafter.load(folder, target, drafts)
    if dtype == torch.float64:
        tiny.in_double(target.model)
        tiny.in_double(drafter.model)
    return target, drafter


def by_hand(target: Target, drafter: MTPDrafter, text: list[int], depth: int) -> list[int]:
    """Greedy drafts of a head of one layer from a plain pass over the whole text, without any cache of ours."""
    features = features_of(target, text[:-1], (*drafter.taps,))[None]
    _, hidden = features.chunk(2, dim=-1)
    tokens, drafts, config = list(text[1:]), [], decoder_of(target.model).config
    head = drafter.model
    before, head.layers[0].self_attn.config._attn_implementation = config._attn_implementation, "sdpa"
    try:
        for _ in range(depth):
            positions = torch.arange(hidden.shape[1])[None]
            out = head(target.embedding(torch.tensor([tokens])), hidden, target.rope(positions))
            drafts.append(int(target.head(out[:, -1]).argmax()))
            tokens.append(drafts[-1])
            hidden = torch.cat([hidden, out[:, -1:]], dim=1)
    finally:
        head.layers[0].self_attn.config._attn_implementation = before
    return drafts


@pytest.mark.parametrize("kind", KINDS)
def test_drafts_are_those_of_a_plain_pass(kind: str, tmp_path: Path) -> None:
    """After a prompt in chunks and after partial commits, for slots of different lengths side by side."""
    target, drafter = load(with_head(kind, tmp_path), drafts=4)
    lines = [torch.randint(4, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (2, 13, 9)]
    features = [features_of(target, line[:-1], drafter.taps) for line in lines]
    drafter.allocate(slots=3, capacity=40, chunk=8)
    at = torch.zeros(3, dtype=torch.long)
    ends = torch.tensor([len(line) - 1 for line in lines])
    for step in (1, 5, 2, 7, 3):
        counts = torch.minimum(torch.full_like(at, step), ends - at)
        block = torch.zeros(3, 8, features[0].shape[-1], dtype=torch.float64)
        for row, (own, begin, count) in enumerate(zip(features, at.tolist(), counts.tolist(), strict=True)):
            block[row, :count] = own[begin : begin + count]
        drafter.extend(slice(0, 3), block, counts, 40)
        at += counts
        drafter.draft(slice(0, 3), torch.tensor([5, 6, 7]), 40)  # a look that leaves nothing behind
    assert torch.equal(at, ends)
    dist = drafter.draft(slice(0, 3), torch.tensor([line[-1] for line in lines]), 40, width=2)
    for row, line in enumerate(lines):
        assert dist.ids[row, :, 0].tolist() == by_hand(target, drafter, line, 4)
    assert dist.ids.shape == (3, 4, 2) and bool((dist.logp[..., 0] > dist.logp[..., 1]).all())


def test_control_a_row_shifted_by_one(tmp_path: Path) -> None:
    target, drafter = load(with_head("qwen3_5", tmp_path), drafts=4)
    line = torch.randint(4, 64, (13,), generator=torch.Generator().manual_seed(1)).tolist()
    features = features_of(target, line[:-1], drafter.taps)[None]
    drafter.allocate(slots=1, capacity=40, chunk=12)
    drafter.extend(slice(0, 1), features.roll(1, dims=1), torch.tensor([12]), 40)
    assert drafter.draft(slice(0, 1), torch.tensor(line[-1:]), 40).ids[0, :, 0].tolist() != by_hand(
        target, drafter, line, 4
    )


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_lossless_for_every_k(kind: str, layers: int, tmp_path: Path) -> None:
    folder = with_head(kind, tmp_path, layers)
    target, _ = load(folder)
    sampled = [SamplingParams(temperature=0.8, seed=3), SamplingParams(temperature=1.0, top_p=0.9, seed=4)]
    asked = [*requests(), *(Request(list(p), 14, s) for p in PROMPTS[:2] for s in sampled)]
    plain = texts(decode(target, None, asked))
    for drafts in (1, 2, 3, 4):
        drafter = MTPDrafter.load(folder, target, drafts)
        tiny.in_double(drafter.model)
        assert texts(decode(target, drafter, asked)) == plain


@pytest.mark.parametrize("layers", [2, 3])
def test_several_layers_do_not_depend_on_how_the_text_came(layers: int, tmp_path: Path) -> None:
    target, drafter = load(with_head("qwen3_5", tmp_path, layers), drafts=5)
    line = torch.randint(4, 64, (11,), generator=torch.Generator().manual_seed(2)).tolist()
    features = features_of(target, line[:-1], drafter.taps)[None]
    seen = []
    for parts in ([10], [1] * 10, [3, 4, 3]):
        drafter.allocate(slots=1, capacity=40, chunk=10)
        for part in features.split(parts, dim=1):
            drafter.extend(slice(0, 1), part, torch.tensor([part.shape[1]]), 40)
            drafter.draft(slice(0, 1), torch.tensor([9]), 40)
        seen.append(drafter.draft(slice(0, 1), torch.tensor(line[-1:]), 40, width=64).logp)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[2], seen[0])


def test_experts_stored_one_by_one_are_joined(tmp_path: Path) -> None:
    def apart(tensors: dict[str, Tensor]) -> None:
        place = "mtp.layers.0.mlp.experts"
        both, down = tensors.pop(f"{place}.gate_up_proj"), tensors.pop(f"{place}.down_proj")
        for i in range(len(both)):
            gate, up = both[i].chunk(2)
            names = {"gate_proj": gate.clone(), "up_proj": up.clone(), "down_proj": down[i].clone()}
            tensors.update({f"{place}.{i}.{name}.weight": weight for name, weight in names.items()})

    joined = load(with_head("qwen3_5_moe", tmp_path / "a"), dtype=torch.float32)[1].model.state_dict()
    parts = load(with_head("qwen3_5_moe", tmp_path / "b", change=apart), dtype=torch.float32)[1].model.state_dict()
    assert all(torch.equal(joined[name], parts[name]) for name in joined)


# --- refusals -------------------------------------------------------------------------------------------


def refused(code: str, named: str, folder: Path) -> None:
    target = Target.load(folder, dtype=torch.float32)
    with pytest.raises(UserError) as caught:
        MTPDrafter.load(folder, target, 2)
    assert caught.value.code == code and named in caught.value.message, caught.value


def test_a_checkpoint_without_a_head() -> None:
    refused("mtp-missing", "promises no", tiny.target_folder("qwen3_5"))


def test_a_promised_head_that_is_not_there(tmp_path: Path) -> None:
    def without(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("mtp.")]:
            del tensors[name]

    refused("mtp-missing", "no tensor begins with mtp.", with_head("qwen3_5", tmp_path, change=without))


def test_a_head_of_another_width(tmp_path: Path) -> None:
    def wider(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.fc.weight"] = torch.zeros(48, 96)

    refused(
        "weights-invalid",
        "fc.weight [48, 96], the target's width asks for [32, 64]",
        with_head("qwen3_5", tmp_path, change=wider),
    )


@pytest.mark.parametrize("name", ["mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"])
def test_a_tensor_that_is_missing(name: str, tmp_path: Path) -> None:
    named = name.removeprefix("mtp.")
    refused("weights-invalid", f"missing: {named}", with_head("qwen3_5", tmp_path, change=lambda t: t.pop(name)))


def test_a_tensor_that_nobody_knows(tmp_path: Path) -> None:
    def more(tensors: dict[str, Tensor]) -> None:
        tensors["mtp.embed_tokens.weight"] = torch.zeros(64, 32)

    refused("weights-invalid", "not understood: embed_tokens.weight", with_head("qwen3_5", tmp_path, change=more))
