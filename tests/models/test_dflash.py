"""The drafter against plain loops written from the method's description (dflash.md 1.2 and 1.3), and its properties.

Every planted fault that is known to kill acceptance silently must move the drafts away from those loops.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.config.drafter import DrafterSpec
from draftproof.config.layers import LayerSpec
from draftproof.models import dflash
from draftproof.models.dflash import DFlashDrafter, DFlashLayer, DraftDist, RMSNorm, Rope, rotate
from draftproof.models.target import causal_plan
from tests import tiny

ANCHOR, WINDOW, BLOCK = 9, 6, 4
SLIDING, FULL = "sliding_attention", "full_attention"
VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {},
    "full": {"layer_types": [FULL] * 3},
    "sliding": {"layer_types": [SLIDING] * 3},
    "full causal": {"layer_types": [FULL] * 3, "is_causal": True},
    "mixed causal": {"is_causal": True},
    "sliding causal, full not": {"is_causal": None},
    "window of one block": {"sliding_window": BLOCK},
    "partial rotary": {"partial_rotary_factor": 0.5},
    "bias": {"attention_bias": True},
    "embedding scale": {"dflash_config": {"input_embedding_scale": 3.0}},
    "head scale and cap": {"dflash_config": {"output_multiplier": 0.5, "final_logit_softcapping": 4.0}},
    "taps out of order": {"dflash_config": {"target_layer_ids": [4, 0]}},
    "no groups": {"num_key_value_heads": 4},
}  # fmt: skip


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


# --- the method in plain loops ----------------------------------------------------------------------


class Loops:
    """One block of drafts, row by row and head by head, from named tensors."""

    def __init__(self, drafter: DFlashDrafter) -> None:
        self.w = {name: weight.double() for name, weight in drafter.model.state_dict().items()}
        self.spec: DrafterSpec = drafter.spec
        self.table = drafter.target.embedding.weight.double()
        self.head = drafter.target.head.weight.double()

    def logp(self, features: Tensor, anchor: int) -> Tensor:
        """features [P, K * H] of the positions 0..P-1 -> log-probabilities [B - 1, V] of the positions P+1..P+B-1."""
        spec, start = self.spec, len(features)
        context = self.norm(features @ self.w["fc.weight"].T, "hidden_norm")
        block = [anchor] + [spec.mask_token_id] * (spec.block_size - 1)
        x = torch.stack([self.table[token] * spec.input_embedding_scale for token in block])
        for index, layer in enumerate(spec.layers):
            x = self.layer(x, context, start, f"layers.{index}", layer)
        logits = self.norm(x, "norm")[1:] @ self.head.T * spec.output_multiplier
        if cap := spec.final_logit_softcapping:
            logits = cap * torch.tanh(logits / cap)
        return logits.log_softmax(-1)

    def layer(self, x: Tensor, context: Tensor, start: int, at: str, kind: LayerSpec) -> Tensor:
        spec, h = self.spec, self.norm(x, f"{at}.input_layernorm")
        queries = self.heads(h, f"{at}.self_attn.q", spec.num_heads, start)
        keys = self.heads(context, f"{at}.self_attn.k", spec.num_kv_heads, 0)
        keys = torch.cat([keys, self.heads(h, f"{at}.self_attn.k", spec.num_kv_heads, start)])
        values = self.linear(torch.cat([context, h]), f"{at}.self_attn.v_proj")
        values = values.view(-1, spec.num_kv_heads, spec.head_dim)
        out = torch.zeros_like(queries)
        for j in range(len(x)):
            seen = [t for t in range(start) if not kind.sliding or t > start + j - kind.window]  # type: ignore[operator]
            seen += [start + i for i in range(len(x)) if not kind.causal or i <= j]
            for head in range(spec.num_heads):
                kv = head // (spec.num_heads // spec.num_kv_heads)
                scores = keys[seen, kv] @ queries[j, head] / spec.head_dim**0.5
                out[j, head] = scores.softmax(0) @ values[seen, kv]
        x = x + self.linear(out.flatten(1), f"{at}.self_attn.o_proj")
        u = self.norm(x, f"{at}.post_attention_layernorm")
        gate, up = self.linear(u, f"{at}.mlp.gate_proj"), self.linear(u, f"{at}.mlp.up_proj")
        return x + self.linear(gate * gate.sigmoid() * up, f"{at}.mlp.down_proj")

    def heads(self, rows: Tensor, at: str, count: int, start: int) -> Tensor:
        """Project, norm each head, rotate by the absolute position: [rows, count, head_dim]."""
        y = self.norm(self.linear(rows, f"{at}_proj").view(len(rows), count, -1), f"{at}_norm")
        half = self.spec.rope.rotary_dim // 2
        out = y.clone()
        for row in range(len(rows)):
            for i in range(half):
                angle = torch.tensor((start + row) / self.spec.rope.base ** (i / half), dtype=torch.float64)
                a, b = y[row, :, i], y[row, :, i + half]
                out[row, :, i] = a * angle.cos() - b * angle.sin()
                out[row, :, i + half] = b * angle.cos() + a * angle.sin()
        return out

    def linear(self, x: Tensor, at: str) -> Tensor:
        return x @ self.w[f"{at}.weight"].T + self.w.get(f"{at}.bias", 0.0)

    def norm(self, x: Tensor, at: str) -> Tensor:
        return x / (x.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt() * self.w[f"{at}.weight"]


# --- the drafter in service -------------------------------------------------------------------------


def new_drafter(kind: str = "llama", **changes: Any) -> DFlashDrafter:
    drafter = tiny.drafter(tiny.target(kind), **changes)
    drafter.allocate(slots=2, capacity=100, chunk=20)
    return drafter


def features_of(drafter: DFlashDrafter, rows: int, seed: int = 0) -> Tensor:
    width = len(drafter.taps) * tiny.HIDDEN
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def extend(drafter: DFlashDrafter, features: Tensor, chunk: int = 20, slot: int = 0) -> None:
    for part in features.split(chunk):
        reach = int(drafter.cache.lengths[slot]) + len(part)  # type: ignore[union-attr]
        drafter.extend(slice(slot, slot + 1), part[None], torch.tensor([len(part)]), reach)


def draft(drafter: DFlashDrafter, anchor: int = ANCHOR, slot: int = 0) -> Tensor:
    """Log-probabilities [D, V] of one slot."""
    reach = int(drafter.cache.lengths[slot]) + BLOCK  # type: ignore[union-attr]
    return dense(drafter.draft(slice(slot, slot + 1), torch.tensor([anchor]), reach, width=tiny.VOCAB))[0]


def dense(dist: DraftDist) -> Tensor:
    assert (dist.logp.diff(dim=-1) <= 0).all(), "best first"
    return torch.zeros_like(dist.logp).scatter_(-1, dist.ids, dist.logp)


def differ(a: Tensor, b: Tensor) -> bool:
    return bool((a - b).abs().max() > 1e-4)


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=0, atol=2e-5, check_dtype=False)


def check_loops(drafter: DFlashDrafter, rows: int = 20, extra: int = 0, anchor: int = ANCHOR) -> None:
    """extra: rows of the context beyond those that the loops see; anchor: what the drafter is told."""
    features = features_of(drafter, rows + 1)
    wanted = Loops(drafter)
    wanted.spec = drafter.model.spec  # a fault planted in drafter.spec is the drafter's alone
    extend(drafter, features[: rows + extra], chunk=7)
    close(draft(drafter, anchor), wanted.logp(features[:rows], ANCHOR))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_drafts_equal_plain_loops(changes: dict[str, Any]) -> None:
    check_loops(new_drafter(**changes))


@pytest.mark.parametrize("rows", [1, WINDOW - 1, WINDOW, WINDOW + 1, 70])
@pytest.mark.parametrize("variant", ["mixed", "sliding causal, full not"])
def test_drafts_equal_plain_loops_at_every_length(rows: int, variant: str) -> None:
    """Shorter than the window, at its edge, and longer than the sliding ring of 64 rows."""
    check_loops(new_drafter(**VARIANTS[variant]), rows)


def test_embedding_is_the_raw_table_whatever_the_target_multiplies() -> None:
    """Gemma scales its embeddings by sqrt(H); the drafter reads the table below that, as its authors do."""
    drafter = new_drafter("gemma3")
    check_loops(drafter)
    tokens = torch.tensor([[5]])
    raw = dflash.embed(tokens, drafter.target, drafter.spec)
    assert torch.equal(raw[0, 0], drafter.target.embedding.weight[5])
    torch.testing.assert_close(drafter.target.embedding(tokens), raw * tiny.HIDDEN**0.5)  # it does scale


@pytest.mark.parametrize("rows", [20, 75])
def test_a_cache_filled_row_by_row_still_holds_a_block(rows: int) -> None:
    """The block is longer than any chunk of the context."""
    drafter = new_drafter()
    drafter.allocate(slots=2, capacity=100, chunk=1)
    features = features_of(drafter, rows)
    extend(drafter, features, chunk=1)
    close(draft(drafter), Loops(drafter).logp(features, ANCHOR))


def relayer(drafter: DFlashDrafter, **changes: Any) -> DFlashDrafter:
    """Plant another view of every layer in the drafter alone, and make its cache anew."""
    layers = tuple(dataclasses.replace(layer, **changes) for layer in drafter.spec.layers)
    drafter.spec = dataclasses.replace(drafter.spec, layers=layers)
    drafter.allocate(slots=2, capacity=100, chunk=20)
    return drafter


FAULTS: dict[str, Callable[[], None]] = {
    "window ignored": lambda: check_loops(relayer(new_drafter(), sliding=False, window=None)),
    "window one short": lambda: check_loops(relayer(new_drafter(**VARIANTS["sliding"]), window=WINDOW - 1)),
    "window one long": lambda: check_loops(relayer(new_drafter(**VARIANTS["sliding"]), window=WINDOW + 1)),
    "causal for bidirectional": lambda: check_loops(relayer(new_drafter(), causal=True)),
    "bidirectional for causal": lambda: check_loops(relayer(new_drafter(is_causal=True), causal=False)),
    "mask row in slot 0": lambda: check_loops(new_drafter(), anchor=3),
    "context one row too long": lambda: check_loops(new_drafter(), extra=1),
    "context one row too short": lambda: check_loops(new_drafter(), extra=-1),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_control_faults_of_wiring(fault: Callable[[], None]) -> None:
    with pytest.raises(AssertionError):
        fault()


@pytest.mark.parametrize(
    "fault", ["input norm on the context", "1 + w norms", "positions from 0 in every chunk", "interleaved rotation"]
)
def test_control_faults_of_arithmetic(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    norm, rope = RMSNorm.forward, Rope.forward

    def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        order = torch.arange(x.shape[-1]).view(-1, 2).T.flatten()
        return rotate(x[..., order], cos, sin)[..., order.argsort()]

    if fault == "input norm on the context":
        monkeypatch.setattr(
            DFlashLayer, "context_kv", lambda s, c, *r: s.self_attn.keys_values(s.input_layernorm(c), *r)
        )
    elif fault == "1 + w norms":
        monkeypatch.setattr(RMSNorm, "forward", lambda s, x: norm(s, x) + norm(s, x) / s.weight)
    elif fault == "positions from 0 in every chunk":
        monkeypatch.setattr(Rope, "forward", lambda s, p, dtype: rope(s, p - p[:, :1], dtype))
    else:
        monkeypatch.setattr(dflash, "rotate", interleaved)
    with pytest.raises(AssertionError):
        check_loops(new_drafter())


# --- taps, end to end with a target -----------------------------------------------------------------


def check_taps(kind: str, taps: tuple[int, ...] = (0, 2, 4)) -> None:
    """From a text through the target's hooks to drafts; the loops read the plain model's own hidden states."""
    drafter, owner, text = new_drafter(kind), tiny.target(kind), torch.arange(20) * 5 % tiny.VOCAB
    plan = causal_plan(owner.new_cache(slots=1, capacity=20, chunk=20), slice(0, 1), 20, 20)
    features = owner.forward(text[None], plan, taps=taps).features
    assert features is not None and drafter.taps == (0, 2, 4)
    with torch.no_grad():
        states = tiny.plain_model(kind)(input_ids=text[None], output_hidden_states=True).hidden_states
    extend(drafter, features[0])
    wanted = torch.cat([states[tap + 1][0] for tap in drafter.taps], -1)
    close(draft(drafter), Loops(drafter).logp(wanted, ANCHOR))


@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_taps_are_those_of_the_config(kind: str) -> None:
    check_taps(kind)


@pytest.mark.parametrize("taps", [(1, 3, 5), (0, 1, 3), (0, 2, 3), (4, 2, 0)], ids=str)
def test_control_other_taps(taps: tuple[int, ...]) -> None:
    """One up, one down (tap 0 has no layer below), one of three, another order."""
    with pytest.raises(AssertionError):
        check_taps("llama", taps)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_tap_identity(k: int) -> None:
    """With fc picking tap k, the context row is the normed residual after layer id k, and not of its neighbours."""
    drafter, owner, text = new_drafter(), tiny.target(), torch.arange(12)
    weight = torch.zeros_like(drafter.model.fc.weight)
    weight[:, k * tiny.HIDDEN : (k + 1) * tiny.HIDDEN] = torch.eye(tiny.HIDDEN)
    drafter.model.fc.weight.data = weight
    plan = causal_plan(owner.new_cache(slots=1, capacity=12, chunk=12), slice(0, 1), 12, 12)
    context = drafter.model.project(owner.forward(text[None], plan, taps=drafter.taps).features)  # type: ignore[arg-type]
    with torch.no_grad():
        states = tiny.plain_model()(input_ids=text[None], output_hidden_states=True).hidden_states
    entry = drafter.taps[k] + 1
    wanted, above, below = (Loops(drafter).norm(states[entry + d], "hidden_norm") for d in (0, 1, -1))
    torch.testing.assert_close(context, wanted, rtol=0, atol=1e-10)
    assert differ(context, above) and differ(context, below)


# --- properties -------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["mixed", "mixed causal"])
@pytest.mark.parametrize("rows", [19, 85])
def test_chunks_of_the_context_do_not_matter(variant: str, rows: int) -> None:
    outs = []
    for chunk in (1, 7, 20):
        drafter = new_drafter(**VARIANTS[variant])
        extend(drafter, features_of(drafter, rows), chunk)
        outs.append(draft(drafter))
    close(outs[0], outs[1])
    close(outs[0], outs[2])


def last_row_reaches_row_1(**changes: Any) -> bool:
    """Does another token in the last mask row change the draft of row 1?"""
    drafter = new_drafter(**changes)
    extend(drafter, features_of(drafter, 12))
    before = draft(drafter)
    drafter._block = drafter._block.clone()
    drafter._block[-1] = 7
    after = draft(drafter)
    assert differ(before[-1], after[-1]), "the row itself must change"
    return differ(before[0], after[0])


@pytest.mark.parametrize(
    "kinds", [[FULL] * 3, [SLIDING] * 3, [SLIDING, SLIDING, FULL]], ids=["full", "sliding", "mixed"]
)
def test_causality(kinds: list[str]) -> None:
    assert last_row_reaches_row_1(layer_types=kinds, is_causal=False)
    assert not last_row_reaches_row_1(layer_types=kinds, is_causal=True)


def attended_row(drafter: DFlashDrafter, row: int, monkeypatch: pytest.MonkeyPatch) -> Tensor:
    """What the first layer's attention returns for one block row; row 0 has no draft of its own."""
    seen: list[Tensor] = []
    right = dflash.attend

    def keep(*args: Any) -> Tensor:
        seen.append(right(*args))
        return seen[-1]

    with monkeypatch.context() as patch:
        patch.setattr(dflash, "attend", keep)
        draft(drafter)
    return seen[0][0, :, row]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("row", [0, 1, 3])
