"""A request on its way: submitted to the worker, its choices followed side by side, broken off when nobody waits."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterable
from contextlib import suppress
from typing import Any, Literal, TypeVar

from starlette.requests import Request as HttpRequest

from draftproof.engine.request import StepResult
from draftproof.serve.answer.choice import Choice, Part
from draftproof.serve.asked.ask import Asked
from draftproof.serve.errors import ApiError, too_slow
from draftproof.serve.served import Served
from draftproof.serve.worker import DrainingError, QueueFullError, Ticket

Result = TypeVar("Result")


class ClientGoneError(Exception):
    """Nobody is there to hear an answer."""


class Run:
    """Submits at once: ApiError 429 where too many wait, 503 when the server stops. Iterate over `parts` to its end, or
    close it: what still runs is cancelled then.
    """

    def __init__(self, served: Served, asked: Asked, deadline: float | None) -> None:
        """deadline: by the event loop's clock."""
        self.served, self.asked, self.deadline = served, asked, deadline
        self.tickets = self._submit()
        self._tasks: list[asyncio.Task[None]] = []

    def _submit(self) -> list[Ticket]:
        metrics = self.served.metrics
        try:
            tickets = self.served.worker.submit(*self.asked.requests)
        except QueueFullError as error:
            if metrics:
                metrics.refused()
            message = "too many requests are waiting: try again later"
            raise ApiError(429, message, code="queue_full", retry_after=error.retry_after) from None
        except DrainingError:
            self.served.check()  # says whether it stops or its engine has ended
            raise
        if metrics:
            for _ in self.asked.prompts:
                metrics.request(len(tickets) // len(self.asked.prompts))
        return tickets

    async def parts(self) -> AsyncIterator[Part]:
        """What every step adds to every choice; ApiError 500, 503 or 504 where one of them fails."""
        # So many results wait at most; the rest stays with the tickets, which hold as many as a request has tokens.
        results: asyncio.Queue[tuple[int, StepResult]] = asyncio.Queue(maxsize=len(self.tickets))
        self._tasks = [asyncio.create_task(_follow(n, ticket, results)) for n, ticket in enumerate(self.tickets)]
        left = len(self._tasks)
        reason: Literal["abort", "error"] = "abort"
        try:
            while left:
                number, result = await self._next(results)
                choice = self.asked.choices[number]
                if choice.finish is not None:
                    continue  # it ended before its request did
                part = self._take(choice, result)
                if part.finish is not None:
                    left -= 1
                    self._end(self.tickets[number], "length" if part.finish == "length" else "stop")
                yield part
        except ApiError as error:
            reason = "abort" if error.status == 504 else "error"
            raise
        finally:
            self.close(reason)

    async def _next(self, results: asyncio.Queue[tuple[int, StepResult]]) -> tuple[int, StepResult]:
        try:
            async with asyncio.timeout_at(self.deadline):
                return await results.get()
        except TimeoutError:
            raise too_slow(self.served.limits.seconds or 0.0) from None

    def _take(self, choice: Choice, result: StepResult) -> Part:
        try:
            return choice.take(result)
        except ApiError:
            if self.served.worker.draining:
                raise ApiError(503, result.error or "the server is stopping", code="draining") from None
            raise

    def close(self, reason: Literal["abort", "error"] = "abort") -> None:
        """Whatever has not ended, ends now. Safe to repeat."""
        for task in self._tasks:
            task.cancel()
        for ticket, choice in zip(self.tickets, self.asked.choices, strict=True):
            if choice.finish is None:
                self._end(ticket, reason)

    def _end(self, ticket: Ticket, reason: Literal["stop", "length", "abort", "error"]) -> None:
        ticket.cancel()
        if self.served.metrics:
            self.served.metrics.finished(ticket, reason)


async def _follow(number: int, ticket: Ticket, results: asyncio.Queue[tuple[int, StepResult]]) -> None:
    async for result in ticket:
        await results.put((number, result))


async def while_connected(request: HttpRequest, work: Coroutine[Any, Any, Result]) -> Result:
    """The work's result; ClientGoneError, and the work cancelled, when the client goes first. The body must have been
    read before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        await _stopped((working, gone))


async def _disconnected(request: HttpRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stopped(tasks: Iterable[asyncio.Future[Any]]) -> None:
    for task in tasks:
        if not task.done():
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task
