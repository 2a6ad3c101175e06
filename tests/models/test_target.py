"""The target on our cache against the same transformers model by itself, in float64, and what is refused at loading."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from draftproof.config.target import read_target
from draftproof.errors import UserError
from draftproof.models import attention, target
from draftproof.models.cache import Cache, Slots
from draftproof.models.plan import Plan
from draftproof.models.target import FINAL, Tap, Target, TargetOut, causal_plan, require_kinds, require_supported
from draftproof.spec.tree import chain, visibility
from tests import tiny
from tests.spec.forest import forest, path_to

LENGTH = 30  # the windows of qwen2 and gemma3 are 8
CHUNKS = {"one chunk": [LENGTH], "ragged": [7, 1, 11, 3, 8], "token by token": [1] * LENGTH}
TAPS: tuple[Tap, ...] = (0, 3, FINAL)
ALL = (*tiny.KINDS, *tiny.HYBRIDS)


def sharp(kind: str) -> dict[str, float]:
    """Hybrids' modules compute norms and recurrence in float32 whatever the weights are: `test_hybrid` is sharper."""
    return {"rtol": 0, "atol": 5e-4 if kind in tiny.HYBRIDS else 1e-10}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def text(length: int = LENGTH, seed: int = 0) -> Tensor:
    return torch.randint(4, tiny.VOCAB, (length,), generator=torch.Generator().manual_seed(seed))


def plain(kind: str, tokens: Tensor) -> Any:
    """The model's own forward, all hidden states included."""
    with torch.no_grad():
        return tiny.plain_model(kind)(input_ids=tokens[None], use_cache=False, output_hidden_states=True)


def feed(owner: Target, cache: Cache, slot: int, tokens: Tensor, chunks: list[int] | None = None) -> TargetOut:
    """Run and commit a text in chunks on one slot; all logits and tapped features."""
    where, outs = slice(slot, slot + 1), []
    for part in tokens.split(chunks or [len(tokens)]):
        plan = causal_plan(cache, where, len(part), int(cache.lengths[slot]) + len(part))
        outs.append(owner.forward(part[None], plan, taps=TAPS))
        cache.commit(where, torch.tensor([len(part)]))
    return TargetOut(*(torch.cat([getattr(o, f) for o in outs], 1) for f in ("logits", "features")))


def new_cache(owner: Target, slots: int = 1, chunk: int = LENGTH) -> Cache:
    return owner.new_cache(slots=slots, capacity=80, chunk=chunk)


def check_forward(kind: str, chunks: list[int]) -> None:
    owner = tiny.target(kind)
    cache = new_cache(owner, chunk=max(chunks))
    out = feed(owner, cache, 0, text(), chunks)
    torch.testing.assert_close(out.logits, plain(kind, text()).logits, **sharp(kind))


@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("kind", ALL)
def test_forward_equals_the_models_own(kind: str, chunks: list[int]) -> None:
    check_forward(kind, chunks)


