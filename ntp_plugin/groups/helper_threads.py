"""Threads that wait in place of the main thread, and may be left behind.

They are daemons: a thread in an operation that never ends must not delay the end of the process, as the threads of an
executor would.
"""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

type _Call = tuple[Future[Any], Callable[[], Any]]


class Helpers:
    """A pool with as many threads as there are simultaneous calls; idle threads are reused."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = 0
        self._idle = 0
        self._lock = threading.Lock()

    def submit[Result](self, call: Callable[[], Result]) -> Future[Result]:
        """Run a call on an idle thread, or on a new one."""
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
        """End every thread as soon as it is idle."""
        with self._lock:
            for _ in range(self._threads):
                self._calls.put(None)
            self._threads = self._idle = 0

    def _serve(self) -> None:
        while (asked := self._calls.get()) is not None:
            future, call = asked
            try:
                future.set_result(call())
            except BaseException as error:  # the caller that asks for the result raises it
                future.set_exception(error)
            del asked, future, call  # an idle helper keeps nothing alive
            with self._lock:
                self._idle += 1
