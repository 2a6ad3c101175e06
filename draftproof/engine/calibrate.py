"""The measured budget's two memories: what a round costs on this machine, and how far drafts are followed.

Costs are measured once a machine, model shape, dtype, batch and context, by running the loop's own `step` on rows of no
meaning, and kept under their key in the cache folder; another key is another file. What was learned about acceptance is
kept by drafter weights. Both files may be deleted at any time.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from draftproof.engine.batch import Batch, Drafter
from draftproof.engine.engine import Engine
from draftproof.engine.propose import Proposer, Speculation
from draftproof.engine.request import Request, SamplingParams
from draftproof.engine.step import step
from draftproof.errors import UserError
from draftproof.fetch import cache_dir, locked, notice, write_atomically
from draftproof.models.prepacked import is_prepacked
from draftproof.models.target import Target
from draftproof.provenance import provenance
from draftproof.spec.budget import FIRST_PAUSE, LONGEST_PAUSE, Auto, Autos
from draftproof.spec.builders import build, width_for
from draftproof.spec.candidates import noise_aware, noise_for
from draftproof.spec.costs import Costs
from draftproof.spec.expected import Calibration

VERSION = 1  # of what is measured; another one measures again
GRID = (256, 1024, 4096, 16384, 65536, 262144)  # contexts that are measured
TREES = (15, 23, 31, 47, 63, 95, 127, 191, 255)  # nodes behind the root, which fill buckets
CPU_MOST = 63
REPEATS = 7
SEVERAL = 256  # longest context that is measured with several requests at once
FEW = (1, 3, 8, 15)  # budgets that are measured with several at once: the wait at a server's first start counts
DEAR = 5.0  # with several requests at once: rounds that cost so many plain ones are not measured


def auto_for(
    target: Target, drafter: Drafter, how: Speculation, *, context: int, sampled: bool, slots: int = 1
) -> Auto:
    """The measured choice for engines of `slots` requests and `context` tokens, with what was learned before."""
    costs = costs_for(target, drafter, how, context=context, sampled=sampled, slots=slots)
    auto = Auto(costs, place=costs.place)
    _recall(auto, drafter, sampled)
    return auto


def autos_for(target: Target, drafter: Drafter, how: Speculation, *, context: int, slots: int) -> Autos:
    """The same for a server: choices for 1, 2, 4, ... requests at once up to `slots`, greedy and sampled. With several
    at once only contexts up to SEVERAL are measured: there the number of rows decides, not what they attend to. In
    service, rounds correct what was measured with nothing else to do."""
    sizes = sorted({min(2**i, slots) for i in range(slots.bit_length() + 1)})
    rooms = {n: context if n == 1 else min(context, SEVERAL) for n in sizes}
    choices = {
        (n, sampled): auto_for(target, drafter, how, context=rooms[n], sampled=sampled, slots=n)
        for n in sizes
        for sampled in (False, True)
    }
    for auto in choices.values():
        auto.live = True
    return Autos(choices)


def costs_for(
    target: Target,
    drafter: Drafter,
    how: Speculation,
    *,
    context: int,
    sampled: bool,
    slots: int = 1,
    again: bool = False,
) -> Costs:
    """The cost table from disk; contexts that it lacks (all of them with `again`) are measured first."""
    key = cost_key(target, drafter, how, sampled=sampled, slots=slots)
    place = _digest(key)
    path = cache_dir() / "costs" / f"{place}.json"
    wanted = contexts_for(context, target.spec.max_positions)
    known = {} if again else _known(path)
    if all(str(size) in known for size in wanted):
        return table({size: known[str(size)] for size in wanted}, place)
    with locked(path):
        known = {} if again else _known(path)
        for size in wanted:
            if str(size) not in known:
                many = f" with {slots} requests at once" if slots > 1 else ""
                kind = "sampled" if sampled else "greedy"
                told = f"measuring {kind} rounds at {size} tokens of context{many} (once for this machine and pair)"
                notice(told)
                known[str(size)] = measure(target, drafter, how, context=size, sampled=sampled, slots=slots)
                write_atomically(path, iter([json.dumps({"key": key, "contexts": known}, indent=1).encode()]))
    return table({size: known[str(size)] for size in wanted}, place)


def table(measured: dict[int, dict[str, Any]], place: str = "") -> Costs:
    """Budgets that every context measured (a budget that can never pay at one is left out at all)."""
    contexts = tuple(sorted(measured))
    nodes = tuple(sorted(set.intersection(*(set(map(int, measured[c]["seconds"])) for c in contexts))))
    seconds = tuple(tuple(measured[c]["seconds"][str(n)] for n in nodes) for c in contexts)
    return Costs(nodes, contexts, seconds, tuple(measured[c]["draft"] for c in contexts), place)


def contexts_for(context: int, limit: int | None) -> list[int]:
    room = min(context, limit or context)
    sizes = [GRID[0], *(size for size in GRID if size <= room)]
    top = (limit or 2 * GRID[-1]) - CPU_MOST  # rounds must fit behind the context
    return sorted({max(min(size, top), 1) for size in sizes})


def budgets(depth: int, most: int) -> list[int]:
    """Chains of growing width, then trees."""
    chains = {1, 2, 3, 4, 6, 8, 11, depth}
    return sorted({n for n in chains if n <= min(depth, most)} | {n for n in TREES if depth < n <= most})


# --- measuring ------------------------------------------------------------------------------------------


def measure(
    target: Target, drafter: Drafter, how: Speculation, *, context: int, sampled: bool, slots: int
) -> dict[str, Any]:
    """Least seconds of a round by nodes (what others do on the machine only adds), repeats interleaved."""
    most = max(1, (CPU_MOST if target.device.type == "cpu" else TREES[-1]) // slots)
    options = budgets(drafter.depth, most)
    if slots > 1:
        options = sorted({n for n in options if n in FEW} | {options[-1]})
    most = options[-1]
    engine, batch = _engine(target, drafter, how, context, sampled, slots, most)
    rounds: dict[int, Callable[[], None]] = {0: _round(engine, batch, context, None)}
    for nodes in options:
        fixed = Speculation(nodes, how.builder, how.noise_aware, how.padded)
        rounds[nodes] = _round(engine, batch, context, Proposer(drafter, fixed, target.spec.vocab_size))
    worthwhile = _possible(target, rounds, 1.5 * (drafter.depth + 1) if slots == 1 else DEAR)
    spent: dict[int, list[float]] = {nodes: [] for nodes in worthwhile}
    drafts = []
    for _ in range(REPEATS if slots == 1 else -(-REPEATS // 3)):
        for nodes in worthwhile:
            spent[nodes].append(_clock(target, rounds[nodes]))
        drafts.append(_clock(target, lambda: _draft(engine, batch, context, most)))
    return {"seconds": {str(n): min(s) for n, s in spent.items()}, "draft": min(drafts)}


def _possible(target: Target, rounds: dict[int, Callable[[], None]], dear: float) -> list[int]:
    """Warm up; leave out budgets that cost more than `dear` plain rounds, more than accepted drafts could pay for."""
    kept: list[int] = []
    for nodes, act in rounds.items():
        act()
        seconds = _clock(target, act)
        if nodes == 0:
            plain = seconds
        elif seconds > dear * plain:
            break
        kept.append(nodes)
    return kept


def _engine(
    target: Target, drafter: Drafter, how: Speculation, context: int, sampled: bool, slots: int, most: int
) -> tuple[Engine, Batch]:
    room = 2 * (drafter.depth + 1)
    fixed = Speculation(most, how.builder, how.noise_aware, how.padded)
    engine = Engine(target, drafter, slots=slots, context=context + room, how=fixed)
    params = SamplingParams(temperature=0.7 if sampled else 0.0, seed=0)
    batch = engine.seat([Request([1], room, params) for _ in range(slots)])
    return engine, batch


def _round(engine: Engine, batch: Batch, context: int, proposer: Proposer | None) -> Callable[[], None]:
    def act() -> None:
        _rewind(engine, batch, context)
        step(batch, engine.target, engine.cache, proposer)

    return act


def _draft(engine: Engine, batch: Batch, context: int, most: int) -> None:
    _rewind(engine, batch, context)
    drafter, vocab = engine.drafter, engine.target.spec.vocab_size
    assert drafter and engine.proposer
    noise = noise_for(batch.sampling, engine.cache.lengths[batch.slots], drafter.depth, vocab)
    rescore = noise_aware(batch.sampling, noise) if engine.proposer.how.noise_aware else None
    dist = drafter.draft(batch.slots, batch.anchors, context + most + 1, width_for(most, vocab), rescore)
    build(engine.proposer.how.builder, batch.anchors, dist, most)


def _rewind(engine: Engine, batch: Batch, context: int) -> None:
    """As if `context` rows were committed: what they hold does not change what a round costs."""
    assert engine.drafter
    for cache in (engine.cache, engine.drafter.cache):
        if cache is not None:
            cache.lengths[batch.slots] = context
    batch.longest, room = context, 2 * (engine.drafter.depth + 1)
    batch.budget.fill_(room)
    batch.left = [room] * len(batch.left)


def _clock(target: Target, act: Callable[[], None]) -> float:
    def wait() -> None:
        if target.device.type == "cuda":
            torch.cuda.synchronize()

    wait()
    begun = time.perf_counter()
    act()
    wait()
    return time.perf_counter() - begun


# --- on disk --------------------------------------------------------------------------------------------


def cost_key(target: Target, drafter: Drafter, how: Speculation, *, sampled: bool, slots: int) -> dict[str, Any]:
    """What a round's time depends on."""
    where = torch.cuda.get_device_name() if target.device.type == "cuda" else "cpu"
    known = provenance(where, str(target.dtype))
    return {
        "version": VERSION,
        "device": where,
        "dtype": str(target.dtype),
        "cpu": known["cpu"],
        "cpus": known["cpus"],
        "threads": torch.get_num_threads(),
        "prepacked": is_prepacked(target.model),
        "versions": known["versions"],
        "target": _digest(asdict(target.spec)),
        "drafter": _digest([type(drafter).__name__, drafter.depth, _shapes(drafter)]),
        "builder": how.builder.name,
        "noise_aware": how.noise_aware,
        "padded": how.padded,
        "sampled": sampled,
        "slots": slots,
    }


