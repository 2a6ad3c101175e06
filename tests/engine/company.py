"""Requests in company: tiny pairs of every kind, a pool of different requests, what each gives alone, and schedules.

The drafter in most tests is a real one that runs in full, with proposals of a `Reader`: it reads the committed text out
of its features and fails when that is no known text. So rows of another request, a row too many or a slot mixed up
cannot pass, whoever shares the engine.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from draftproof.engine import engine as engine_module
from draftproof.engine import slots as slots_module
from draftproof.engine.engine import Engine
from draftproof.engine.propose import Speculation
from draftproof.engine.request import Request, SamplingParams, StepResult, TokenLogprob
from draftproof.models import cache as cache_module
from draftproof.models.cache import Slots
from draftproof.models.dflash import DraftDist
from draftproof.models.mtp import MTPDrafter
from draftproof.models.target import EMBEDDING, Target
from tests import tiny

CONTEXT = 128
DEPTH = 4
KINDS = ("llama", "qwen2", "gemma3", "qwen3_5")
HOWS = {"chain": Speculation("chain"), "tree": Speculation(8)}


# --- drafters -------------------------------------------------------------------------------------------


class Reader(tiny.KnowingTree):
    """Proposals that depend on the committed text alone, which it reads out of the target's embedding rows."""

    def __init__(self, owner: Target, texts: list[list[int]], **settings: Any) -> None:
        super().__init__(owner, texts, **settings)
        self.taps: tuple[Any, ...] = (EMBEDDING,)
        with torch.no_grad():
            self.table: Tensor = owner.embedding(torch.arange(tiny.VOCAB))
        self.read: list[list[int]] = []  # by slot

    def allocate(self, *, slots: int, capacity: int, chunk: int) -> None:
        self.read = [[] for _ in range(slots)]

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        tokens = torch.cdist(features, self.table.expand(len(features), -1, -1)).argmin(-1).tolist()
        for row, slot in enumerate(self._slots(slots)):
            self.read[slot] += tokens[row][: int(counts[row])]
            assert len(self.read[slot]) <= reach

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        seen = [[*self.read[slot], anchor] for slot, anchor in zip(self._slots(slots), anchors.tolist(), strict=True)]
        rows = [next((i for i, text in enumerate(self.texts) if text[: len(s)] == s), None) for s in seen]
        assert None not in rows, f"the drafter holds a text that is nobody's: {seen[rows.index(None)]}"
        logits = [self.logits(row, len(s)) for row, s in zip(rows, seen, strict=True) if row is not None]
        return tiny.likeliest(torch.stack(logits), width)

    def drop(self, slots: Slots) -> None:
        for slot in self._slots(slots):
            self.read[slot] = []

    def swap(self, one: int, other: int, reach: int) -> None:
        self.read[one], self.read[other] = self.read[other][:reach], self.read[one][:reach]

    def fork(self, source: int, slots: Slots, reach: int | None = None) -> None:
        for slot in self._slots(slots):
            self.read[slot] = self.read[source][:reach]

    def resize(self, slots: int, capacity: int) -> None:
        assert all(len(read) <= capacity for read in self.read[:slots])
        self.read = (self.read + [[] for _ in range(slots)])[:slots]

    def save(self, slot: int, begin: int, end: int) -> list[Tensor]:
        assert end <= len(self.read[slot])
        return [torch.tensor([self.read[slot][begin:end]])]

    def load(self, slot: int, begin: int, saved: Any) -> None:
        assert len(self.read[slot]) == begin
        self.read[slot] += saved[0][0].tolist()

    def restore(self, slot: int, length: int, state: Any) -> None:
        assert len(self.read[slot]) == length


class Company:
    """A real drafter that runs in full, with a reader's proposals. `told`: what the real one thinks of every text."""

    def __init__(self, real: Any, reader: Reader) -> None:
        self.real, self.reader, self.depth = real, reader, real.depth
        self.cache: cache_module.Cache | None = None
        self.taps = (EMBEDDING, *real.taps)
        self.told: dict[tuple[int, ...], Tensor] = {}

    @property
    def stores(self) -> list[Any]:
        return [*self.real.stores, self.reader]

    def allocate(self, **sizes: int) -> None:
        self.real.allocate(**sizes)
        self.reader.allocate(**sizes)
        self.cache = self.real.cache

    def extend(self, slots: Slots, features: Tensor, counts: Tensor, reach: int) -> None:
        self.reader.extend(slots, features[..., : tiny.HIDDEN], counts, reach)
        self.real.extend(slots, features[..., tiny.HIDDEN :], counts, reach)

    def draft(self, slots: Slots, anchors: Tensor, reach: int, width: int = 1, rescore: Any = None) -> DraftDist:
        dist = self.real.draft(slots, anchors, reach, tiny.VOCAB)
        logp = torch.zeros_like(dist.logp).scatter_(2, dist.ids, dist.logp)
        for row, slot in enumerate(self.reader._slots(slots)):
            self.told[*self.reader.read[slot], int(anchors[row])] = logp[row]
        return self.reader.draft(slots, anchors, reach, width, rescore)

    def drop(self, slots: Slots) -> None:
        self.real.drop(slots)
        self.reader.drop(slots)


