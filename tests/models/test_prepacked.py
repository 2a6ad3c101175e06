"""Weights in oneDNN's layout: the same values under the same names, and the same text."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request
from draftproof.models.prepacked import Prepacked, can_prepack, is_prepacked, prepack
from draftproof.models.target import Target
from tests import tiny

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not can_prepack(CPU, torch.float32), reason="this PyTorch has no oneDNN")


class Two(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(48, 96, dtype=dtype), nn.Linear(96, 24, bias=False, dtype=dtype)
        self.other = nn.LayerNorm(24, dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.other(self.two(self.one(x)))


@pytest.mark.parametrize("rows", [1, 2, 7, 8, 64, 300])
def test_the_products_are_the_same(rows: int) -> None:
    torch.manual_seed(0)
    model, x = Two().requires_grad_(False), torch.randn(2, rows, 48)
    before = model(x)
    prepack(model)
    assert isinstance(model.one, Prepacked) and isinstance(model.two, Prepacked)
    assert torch.allclose(model(x), before, atol=1e-5)
    assert torch.allclose(model(x.transpose(0, 1)), before.transpose(0, 1), atol=1e-5), "strided rows"
    assert model(x[:, :0]).shape == (2, 0, 24)


def test_names_and_values_stay() -> None:
    model = Two().requires_grad_(False)
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    size = sum(p.numel() for p in model.parameters())
    prepack(model)
    after = model.state_dict()
    assert set(after) == set(before) and all(torch.equal(after[name], before[name]) for name in before)
    assert sum(p.numel() for p in model.parameters()) == size
    Two().load_state_dict(after)


def test_a_deep_copy_computes_the_same() -> None:
    model, x = Two().requires_grad_(False), torch.randn(2, 5, 48)
    prepack(model)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(x), model(x)) and twin.one is not model.one
    twin.one.bias.data.fill_(7.0)
    assert not torch.equal(twin(x), model(x)), "what may be written to is its own"


def test_the_plain_weight_is_let_go() -> None:
    model = Two().requires_grad_(False)
    held = weakref.ref(model.one.weight)
    prepack(model)
    gc.collect()
    assert held() is None


def test_the_file_that_was_read_is_let_go() -> None:
    """On Linux the weights are a mapping of the file until the last of them has gone."""
    target = Target.load(tiny.target_folder("llama"), dtype=torch.float32)
    before = {name: weight.data_ptr() for name, weight in target.model.named_parameters()}
    values = {name: weight.clone() for name, weight in target.model.named_parameters()}
    target.prepack()
    left = {name: weight for name, weight in target.model.named_parameters() if not weight.is_mkldnn}
    assert "model.norm.weight" in left and all(weight.data_ptr() != before[name] for name, weight in left.items())
    assert all(torch.equal(weight, values[name]) for name, weight in left.items() if name in values)


def test_what_is_more_than_the_packed_stays_where_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Embedding(500, 8)).requires_grad_(False)
    before = model[1].weight.data_ptr()
    prepack(model)
    assert is_prepacked(model) and model[1].weight.data_ptr() == before


def test_other_kinds_of_numbers_stay_as_they_are() -> None:
    for dtype in (torch.float64, torch.float16):
        model = Two(dtype)
        prepack(model)
        assert not is_prepacked(model)


def test_a_layer_that_computes_something_else_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Prepacked, "forward", lambda self, x: x.new_zeros(*x.shape[:-1], self.out_features))
    model = Two()
    prepack(model)
    assert not is_prepacked(model)


def test_a_subclass_may_compute_something_else() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(x)

    model = nn.Sequential(Scaled(8, 8), nn.Linear(8, 8))
    prepack(model)
    assert type(model[0]) is Scaled and type(model[1]) is Prepacked


@pytest.mark.parametrize("kind", ["llama", "gemma3", "qwen3_5"])
def test_a_pair_says_the_same(kind: str) -> None:
    """In float32 another order of sums may decide a near tie; these do not have one within 40 tokens."""
    texts = []
    for packed in (False, True):
        target = Target.load(tiny.target_folder(kind), dtype=torch.float32)
        drafter = tiny.drafter(target)
        if packed:
            target.prepack()
            drafter.prepack()
            assert is_prepacked(target.model) and is_prepacked(drafter.model)
            assert target.head is target.model.get_output_embeddings() and isinstance(target.head, Prepacked)
        engine = Engine(target, drafter, context=96, how=Speculation(6))
        requests = [Request([5, 17, 3, 8], 40)]
        texts.append([token for result in engine.generate(requests) for token in result.tokens])
    assert texts[0] == texts[1]


def test_bfloat16_where_the_cpu_has_it() -> None:
    if not can_prepack(CPU, torch.bfloat16):
        pytest.skip("no bfloat16 arithmetic on this CPU")
    torch.manual_seed(0)
    model, x = Two(torch.bfloat16).requires_grad_(False), torch.randn(2, 5, 48, dtype=torch.bfloat16)
    before = model(x).float()
    prepack(model)
    assert is_prepacked(model) and torch.allclose(model(x).float(), before, atol=0.06)
