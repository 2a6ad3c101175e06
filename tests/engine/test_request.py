"""Requests are checked at the border: one clear error with a code, whatever is wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from draftproof.engine.engine import Engine
from draftproof.engine.pair import choose_device, choose_dtype
from draftproof.engine.request import Request, SamplingParams
from draftproof.errors import UserError
from tests import tiny
from tests.engine.decoding import decode

BAD: list[tuple[str, Any]] = [
    *(("temperature", v) for v in (-1.0, math.nan, math.inf, -math.inf)),
    *(("top_p", v) for v in (0.0, 1.5, -0.1, math.nan)),
    ("top_k", -1),
    *(("min_p", v) for v in (-0.1, 1.1, math.nan)),
    *(("repetition_penalty", v) for v in (0.0, -1.0, math.nan, math.inf)),
    *(("seed", v) for v in (2**63, -(2**63) - 1)),
]
GOOD: list[tuple[str, Any]] = [
    ("temperature", 0.0),
    ("temperature", 2.5),
    ("top_p", 1.0),
    ("top_p", 1e-6),
    ("top_k", 0),
    ("min_p", 1.0),
    ("repetition_penalty", 0.5),
    ("seed", -(2**63)),
    ("seed", 2**63 - 1),
]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_bad_sampling_is_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(UserError) as caught:
        SamplingParams(**{name: value})
    assert caught.value.code == "bad-option"
    assert name in caught.value.message and name in caught.value.fix


@pytest.mark.parametrize(("name", "value"), GOOD)
def test_the_edges_are_allowed_and_run(name: str, value: Any) -> None:
    params = SamplingParams(**{"temperature": 1.0, name: value})
    assert len(decode(tiny.target(), None, [Request([4, 5], 3, params)])[0].tokens) == 3


@pytest.mark.parametrize("count", [0, -5])
def test_max_tokens_below_one(count: int) -> None:
    with pytest.raises(UserError) as caught:
        Request([1, 2], count)
    assert caught.value.code == "bad-option" and "max_tokens" in caught.value.message


def test_empty_prompt() -> None:
    with pytest.raises(UserError) as caught:
        Request([], 5)
    assert caught.value.code == "prompt-empty"


def test_a_context_beyond_the_model_is_refused_before_anything_is_allocated() -> None:
    limit = tiny.target().spec.max_positions
    assert limit == 512
    with pytest.raises(UserError) as caught:
        Engine(tiny.target(), context=limit + 1)
    assert caught.value.code == "prompt-too-long" and "513" in caught.value.message and "512" in caught.value.message
    Engine(tiny.target(), context=limit)


def test_prompt_and_answer_must_fit_the_engine() -> None:
    engine = Engine(tiny.target(), context=16)
    assert sum(len(r.tokens) for r in engine.generate([Request([4] * 12, 4)])) == 4
    for prompt, count in (([4] * 12, 5), ([4] * 17, 1)):
        with pytest.raises(UserError) as caught:
            list(engine.generate([Request(prompt, count)]))
        assert caught.value.code == "prompt-too-long"


@pytest.mark.parametrize(("native", "dtype"), [(True, "bfloat16"), (False, "float16")])
def test_a_gpu_gets_the_format_it_multiplies(native: bool, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: native)
    assert choose_dtype("auto", "cuda").value == dtype


def test_device_and_dtype_carry_their_reason() -> None:
    assert choose_device("cpu").reason == "asked for"
    assert choose_device("auto").reason.startswith("auto: ")
    assert choose_dtype("float64", "cpu").value == "float64"
    assert choose_dtype("auto", "cpu").reason.startswith("auto: this CPU")


@pytest.mark.parametrize("asked", ["tpu", "cpu:x", ""])
def test_unknown_device(asked: str) -> None:
    with pytest.raises(UserError) as caught:
        choose_device(asked)
    assert caught.value.code in ("bad-option", "device-unavailable")


def test_unknown_dtype() -> None:
    with pytest.raises(UserError) as caught:
        choose_dtype("int3", "cpu")
    assert caught.value.code == "bad-option"
