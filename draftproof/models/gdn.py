"""The gated delta rule, in plain torch: one function for a token, a block, a tree and a long prompt.

A head keeps a state S [key_dim, value_dim]. Row t with decay exp(g_t), key k_t, value v_t and rate beta_t does

    S_t = exp(g_t) S_parent + k_t u_t^T,   u_t = beta_t (v_t - exp(g_t) S_parent^T k_t),   out_t = S_t^T q_t

(Yang et al., "Gated Delta Networks", arXiv 2412.06464). With G_t the sum of g along the path from the root, all rows of
a block solve one unit-triangular system for u ("WY form"); on a tree the causal mask becomes the ancestor mask. No row
keeps a state of its own: a path is committed by a rank-|path| update,

    S = exp(G_last) S_0 + sum over a on the path of exp(G_last - G_a) k_a u_a^T
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

CHUNK = 64  # rows solved at once in a causal pass
NORM_EPS = 1e-6  # of the queries' and keys' l2 norm, as transformers and flash-linear-attention have it


@dataclass(frozen=True)
class Rows:
    """N rows of R requests, H value heads: q, k [R, H, N, key_dim], v [R, H, N, value_dim], g <= 0 and beta [R, H, N].

    All in the state's dtype; q and k are normed and q is scaled (`unit_rows`).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor

    def part(self, begin: int, end: int) -> Rows:
        return Rows(*(t[:, :, begin:end] for t in (self.q, self.k, self.v, self.g, self.beta)))

    def at(self, path: Tensor) -> Rows:
        """The rows at path [R, K]."""
        return Rows(*(take(t, path) for t in (self.q, self.k, self.v, self.g, self.beta)))


@dataclass(frozen=True)
class Written:
    """What N rows add to a state: k [R, H, N, key_dim], u [R, H, N, value_dim], path sums of g float64 [R, H, N]."""

    k: Tensor
    u: Tensor
    total: Tensor

    def added_to(self, state: Tensor, counts: Tensor | None = None, path: Tensor | None = None) -> Tensor:
        """`state` after `counts` [R] of the rows: those at path[:, :count] (int64 [R, K], a path from the root), or the
        first ones; without counts all of them. Count 0 leaves the state as it is."""
        k, u, total = self.k, self.u, self.total
        if path is not None:
            k, u, total = (take(t, path) for t in (k, u, total))
        if counts is None:
            last = total[:, :, -1:]
            weight = (last - total).exp()
        else:
            index = (counts - 1).clamp(min=0)[:, None, None].expand(-1, total.shape[1], 1)
            last = torch.where(counts[:, None, None] > 0, total.gather(2, index), 0.0)
            kept = torch.arange(total.shape[2], device=counts.device) < counts[:, None, None]
            weight = (last - total).masked_fill(~kept, -torch.inf).exp()
        added = (k * weight.to(k.dtype)[..., None]).transpose(-1, -2) @ u
        return last.exp().to(state.dtype)[..., None] * state + added


def unit_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Rows:
    """Rows from the layer's projections: q, k [R, N, key_heads, d], v [R, N, H, d], g, beta [R, N, H], as a layer has
    them. Every key head serves H / key_heads consecutive value heads."""
    wide, repeat = g.dtype, v.shape[2] // k.shape[2]
    q, k, v = (t.transpose(1, 2).to(wide) for t in (q, k, v))
    q, k = (t * torch.rsqrt(t.square().sum(-1, keepdim=True) + NORM_EPS) for t in (q, k))
    q = q * q.shape[-1] ** -0.5
    q, k = (t.repeat_interleave(repeat, dim=1) if repeat > 1 else t for t in (q, k))
    return Rows(q, k, v, g.transpose(1, 2), beta.transpose(1, 2).to(wide))


def run(rows: Rows, state: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Written]:
    """Outputs [R, H, N, value_dim] of all rows behind `state` [R, H, key_dim, value_dim], which is left as it is.

    seen [R, N, N]: row i descends from row j, or is it; rows stand in topological order. None: each row follows the one
    before it, and long inputs go chunk by chunk.
    """
    count = rows.g.shape[2]
    if seen is not None or count <= CHUNK:
        return _block(rows, state, seen)
    outs, parts = [], []
    base = torch.zeros_like(rows.g[:, :, :1], dtype=torch.float64)
    for begin in range(0, count, CHUNK):
        out, written = _block(rows.part(begin, begin + CHUNK), state, None)
        state = written.added_to(state)
        outs.append(out)
        parts.append(Written(written.k, written.u, written.total + base))
        base = parts[-1].total[:, :, -1:]
    k, u, total = (torch.cat([getattr(p, name) for p in parts], dim=2) for name in ("k", "u", "total"))
    return torch.cat(outs, dim=2), Written(k, u, total)


