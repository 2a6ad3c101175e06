"""`draftproof bench --shape`: a target and its drafter at their published sizes, with random weights, on one device.

What each part costs in time and memory, beside the time that moving its bytes takes at the bandwidth which a plain copy
reaches in the same run. Random weights say nothing about acceptance: the speed-up is told for an assumed tau.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, cast

from draftproof.bench.machine import provenance
from draftproof.errors import UserError

if TYPE_CHECKING:
    from draftproof.engine.batch import Batch
    from draftproof.engine.engine import Engine
    from draftproof.engine.propose import Proposer
    from draftproof.engine.request import Request
    from draftproof.models.dflash import DFlashDrafter
    from draftproof.models.target import Target

CONTEXTS = (1024, 32768)
NODES = (3, 7, 23, 31, 63, 127)  # drafted nodes of further rounds, beside plain decoding and the drafter's chain
ROOM = 64  # tokens behind the context: rounds that are timed
REPEATS = 15
COPY_BYTES = 2**31


@dataclass(frozen=True)
class Part:
    """Median milliseconds of one part, started kernel by kernel (`eager`) and, where it can be, as one CUDA graph; the
    bytes it must move; peak device memory while it ran."""

    name: str
    context: int
    rows: int
    eager: float
    graph: float | None
    bytes: int
    peak: int

    @property
    def best(self) -> float:
        return self.eager if self.graph is None else min(self.eager, self.graph)


def run_shape(
    name: str, *, contexts: tuple[int, ...], taus: tuple[float, ...], device: str, dtype: str
) -> dict[str, Any]:
    """Build the pair, prefill each context, time the parts of a round. Errors: not-found, prompt-too-long."""
    from draftproof.engine.pair import DTYPES, choose_device, choose_dtype

    folder = shape_folder(name)
    where = choose_device(device)
    kind = choose_dtype(dtype, where.value)
    target, drafter = build(folder, DTYPES[kind.value], where.value)
    bandwidth = copy_bandwidth(where.value)
    notice(f"{name}: {weight_bytes(target.model) / 2**30:.1f} GiB of target, copy {bandwidth / 1e9:.0f} GB/s")
    parts: list[Part] = []
    imposed: list[dict[str, Any]] = []
    for context in contexts:
        parts += measure(target, drafter, context)
        imposed += imposed_acceptance(parts, context, drafter.depth)
    return {
        "shape": name,
        "weights": {"target": weight_bytes(target.model), "drafter": weight_bytes(drafter.model)},
        "bandwidth": bandwidth,
        "parts": [vars(part) | {"floor": part.bytes / bandwidth * 1e3} for part in parts],
        "imposed": imposed,
        "assumed": [speed_up(parts, context, tau) for context in contexts for tau in taus],
        "provenance": provenance(f"{where.value} ({where.reason})", f"{kind.value} ({kind.reason})"),
    }


def shape_folder(name: str) -> Path:
    """A shipped shape, or a folder that holds target/config.json and drafter/config.json."""
    shipped = Path(str(files("draftproof"))) / "bench" / "shapes"
    for folder in (shipped / name, Path(name)):
        if all((folder / part / "config.json").is_file() for part in ("target", "drafter")):
            return folder
    known = ", ".join(sorted(path.name for path in shipped.iterdir()))
    raise UserError("not-found", f"no shape {name!r}", f"use {known}, or a folder with target/ and drafter/ configs")


def build(folder: Path, dtype: Any, device: str) -> tuple[Target, DFlashDrafter]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from draftproof.config.drafter import read_drafter
    from draftproof.config.target import read_target
    from draftproof.models import attention
    from draftproof.models.dflash import DFlash, DFlashDrafter
    from draftproof.models.target import Target

    attention.register()
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(folder / "target").get_text_config()
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention.NAME)
        target = Target(model, read_target(folder / "target"))
        draft = DFlash(read_drafter(folder / "drafter")).to(dtype)
        for weight in draft.parameters():
            if weight.dim() > 1:
                torch.nn.init.normal_(weight, std=0.02)
    target.self_check()
    return target, DFlashDrafter(draft, target)


def measure(target: Target, drafter: DFlashDrafter, context: int) -> list[Part]:
    """The parts at one context: prefill, then rounds of one row (plain) and of a block."""
    parts = []
    for rows, drafting in ((1, None), (drafter.depth + 1, drafter)):
        engine, batch, prefill = prefilled(target, drafting, context)
        if drafting:
            parts.append(prefill)
        begun = len(parts)
        parts += round_parts(engine, batch, context, rows)
        if drafting:
            parts += [tree_part(engine, batch, context, nodes) for nodes in NODES if nodes != drafting.depth]
            parts += [build_part(engine, batch, context, nodes) for nodes in NODES if nodes > drafting.depth]
        for part in parts[begun:]:
            notice(f"  context {context}, {part.rows} rows, {part.name}: {part.best:.2f} ms")
        del engine, batch
        empty_cache(target)
    return parts


def prefilled(target: Target, drafter: DFlashDrafter | None, context: int) -> tuple[Engine, Batch, Part]:
    from draftproof.engine.engine import Engine
    from draftproof.engine.propose import Speculation
    from draftproof.engine.request import Request

    how = Speculation(max(NODES)) if drafter else None
    engine = Engine(target, drafter, context=context + ROOM, how=how)
    prompt = [(7 * i + 11) % target.spec.vocab_size for i in range(context)]
    request = Request(prompt, ROOM)
    run_prompt(engine, request)  # the first pass compiles kernels and fills allocators
    reset_peak(target)
    begun = time.perf_counter()
    batch = run_prompt(engine, request)
    synchronize(target)
    spent = (time.perf_counter() - begun) * 1e3
    moved = weight_bytes(target.model) * -(-context // engine.chunk)
    batch.longest = context
    return engine, batch, Part("prefill", context, context, spent, None, moved, peak(target))


def run_prompt(engine: Engine, request: Request) -> Batch:
    batch = engine.seat([request])
    one = engine.table.taken[0]
    while one.rows < one.goal:
        engine.run_prompt(one, engine.chunk)
    return batch


def round_parts(engine: Engine, batch: Batch, context: int, rows: int) -> list[Part]:
    """Draft, verify and commit, and the whole round that `run` takes; each starts from the same committed rows."""
    import torch

    from draftproof.engine.propose import Proposer, Speculation
    from draftproof.spec.tree import chain, visibility

    target, cache, drafter = engine.target, engine.cache, engine.drafter
    length = cache.lengths.clone()
    anchors, one = batch.anchors.clone(), torch.ones_like(batch.anchors)
    drafts = None if drafter is None else anchors[:, None].expand(-1, rows - 1)
    tree, reach = chain(anchors, drafts), context + rows

    def verify() -> None:
        cache.lengths.copy_(length)
        plan = cache.plan(batch.slots, tree.depth, visibility(tree), reach, causal=True)
        target.forward(tree.token, plan, taps=drafter.taps if drafter else ())
        cache.commit(batch.slots, one)

    def draft() -> None:
        assert drafter is not None
        drafter.draft(batch.slots, anchors, reach)

    proposer = None if drafter is None else Proposer(drafter, Speculation(), target.spec.vocab_size)
    whole = whole_round(engine, batch, proposer)
    moved = step_bytes(target, context)
    drafting = 0 if drafter is None else draft_bytes(cast(Any, drafter), target, context)
    parts = [timed(target, "verify and commit", context, rows, moved, verify)]
    if drafter is not None:
        parts.append(timed(target, "draft", context, rows, drafting, draft))
    parts.append(timed(target, "whole round", context, rows, moved + drafting, whole))
    return parts


def tree_part(engine: Engine, batch: Batch, context: int, nodes: int) -> Part:
    """The whole round of another budget: a chain of `nodes`, or a tree where they are more than the drafter's depth."""
    from draftproof.engine.propose import Proposer, Speculation

    target, drafter = engine.target, cast(Any, engine.drafter)
    moved = step_bytes(target, context) + draft_bytes(drafter, target, context)
    proposer = Proposer(drafter, Speculation(nodes), target.spec.vocab_size)
    return timed(target, "whole round", context, nodes + 1, moved, whole_round(engine, batch, proposer))


