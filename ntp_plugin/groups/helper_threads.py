"""Threads that wait in the place of the main thread, and may be left behind.

They are daemons: one that stands in an operation that nobody ends must not hold up the end of the process, as the
threads of an executor would.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

type _Call = tuple[Future[Any], Callable[[], Any]]


class Helpers:
    """As many threads as there are calls at once; they are kept for the next ones."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit[Result](self, call: Callable[[], Result]) -> Future[Result]:
        """Begin a call on a thread that has nothing to do."""
        future: Future[Result] = Future()
        with self._lock:
            if self._idle:
                self._idle -= 1
            else:
                self._threads += 1
                threading.Thread(target=self._serve, name="ntp-helper", daemon=True).start()
        self._calls.put((future, call))
        return future

    def close(self) -> None:
        """Every thread ends when it has nothing to do."""
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = self._idle = 0

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            try:
                future.set_result(call())
            except BaseException as error:  # whoever asked for the result raises it
                future.set_exception(error)
            del asked, future, call  # while it waits for the next one, a helper keeps nothing alive
            with self._lock:
                self._idle += 1