@pytest.mark.parametrize("length", [10, 64, 83])
def test_window_edge(length: int, row: int, causal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block row j sees the context row at P + j - W + 1 and not the one before, also where the ring has wrapped."""
    changes = {"num_hidden_layers": 1, "layer_types": [SLIDING], "is_causal": causal}

    def attended(moved: int | None) -> Tensor:
        drafter = new_drafter(**changes)
        features = features_of(drafter, length)
        if moved is not None:
            features[moved] += 1
        extend(drafter, features)
        return attended_row(drafter, row, monkeypatch)

    edge = length + row - WINDOW + 1
    assert differ(attended(edge), attended(None))
    assert torch.equal(attended(edge - 1), attended(None))


def test_the_anchor_is_no_context() -> None:
    """The drafter sees P context rows, never P + 1: what a draft stages behind them is overwritten, not kept."""
    drafter = new_drafter()
    extend(drafter, features_of(drafter, 12))
    draft(drafter)
    assert drafter.cache is not None and drafter.cache.lengths.tolist() == [12, 0]


def test_block_rows_are_never_committed() -> None:
    """A draft leaves no trace: repeated, or made between two extensions with any anchor."""
    quiet, busy = new_drafter(), new_drafter()
    features = features_of(quiet, 85)
    for begin in range(0, 85, 5):
        for drafter in (quiet, busy):
            extend(drafter, features[begin : begin + 5])
        first = draft(busy, anchor=begin % tiny.VOCAB)
        assert torch.equal(first, draft(busy, anchor=begin % tiny.VOCAB))
    assert torch.equal(draft(quiet), draft(busy))


def test_rows_beyond_the_count_are_not_committed() -> None:
    """Features of rejected nodes come along with accepted ones; only `counts` of them stay."""
    exact, padded = new_drafter(), new_drafter()
    features = features_of(exact, 30)
    extend(exact, features[:13])
    for begin, count in ((0, 4), (4, 2), (6, 0), (6, 4), (10, 3)):
        rows = torch.cat([features[begin : begin + count], 9 * features[20 : 24 - count]])
        padded.extend(slice(0, 1), rows[None], torch.tensor([count]), 30)
    close(draft(exact), draft(padded))


@pytest.mark.parametrize("order", [slice(0, 2), torch.tensor([1, 0]), torch.tensor([1])])
def test_slots_of_different_lengths_equal_each_alone(order: Any) -> None:
    both = new_drafter()
    features = [features_of(both, 5, seed=1), features_of(both, 17, seed=2)]
    for slot in (0, 1):
        extend(both, features[slot], slot=slot)
    slots = list(range(2))[order] if isinstance(order, slice) else order.tolist()
    out = dense(both.draft(order, torch.tensor([9 + s for s in slots]), 24, width=tiny.VOCAB))
    for row, slot in enumerate(slots):
        alone = new_drafter()
        extend(alone, features[slot])
        close(out[row], draft(alone, anchor=9 + slot))


def test_drop_forgets_the_context() -> None:
    used, fresh = new_drafter(), new_drafter()
    extend(used, features_of(used, 30, seed=3))
    used.drop(slice(0, 1))
    for drafter in (used, fresh):
        extend(drafter, features_of(drafter, 4))
    close(draft(used), draft(fresh))


def test_the_best_are_a_prefix_of_all() -> None:
    drafter = new_drafter()
    extend(drafter, features_of(drafter, 8))
    everything, three = (drafter.draft(slice(0, 1), torch.tensor([ANCHOR]), 12, width=w) for w in (tiny.VOCAB, 3))
    assert three.ids.shape == three.logp.shape == (1, BLOCK - 1, 3) and three.logp.dtype == torch.float32
    assert torch.equal(three.ids, everything.ids[..., :3]) and torch.equal(three.logp, everything.logp[..., :3])
    torch.testing.assert_close(everything.logp.exp().sum(-1), torch.ones(1, BLOCK - 1))


# --- rotary positions -------------------------------------------------------------------------------


def test_rotation_equals_transformers_qwen3() -> None:
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = Qwen3Config(head_dim=8, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    x = torch.randn(1, 2, 5, 8)
    positions = torch.tensor([[0, 1, 7, 100, 4000]])
    theirs, _ = apply_rotary_pos_emb(x, x, *Qwen3RotaryEmbedding(config)(x, positions))
    ours = rotate(x, *tiny_rope()(positions, torch.float32))
    torch.testing.assert_close(ours, theirs)


def tiny_rope(dim: int = 8) -> Rope:
    return Rope(tiny.drafter_spec(partial_rotary_factor=dim / 8).rope)


def test_scores_depend_on_the_distance_alone() -> None:
    """Context and block are rotated by positions of one scale: moving both leaves q . k, moving one changes it."""
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64)

    def score(at_q: int, at_k: int) -> Tensor:
        rope = tiny_rope()
        turned = [rotate(x, *rope(torch.tensor([[p]]), torch.float64)) for x, p in ((q, at_q), (k, at_k))]
        return (turned[0] * turned[1]).sum()

    torch.testing.assert_close(score(30, 12), score(1030, 1012))
    assert differ(score(30, 12), score(1030, 12)) and differ(score(30, 12), score(31, 12))


def test_partial_rotary_leaves_the_rest_of_a_head() -> None:
    x = torch.randn(1, 1, 3, 8)
    turned = rotate(x, *tiny_rope(4)(torch.tensor([[3, 4, 5]]), torch.float32))
    assert torch.equal(turned[..., 4:], x[..., 4:]) and differ(turned[..., :4], x[..., :4])


def test_rounding_the_weights_does_not_round_the_frequencies() -> None:
    exact, rounded = tiny_rope(), tiny_rope().to(torch.bfloat16)
    assert torch.equal(exact.inverse, rounded.inverse) and rounded.inverse.dtype == torch.float64