def build_part(engine: Engine, batch: Batch, context: int, nodes: int) -> Part:
    """Building the tree alone: the part of a round that is neither drafter nor target."""
    from draftproof.spec.builders import SPINE_FIRST, build, width_for

    assert engine.drafter is not None
    vocab = engine.target.spec.vocab_size
    dist = engine.drafter.draft(batch.slots, batch.anchors, context + nodes + 1, width_for(nodes, vocab))

    def act() -> None:
        build(SPINE_FIRST, batch.anchors, dist, nodes)

    return timed(engine.target, "build the tree", context, nodes + 1, 0, act)


def whole_round(engine: Engine, batch: Batch, proposer: Proposer | None) -> Callable[[], None]:
    """What `run` does in a round, always from the same committed rows (recurrent states move on, at no other cost)."""
    from draftproof.engine.step import step

    length, drafter = engine.cache.lengths.clone(), engine.drafter

    def act() -> None:
        engine.cache.lengths.copy_(length)
        if drafter is not None and drafter.cache is not None:
            drafter.cache.lengths.copy_(length)
        batch.budget.fill_(ROOM)
        batch.left = [ROOM]
        step(batch, engine.target, engine.cache, proposer)

    return act


def imposed_acceptance(parts: list[Part], context: int, depth: int) -> list[dict[str, Any]]:
    """Every measured budget, and the measured choice among them, at imposed acceptance (`imposed.py`)."""
    from draftproof.bench.imposed import table
    from draftproof.spec.costs import Costs

    rounds = {p.rows - 1: p.best / 1e3 for p in parts if p.context == context and p.name == "whole round"}
    draft = next(p.best / 1e3 for p in parts if p.context == context and p.name == "draft")
    nodes = tuple(sorted(rounds))
    return table(Costs(nodes, (context,), (tuple(rounds[n] for n in nodes),), (draft,)), context, depth)


