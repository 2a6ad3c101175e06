"""One thread for all of torch's work: loading, measuring, stepping.

OpenMP keeps a team of workers for every thread that ever started parallel work. With a second team there are more
workers than cores, and then they sleep between two pieces of work in place of spinning: a step of the embedded pair on
two cores took 1.5 to 1.8 times as long (docs/log.md, 2026-11-30). On a GPU the current device belongs to a thread, too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

Result = TypeVar("Result")


class OneThread:
    """A daemon: whoever is interrupted while it works need not wait for it."""

    def __init__(self) -> None:
        self._work: SimpleQueue[tuple[Callable[[], Any], Future[Any]]] = SimpleQueue()
        threading.Thread(target=self._run, name="engine", daemon=True).start()

    def begin(self, act: Callable[[], Result]) -> Future[Result]:
        told: Future[Result] = Future()
        self._work.put((act, told))
        return told

    def call(self, act: Callable[[], Result]) -> Result:
        """The result, or the exception, of what is run there."""
        return self.begin(act).result()

    def _run(self) -> None:
        while True:
            act, told = self._work.get()
            try:
                told.set_result(act())
            except BaseException as error:
                told.set_exception(error)