@dataclass
class Learned:
    """The acceptance file of a drafter: calibrations, and drafts as they usually are, by kind of request; (next pause,
    tokens left of it) by place."""

    calibrations: dict[str, Calibration] = field(default_factory=dict)
    pauses: dict[str, tuple[int, float]] = field(default_factory=dict)
    usual: dict[str, dict[int, float]] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Learned:
        """A file that is damaged anywhere is an absent one."""
        data = _read(path)
        try:
            calibrations = {name: Calibration.from_dict(c) for name, c in data.get("calibrations", {}).items()}
            pauses = {place: (int(p), float(w)) for place, (p, w) in data.get("pauses", {}).items()}
            usual = {
                name: {int(n): float(g) for n, g in gains.items()} for name, gains in data.get("usual", {}).items()
            }
        except (TypeError, ValueError, AttributeError, OverflowError):
            return cls()
        learned = [v for c in calibrations.values() for d in (c.followed, c.promised) for v in d.values()]
        numbers = [
            *learned,
            *(v for pair in pauses.values() for v in pair),
            *(g for u in usual.values() for g in u.values()),
        ]
        return cls(calibrations, pauses, usual) if all(_sound(v) for v in numbers) else cls()

    def as_json(self) -> str:
        kinds = {name: c.as_dict() for name, c in self.calibrations.items()}
        return json.dumps({"calibrations": kinds, "pauses": self.pauses, "usual": self.usual})