def timed(target: Target, name: str, context: int, rows: int, moved: int, act: Callable[[], None]) -> Part:
    for _ in range(2):
        act()
    reset_peak(target)
    eager = clock(target, act)
    top = peak(target)
    replay = captured(target, act, f"{name}, {rows} rows")
    graph = None if replay is None else clock(target, replay)
    return Part(name, context, rows, eager, graph, moved, top)


def clock(target: Target, act: Callable[[], None]) -> float:
    """Median wall milliseconds of one call, the device idle before and after."""
    spent = []
    for _ in range(REPEATS):
        synchronize(target)
        begun = time.perf_counter()
        act()
        synchronize(target)
        spent.append((time.perf_counter() - begun) * 1e3)
    return median(spent)


def captured(target: Target, act: Callable[[], None], name: str) -> Callable[[], None] | None:
    """The same work as one CUDA graph, or None where a kernel cannot be captured (said on stderr)."""
    import torch

    if target.device.type != "cuda":
        return None
    try:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            act()
        torch.cuda.current_stream().wait_stream(side)
        with torch.cuda.graph(graph):
            act()
        return graph.replay
    except RuntimeError as error:
        notice(f"  {name}: no CUDA graph ({str(error).splitlines()[0][:100]})")
        torch.cuda.synchronize()
        return None


# --- bytes ----------------------------------------------------------------------------------------------


def weight_bytes(module: Any) -> int:
    return sum(weight.numel() * weight.element_size() for weight in module.parameters())


def step_bytes(target: Target, context: int) -> int:
    """What a verify pass must move: every weight but embedding rows, K/V rows in sight, states in and out."""
    spec, size = target.spec, target.embedding.weight.element_size()
    weights = weight_bytes(target.model)
    if target.head.weight is not target.embedding.weight:
        weights -= target.embedding.weight.numel() * size
    rows = sum(
        min(context, spec.sliding_window or context) if kind == "sliding" else context
        for kind in spec.layer_kinds
        if kind != "linear"
    )
    states = sum(
        2 * 4 * d.shape.heads * d.shape.key_dim * d.shape.value_dim + 2 * size * d.shape.channels * (d.kernel - 1)
        for d in target.deltas.values()
    )
    return int(weights + 2 * rows * spec.num_kv_heads * spec.head_dim * size + states)


def draft_bytes(drafter: DFlashDrafter, target: Target, context: int) -> int:
    """What a draft pass must move: the drafter's layers, its context rows in sight, and the target's head."""
    spec, size = drafter.spec, target.embedding.weight.element_size()
    rows = sum(min(context, layer.window or context) for layer in spec.layers)
    layers = weight_bytes(drafter.model) - drafter.model.fc.weight.numel() * size
    return int(layers + target.head.weight.numel() * size + 2 * rows * spec.num_kv_heads * spec.head_dim * size)


def copy_bandwidth(device: str) -> float:
    """Bytes a second (read and written) of a large copy on the device: what memory gives in practice."""
    import torch

    count = COPY_BYTES if device.startswith("cuda") else COPY_BYTES // 16
    source = torch.ones(count, dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    best = float("inf")
    for _ in range(5):
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        begun = time.perf_counter()
        copy.copy_(source)
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - begun)
    return 2 * count / best


def speed_up(parts: list[Part], context: int, tau: float) -> dict[str, Any]:
    """tokens/s of plain rounds and of drafted rounds that emit `tau` tokens each."""
    rounds = {p.rows: p.best for p in parts if p.context == context and p.name == "whole round"}
    block = next(p.rows for p in parts if p.name == "draft")
    plain, drafted = rounds[1], rounds[block]
    rates = {"plain": 1e3 / plain, "drafted": tau * 1e3 / drafted}
    return {"context": context, "assumed_tau": tau, **rates, "ratio": rates["drafted"] / rates["plain"]}


# --- the device -----------------------------------------------------------------------------------------


def synchronize(target: Target) -> None:
    import torch

    if target.device.type == "cuda":
        torch.cuda.synchronize()


def reset_peak(target: Target) -> None:
    import torch

    if target.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()


def peak(target: Target) -> int:
    import torch

    return torch.cuda.max_memory_allocated() if target.device.type == "cuda" else 0


def empty_cache(target: Target) -> None:
    import torch

    if target.device.type == "cuda":
        torch.cuda.empty_cache()


def notice(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
