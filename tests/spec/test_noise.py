"""The noise: its bits against integer arithmetic, its law against scipy, its independence across every key."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from draftproof.spec import noise
from draftproof.spec.noise import gumbel, hash_bits

M32, M64, GOLDEN = 2**32 - 1, 2**64 - 1, 0x9E3779B97F4A7C15
KEYS = ("seed", "choice", "position", "token")
int64 = st.integers(-(2**63), 2**63 - 1)


def mix32(h: int) -> int:
    """lowbias32 as published by Wellons."""
    h ^= h >> 16
    h = h * 0x7FEB352D & M32
    h ^= h >> 15
    h = h * 0x846CA68B & M32
    return h ^ h >> 16


def mix64(h: int) -> int:
    """splitmix64's finaliser."""
    h &= M64
    h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 & M64
    h = (h ^ h >> 27) * 0x94D049BB133111EB & M64
    return h ^ h >> 31


def reference(seed: int, choice: int, position: int, token: int) -> int:
    key = mix64(mix64(seed + GOLDEN) ^ mix64(choice + 1) ^ mix64(position * GOLDEN))
    return mix32(mix32((token * 0x9E3779B1 & M32) ^ (key & M32)) ^ key >> 32)


def bits_of(seed: int, choice: int, position: int, vocab: int) -> list[int]:
    out = hash_bits(torch.tensor([seed]), torch.tensor([choice]), torch.tensor([[position]]), vocab)
    assert out.dtype == torch.int32 and out.shape == (1, 1, vocab)
    return [b & M32 for b in out[0, 0].tolist()]


def check_bits(seed: int, choice: int, position: int) -> None:
    assert bits_of(seed, choice, position, 40) == [reference(seed, choice, position, t) for t in range(40)]


@settings(deadline=None, max_examples=150, derandomize=True, database=None)
@given(int64, int64, st.integers(0, 2**40))
@example(0, 0, 0)
@example(-1, -1, 1)
@example(2**63 - 1, 2**63 - 1, 2**31)
@example(-(2**63), 3, 2**32 - 1)
def test_bits_equal_integer_arithmetic(seed: int, choice: int, position: int) -> None:
    check_bits(seed, choice, position)


