"""An answer as server-sent events. A client that goes away, or reads nothing for a minute, ends its request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from draftproof.serve.answer.objects import Answer
from draftproof.serve.errors import ApiError
from draftproof.serve.parsers.base import dumps
from draftproof.serve.running import Run

STALLED = 60.0  # seconds in which a client must read something
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # the latter for nginx
DONE = b"data: [DONE]\n\n"


class EventStream(StreamingResponse):
    """The run is broken off when the response ends, whether or not its first part was ever asked for."""

    def __init__(self, run: Run, answer: Answer) -> None:
        super().__init__(events(run, answer), media_type="text/event-stream", headers=HEADERS)
        self.run = run

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def patient(message: Message) -> None:
            async with asyncio.timeout(STALLED):
                await send(message)

        try:
            await super().__call__(scope, receive, patient)
        except TimeoutError:
            pass  # uvicorn closes a connection whose response is not complete
        finally:
            self.run.close()


async def events(run: Run, answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for part in run.parts():
            for chunk in answer.chunks(part):
                yield event(chunk)
        for chunk in answer.closing():
            yield event(chunk)
    except ApiError as error:
        yield event(error.body())
    yield DONE


def event(value: Mapping[str, Any]) -> bytes:
    return f"data: {dumps(value)}\n\n".encode()
