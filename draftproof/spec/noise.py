"""Gumbel noise that is a function of (seed, choice, absolute position, token id) and nothing else.

argmax(logp + gumbel) is one exact draw from softmax(logp). With the noise fixed per position, a text is a function of
the target and the seed: no drafter, tree, batch or budget can change it. The hash is counter-based integer arithmetic
that wraps the same way on every device; only the two logarithms at the end may differ by an ulp. The mixing functions
are Wellons' lowbias32 (github.com/skeeto/hash-prospector) and Steele's splitmix64 finaliser.
"""

from __future__ import annotations

import torch
from torch import Tensor

_GOLDEN = -7046029254386353131  # 2^64 / phi as int64
_MIX_1 = -4658895280553007687
_MIX_2 = -7723592293110705685
_MASK32 = 0xFFFFFFFF


def hash_bits(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """seed, choice int64 [R], position int64 [R, N] -> int32 [R, N, vocab], every bit fair."""
    key = _mix64(_mix64(seed + _GOLDEN)[:, None] ^ _mix64(choice + 1)[:, None] ^ _mix64(position * _GOLDEN))
    low, high = _to_int32(key), _to_int32(_shift64(key, 32))
    token = torch.arange(vocab, dtype=torch.int32, device=position.device) * _int32(0x9E3779B1)
    bits = _mix32(token ^ low[..., None])
    bits ^= high[..., None]
    return _mix32(bits)


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, vocab: int) -> Tensor:
    """float32 [R, N, vocab] standard Gumbel noise; `position` is the absolute position of the token to be chosen.

    v = (bits + 1/2) / 2^32 is kept exact near 0, where -log(-log1p(-v)) is large: the tail that decides an argmax.
    """
    bits = hash_bits(seed, choice, position, vocab)
    uniform = bits.float()
    uniform = uniform.add_(0.5).mul_(2.0**-32).add_((bits < 0).float())
    uniform.clamp_(max=1.0 - 2.0**-24)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(h: Tensor) -> Tensor:
    h = h ^ ((h >> 16) & 0xFFFF)
    h *= _int32(0x7FEB352D)
    h ^= (h >> 15) & 0x1FFFF
    h *= _int32(0x846CA68B)
    h ^= (h >> 16) & 0xFFFF
    return h


def _mix64(h: Tensor) -> Tensor:
    h = (h ^ _shift64(h, 30)) * _MIX_1
    h = (h ^ _shift64(h, 27)) * _MIX_2
    return h ^ _shift64(h, 31)


def _shift64(h: Tensor, by: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (h >> by) & ((1 << (64 - by)) - 1)


def _to_int32(h: Tensor) -> Tensor:
    """The low 32 bits, as a signed number."""
    low = h & _MASK32
    return (low - ((low >> 31) << 32)).to(torch.int32)


def _int32(value: int) -> int:
    return value - (1 << 32) if value >= 1 << 31 else value
