"""CUDA graphs of the plain step, for wide batches. The captured step is `engine/step.py`'s, not another one.

A graph holds the addresses of its tensors, so everything a step reads and writes is updated in place. One graph a
length bucket; they share a memory pool. On a CPU the same object runs the step eagerly.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from draftproof.engine.batch import Batch
from draftproof.engine.step import step
from draftproof.models.cache import Cache
from draftproof.models.target import Target

BUCKET = 128  # attended rows per graph


class PlainStepper:
    """Plain decoding of all slots of a cache; the token of every row is appended to `history` [R, columns]."""

    def __init__(self, target: Target, cache: Cache, batch: Batch, columns: int) -> None:
        self.target, self.cache, self.batch = target, cache, batch
        rows = batch.anchors.shape[0]
        self.history = torch.zeros(rows, columns, dtype=torch.long, device=target.device)
        self.written = torch.zeros(rows, dtype=torch.long, device=target.device)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def step(self, longest: int) -> None:
        """One token for every row with budget; `longest` bounds the committed rows."""
        reach = min(-(-(longest + 1) // BUCKET) * BUCKET, self.cache.capacity)
        if self.target.device.type != "cuda":
            self._once(reach)
            return
        if reach not in self._graphs:
            self._graphs[reach] = self._capture(reach)
        self._graphs[reach].replay()

    def _once(self, reach: int) -> None:
        taken = step(dataclasses.replace(self.batch, longest=reach - 1), self.target, self.cache, None).taken
        column = self.written.clamp(max=self.history.shape[1] - 1)[:, None]
        kept = torch.where(taken.counts[:, None] > 0, taken.tokens[:, :1], self.history.gather(1, column))
        self.history.scatter_(1, column, kept)
        self.written += taken.counts

    def _capture(self, reach: int) -> torch.cuda.CUDAGraph:
        state = self._state()
        before = [t.clone() for t in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # warm-up: kernels and workspaces are chosen outside the graph
                self._once(reach)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._once(reach)
        self._pool = self._pool or graph.pool()
        for tensor, value in zip(state, before, strict=True):
            tensor.copy_(value)  # the warm-up steps never happened: rows past `lengths` are visible to nobody
        return graph

    def _state(self) -> list[Tensor]:
        return [self.batch.anchors, self.batch.budget, self.cache.lengths, self.history, self.written]