@pytest.mark.parametrize("fault", ["signed shift of 64 bits", "other constant", "position not mixed"])
def test_control_bits(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own >> keeps the sign: bits that are right for small keys only."""
    if fault == "signed shift of 64 bits":
        monkeypatch.setattr(noise, "_shift64", lambda h, by: h >> by)
    elif fault == "other constant":
        monkeypatch.setattr(noise, "_MIX_2", noise._MIX_2 + 2)
    else:
        monkeypatch.setattr(noise, "_GOLDEN", 0)
    with pytest.raises(AssertionError):
        check_bits(-5, 1, 17)


def test_rows_and_positions_of_a_batch_are_those_of_one_alone() -> None:
    seed, choice = torch.tensor([3, -9]), torch.tensor([0, 2])
    position = torch.tensor([[4, 5, 5], [100, 7, 4]])
    batch = hash_bits(seed, choice, position, 11)
    for r in range(2):
        for n in range(3):
            alone = bits_of(int(seed[r]), int(choice[r]), int(position[r, n]), 11)
            assert [b & M32 for b in batch[r, n].tolist()] == alone


def neighbours(draw: Callable[..., Tensor], key: str) -> tuple[Tensor, Tensor]:
    """The same draw for `key` and for `key` + 1, over 16 seeds, 4 choices, 32 positions and 32 tokens."""
    seed = torch.arange(16).repeat_interleave(4) * 1000 - 7
    choice = torch.arange(4).repeat(16) * 10
    position = (torch.arange(32) * 10).expand(64, 32)
    if key == "token":
        both = draw(seed, choice, position, 33)
        return both[..., :-1], both[..., 1:]
    moved = {"seed": seed, "choice": choice, "position": position}
    first = draw(*moved.values(), 32)
    moved[key] = moved[key] + 1
    return first, draw(*moved.values(), 32)


def check_avalanche(key: str) -> None:
    """65,536 pairs: a bit that flips in half of them does so within 5 standard errors, 0.01."""
    first, second = neighbours(hash_bits, key)
    flipped = first ^ second
    rates = torch.stack([(flipped >> bit & 1).double().mean() for bit in range(32)])
    assert (rates - 0.5).abs().max() < 0.01, rates


@pytest.mark.parametrize("key", KEYS)
def test_every_bit_flips_in_half_of_the_neighbours(key: str) -> None:
    check_avalanche(key)


@pytest.mark.parametrize("key", KEYS)
def test_control_without_the_last_mixing(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(h: Tensor) -> Tensor:
        return h.clone()

    monkeypatch.setattr(noise, "_mix32", identity)
    if key != "token":
        monkeypatch.setattr(noise, "_mix64", identity)
    with pytest.raises(AssertionError):
        check_avalanche(key)


def check_law(values: Tensor) -> None:
    """Standard Gumbel by Kolmogorov-Smirnov, and uniform top and bottom of the scale by chi-square."""
    sample = values.double().flatten().numpy()
    assert stats.kstest(sample, stats.gumbel_r.cdf).pvalue > 1e-3
    counts = np.histogram(stats.gumbel_r.cdf(sample), bins=256, range=(0, 1))[0]
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("seed", [0, -1, 2**62])
def test_law_along_positions_and_tokens(seed: int) -> None:
    """400 positions in a row of 500 tokens: what one text really uses."""
    check_law(gumbel(torch.tensor([seed]), torch.tensor([0]), torch.arange(400)[None], 500))


def test_law_of_one_token_along_positions() -> None:
    check_law(gumbel(torch.tensor([5]), torch.tensor([1]), torch.arange(100_000)[None], 1))


def test_control_law_of_nearly_gumbel_noise() -> None:
    """A scale 3 % off is seen."""
    with pytest.raises(AssertionError):
        check_law(1.03 * gumbel(torch.tensor([0]), torch.tensor([0]), torch.arange(400)[None], 500))


def check_uncorrelated(key: str, draw: Callable[..., Tensor] = gumbel) -> None:
    first, second = neighbours(draw, key)
    r = float(np.corrcoef(first.flatten().numpy(), second.flatten().numpy())[0, 1])
    assert abs(r) < 4 / first.numel() ** 0.5, r


@pytest.mark.parametrize("key", KEYS)
def test_neighbours_are_uncorrelated(key: str) -> None:
    check_uncorrelated(key)


@pytest.mark.parametrize("key", KEYS[:3])
def test_control_noise_shared_between_two_neighbours(key: str) -> None:
    def shared(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
        keys = {"seed": seed, "choice": choice, "position": position}
        keys[key] = (keys[key] + 8) // 10  # ...2 and ...3, 0 and 1 fall together
        return gumbel(*keys.values(), vocab)

    with pytest.raises(AssertionError):
        check_uncorrelated(key, shared)


def with_bits(bits: list[int], monkeypatch: pytest.MonkeyPatch) -> Tensor:
    signed = torch.tensor(bits, dtype=torch.int64).to(torch.int32).view(1, 1, -1)
    monkeypatch.setattr(noise, "hash_bits", lambda *_: signed.clone())
    return gumbel(torch.tensor([0]), torch.tensor([0]), torch.tensor([[0]]), len(bits))[0, 0]


EXTREME = [-(2**31), -(2**31) + 1, -129, -128, -2, -1, 0, 1, 2, 2**24 - 1, 2**24, 2**31 - 65, 2**31 - 1]


def test_finite_for_every_bit_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    values = with_bits(EXTREME, monkeypatch)
    assert values.dtype == torch.float32 and torch.isfinite(values).all()
    assert values.argmax() == EXTREME.index(0) and values.max() == pytest.approx(33 * np.log(2))


def test_control_without_the_clamp_the_lowest_bits_are_infinite(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tensor, "clamp_", lambda self, **_: self)
    assert not torch.isfinite(with_bits(EXTREME, monkeypatch)).all()


def exact(bits: list[int]) -> Tensor:
    v = (torch.tensor(bits).double() + 0.5) / 2**32
    return -torch.log(-torch.log1p(-v))


def check_upper_tail(values: Tensor, bits: list[int]) -> None:
    """Within 2 ulp of float64, for the largest 1/65,536 of all values: those that decide an argmax."""
    ulp = torch.from_numpy(np.spacing(exact(bits).float().numpy()))
    assert ((values.double() - exact(bits)).abs() <= 2 * ulp).all()


TAIL = [*range(256), *range(256, 65_536, 37)]


def test_upper_tail_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    check_upper_tail(with_bits(TAIL, monkeypatch), TAIL)


def test_control_the_textbook_formula_loses_the_tail() -> None:
    u = 1 - (torch.tensor(TAIL).float() + 0.5) * 2**-32
    with pytest.raises(AssertionError):
        check_upper_tail(-torch.log(-torch.log(u)), TAIL)