def remember(auto: Auto, drafter: Drafter, sampled: bool) -> None:
    """Keep what was learned for the next process, beside what others learned of other kinds of requests or machines. A
    file that cannot be written is no reason to fail."""
    path = _learned_file(drafter, sampled)
    try:
        with locked(path):
            learned = Learned.read(path)
            learned.calibrations.update(auto.calibrations)
            learned.usual.update(auto.usual)
            learned.pauses[auto.place] = auto.pause, max(auto.waiting, 0.0)
            write_atomically(path, iter([learned.as_json().encode()]))
    except UserError:
        return


def _recall(auto: Auto, drafter: Drafter, sampled: bool) -> None:
    learned = Learned.read(_learned_file(drafter, sampled))
    pause, waiting = learned.pauses.get(auto.place, (FIRST_PAUSE, 0.0))
    auto.calibrations.update(learned.calibrations)
    auto.usual.update(learned.usual)
    auto.pause = min(max(pause, FIRST_PAUSE), LONGEST_PAUSE)
    auto.waiting = min(waiting, LONGEST_PAUSE)


def _learned_file(drafter: Drafter, sampled: bool) -> Path:
    """By the drafter's weights (the first values of each) and by greedy or sampled."""
    model: Any = getattr(drafter, "model", None)
    found = [] if model is None else [_plain(w).flatten()[:64].float().tolist() for w in model.parameters()]
    return cache_dir() / "acceptance" / f"{_digest([found, drafter.depth, sampled])}.json"


def _plain(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_dense() if weight.is_mkldnn else weight


def _shapes(drafter: Drafter) -> list[list[int]]:
    model: Any = getattr(drafter, "model", None)
    return [] if model is None else [list(w.shape) for w in model.parameters()]


def _known(path: Path) -> dict[str, dict[str, Any]]:
    """The contexts of a costs file whose entries are whole."""
    contexts = _read(path).get("contexts")
    return {k: v for k, v in contexts.items() if _whole(v)} if isinstance(contexts, dict) else {}


def _whole(entry: Any) -> bool:
    """Seconds of plain decoding and maybe of other budgets, and of a draft: all of them positive numbers."""
    if not isinstance(entry, dict) or not isinstance(seconds := entry.get("seconds"), dict):
        return False
    numbers = [*seconds.values(), entry.get("draft")]
    named = all(len(k) < 5 and k.isdecimal() and k == str(int(k)) for k in seconds)
    return "0" in seconds and named and all(_sound(v) and v > 0 for v in numbers)


def _sound(value: Any) -> bool:
    return isinstance(value, int | float) and 0 <= value < 1e9


def _read(path: Path) -> dict[str, Any]:
    """A damaged file is an absent one: it is measured again."""
    try:
        data = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:16]