def wrong_scale(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    return attention_as_it_is(q, k, v, mask, 1.02 * scale)


attention_as_it_is = attention.folded_attention


@pytest.mark.parametrize("kind", ALL)
def test_control_forward_with_another_scale(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "folded_attention", wrong_scale)
    with pytest.raises(AssertionError):
        check_forward(kind, [LENGTH])


def shift_window(by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask's window off by one, or without one."""
    build = Plan._build_mask

    def shifted(self: Plan, window: int | None, rows: int, seen: int) -> Tensor:
        return build(self, None if window is None or by is None else window + by, rows, seen)

    monkeypatch.setattr(Plan, "_build_mask", shifted)


@pytest.mark.parametrize("by", [None, 1, -1])
@pytest.mark.parametrize("kind", ["qwen2", "gemma3"])
def test_control_forward_with_another_window(kind: str, by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    shift_window(by, monkeypatch)
    with pytest.raises(AssertionError):
        check_forward(kind, [LENGTH])


# --- taps -------------------------------------------------------------------------------------------


def check_taps(kind: str, shift: int = 0) -> None:
    """`hidden_states[i + 1]` of the plain model is the stream after layer i; its last entry is after the final norm."""
    owner, states = tiny.target(kind), plain(kind, text()).hidden_states
    out = feed(owner, new_cache(owner), 0, text(), CHUNKS["ragged"])
    assert out.features is not None
    for column, layer in zip(out.features.split(tiny.HIDDEN, -1), (0, 3), strict=False):
        torch.testing.assert_close(column, states[layer + 1 + shift], **sharp(kind))
    torch.testing.assert_close(out.features[..., -tiny.HIDDEN :], states[-1], **sharp(kind))


@pytest.mark.parametrize("kind", ALL)
def test_taps_are_the_stream_after_a_layer(kind: str) -> None:
    check_taps(kind)


@pytest.mark.parametrize("shift", [1, -1])
@pytest.mark.parametrize("kind", ALL)
def test_control_taps_one_layer_off(kind: str, shift: int) -> None:
    with pytest.raises(AssertionError):
        check_taps(kind, shift)


@pytest.mark.parametrize("kind", ALL)
def test_the_last_layers_tap_is_before_the_final_norm(kind: str) -> None:
    """Where `hidden_states` has no entry: an own hook on the plain model."""
    seen: list[Tensor] = []
    layer = tiny.plain_model(kind).get_decoder().layers[-1]
    handle = layer.register_forward_hook(lambda _m, _a, out: seen.append(out[0] if isinstance(out, tuple) else out))
    plain(kind, text())
    handle.remove()
    owner = tiny.target(kind)
    plan = causal_plan(new_cache(owner), slice(0, 1), LENGTH, LENGTH)
    out = owner.forward(text()[None], plan, taps=[tiny.LAYERS - 1, FINAL])
    assert out.features is not None
    torch.testing.assert_close(out.features[..., : tiny.HIDDEN], seen[0].view(1, LENGTH, -1), **sharp(kind))
    assert not torch.equal(*out.features.split(tiny.HIDDEN, -1))


def test_taps_come_in_listed_order_and_leave_no_hooks() -> None:
    owner = tiny.target()
    cache = new_cache(owner)

    def forward(taps: list[Tap]) -> Tensor | None:
        return owner.forward(text()[None], causal_plan(cache, slice(0, 1), LENGTH, LENGTH), taps=taps).features

    first, second = forward([4, 1]), forward([1, 4])
    assert first is not None and second is not None
    assert torch.equal(first.roll(tiny.HIDDEN, -1), second) and not torch.equal(first, second)
    assert forward([]) is None
    assert not any(module._forward_hooks for module in (*owner.layers, owner.final_norm))


def test_rows_ask_for_some_logits_only() -> None:
    owner = tiny.target()
    cache = new_cache(owner)

    def forward(rows: int | Tensor) -> Tensor:
        return owner.forward(text()[None], causal_plan(cache, slice(0, 1), LENGTH, LENGTH), rows=rows).logits

    everything = forward(0)
    assert everything.shape == (1, LENGTH, tiny.VOCAB)
    torch.testing.assert_close(forward(3), everything[:, -3:], **sharp("llama"))
    torch.testing.assert_close(forward(torch.tensor([2, 9])), everything[:, [2, 9]], **sharp("llama"))


# --- batches and trees ------------------------------------------------------------------------------

PROMPTS = [text(n, seed) for seed, n in enumerate((3, 21, 12))]
BUSHY = forest(
    [[-1, 0, 0, 1, 1, 2, 3, 5], [-1, 0, 1, 2, 3, 4, 5, 6], [-1, 0, 0]],
    [[9, 8, 7, 6, 5, 4, 10, 11], [11, 12, 13, 14, 15, 16, 17, 18], [9, 20, 21]],
)


def prefilled(owner: Target) -> Cache:
    cache = new_cache(owner, slots=3, chunk=21)
    for slot, prompt in enumerate(PROMPTS):
        feed(owner, cache, slot, prompt)
    return cache


def verify(owner: Target, cache: Cache, order: Slots, rows: list[int]) -> TargetOut:
    plan = cache.plan(order, BUSHY.depth[rows], visibility(BUSHY)[rows], 29)
    return owner.forward(BUSHY.token[rows], plan, taps=TAPS)


def check_tree(kind: str) -> None:
    """Three slots of different lengths, one tree each, in one forward: every node as its root -> node path alone."""
    owner = tiny.target(kind)
    cache, order = prefilled(owner), [2, 0, 1]
    out = verify(owner, cache, torch.tensor(order), order)
    for row, slot in enumerate(order):
        for node in range(int(BUSHY.n[slot])):
            path = path_to(BUSHY, slot, node)
            alone = plain(kind, torch.cat([PROMPTS[slot], BUSHY.token[slot, path]]))
            torch.testing.assert_close(out.logits[row, node], alone.logits[0, -1], **sharp(kind))
            assert out.features is not None
            torch.testing.assert_close(
                out.features[row, node, -tiny.HIDDEN :], alone.hidden_states[-1][0, -1], **sharp(kind)
            )


@pytest.mark.parametrize("kind", ALL)
def test_every_node_of_a_tree_equals_its_path_alone(kind: str) -> None:
    check_tree(kind)


@pytest.mark.parametrize("fault", ["siblings seen", "position is the index"])
def test_control_tree(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Cache.plan

    def faulty(self: Cache, slots: Slots, depth: Tensor, visible: Tensor, reach: int, *, causal: bool = False) -> Plan:
        if fault == "siblings seen":
            visible = torch.ones_like(visible).tril()
        else:
            depth = torch.arange(depth.shape[1]).expand_as(depth)
        return plan(self, slots, depth, visible, reach, causal=causal)

    monkeypatch.setattr(Cache, "plan", faulty)
    with pytest.raises(AssertionError):
        check_tree("llama")


def check_continuity(kind: str, path: list[int], committed: list[int]) -> None:
    """After a commit the next logits and features are those of a fresh prefill of the committed text."""
    owner = tiny.target(kind)
    cache, slot = prefilled(owner), slice(0, 1)
    verify(owner, cache, slot, [0])
    cache.commit(slot, torch.tensor([len(path)]), torch.tensor([path + [0] * (8 - len(path))]))
    out = feed(owner, cache, 0, text(12, 9), [5, 7])
    fresh = plain(kind, torch.cat([PROMPTS[0], BUSHY.token[0, committed], text(12, 9)]))
    torch.testing.assert_close(out.logits[0], fresh.logits[0, -12:], **sharp(kind))
    assert out.features is not None
    torch.testing.assert_close(out.features[0, :, : tiny.HIDDEN], fresh.hidden_states[1][0, -12:], **sharp(kind))


@pytest.mark.parametrize("path", [[0], [0, 2, 5, 7], [0, 1, 4]], ids=str)
@pytest.mark.parametrize("kind", ALL)
def test_a_partial_accept_leaves_the_cache_of_a_fresh_prefill(kind: str, path: list[int]) -> None:
    check_continuity(kind, path, path)


def test_control_a_row_behind_the_accepted_path() -> None:
    with pytest.raises(AssertionError):
        check_continuity("llama", [0, 2, 5], [0, 2])


@pytest.mark.parametrize("kind", ALL)
def test_a_chain_through_the_tree_path_is_bitwise_the_chain(kind: str) -> None:
    owner = tiny.target(kind)
    line = chain(BUSHY.token[:, 0], BUSHY.token[:, 1:])
    outs = []
    for tree in (line, dataclasses.replace(line, chain=False)):
        cache = prefilled(owner)
        plan = cache.plan(slice(0, 3), tree.depth, visibility(tree), 29)
        outs.append(owner.forward(tree.token, plan).logits)
    if kind in tiny.HYBRIDS:
        torch.testing.assert_close(*outs, rtol=0, atol=1e-11)
    else:
        assert torch.equal(*outs)


# --- refusals ---------------------------------------------------------------------------------------


def refused(code: str, named: str, act: Callable[[], object]) -> None:
    with pytest.raises(UserError) as caught:
        act()
    assert caught.value.code == code and named in caught.value.message, caught.value


def test_self_check_refuses_an_attention_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tiny.target()
    owner.self_check()
    monkeypatch.setattr(attention, "folded_attention", wrong_scale)
    refused("target-mismatch", "llama", owner.self_check)
    assert owner.model.config._attn_implementation == attention.NAME


@pytest.mark.parametrize("by", [None, 1, -1])
def test_self_check_is_longer_than_the_window(by: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    owner = tiny.target("qwen2")
    shift_window(by, monkeypatch)
    refused("target-mismatch", "qwen2", owner.self_check)


def test_self_check_refuses_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "folded_attention", lambda q, *_: q * torch.nan)
    refused("target-mismatch", "llama", tiny.target().self_check)


def copy_of(kind: str, to: Path, **config: Any) -> Path:
    folder = to / "model"
    shutil.copytree(tiny.target_folder(kind), folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def load(folder: Path) -> Target:
    return Target.load(folder, dtype=torch.float32)


def test_an_untouched_copy_loads(tmp_path: Path) -> None:
    assert load(copy_of("qwen3", tmp_path)).dtype == torch.float32


def test_unknown_layers_are_refused_before_the_weights_are_read(tmp_path: Path) -> None:
    kinds = ["mamba", "full_attention"] * (tiny.LAYERS // 2)
    folder = copy_of("qwen3", tmp_path, layer_types=kinds)
    (folder / "model.safetensors").unlink()
    refused("target-unsupported", "layers of kind mamba", lambda: load(folder))


def test_linear_layers_that_the_model_lacks_are_refused(tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"] * (tiny.LAYERS // 2)
    spec = read_target(copy_of("qwen3", tmp_path, layer_types=kinds))
    refused("target-unsupported", "recurrent layers [0, 2, 4], the model []", lambda: require_kinds(spec, {}))


def test_a_layer_count_that_differs_is_refused() -> None:
    spec = tiny.target().spec
    require_supported(spec, tiny.LAYERS)
    refused("target-mismatch", "promises 6 layers, the model has 5", lambda: require_supported(spec, tiny.LAYERS - 1))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_nan_weights_are_refused_by_name(bad: float, tmp_path: Path) -> None:
    name, folder = "model.layers.3.mlp.up_proj.weight", copy_of("llama", tmp_path)
    edit(folder, lambda tensors: tensors[name].view(-1)[5:6].fill_(bad))
    refused("weights-invalid", name, lambda: load(folder))


def test_control_without_the_look_at_the_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unused row of the embedding holds NaN: nothing else notices, so the look itself is what refuses."""
    folder = copy_of("llama", tmp_path)
    name = "model.embed_tokens.weight"
    used = set(((torch.arange(24) * 7 + 11) % tiny.VOCAB).tolist())
    idle = next(i for i in range(tiny.VOCAB) if i not in used)
    edit(folder, lambda tensors: tensors[name][idle].fill_(torch.nan))
    refused("weights-invalid", name, lambda: load(folder))
    monkeypatch.setattr(target, "require_finite", lambda *_: None)
    load(folder)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    refused("weights-truncated", "model.safetensors", lambda: load(folder))


def test_a_missing_tensor_is_refused_by_name(tmp_path: Path) -> None:
    """transformers fills it with random numbers and only logs a line."""
    name, folder = "model.layers.3.mlp.up_proj.weight", copy_of("llama", tmp_path)
    edit(folder, lambda tensors: tensors.pop(name))
    refused("weights-invalid", name, lambda: load(folder))


def test_a_misshapen_tensor_is_refused_by_name(tmp_path: Path) -> None:
    name, folder = "model.layers.3.mlp.up_proj.weight", copy_of("llama", tmp_path)
    edit(folder, lambda tensors: tensors.update({name: tensors[name][:-1].contiguous()}))
    refused("weights-invalid", name, lambda: load(folder))


def test_weights_with_more_layers_than_the_config_are_refused(tmp_path: Path) -> None:
    folder = copy_of("llama", tmp_path, num_hidden_layers=tiny.LAYERS - 1)
    refused("weights-invalid", f"model.layers.{tiny.LAYERS - 1}.", lambda: load(folder))
