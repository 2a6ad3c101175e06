"""The socket, the signals and the life of the process around uvicorn."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import uvicorn
from fastapi import FastAPI

from draftproof.errors import UserError
from draftproof.serve.served import Served

log = logging.getLogger("draftproof")
SIGNALS = (signal.SIGINT, signal.SIGTERM)
KEEP_ALIVE = 75  # seconds that an idle connection stays open: longer than the proxies' usual 60
SLACK = 5.0  # seconds for the last bytes of answers, behind the drain


def bind(host: str, port: int) -> socket.socket:
    """Taken before the model is loaded, so that a wrong address costs no time; nobody can connect yet.

    UserError port-in-use, bad-option.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError, OverflowError) as error:
        raise UserError("bad-option", f"--host {host}: {error}", "give an address of this machine") from None
    family, kind, protocol, _, address = found[0]
    made = socket.socket(family, kind, protocol)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(address)
    except OSError as error:
        made.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError("port-in-use", f"{host}:{port} is taken", "choose another --port") from None
        raise UserError("bad-option", f"{host}:{port}: {error.strerror}", "give an address of this machine") from None
    return made


def listen(app: FastAPI, served: Served, taken: socket.socket) -> None:
    """Until SIGTERM or SIGINT; returns when everything that ran has ended, or its time was up."""
    Server(app, served).run([taken])


def settings(app: FastAPI, served: Served) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        log_config=None,
        log_level="warning",
        access_log=False,
        ws="none",
        server_header=False,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=int(served.limits.drain + SLACK),
    )


class Server(uvicorn.Server):
    """The first signal drains, the second ends the process at once."""

    def __init__(self, app: FastAPI, served: Served) -> None:
        super().__init__(settings(app, served))
        self.served = served

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        for taken in sockets or ():
            host, port = taken.getsockname()[:2]
            shown = f"[{host}]" if ":" in host else host
            log.info("serving %s on http://%s:%d", self.served.names[0], shown, port)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Nobody new is let in; what runs has the drain's time, while uvicorn waits for its answers to be sent."""
        log.info("stopping: %d requests still run", self.served.worker.open)
        drain = asyncio.create_task(self.served.worker.drain(self.served.limits.drain))
        await super().shutdown(sockets)
        await drain

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Without raising them again afterwards, as uvicorn does: a drained server ends with exit code 0.
        Another thread than the main one gets no signals."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)
        self.should_exit = True
