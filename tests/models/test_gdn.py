"""The gated delta rule: block, chunked and tree form against the rule written down node by node, and its commit."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from draftproof.models import gdn

R, H, DK, DV = 2, 3, 8, 6


def draw_rows(count: int, *, seed: int = 0, decay: float = 1.0, dtype: torch.dtype = torch.float64) -> gdn.Rows:
    draw = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    g = -decay * torch.rand(R, count, H, generator=draw, dtype=dtype)
    beta = torch.rand(R, count, H, generator=draw, dtype=dtype)
    return gdn.unit_rows(randn(R, count, 1, DK), randn(R, count, 1, DK), randn(R, count, H, DV), g, beta)


def draw_state(seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(R, H, DK, DV, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def draw_parents(count: int, seed: int) -> list[int]:
    draw = torch.Generator().manual_seed(seed)
    return [-1, *(int(torch.randint(0, node, (1,), generator=draw)) for node in range(1, count))]


def ancestry(parents: list[int]) -> tuple[Tensor, Tensor]:
    """seen [R, N, N] and depth [R, N] of one tree for all requests."""
    count = len(parents)
    seen, depth = torch.eye(count, dtype=torch.bool), torch.zeros(count, dtype=torch.long)
    for node, above in enumerate(parents):
        if above >= 0:
            seen[node] |= seen[above]
            depth[node] = depth[above] + 1
    return seen.expand(R, count, count), depth.expand(R, count)


def path_to(parents: list[int], node: int) -> list[int]:
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    return path


@pytest.mark.parametrize("decay", [0.1, 5.0, 60.0])
@pytest.mark.parametrize("count", [1, 2, 16, 64, 65, 200])
def test_causal_forms_equal_the_rule_written_down(count: int, decay: float) -> None:
    rows, state = draw_rows(count, decay=decay), draw_state()
    out, written = gdn.run(rows, state)
    expected, states = gdn.sequential(rows, state, torch.arange(count) - 1)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    torch.testing.assert_close(written.added_to(state), states[:, :, -1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("decay", [0.1, 5.0, 60.0])
@pytest.mark.parametrize("seed", range(4))
def test_trees_equal_the_rule_written_down(seed: int, decay: float) -> None:
    """Every node's output, and every path's committed state: siblings do not see each other."""
    parents = draw_parents(24, seed)
    rows, state, (seen, _) = draw_rows(24, seed=seed, decay=decay), draw_state(), ancestry(parents)
    out, written = gdn.run(rows, state, seen)
    expected, states = gdn.sequential(rows, state, torch.tensor(parents))
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-10)
    for node in range(24):
        path = path_to(parents, node)
        padded = torch.tensor([path + [0] * (24 - len(path))] * R)
        committed = written.added_to(state, torch.tensor([len(path)] * R), padded)
        torch.testing.assert_close(committed, states[:, :, node], rtol=0, atol=1e-10)


def test_control_flat_order_on_a_tree_differs() -> None:
    parents = [-1, 0, 0, 1, 2]
    rows, state = draw_rows(5), draw_state()
    expected, _ = gdn.sequential(rows, state, torch.tensor(parents))
    out, _ = gdn.run(rows, state)
    assert (out - expected).abs().amax((0, 1, 3)).tolist()[2] > 1e-3


@pytest.mark.parametrize("count", [7, 150])
def test_ragged_commits_equal_the_states_on_the_way(count: int) -> None:
    rows, state = draw_rows(count), draw_state()
    _, written = gdn.run(rows, state)
    _, states = gdn.sequential(rows, state, torch.arange(count) - 1)
    for first, second in ((0, 1), (3, count), (count - 1, 2)):
        committed = written.added_to(state, torch.tensor([first, second]))
        for row, kept in enumerate((first, second)):
            expected = states[row, :, kept - 1] if kept else state[row]
            torch.testing.assert_close(committed[row], expected, rtol=0, atol=1e-10)


def test_float32_under_strong_decays_stays_finite_and_close() -> None:
    rows, state = draw_rows(300, decay=80.0, dtype=torch.float32), draw_state(dtype=torch.float32)
    wide = gdn.Rows(*(t.double() for t in (rows.q, rows.k, rows.v, rows.g, rows.beta)))
    out, written = gdn.run(rows, state)
    expected, states = gdn.sequential(wide, state.double(), torch.arange(300) - 1)
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(written.added_to(state).double(), states[:, :, -1], rtol=0, atol=1e-5)


def test_transformers_reference_agrees() -> None:
    from transformers.models.qwen3_next import modeling_qwen3_next as theirs

    draw = torch.Generator().manual_seed(3)
    q, k = (torch.randn(R, 70, 1, DK, generator=draw) for _ in range(2))
    v, g = torch.randn(R, 70, H, DV, generator=draw), -torch.rand(R, 70, H, generator=draw)
    beta, state = torch.rand(R, 70, H, generator=draw), draw_state(dtype=torch.float32)
    expected, last = theirs.torch_recurrent_gated_delta_rule(
        q.expand(-1, -1, H, -1), k.expand(-1, -1, H, -1), v, g=g, beta=beta,
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out, written = gdn.run(gdn.unit_rows(q, k, v, g, beta), state)
    torch.testing.assert_close(out.transpose(1, 2), expected, rtol=0, atol=1e-5)
    torch.testing.assert_close(written.added_to(state), last, rtol=0, atol=1e-5)


# --- convolution --------------------------------------------------------------------------------------


def paths_alone(columns: Tensor, window: Tensor, weight: Tensor, parents: list[int]) -> Tensor:
    """Every node's output when its root path runs alone, by torch's own convolution."""
    outs = []
    for node in range(len(parents)):
        line = torch.cat([window, columns[:, path_to(parents, node)]], dim=1).transpose(1, 2)
        full = torch.nn.functional.conv1d(line, weight[:, None], groups=weight.shape[0])
        outs.append(torch.nn.functional.silu(full[:, :, -1]))
    return torch.stack(outs, 1)


@pytest.mark.parametrize("taps", [2, 4])
def test_convolution_reads_ancestors_then_history(taps: int) -> None:
    draw = torch.Generator().manual_seed(5)
    columns = torch.randn(R, 12, 10, generator=draw, dtype=torch.float64)
    window = torch.randn(R, taps - 1, 10, generator=draw, dtype=torch.float64)
    weight = torch.randn(10, taps, generator=draw, dtype=torch.float64)
    line, tree = list(range(-1, 11)), draw_parents(12, 2)
    torch.testing.assert_close(
        gdn.convolve(columns, window, weight, None, None), paths_alone(columns, window, weight, line)
    )
    seen, depth = ancestry(tree)
    rows = gdn.ancestor_rows(seen, depth, taps)
    torch.testing.assert_close(
        gdn.convolve(columns, window, weight, None, rows), paths_alone(columns, window, weight, tree)
    )
    off = (rows - 1).clamp(min=0)  # control: the window off by one
    wrong = gdn.convolve(columns, window, weight, None, off) - paths_alone(columns, window, weight, tree)
    assert wrong.abs().max() > 0.1


def test_the_window_after_any_number_of_rows() -> None:
    columns, window = torch.arange(1, 11.0).reshape(1, 5, 2), torch.arange(-6, 0.0).reshape(1, 3, 2)
    line = torch.cat([window, columns], dim=1)[0]
    for count in range(6):
        kept = gdn.last_columns(columns, window, torch.tensor([count]))
        assert torch.equal(kept[0], line[count : count + 3])
    path = torch.tensor([[0, 2, 4, 0, 0]])
    kept = gdn.last_columns(columns, window, torch.tensor([2]), path)
    assert torch.equal(kept[0], torch.stack([window[0, 2], columns[0, 0], columns[0, 2]]))