def _block(rows: Rows, state: Tensor, seen: Tensor | None) -> tuple[Tensor, Written]:
    q, k, v, beta = rows.q, rows.k, rows.v, rows.beta[..., None]
    total, weight = _decays(rows.g, seen)
    decay = total.exp().to(state.dtype)[..., None]
    u = beta * (v - decay * (k @ state))
    if k.shape[2] > 1:
        system = beta * weight * (k @ k.transpose(-1, -2))  # the diagonal is not read
        u = torch.linalg.solve_triangular(system, u, upper=False, unitriangular=True)
    out = decay * (q @ state) + (weight * (q @ k.transpose(-1, -2))) @ u
    return out, Written(k, u, total)


def _decays(g: Tensor, seen: Tensor | None) -> tuple[Tensor, Tensor]:
    """G float64 [R, H, N] and exp(G_t - G_a) [R, H, N, N], 0 where row t does not see row a.

    Differences of long sums need float64; the mask comes before exp, which would overflow elsewhere.
    """
    wide = g.double()
    if seen is None:
        total = wide.cumsum(-1)
        order = torch.arange(g.shape[-1], device=g.device)
        mask = order[:, None] >= order
    else:
        mask = seen[:, None]
        total = (mask.double() @ wide[..., None])[..., 0]
    gap = (total[..., :, None] - total[..., None, :]).masked_fill(~mask, -torch.inf)
    return total, gap.exp().to(g.dtype)


def take(rows: Tensor, path: Tensor) -> Tensor:
    """rows [R, H, N, ...] at path [R, K] -> [R, H, K, ...]."""
    index = path.reshape(path.shape[0], 1, path.shape[1], *[1] * (rows.dim() - 3))
    return rows.gather(2, index.expand(-1, rows.shape[1], -1, *rows.shape[3:]))


def convolve(columns: Tensor, window: Tensor, weight: Tensor, bias: Tensor | None, ancestors: Tensor | None) -> Tensor:
    """The layer's depthwise causal convolution and SiLU: columns [R, N, C] behind window [R, K - 1, C] -> [R, N, C].

    ancestors int64 [R, N, K]: the row of [window, columns] that each tap reads (`ancestor_rows`); None: each row
    follows the one before it. Sums in float32 at least, result in the weight's dtype.
    """
    wide = torch.promote_types(columns.dtype, torch.float32)
    rows, count, taps = torch.cat([window, columns], dim=1).to(wide), columns.shape[1], weight.shape[1]
    out = torch.zeros_like(columns, dtype=wide)
    for tap in range(taps):
        if ancestors is None:
            read = rows[:, tap : tap + count]
        else:
            read = rows.gather(1, ancestors[:, :, tap, None].expand(-1, -1, rows.shape[2]))
        out = out + read * weight[:, tap].to(wide)
    out = out if bias is None else out + bias.to(wide)
    return F.silu(out.to(columns.dtype))


def ancestor_rows(seen: Tensor, depth: Tensor, taps: int) -> Tensor:
    """Rows of [window, columns] under the convolution's taps, oldest first: int64 [R, N, taps].

    A node of depth d reads its ancestors of depth d - taps + 1 .. d; depths below 0 lie in the window.
    """
    wanted = depth[:, :, None] + torch.arange(1 - taps, 1, device=depth.device)  # [R, N, taps]
    match = seen[:, :, None, :] & (depth[:, None, None, :] == wanted[..., None])
    node = match.int().argmax(-1)
    return torch.where(wanted < 0, wanted + taps - 1, node + taps - 1)


def last_columns(columns: Tensor, window: Tensor, counts: Tensor, path: Tensor | None = None) -> Tensor:
    """The convolution's window after `counts` [R] rows (those on the path, or the first): [R, K - 1, C]."""
    if path is not None:
        columns = columns.gather(1, path[:, :, None].expand(-1, -1, columns.shape[2]))
    kept = window.shape[1]
    index = counts[:, None] + torch.arange(kept, device=counts.device)
    return torch.cat([window, columns], dim=1).gather(1, index[:, :, None].expand(-1, -1, columns.shape[2]))


def sequential(rows: Rows, state: Tensor, parent: Tensor) -> tuple[Tensor, Tensor]:
    """The rule as it is written above, node by node with a state each: the reference of the tests.

    parent int64 [N], -1 for the root; returns outputs [R, H, N, value_dim] and states [R, H, N, key_dim, value_dim].
    """
    states: list[Tensor] = []
    outs = []
    for node, above in enumerate(parent.tolist()):
        before = (state if above < 0 else states[above]) * rows.g[:, :, node].exp()[..., None, None]
        k, q = rows.k[:, :, node, :, None], rows.q[:, :, node, :, None]
        u = rows.beta[:, :, node, None] * (rows.v[:, :, node] - (before * k).sum(-2))
        states.append(before + k * u[..., None, :])
        outs.append((states[-1] * q).sum(-2))
    return torch.stack(outs, 2), torch.stack(states, 2)