@cache
def head_folder() -> Path:
    from tests.models.test_mtp import with_head

    return with_head("qwen3_5", Path(tempfile.mkdtemp(prefix="draftproof-tiny-mtp-")), layers=2)


@cache
def owner(kind: str) -> Target:
    if kind != "mtp":
        return tiny.target(kind)
    target = Target.load(head_folder(), dtype=torch.float64)
    tiny.in_double(target.model)
    return target


def real_drafter(kind: str) -> Any:
    """kind "mtp": the head of a qwen3_5, of two layers."""
    if kind != "mtp":
        return tiny.drafter(owner(kind), block_size=DEPTH + 1)
    drafter = MTPDrafter.load(head_folder(), owner(kind), DEPTH)
    tiny.in_double(drafter.model)
    return drafter


def company(kind: str, texts: list[list[int]], *, wrong: float = 0.2, **settings: Any) -> Company:
    return Company(real_drafter(kind), Reader(owner(kind), texts, depth=DEPTH, wrong=wrong, **settings))


# --- requests -------------------------------------------------------------------------------------------


class Shy:
    """A function of the text: what it may go on with depends on its last two tokens."""

    stateful = False

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        scores[(7 * ids[-1] + 3 * ids[-min(2, len(ids))]) % 5 :: 5] -= 4.0
        return scores


class Counting:
    """Its answer depends on how often it was asked before; it must be asked about every text once, in order."""

    stateful = True

    def __init__(self) -> None:
        self.asked: list[int] = []

    def __call__(self, ids: Sequence[int], scores: Tensor) -> Tensor:
        assert not self.asked or len(ids) == self.asked[-1] + 1, "a processor with state was asked out of order"
        self.asked.append(len(ids))
        scores[len(self.asked) % 7 :: 7] -= 4.0
        return scores


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(4, tiny.VOCAB), k=count)


SYSTEM = words(0, 22)  # what several prompts begin with
STOPS = (tuple(range(5, 30, 5)), tuple(range(33, 60, 6)))


def pool(number: int) -> Request:
    """Request `number` of a dozen, with fresh processors."""
    hot, warm = SamplingParams(temperature=1.0, seed=number), SamplingParams(temperature=0.7, top_k=6, seed=number)
    return [
        lambda: Request(words(1, 7), 12),
        lambda: Request(SYSTEM, 14, warm, STOPS[0], logprobs=3),
        lambda: Request([*SYSTEM, *words(2, 5)], 10, replace(hot, repetition_penalty=1.3), STOPS[1]),
        lambda: Request([*SYSTEM, *words(3, 35)], 14, replace(hot, presence_penalty=1.1, frequency_penalty=-0.6)),
        lambda: Request(words(4, 57), 14, SamplingParams(logit_bias={9: 2.5, 12: -4.0, 40: 2.0}), logprobs=0),
        lambda: Request(words(5, 3), 13, replace(hot, min_p=0.05), STOPS[0], processors=[Shy()], logprobs=1),
        lambda: Request(words(6, 18), 12, replace(warm, frequency_penalty=0.9), processors=[Counting()]),
        lambda: Request(words(7, 9), 11, replace(hot, top_p=0.8), budget="none"),
        lambda: Request([*SYSTEM, *words(2, 5), 7], 12, budget="chain", logprobs=2),
        lambda: Request(words(9, 57), 13, replace(hot, choice=1), budget=3),
        lambda: Request([*SYSTEM, *words(3, 12)], 1, hot, logprobs=1),
        lambda: Request(words(11, 70), 13, replace(hot, repetition_penalty=0.8), keep_trees=True),
    ][number]()


POOL = 12


@dataclass
class Outcome:
    """What one request gave: `before` holds, for every step, how many tokens it still had to go."""

    tokens: list[int] = field(default_factory=list)
    finish: str | None = None
    logprobs: list[TokenLogprob] = field(default_factory=list)
    steps: list[StepResult] = field(default_factory=list)
    before: list[int] = field(default_factory=list)

    def add(self, result: StepResult, limit: int) -> None:
        assert self.finish is None, "a result behind the last one"
        self.before.append(limit - len(self.tokens))
        self.tokens += result.tokens
        self.finish = result.finish
        self.logprobs += result.logprobs or []
        self.steps.append(result)

    def accepted(self, fully: int = 1) -> list[int]:
        """Of the steps that still had `fully` tokens to go."""
        both = zip(self.steps, self.before, strict=True)
        return [s.accepted for s, before in both if not s.prefill and before >= fully]


@cache
def truth(kind: str) -> list[list[int]]:
    """Prompts and answers of the pool: plain decoding, one by one."""
    return [[*pool(n).prompt_ids, *alone(kind, "plain", n).tokens] for n in range(POOL)]


