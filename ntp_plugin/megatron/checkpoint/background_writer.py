"""Writes the checkpoints of `--async-save` on a thread of the rank that trains.

Megatron keeps a process for each rank that writes. It would outlive a rank that is killed, and write on in a folder
into which the others save anew; and it needs a GPU. A thread ends with its rank. torch's own asynchronous checkpoints
are written by a thread as well.

The thread writes what the tensors were when the save was scheduled: those on a GPU have been copied to the host then,
and those on the host are cloned here, since training goes on to change them.
"""

import functools
import queue
import threading
from typing import Any

from megatron.core.dist_checkpointing.strategies.async_utils import AsyncCaller, AsyncRequest

from ntp_plugin.patching import Replacement

LOOK_S = 0.05
"""Time between two looks at a thread that is waited for."""


class WriterThread(AsyncCaller):  # type: ignore[misc]
    """Megatron's interface to what writes one checkpoint."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self.iteration = 0
        """After which the save was scheduled; set by a live job."""

    @property
    def writes(self) -> bool:
        """Whether this rank's part is still being written."""
        return self._thread is not None and self._thread.is_alive()

    def schedule_async_call(self, async_req: AsyncRequest) -> None:
        """Copy what is to be written, and begin to write it."""
        if async_req.async_fn is None:  # this rank writes nothing
            return
        arguments = list(async_req.async_fn_args)
        if async_req.preload_fn is not None:
            arguments[1] = _own_copies(arguments[1], async_req.preload_fn())

        def write() -> None:
            try:
                async_req.async_fn(*arguments, **async_req.async_fn_kwargs)
            except BaseException as error:
                self._error = error

        self._thread = threading.Thread(target=write, name="ntp-checkpoint", daemon=True)
        self._thread.start()

    def is_current_async_call_done(self, blocking: bool = False, no_dist: bool = False) -> bool:
        """Whether all ranks have written theirs; `blocking` waits for this rank's part."""
        done = not self.writes if no_dist else bool(self.sync_all_async_calls(int(self.writes)))
        if done or blocking:
            self.close()
        return done or blocking

    def close(self, abort: bool = False) -> None:
        """Wait until this rank's part is written, whether it is wanted still or not: a thread cannot be stopped."""
        while self._thread is not None and self._thread.is_alive():
            self._thread.join(LOOK_S)  # a wait without an end could not be interrupted by a signal
        self._thread = None
        error, self._error = self._error, None
        if error is not None and not abort:
            raise error

    def __del__(self) -> None:
        """Leave the thread alone: it holds all that it needs."""


def _own_copies(originals: list[Any], staged: list[Any]) -> list[Any]:
    """Return what was staged for writing, with clones of those tensors that still belong to the training."""
    kept = {tensor.untyped_storage().data_ptr() for _, _, (_, items) in originals for _, tensor in items}
    return [
        (
            file,
            key,
            (
                data,
                [
                    (item, tensor.clone() if tensor.untyped_storage().data_ptr() in kept else tensor)
                    for item, tensor in items
                ],
            ),
        )
        for file, key, (data, items) in staged
    ]


_STRATEGIES = "megatron.core.dist_checkpointing.strategies"
BY_A_THREAD: tuple[Replacement, ...] = (
    Replacement(
        target=f"{_STRATEGIES}.async_utils:AsyncCallsQueue._get_async_caller",
        why="a process that writes stays behind when its rank is killed, and needs a GPU",
        make=lambda original: functools.wraps(original)(lambda _: WriterThread()),
    ),
    Replacement(
        target=f"{_STRATEGIES}.filesystem_async:get_write_results_queue",
        why="its queue starts a process that stays behind when this rank is killed, and that imports everything again",
        make=lambda original: functools.wraps(original)(lambda *_, **__: queue.Queue()),
    ),
    Replacement(
        target="megatron.training.initialize:init_persistent_async_worker",
        why="nothing is for a process to write",
        make=lambda original: functools.wraps(original)(lambda *_, **__: None),
    ),
)
