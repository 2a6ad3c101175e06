"""vLLM's two log lines once an interval, word for word, so that tools made for its logs read ours (doctor's own too).

The one addition: where a draft had more nodes than a pass has positions, so was a tree, "Largest draft: 24 nodes" ends
the second line. Without it a reader would take drafted tokens for those of chains, and find that the sums are wrong.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable

from draftproof.engine.request import EngineState
from draftproof.serve.stats.counts import Drafts, grown
from draftproof.serve.worker import Report

log = logging.getLogger("draftproof")
LOOKUPS = 1000  # the latest that the hit rate is about


class LogLine:
    """Give every report to `step`, and let `run` be a task of the event loop.

    depth: drafts a pass, 0 without a drafter; interval: seconds; device: whose memory holds the K/V ("cuda", "cpu").

    A server that did nothing for two intervals says so at DEBUG only, as vLLM does.
    """

    def __init__(
        self,
        depth: int,
        interval: float = 10.0,
        device: str = "cuda",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.depth, self.interval, self.clock = depth, interval, clock
        self.memory = "GPU" if device.startswith("cuda") else device.upper()
        self._state = EngineState()
        self._lookups: deque[tuple[int, int]] = deque(maxlen=LOOKUPS)
        self._busy = False
        self._begin()

    def _begin(self) -> None:
        self._since = self.clock()
        self._drafts = Drafts(self.depth)
        self._prompt = self._generated = self._preemptions = 0

    def step(self, report: Report) -> None:
        more = grown(self._state, report.state)
        self._state = report.state
        self._prompt += more.prompt_tokens
        self._preemptions += more.preemptions
        if more.queries:
            self._lookups.append((more.queries, more.hits))
        for _, result in report.results:
            self._generated += len(result.tokens)
            if self.depth:
                self._drafts.add(result)

    async def run(self) -> None:
        """Until it is cancelled; then it tells of the interval that was not over."""
        try:
            while True:
                await asyncio.sleep(self.interval)
                self.log()
        finally:
            self.log()

    def log(self) -> None:
        """Both lines for the time since the last ones."""
        seconds = self.clock() - self._since
        busy = bool(self._prompt or self._generated)
        level = logging.INFO if busy or self._busy else logging.DEBUG
        log.log(level, "%s", self._engine_line(seconds))
        if self._drafts.drafts:
            log.log(level, "%s", draft_line(self._drafts, seconds))
        self._busy = busy
        self._begin()

    def _engine_line(self, seconds: float) -> str:
        state = self._state
        parts = [
            f"Avg prompt throughput: {_rate(self._prompt, seconds):.1f} tokens/s",
            f"Avg generation throughput: {_rate(self._generated, seconds):.1f} tokens/s",
            f"Running: {state.running} reqs",
            f"Waiting: {state.waiting} reqs",
        ]
        if self._preemptions:
            parts.append(f"Preemptions: {self._preemptions}")
        parts.append(f"{self.memory} KV cache usage: {100 * state.usage:.1f}%")
        if self._lookups:
            queries, hits = (sum(column) for column in zip(*self._lookups, strict=True))
            parts.append(f"Prefix cache hit rate: {100 * hits / queries:.1f}%")
        return "Engine 000: " + ", ".join(parts)


def draft_line(drafts: Drafts, seconds: float) -> str:
    """Of at least one draft."""
    rates = ", ".join(f"{count / drafts.drafts:.3f}" for count in drafts.reached)
    line = (
        f"SpecDecoding metrics: Mean acceptance length: {1 + drafts.accepted / drafts.drafts:.2f}, "
        f"Accepted throughput: {_rate(drafts.accepted, seconds):.2f} tokens/s, "
        f"Drafted throughput: {_rate(drafts.nodes, seconds):.2f} tokens/s, "
        f"Accepted: {drafts.accepted} tokens, Drafted: {drafts.nodes} tokens, "
        f"Per-position acceptance rate: {rates}, "
        f"Avg Draft acceptance rate: {100 * drafts.accepted / drafts.nodes:.1f}%"
    )
    return line + (f", Largest draft: {drafts.widest} nodes" if drafts.widest > drafts.depth else "")


def _rate(count: int, seconds: float) -> float:
    return count / seconds if seconds > 0 else 0.0