@cache
def alone(kind: str, how: str, number: int) -> Outcome:
    """how: plain, dflash (a random drafter's own chain), or a key of HOWS with a drafter that is often right."""
    engine = engine_for(kind, how, slots=1)
    outcome = only(engine, pool(number))
    if isinstance(engine.drafter, Company):
        HEARD.setdefault((kind, how), {}).update(engine.drafter.told)
    return outcome


HEARD: dict[tuple[str, str], dict[tuple[int, ...], Tensor]] = {}  # what drafters said to those that were alone


def same_drafts(engine: Engine, kind: str, how: str) -> int:
    """The real drafter's distributions behind every text; how many were compared."""
    assert isinstance(engine.drafter, Company)
    wanted = HEARD[kind, how]
    both = [(logp, wanted[text]) for text, logp in engine.drafter.told.items() if text in wanted]
    for given, logp in both:
        torch.testing.assert_close(given, logp, rtol=0, atol=1e-5)
    return len(both)


def only(engine: Engine, request: Request) -> Outcome:
    outcome = Outcome()
    for result in engine.generate([request]):
        outcome.add(result, request.max_tokens)
    return outcome


def engine_for(kind: str, how: str, **settings: Any) -> Engine:
    settings = {"context": CONTEXT} | settings
    if how == "plain":
        return Engine(owner(kind), None, **settings)
    if how == "dflash":
        return Engine(owner(kind), real_drafter(kind), **settings)
    return Engine(owner(kind), company(kind, truth(kind)), how=HOWS[how], **settings)


def same(given: Outcome, wanted: Outcome, *, fully: int = 1) -> None:
    """All of it, and step by step what was accepted."""
    assert given.tokens == wanted.tokens and given.finish == wanted.finish
    assert given.accepted(fully) == wanted.accepted(fully)
    same_logprobs(given.logprobs, wanted.logprobs)


def same_logprobs(given: Sequence[TokenLogprob], wanted: Sequence[TokenLogprob]) -> None:
    """They are float32: the last bits depend on how many rows a product had."""
    assert len(given) == len(wanted)
    for a, b in zip(given, wanted, strict=True):
        assert math.isclose(a.logprob, b.logprob, rel_tol=1e-6, abs_tol=1e-6)
        assert [token for token, _ in a.top] == [token for token, _ in b.top]
        assert all(math.isclose(x, y, rel_tol=1e-6, abs_tol=1e-6) for (_, x), (_, y) in zip(a.top, b.top, strict=True))


# --- schedules ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Coming:
    """Request `number` of the pool comes before this step, and is cancelled `life` steps later, if it still runs."""

    number: int
    step: int = 0
    life: int | None = None


def run(engine: Engine, coming: Sequence[Coming], look: Callable[[Engine], None] | None = None) -> list[Outcome]:
    """One outcome for each; `look` after every step."""
    places: dict[int, int] = {}
    outcomes = [Outcome() for _ in coming]
    step, last = 0, max((c.step for c in coming), default=0)
    while step <= last or engine.busy:
        assert step < 1500, "it never ends"
        for place, c in enumerate(coming):
            if c.step == step:
                places[engine.add(pool(c.number))] = place
        for number, place in places.items():
            life = coming[place].life
            if life is not None and coming[place].step + life == step:
                engine.cancel(number)
        for result in engine.step():
            outcomes[places[result.index]].add(result, pool(coming[places[result.index]].number).max_tokens)
        if look:
            look(engine)
        step += 1
    return outcomes


def at_rest(engine: Engine) -> None:
    """Nobody is left, nor is anything of theirs."""
    assert not engine.busy and not engine.table.taken and not engine.waiting
    assert engine.state.running == engine.state.waiting == 0 and engine.state.usage == 0
    if engine.proposer:
        assert not engine.proposer.backlog._waiting and engine.proposer.backlog._rows == 0


def cache_bytes(engine: Engine) -> int:
    """Of all tensors that target's and drafter's caches are made of."""
    stores: list[Any] = [*engine.table.stores]
    caches: list[Any] = [getattr(store, "cache", None) or store for store in stores]
    caches = [one for one in caches if isinstance(one, cache_module.Cache)]
    tensors = [t for c in caches for t in (*c.keys.values(), *c.values.values())]
    tensors += [t for c in caches for s in c.states.values() for t in (s.state, s.window)]
    lanes = [store.pending for store in stores if hasattr(store, "pending")]
    return sum(t.nbytes for t in [*tensors, *lanes])


class Small:
    """Caches that grow from little, in small steps, with little left to everybody: what is rare becomes common."""

    def __enter__(self) -> None:
        self.patches = [
            patch.object(slots_module, "FIRST_ROWS", 8),
            patch.object(slots_module, "FIRST_SLOTS", 1),
            patch.object(cache_module, "REACH_STEP", 8),
            patch.object(engine_module, "HEADROOM", 4),
        ]
        for one in self.patches:
            one.start()

    def __exit__(self, *_: object) -> None:
        for one in self.patches:
            one.stop()
