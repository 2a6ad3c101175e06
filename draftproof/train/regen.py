"""The target writes the training texts: thousands of requests side by side through the same target, cache and step."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftproof.engine.batch import Batch
from draftproof.engine.graphs import PlainStepper
from draftproof.models.target import Target, causal_plan
from draftproof.spec.sampling import Sampling

CHECK_EVERY = 16  # steps between looks for finished rows


@dataclass(frozen=True)
class Job:
    """One text to write: temperature 0 is greedy, the seed keys its noise."""

    prompt_ids: list[int]
    temperature: float
    seed: int
    max_tokens: int


class Writer:
    """`slots` jobs in flight; a finished row is refilled with the next job."""

    def __init__(self, target: Target, *, slots: int, max_prompt: int, max_tokens: int, stops: Sequence[int]) -> None:
        self.target, self.slots, self.max_prompt = target, slots, max_prompt
        device = target.device
        self.cache = target.new_cache(slots=slots, capacity=max_prompt + max_tokens, chunk=max_prompt)
        zeros = torch.zeros(slots, dtype=torch.long, device=device)
        ones = torch.ones(slots, device=device)
        sampling = Sampling(
            temperature=ones.clone(), top_k=zeros.clone(), top_p=ones, min_p=ones - 1, penalty=ones, seed=zeros.clone(),
            choice=zeros.clone(), seen=None, sampled=True, filtered=False,
        )  # fmt: skip
        stop = torch.tensor(list(stops), dtype=torch.long, device=device)
        self.batch = Batch(slice(0, slots), zeros.clone(), zeros.clone(), stop, sampling, 0)
        self.stepper = PlainStepper(target, self.cache, self.batch, max_tokens)

    def write(
        self,
        jobs: Iterable[Job],
        *,
        seconds: float = float("inf"),
        report: Callable[[int, int], None] | None = None,
    ) -> Iterator[tuple[Job, list[int]]]:
        """Yield (job, response ids) as rows finish; stop taking new jobs after `seconds`."""
        queue: Iterator[Job] = iter(jobs)
        rows: list[Job | None] = [None] * self.slots
        lengths, begun, tokens = [0] * self.slots, time.monotonic(), 0
        while True:
            free = [i for i, row in enumerate(rows) if row is None]
            taken = [] if time.monotonic() - begun > seconds else list(_take(queue, len(free)))
            fresh = list(zip(free, taken, strict=False))
            self._admit(fresh)
            for slot, job in fresh:
                rows[slot], lengths[slot] = job, len(job.prompt_ids)
            if not any(rows):
                return
            for _ in range(CHECK_EVERY):
                self.stepper.step(max(n for n, row in zip(lengths, rows, strict=True) if row))
                lengths = [n + 1 for n in lengths]
            for slot, job, ids in self._finished(rows):
                tokens += len(ids)
                rows[slot] = None
                yield job, ids
            if report:
                report(tokens, sum(r is not None for r in rows))

    def _admit(self, fresh: Sequence[tuple[int, Job]]) -> None:
        """Prefill all but the last prompt token of the new rows; that one is the anchor of the first step."""
        if not fresh:
            return
        device, batch = self.target.device, self.batch
        slots = torch.tensor([slot for slot, _ in fresh], device=device)
        jobs = [job for _, job in fresh]
        self.cache.drop(slots)
        counts = torch.tensor([len(j.prompt_ids) - 1 for j in jobs], device=device)
        width = max(len(j.prompt_ids) for j in jobs) - 1
        if width:
            padded = [(j.prompt_ids[:-1] + [0] * width)[:width] for j in jobs]
            plan = causal_plan(self.cache, slots, width, width)
            self.target.forward(torch.tensor(padded, device=device), plan, rows=1)
            self.cache.commit(slots, counts)
        batch.anchors[slots] = torch.tensor([j.prompt_ids[-1] for j in jobs], device=device)
        batch.budget[slots] = torch.tensor([j.max_tokens for j in jobs], device=device)
        batch.sampling.temperature[slots] = torch.tensor([j.temperature for j in jobs], device=device)
        batch.sampling.seed[slots] = torch.tensor([j.seed for j in jobs], device=device)
        self.stepper.written[slots] = 0

    def _finished(self, rows: Sequence[Job | None]) -> Iterator[tuple[int, Job, list[int]]]:
        done = (self.batch.budget == 0).tolist()
        slots = [i for i, row in enumerate(rows) if row is not None and done[i]]
        if not slots:
            return
        index = torch.tensor(slots, device=self.target.device)
        history, written = self.stepper.history[index].tolist(), self.stepper.written[index].tolist()
        for slot, ids, count in zip(slots, history, written, strict=True):
            job = rows[slot]
            assert job is not None
            yield slot, job, ids[:count]


def _take(queue: Iterator[Job], count: int) -> Iterator[Job]:
    for _ in range(count):
        job = next(queue, None)
        if job is None:
            return
        yield job
