"""The DFlash drafter, top to bottom: one pass turns an anchor and mask tokens into a block of drafts.

The target's tapped features become keys and values of every draft layer (`extend`, once per committed token, never
rolled back). The block [anchor, mask, mask, ...] then attends to that context and to itself (`draft`); its own rows
are staged behind the committed ones and never committed. Embedding and head are the target's. Method: Chen et al.,
"DFlash", arXiv 2602.06036; tensor names and layout are the authors' checkpoints'.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from draftproof.config.drafter import DrafterSpec, RopeSpec, read_drafter
from draftproof.models.attention import attend
from draftproof.models.cache import Cache, LayerShape, Slots
from draftproof.models.prepacked import prepack
from draftproof.models.target import Target

Rescore = Callable[[Tensor, int], Tensor]  # (logits float32 [R, n, V] of the depths from `first` on, first) -> scores
Scorer = Callable[[Tensor, Tensor, int], Tensor]  # (rows [M], parent tokens [M], depth) -> log-probabilities [M, k]


@dataclass(frozen=True)
class DraftDist:
    """What one pass proposes: ids int64 [R, D, k] and their log-probabilities float32 [R, D, k], best first.

    Depth d (0-based) is about the token d + 1 positions after the anchor. logp is normalised over the full vocabulary.
    scorer: a drafter whose depths depend on each other says what a parent token makes of the candidates ids[:, d].
    """

    ids: Tensor
    logp: Tensor
    scorer: Scorer | None = None


def likeliest(logits: Tensor, width: int, rescore: Rescore | None = None, first: int = 0) -> DraftDist:
    """The `width` best tokens of each row: logits [R, n, V] of the depths from `first` on, rescored if asked."""
    scores = logits.float()
    if rescore is not None:
        scores = rescore(scores, first)
    best, ids = scores.topk(width, dim=-1) if width > 1 else scores.max(-1, keepdim=True)
    return DraftDist(ids, best - scores.logsumexp(-1, keepdim=True))


class DFlash(nn.Module):
    """The trainable part. Shapes: S new context rows, B block rows, H hidden, K taps."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        spec.require_runnable()
        self.spec = spec
        self.fc = nn.Linear(len(spec.taps) * spec.target_hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.layers = nn.ModuleList(DFlashLayer(spec) for _ in range(spec.num_layers))
        self.norm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.rope = Rope(spec.rope)

    @property
    def blocks(self) -> list[DFlashLayer]:
        return [cast(DFlashLayer, layer) for layer in self.layers]

    def project(self, features: Tensor) -> Tensor:
        """Tapped features [..., K * H_target] -> the context row c [..., H] that all layers share."""
        return self.hidden_norm(self.fc(features))


class DFlashLayer(nn.Module):
    """A Qwen3 block whose keys and values come from the context as well as from its own rows."""

    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.self_attn = DFlashAttention(spec)
        self.post_attention_layernorm = RMSNorm(spec.hidden_size, eps=spec.rms_norm_eps)
        self.mlp = SwiGLU(spec.hidden_size, spec.intermediate_size)

    def block_qkv(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Block rows x [R, B, H] -> q [R, heads, B, d], k and v [R, kv_heads, B, d]."""
        h = self.input_layernorm(x)
        return self.self_attn.queries(h, cos, sin), *self.self_attn.keys_values(h, cos, sin)

    def context_kv(self, c: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Context rows c [R, S, H] -> k and v. The same weights as the block's, but no input_layernorm."""
        return self.self_attn.keys_values(c, cos, sin)

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual stream x [R, B, H] and attention output [R, heads, B, d] -> the stream after this layer."""
        x = x + self.self_attn.o_proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.post_attention_layernorm(x))


class DFlashAttention(nn.Module):
    def __init__(self, spec: DrafterSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = nn.Linear(spec.hidden_size, width, bias=spec.attention_bias)
        self.k_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.attention_bias)
        self.v_proj = nn.Linear(spec.hidden_size, kv_width, bias=spec.attention_bias)
        self.o_proj = nn.Linear(width, spec.hidden_size, bias=spec.attention_bias)
        self.q_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)
        self.k_norm = RMSNorm(spec.head_dim, eps=spec.rms_norm_eps)

    def queries(self, h: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return rotate(self.q_norm(self._heads(self.q_proj(h))), cos, sin)

    def keys_values(self, h: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return rotate(self.k_norm(self._heads(self.k_proj(h))), cos, sin), self._heads(self.v_proj(h))

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)


class RMSNorm(nn.Module):
    """w * x / rms(x), never the (1 + w) form, whatever the target's own norms are."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class SwiGLU(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Rope(nn.Module):
    """Half-split rotation over the first `rotary_dim` of a head, angles in float32 whatever the weights are."""

    inverse: Tensor

    def __init__(self, spec: RopeSpec) -> None:
        super().__init__()
        exponent = torch.arange(0, spec.rotary_dim, 2, dtype=torch.float64) / spec.rotary_dim
        self.register_buffer("inverse", spec.base**-exponent, persistent=False)

    def forward(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """positions [R, N] -> cos, sin [R, 1, N, rotary_dim / 2]."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        angle = positions[:, None, :, None].to(wide) * self.inverse.to(positions.device, wide)
        return angle.cos().to(dtype), angle.sin().to(dtype)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        inverse = self.inverse  # `.to(bfloat16)` of the drafter must not round the frequencies
        super()._apply(fn, recurse)
        self.inverse = inverse.to(self.inverse.device)
        return self


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


class DFlashDrafter:
    """The drafter in service: a DFlash bound to its target's embedding and head, with a context cache.

    The drafter contract of `engine/step.py`: `taps`, `depth`, `allocate`, `extend`, `draft`.
    """

    def __init__(self, model: DFlash, target: Target) -> None:
        self.model, self.spec, self.target = model.eval().requires_grad_(False), model.spec, target
        self.taps = model.spec.taps
        self.depth = model.spec.block_size - 1  # drafts per pass
        self._block = torch.full((self.depth,), model.spec.mask_token_id, device=target.device)
        self.cache: Cache | None = None

    @classmethod
    def load(cls, folder: str | Path, target: Target) -> DFlashDrafter:
        from draftproof.models.weights import load_drafter_weights

        spec = read_drafter(folder)
        model = DFlash(spec)
        load_drafter_weights(model, Path(folder), target)
        return cls(model.to(device=target.device, dtype=target.dtype), target)

    def prepack(self) -> None:
        """See `Target.prepack`."""
        prepack(self.model)

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        """Make the context cache. chunk is the most rows that one `extend` brings."""
        spec = self.spec
        shapes = [LayerShape(spec.num_kv_heads, spec.head_dim, layer.window) for layer in spec.layers]
        self.cache = Cache(
            shapes,
            slots=slots,
            capacity=capacity,
            chunk=max(chunk, spec.block_size),
            dtype=self.target.dtype,
            device=self.target.device,
        )

    @torch.no_grad()
    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        """Append the first counts [R] of S committed rows, features [R, S, K * H_target], to the context."""
        assert self.cache is not None
        rows = features.shape[1]
        depth, visible = self._block_shape(features.shape[0], rows, causal=True)
        plan = self.cache.plan(slots, depth, visible, reach)
        context = self.model.project(features)
        cos, sin = self.model.rope(plan.positions, context.dtype)
        for index, layer in enumerate(self.model.blocks):
            plan.write(index, *layer.context_kv(context, cos, sin))
        self.cache.commit(slots, counts)

    @torch.no_grad()
    def draft(
        self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Rescore | None = None
    ) -> DraftDist:
        """One pass over [anchor, mask x D] behind the context: anchors int64 [R] -> the `width` best of each depth."""
        assert self.cache is not None
        tokens = torch.cat([anchors[:, None], self._block.expand(anchors.shape[0], -1)], dim=1)
        plans = {
            causal: self.cache.plan(slots, *self._block_shape(tokens.shape[0], tokens.shape[1], causal), reach)
            for causal in {layer.causal for layer in self.spec.layers}
        }
        x = embed(tokens, self.target, self.spec)
        cos, sin = self.model.rope(next(iter(plans.values())).positions, x.dtype)
        for index, (layer, kind) in enumerate(zip(self.model.blocks, self.spec.layers, strict=True)):
            q, k, v = layer.block_qkv(x, cos, sin)
            x = layer.finish(x, attend(plans[kind.causal], index, q, k, v, q.shape[-1] ** -0.5))
        return likeliest(head_logits(self.model.norm(x[:, 1:]), self.target, self.spec), width, rescore)

    def drop(self, slots: Slots) -> None:
        assert self.cache is not None
        self.cache.drop(slots)

    @property
    def stores(self) -> list[Cache]:
        """What it keeps of every request."""
        return [] if self.cache is None else [self.cache]

    def _block_shape(self, rows: int, nodes: int, causal: bool) -> tuple[Tensor, Tensor]:
        order = torch.arange(nodes, device=self.target.device)
        visible = order[:, None] >= order if causal else torch.ones_like(order[:, None] >= order)
        return order.expand(rows, nodes), visible.expand(rows, nodes, nodes)


def embed(tokens: Tensor, target: Target, spec: DrafterSpec) -> Tensor:
    """The target's raw embedding rows: a scale inside the target's embedding module is bypassed, as the authors do."""
    return F.embedding(tokens, target.embedding.weight) * spec.input_embedding_scale


def head_logits(y: Tensor, target: Target, spec: DrafterSpec) -> Tensor:
    """The target's head on the drafter's normed rows, then the drafter's own multiplier and soft cap."""
    logits = target.head(y) * spec.output_multiplier
    cap = spec.final_logit_softcapping
    return cap * torch.tanh(logits / cap) if cap else logits
