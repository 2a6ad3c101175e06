"""Between the event loop and the thread that runs the engine: requests go there, results come back.

The engine is not safe for several threads, and its steps take long; so one thread runs it, and the two sides meet in
two places only: a queue of orders, and `call_soon_threadsafe`.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Protocol

from draftproof.engine.request import EngineState, Request, StepResult
from draftproof.errors import DraftproofError
from draftproof.serve.one_thread import OneThread

log = logging.getLogger("draftproof")
RECENT = 32  # finished requests whose durations tell when there may be room


class Engine(Protocol):
    """What the worker needs of `engine/engine.py`."""

    slots: int

    def add(self, request: Request, arrived: float | None = None) -> int: ...
    def cancel(self, index: int) -> None: ...
    def step(self) -> list[StepResult]: ...
    def reset(self) -> None: ...
    @property
    def state(self) -> EngineState: ...


@dataclass(frozen=True)
class Report:
    """One step of the engine, for the metrics; `stepped` is time.monotonic() at its end."""

    results: list[tuple[Ticket, StepResult]]
    seconds: float
    stepped: float
    state: EngineState


class QueueFullError(DraftproofError):
    """retry_after: seconds after which there may be room."""

    def __init__(self, retry_after: float) -> None:
        super().__init__("too many requests are waiting")
        self.retry_after = retry_after


class DrainingError(DraftproofError):
    """The server is stopping, or its engine has ended: nothing new is taken."""


@dataclass(eq=False)
class Ticket:
    """A submitted request: iterate over its results, the last one has `finish`; `cancel` at any time."""

    worker: Worker
    request: Request
    arrived: float  # time.monotonic()
    done: bool = False
    _results: asyncio.Queue[StepResult] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[StepResult]:
        while True:
            result = await self._results.get()
            yield result
            if result.finish is not None:
                return

    def cancel(self) -> None:
        """The client has gone, or has enough (a stop string). Safe to repeat, and after the end."""
        self.worker.cancel(self)


class Worker:
    """queue: requests that may wait for a slot. report: called in the event loop after every step. thread: where the
    engine was made, for there it shall run."""

    def __init__(
        self,
        engine: Engine,
        *,
        queue: int,
        report: Callable[[Report], None] = lambda _: None,
        thread: OneThread | None = None,
    ) -> None:
        self.engine, self.queue, self.report = engine, queue, report
        self.draining = self.broken = False
        self._open: set[Ticket] = set()  # of the event loop: submitted and not ended
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._orders: deque[tuple[str, Ticket]] = deque()
        self._wake = threading.Condition()
        self._stopping = False
        self._tickets: dict[int, Ticket] = {}  # of the thread: the engine's number -> whose it is
        self._thread = thread or OneThread()
        self._ended: Future[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._emptied = asyncio.Event()

    # ---- in the event loop

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._thread.begin(self._run)

    @property
    def alive(self) -> bool:
        return self._ended is not None and not self._ended.done() and not self.broken

    @property
    def open(self) -> int:
        """Requests that are running or waiting."""
        return len(self._open)

    def submit(self, *requests: Request) -> list[Ticket]:
        """All of them or none: QueueFullError, DrainingError."""
        if self.draining or self.broken:
            raise DrainingError
        room = self.engine.slots + self.queue
        if self.open and self.open + len(requests) > room:  # several choices at once may go beyond an empty queue
            raise QueueFullError(self._wait())
        arrived = time.monotonic()
        tickets = [Ticket(self, request, arrived) for request in requests]
        self._open.update(tickets)
        for ticket in tickets:
            self._order("add", ticket)
        return tickets

    def cancel(self, ticket: Ticket) -> None:
        if not ticket.done:
            self._over(ticket)
            self._order("cancel", ticket)

    async def drain(self, seconds: float) -> None:
        """Take nothing new, let what runs end for so long, then end the rest as errors and stop the thread."""
        self.draining = True
        self._emptied.clear()
        if self._open:
            try:
                await asyncio.wait_for(self._emptied.wait(), seconds)
            except TimeoutError:
                log.warning("%d requests did not end within %.0f s and are broken off", self.open, seconds)
        self._end_all("the server is stopping")
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._ended:
            await asyncio.wait([asyncio.wrap_future(self._ended)], timeout=30.0)

    def _end_all(self, why: str) -> None:
        for ticket in list(self._open):
            ticket.cancel()
            ticket._results.put_nowait(failure(why))

    def _break(self, why: str) -> None:
        """The thread has ended by a fault that nothing could catch: nobody shall wait for it."""
        self.broken = True
        self._end_all(why)

    def _wait(self) -> float:
        """Seconds until a slot is free for one more, by what requests took lately."""
        mean = sum(self._durations) / len(self._durations) if self._durations else 1.0
        return max(1.0, mean * (self.open - self.engine.slots + 1) / self.engine.slots)

    def _order(self, what: str, ticket: Ticket) -> None:
        with self._wake:
            self._orders.append((what, ticket))
            self._wake.notify()

    def _over(self, ticket: Ticket) -> None:
        ticket.done = True
        self._open.discard(ticket)
        if not self._open:
            self._emptied.set()

    def _deliver(self, report: Report) -> None:
        kept = [(ticket, result) for ticket, result in report.results if not ticket.done]
        for ticket, result in kept:
            if result.finish is not None:
                self._durations.append(report.stepped - ticket.arrived)
                self._over(ticket)
            ticket._results.put_nowait(result)
        self.report(Report(kept, report.seconds, report.stepped, report.state))

    # ---- in the thread

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            log.exception("the engine has ended; start the server again")
            self._in_loop(self._break, f"the engine has ended: {type(error).__name__}: {error}")

    def _serve(self) -> None:
        while True:
            with self._wake:
                while not (self._orders or self._tickets or self._stopping):
                    self._wake.wait()
                orders = list(self._orders)
                self._orders.clear()
            if self._stopping and not orders:
                return
            refused = self._follow(orders)
            begun = time.monotonic()
            results = refused + (self._step() if self._tickets else [])
            now = time.monotonic()
            self._in_loop(self._deliver, Report(results, now - begun, now, self.engine.state))

    def _follow(self, orders: Sequence[tuple[str, Ticket]]) -> list[tuple[Ticket, StepResult]]:
        told = []
        for what, ticket in orders:
            if what == "add":
                try:
                    self._tickets[self.engine.add(ticket.request, ticket.arrived)] = ticket
                except Exception as error:
                    log.exception("a request was refused by the engine")
                    told.append((ticket, failure(str(error))))
                continue
            for number in [n for n, other in self._tickets.items() if other is ticket]:
                del self._tickets[number]
                try:
                    self.engine.cancel(number)
                except Exception as error:
                    told += self._all_over(error)
        return told

    def _step(self) -> list[tuple[Ticket, StepResult]]:
        try:
            results = self.engine.step()
        except Exception as error:  # the engine isolates what one request does; this is a fault of its own
            return self._all_over(error)
        told = [(self._tickets[r.index], r) for r in results if r.index in self._tickets]
        for result in results:
            if result.finish is not None:
                self._tickets.pop(result.index, None)
        return told

    def _all_over(self, error: Exception) -> list[tuple[Ticket, StepResult]]:
        log.error("the engine failed; all running requests end", exc_info=error)
        ended = [(t, failure(f"{type(error).__name__}: {error}", n)) for n, t in self._tickets.items()]
        self._tickets.clear()
        self.engine.reset()
        return ended

    def _in_loop(self, act: Callable[[Any], None], what: object) -> None:
        assert self._loop
        try:
            self._loop.call_soon_threadsafe(act, what)
        except RuntimeError:  # the loop has ended: nobody listens any more
            self._tickets.clear()


def failure(error: str, index: int = -1) -> StepResult:
    return StepResult(index, [], 0, "error", error=error)
