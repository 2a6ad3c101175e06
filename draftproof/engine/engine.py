"""Many requests at once: they come and go between steps, prompts are run in chunks beside those that decode."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from draftproof.engine.batch import Batch, Drafter, batch_of
from draftproof.engine.emit import emit
from draftproof.engine.faults import short_of_memory
from draftproof.engine.inflight import InFlight
from draftproof.engine.keeper import Keeper
from draftproof.engine.propose import Proposer, Round, Speculation
from draftproof.engine.request import EngineState, Request, StepResult
from draftproof.engine.slots import SlotTable
from draftproof.engine.step import Step, advance, choices, scores_of, step
from draftproof.errors import UserError
from draftproof.models.target import Target, causal_plan
from draftproof.spec.accept import walk
from draftproof.spec.budget import Auto, Autos
from draftproof.spec.tree import chain

PREFILL_CHUNK = 512  # prompt rows per forward
HEADROOM = 64  # rows that a newcomer must leave to everybody, or it would be sent away again at once
OUT_OF_MEMORY = "out of memory"
RECOVER, LONGEST = 64, 4096  # steps after which one more request is tried again when memory was short
log = logging.getLogger("draftproof")


class Engine:
    """A target, maybe a drafter, and their caches for `slots` requests of at most `context` tokens each."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        slots: int = 1,
        context: int,
        how: Speculation | None = None,
        auto: Auto | Autos | None = None,
        chunk: int = PREFILL_CHUNK,
        prefill_rows: int | None = None,
        memory: int | None = None,
        prefix: int = 0,
        isolate: bool = False,
    ) -> None:
        """how: what to draft (default: the drafter's chain); auto: the measured choice, for its budget "auto"
        (`calibrate.auto_for`).

        chunk: prompt rows of one forward; prefill_rows: of all prompts together in one step, None: whole prompts.
        memory: bytes of the caches, which then grow as they are needed; None: they are made whole at once.
        prefix: bytes for what earlier requests left (0: nothing is kept). isolate: a fault ends the request it came
        from as an error, in place of being raised.
        """
        limit = target.spec.max_positions
        if limit is not None and context > limit:
            raise UserError(
                "prompt-too-long",
                f"{context} tokens of prompt and answer, the model's context is {limit}",
                f"shorten the prompt or lower --max-tokens so that both fit {limit}",
            )
        self.target, self.drafter, self.slots, self.context = target, drafter, slots, context
        self.isolate, self.prefill_rows = isolate, prefill_rows
        self.proposer = Proposer(drafter, how or Speculation(), target.spec.vocab_size, auto) if drafter else None
        self.chunk = min(chunk, context + 1)
        rows = max(self.chunk, self.proposer.rows if self.proposer else 1)
        made = slots if memory is None else 1
        first = context if memory is None else 1
        self.cache = target.new_cache(slots=made, capacity=first, chunk=rows)
        if drafter and self.proposer:
            drafter.allocate(slots=made, capacity=first, chunk=rows)
            self.proposer.backlog.chunk = min(self.proposer.backlog.chunk, rows)
        self.table = SlotTable(self.cache, self.proposer, slots, context, memory)
        if memory is not None and self.table.bytes_for(1, context) > memory:
            raise UserError(
                "bad-option",
                f"{memory / 2**30:.2f} GiB for the cache; one request of {context} tokens takes "
                f"{self.table.bytes_for(1, context) / 2**30:.2f} GiB",
                "give it more, or lower the context",
            )
        self.keeper = Keeper(prefix, self.table, self.proposer, self.chunk) if prefix else None
        self.waiting: deque[InFlight] = deque()
        self.most = slots  # requests at once; lowered for a while when memory was short
        self._numbers, self._turns = 0, itertools.count(1)
        self._rest, self._patience = 0, RECOVER  # steps since memory was short, and until more requests are tried
        self._batch: Batch | None = None
        self._counted = EngineState()

    # ---- requests in, results out

    def generate(self, requests: Sequence[Request]) -> Iterator[StepResult]:
        """Decode these requests side by side; yields each request's tokens step by step, with its place in the list.

        The text depends on the request and its seed alone: not on the drafter, nor on what shares the batch (up to the
        rounding of kernels that see another batch shape).
        """
        self._require_room_for_budget(requests)
        places: dict[int, int] = {}
        try:
            for place, request in enumerate(requests):
                places[self.add(request)] = place
            while self.busy:
                for result in self.step():
                    yield replace(result, index=places[result.index])
        finally:
            self.reset()  # the caller may have stopped early

    def add(self, request: Request, arrived: float | None = None) -> int:
        """Queue a request; its results carry the number that is returned. arrived: by time.monotonic(), if before now.
        UserError prompt-too-long, bad-option."""
        self._require_fit(request)
        self._numbers += 1
        self.waiting.append(InFlight(self._numbers, request, time.monotonic() if arrived is None else arrived))
        return self._numbers

    def cancel(self, number: int) -> None:
        """Nothing more of this request. One that has ended is no error."""
        self.waiting = deque(one for one in self.waiting if one.number != number)
        self._leave([one for one in self.table.taken if one.number == number])

    def reset(self) -> None:
        """Forget all requests."""
        self.waiting.clear()
        self._leave(self.table.taken, keep=False)

    @property
    def busy(self) -> bool:
        return bool(self.waiting or self.table.taken)

    @property
    def state(self) -> EngineState:
        taken = self.table.taken
        full = self.table.memory or self.table.nbytes
        held = sum(self.table.bytes_for(1, one.rows) for one in taken)
        return replace(self._counted, running=len(taken), waiting=len(self.waiting), usage=min(1.0, held / full))

    def seat(self, requests: Sequence[Request]) -> Batch:
        """For measurements: these requests in the first slots, with nothing run (`run_prompt`, `step.step`)."""
        self.reset()
        for request in requests:
            self.add(request)
        self._admit()
        return self._batch_of(self.table.taken, slice(0, len(requests)))

    def step(self) -> list[StepResult]:
        """Decode everybody by one step, let in who can be, run a stretch of prompts: a first token is told at once."""
        self._recover()
        results = self._make_room() + self._decode_all(self.table.decoding)
        return results + self._admit() + self._prefill()

    def _recover(self) -> None:
        """After a want of memory, more requests at once are tried again: later and later, while that fails."""
        self._rest += 1
        if self._rest < self._patience:
            return
        if self.most < self.slots:
            self.most, self._rest = self.most + 1, 0
        else:
            self._patience = RECOVER

    def _require_fit(self, r: Request) -> None:
        spec = self.target.spec
        if len(r.prompt_ids) + r.max_tokens > self.context:
            raise UserError(
                "prompt-too-long",
                f"{len(r.prompt_ids)} prompt tokens and {r.max_tokens} new ones, the context holds {self.context}",
                "shorten the prompt or lower --max-tokens",
            )
        for what, ids in (("the prompt", r.prompt_ids), ("logit_bias", r.sampling.logit_bias)):
            foreign = next((i for i in ids if not 0 <= i < spec.vocab_size), None)
            if foreign is not None:
                message = f"{what} holds token {foreign}, the vocabulary has {spec.vocab_size}"
                raise UserError("bad-option", message, f"use token ids below {spec.vocab_size}")

    def _require_room_for_budget(self, requests: Sequence[Request]) -> None:
        """A number of nodes that no round could ever use was not meant."""
        budget, limit = self.proposer.how.budget if self.proposer else 0, self.target.spec.max_positions
        left = min((limit - len(r.prompt_ids) for r in requests), default=0) if limit is not None else None
        if isinstance(budget, int) and left is not None and budget > left:
            raise UserError(
                "bad-option",
                f"a budget of {budget} nodes, the model's context has {left} tokens left behind the prompt",
                "lower --budget, or shorten the prompt",
            )

    # ---- coming and going

    def _admit(self) -> list[StepResult]:
        """Who fits. One for whom there is no memory although nobody else is there ends."""
        while self.waiting and len(self.table.taken) < self.most:
            one, taken = self.waiting[0], self.table.taken
            rows = max(r.goal for r in (one, *taken)) + (HEADROOM if taken else 1)
            if self._fit(len(taken) + 1, min(rows, self.context)):
                self.waiting.popleft()
                self.table.enter(one)
                one.rows = one.kept = one.stated = 0
                one.turn, one.looked = next(self._turns), False
            elif taken:
                break
            else:
                self.waiting.popleft()
                return [self._no_memory(one)]
        return []

    def _fit(self, requests: int, rows: int) -> bool:
        """Room in the caches; where memory is short, what earlier requests left goes for it."""
        try:
            fits = self.table.fit(requests, rows)
            if not fits and self.table.starved and self.keeper and self.keeper.prefix.nbytes:
                self.keeper.prefix.clear()
                fits = self.table.fit(requests, rows)
            return fits
        except Exception as error:
            self._moved_apart(error)
            return False

    def _take_up(self, one: InFlight) -> None:
        """What an earlier request left: looked up when its turn comes, for others may have left some meanwhile."""
        fresh, one.looked = one.started is None, True
        found = self.keeper.take_up(one) if self.keeper else 0
        if fresh:
            one.started, one.cached = time.monotonic(), found
            if self.keeper:
                self._count(queries=len(one.request.prompt_ids), hits=found)

    def _leave(self, leaving: Sequence[InFlight], *, keep: bool = True) -> None:
        if not leaving:
            return
        if keep and self.keeper:
            for one in leaving:
                self._kept(self.keeper.keep, one)
        self.table.leave(leaving)
        self._batch = None
        self._order()

    def _order(self) -> None:
        try:
            self.table.order()
        except Exception as error:
            self._moved_apart(error)

    def _moved_apart(self, error: Exception) -> None:
        """A move between slots found no memory, maybe in one cache and not in another: everybody begins again."""
        if not (self.isolate and short_of_memory(error)):
            raise error
        self._give_way()
        self._preempt(self.table.taken, keep=False)

    def _preempt(self, leaving: Sequence[InFlight], *, keep: bool, alone: bool = False) -> None:
        """They lose their slots and nothing else: their texts are run again as soon as there is room."""
        self._leave(leaving, keep=keep)
        for one in reversed(leaving):
            one.rows, one.alone = 0, one.alone or alone
            self.waiting.appendleft(one)
        self._count(preemptions=len(leaving))

    def _make_room(self) -> list[StepResult]:
        """The next step must fit; the request that came last makes room, and ends where it is by itself."""
        while (taken := self.table.taken) and not self._fit(len(taken), max(len(one.ids) for one in taken)):
            last = max(taken, key=lambda one: one.number)
            if last.slot < 0:  # a move found no memory, and all have lost their slots
                break
            if len(taken) == 1:
                self._leave([last], keep=False)
                return [self._no_memory(last)]
            self._preempt([last], keep=True)
        return []

    # ---- prompts

    def _prefill(self) -> list[StepResult]:
        """Stretches of prompts within the step's rows, by turns: a long one delays another by one stretch."""
        room, results = self.prefill_rows, []
        ready: dict[InFlight, Tensor] = {}

        def stretch(batch: Sequence[InFlight]) -> list[StepResult]:
            one = batch[0]
            if not one.looked:
                self._take_up(one)
            if one.rows < one.goal:  # a text that goes on may have been taken up whole
                logits = self.run_prompt(one, min(self.chunk, room or self.chunk))
                if logits is not None:
                    ready[one] = logits
            return []

        def first(batch: Sequence[InFlight]) -> list[StepResult]:
            return self._first(batch, torch.stack([ready[one] for one in batch]))

        while (room is None or room > 0) and (rest := self._unread()):
            one = min(rest, key=lambda one: (one.turn, one.number))
            begun, one.turn = one.rows, next(self._turns)
            results += self._guarded(stretch, [one])
            if room is not None:
                room -= max(1, one.rows - begun)
        suspect = any(one.alone for one in ready)
        for some in [[one] for one in ready] if suspect else [list(ready)] if ready else []:
            results += self._settled(first, some)
        self._order()
        return results

    def _unread(self) -> list[InFlight]:
        """Requests whose prompts are not through. Of several with the same prompt the first leaves it to the others."""
        rest = [one for one in self.table.taken if one.rows < one.goal]
        if not self.keeper:
            return rest
        firsts: dict[Hashable, InFlight] = {}
        for one in sorted(rest, key=lambda one: one.number):
            firsts.setdefault(one.number if one.emitted else one.prompt, one)
        return list(firsts.values())

    def run_prompt(self, one: InFlight, most: int) -> Tensor | None:
        """Run a stretch of at most `most` tokens; logits [V] behind the prompt's last one when it was that."""
        begin, end = one.rows, min(one.goal, one.rows + most)
        if self.keeper:
            end = self.keeper.end_of_stretch(one, end)
        slot, device = slice(one.slot, one.slot + 1), self.target.device
        tokens, counts = torch.tensor([one.ids[begin:end]], device=device), torch.tensor([end - begin], device=device)
        plan = causal_plan(self.cache, slot, end - begin, end)
        out = self.target.forward(tokens, plan, taps=self.drafter.taps if self.drafter else (), rows=1)
        self.cache.commit(slot, counts)
        if self.proposer:
            assert out.features is not None
            self.proposer.prefill(slot, out.features, counts, end)
        one.rows = end
        if one.decoding:
            self._batch = None
        self._count(prompt_tokens=end - begin)
        if self.keeper:
            self.keeper.read(one)
        return out.logits[0, -1] if end == one.goal and not one.emitted else None

    def _first(self, requests: Sequence[InFlight], behind: Tensor) -> list[StepResult]:
        """The token after each prompt, chosen like any other: logits [R, V] of its last token."""
        logits = behind[:, None]
        batch = self._batch_of(requests, slice(0, len(requests)))
        positions = torch.tensor([[one.rows - 1] for one in requests], device=logits.device)
        tree = chain(batch.anchors)
        taken = walk(tree, choices(batch, logits, Round(tree), positions), batch.stops, batch.budget)
        advance(batch, taken)
        scores = None if batch.logprobs is None else scores_of(logits, taken, batch.logprobs)
        self._batch = None
        return emit(Step(tree, taken, scores), requests, prefill=True)

    # ---- decoding

    def _decode_all(self, requests: Sequence[InFlight]) -> list[StepResult]:
        """Together; after a fault one by one for a step, so that it shows whose it is."""
        if not any(one.alone for one in requests):
            return self._settled(self._decode, requests)
        results = []
        for one in requests:
            results += self._settled(self._decode_alone, [one])
        self._order()
        return results

    def _decode_alone(self, requests: Sequence[InFlight]) -> list[StepResult]:
        one = requests[0]
        batch = self._batch_of(requests, slice(one.slot, one.slot + 1))
        if self.proposer:
            self.proposer.changed()
        results = emit(step(batch, self.target, self.cache, self.proposer), requests)
        one.alone, self._batch = False, None
        return results

    def _decode(self, requests: Sequence[InFlight]) -> list[StepResult]:
        if self._batch is None or len(self._batch.left) != len(requests):
            self._batch = self._batch_of(requests, slice(0, len(requests)))
            if self.proposer:
                self.proposer.changed()
        self._batch.longest = max(len(one.ids) for one in requests)
        self._batch.left = [one.left for one in requests]
        begun = time.perf_counter()
        done = step(self._batch, self.target, self.cache, self.proposer)
        results = emit(done, requests)
        if self.proposer:
            self.proposer.felt(time.perf_counter() - begun)
        return results

    def _batch_of(self, requests: Sequence[InFlight], slots: slice) -> Batch:
        aware = self.proposer is not None and self.proposer.how.noise_aware
        batch = batch_of(requests, slots, self.target.spec.vocab_size, self.target.device, aware=aware)
        if any(batch.sequential) and self.proposer and self.proposer.how.budget not in ("chain", "none"):
            warnings.warn(
                "a logits processor keeps state from call to call, so it cannot be asked at every node of a tree: its "
                "request drafts a chain",
                stacklevel=2,
            )
        return batch

    def _settled(
        self, act: Callable[[Sequence[InFlight]], list[StepResult]], requests: Sequence[InFlight]
    ) -> list[StepResult]:
        """Of those that did not lose their slots a moment ago. Then who has ended leaves, and what is worth keeping is
        kept: the tokens are told, whatever happens there."""
        requests = [one for one in requests if one.slot >= 0]
        results = self._guarded(act, requests) if requests else []
        self._leave([one for one in requests if one.slot >= 0 and not one.running])
        for one in requests:
            if self.keeper and one.slot >= 0 and not self._kept(self.keeper.wrote, one):
                self._preempt([one], keep=False)  # the drafter may have read half of it
        return results

    def _kept(self, act: Callable[[InFlight], None], one: InFlight) -> bool:
        """What a request leaves for others is no need: a fault there costs no tokens."""
        try:
            act(one)
        except Exception as error:
            if not self.isolate:
                raise
            log.warning("the prefix cache failed and is emptied", exc_info=error)
            if self.keeper:
                self.keeper.prefix.clear()
            return False
        return True

    # ---- faults

    def _guarded(
        self, act: Callable[[Sequence[InFlight]], list[StepResult]], requests: Sequence[InFlight]
    ) -> list[StepResult]:
        """After a fault all of it is run again, one by one; a fault of one by itself ends it."""
        try:
            return act(requests)
        except Exception as error:
            if not self.isolate:
                raise
            self._batch = None
            if self.proposer:
                self.proposer.changed()
            if short_of_memory(error):
                self._give_way()
            again = len(requests) > 1 or not requests[0].alone
            if again:
                self._preempt(requests, keep=False, alone=True)
                return []
            self._leave(requests, keep=False)
            what = OUT_OF_MEMORY if short_of_memory(error) else f"{type(error).__name__}: {error}"
            return [StepResult(one.number, [], 0, "error", error=what) for one in requests]

    def _no_memory(self, one: InFlight) -> StepResult:
        if not self.isolate:
            raise MemoryError(f"the caches cannot hold a request of {one.goal} tokens")
        return StepResult(one.number, [], 0, "error", error=OUT_OF_MEMORY)

    def _give_way(self) -> None:
        """What earlier requests left makes room, and so does company."""
        if self.keeper:
            self.keeper.prefix.clear()
        self.most = max(1, len(self.table.taken) // 2)
        self._rest, self._patience = 0, min(2 * self._patience, LONGEST)

    def _count(self, **more: int) -> None:
        self._counted = replace(self._counted, **{k: getattr(self._counted, k) + v for k, v in more.items()})
