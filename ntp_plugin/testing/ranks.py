"""Real processes that play ranks, with a real store, and a supervisor that publishes deaths.

Ranks are forked from a server that has imported torch once, so that one starts in some ten milliseconds. What they run
is a module-level function `play(rank)`; what it returns comes back pickled. The supervisor sees a process end at once
and creates the view without it, which is the one signal that everybody waits for. A process that returned is done and
not lost.

`Ranks` ends what it started, by process, and nothing else; leaving it with a rank still running is an error unless the
test says that it is left on purpose.
"""

import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.comm import membership
from ntp_plugin.comm.membership import Seat, View
from ntp_plugin.comm.store import TorchStore

_CONTEXT = multiprocessing.get_context("forkserver")
# The last one because torch imports it, for three seconds, when a process makes its first optimizer.
_CONTEXT.set_forkserver_preload(["ntp_plugin.testing.ranks", "ntp_plugin.comm.process_groups", "torch._dynamo"])
_STORE_TIMEOUT = timedelta(seconds=120)
_MEMBERSHIP = "ntp/membership"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """What happens to a slot when it gets to a moment: by default it is killed right there, by its own hand."""

    slot: int
    moment: str
    step: int
    by: signal.Signals = signal.SIGKILL


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """What a process that plays a rank is given."""

    first: View
    seat: Seat
    port: int
    faults: tuple[Fault, ...]
    record: str

    @property
    def slot(self) -> int:
        return self.seat.slot

    @property
    def joining(self) -> bool:
        return self.seat not in self.first.seats

    def connect(self, prefix: str) -> Any:
        """A connection of its own to the store; open all of them at start."""
        client = TCPStore("127.0.0.1", self.port, None, False, _STORE_TIMEOUT)
        return PrefixStore(prefix, client)

    def membership_store(self) -> TorchStore:
        """A connection for agreement, or for waiting for the next view."""
        return TorchStore(self.connect(_MEMBERSHIP))

    def write(self, rows: Sequence[Any]) -> None:
        """Add rows to the record that all ranks share; what is written stays, whatever happens to this process."""
        with Path(self.record).open("ab", buffering=0) as record:
            record.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def reached(self, moment: str, step: int) -> None:
        """Say where this rank is; if a fault was planned for it here, it strikes."""
        for fault in self.faults:
            if (fault.slot, fault.moment, fault.step) == (self.slot, moment, step) and not self.joining:
                os.kill(os.getpid(), fault.by)


@dataclasses.dataclass(kw_only=True, slots=True)
class _Running:
    process: Any
    results: connection.Connection
    seat: Seat
    left_on_purpose: bool = False


class Ranks:
    """So many ranks that play a function; a context manager."""

    def __init__(self, count: int, play: Callable[[Rank], Any], *, faults: Sequence[Fault] = ()) -> None:
        self._server = TCPStore("127.0.0.1", 0, None, True, _STORE_TIMEOUT, wait_for_workers=False)
        self._store = TorchStore(
            PrefixStore(_MEMBERSHIP, TCPStore("127.0.0.1", self._server.port, None, False, _STORE_TIMEOUT))
        )
        self.first = View(epoch=0, seats=tuple(Seat(slot=slot, occupant=f"{slot}/0") for slot in range(count)))
        self._play, self._faults = play, tuple(faults)
        self._running: dict[int, _Running] = {}
        self._births = 0
        self._lock = threading.Lock()
        self._wake, self._waker = os.pipe()
        handle, self._record = tempfile.mkstemp(prefix="ntp-record-")
        os.close(handle)
        self._ending = False
        self.rows: list[Any] = []
        """What the ranks wrote down, once all are ended."""
        self.deaths: dict[int, float] = {}
        """Slot -> when its process was seen to end, on the monotonic clock."""
        self._supervisor = threading.Thread(target=self._supervise, name="ntp-supervisor")

    def __enter__(self) -> "Ranks":
        for seat in self.first.seats:
            self._start(seat)
        self._supervisor.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._ending = True
        os.write(self._waker, b"x")
        self._supervisor.join()
        os.close(self._wake)
        os.close(self._waker)
        left = [running for running in self._running.values() if running.process.is_alive()]
        for running in left:
            running.process.kill()
        for running in self._running.values():
            running.process.join()
            running.results.close()
        self.rows = [json.loads(line) for line in Path(self._record).read_text().splitlines()]
        Path(self._record).unlink()
        forgotten = [running.seat.slot for running in left if not running.left_on_purpose]
        assert kind is not None or not forgotten, f"slots {forgotten} were still running at the end"

    # ------------------------------------------------ what a test does to them

    def kill(self, slot: int) -> float:
        """SIGKILL; returns when, on the monotonic clock."""
        return self._signal(slot, signal.SIGKILL)

    def freeze(self, slot: int) -> float:
        """SIGSTOP. Nobody notices by itself: see `declare_lost`."""
        self._running[slot].left_on_purpose = True
        return self._signal(slot, signal.SIGSTOP)

    def thaw(self, slot: int) -> float:
        """SIGCONT."""
        return self._signal(slot, signal.SIGCONT)

    def declare_lost(self, slot: int) -> None:
        """Create the view without a slot, as a detector would."""
        self._publish_lost(slot)

    def start_again(self, slot: int) -> None:
        """A new process for the slot; it joins by itself. A frozen one that had the slot stays as it is."""
        self._births += 1
        self._start(Seat(slot=slot, occupant=f"{slot}/{self._births}"))

    def wait(self, timeout_s: float) -> dict[int, Any]:
        """Slot -> what its newest process returned; those that were killed are absent. Raises what a rank raised."""
        deadline, results = time.monotonic() + timeout_s, {}
        for slot, running in sorted(self._running.items()):
            if running.left_on_purpose:
                continue
            try:
                if not running.results.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"slot {slot} did not finish within {timeout_s} s")
                outcome = pickle.loads(running.results.recv_bytes())
            except EOFError:
                continue
            if isinstance(outcome, BaseException):
                raise outcome
            results[slot] = outcome
            running.process.join()
        return results

    # ------------------------------------------------ supervision

    def _start(self, seat: Seat) -> None:
        receiving, sending = _CONTEXT.Pipe(duplex=False)
        rank = Rank(first=self.first, seat=seat, port=self._server.port, faults=self._faults, record=self._record)
        process = _CONTEXT.Process(target=_run, args=(self._play, rank, sending), name=f"rank{seat.slot}")
        process.start()
        sending.close()
        with self._lock:
            old = self._running.get(seat.slot)
            if old is not None and old.process.is_alive():
                self._running[-1 - self._births] = old
            elif old is not None:
                old.results.close()
            self._running[seat.slot] = _Running(process=process, results=receiving, seat=seat)
        os.write(self._waker, b"x")

    def _supervise(self) -> None:
        seen: set[int] = set()
        while not self._ending:
            with self._lock:
                living = {r.process.sentinel: r for r in self._running.values() if r.process.pid not in seen}
            ended = connection.wait([*living, self._wake])
            if self._wake in ended:
                os.read(self._wake, 4096)
            for sentinel in ended:
                running = living.get(sentinel)
                if running is None:
                    continue
                seen.add(running.process.pid)
                self.deaths[running.seat.slot] = time.monotonic()
                running.process.join()
                if running.process.exitcode:
                    self._publish_lost(running.seat.slot, running.seat)

    def _publish_lost(self, slot: int, seat: Seat | None = None) -> None:
        while True:
            view = membership.newest_view(self._store.read, self.first)
            if slot not in view.slots or (seat is not None and seat not in view.seats):
                return
            following = membership.without(view, [slot])
            if self._store.create(membership.view_key(following.epoch), following.encode()) == following.encode():
                return

    def _signal(self, slot: int, number: signal.Signals) -> float:
        now = time.monotonic()
        os.kill(self._running[slot].process.pid, number)
        return now


def _run(play: Callable[[Rank], Any], rank: Rank, results: connection.Connection) -> None:
    import torch  # noqa: PLC0415  (the fork server has it already)

    torch.set_num_threads(1)
    try:
        outcome: Any = play(rank)
    except BaseException as error:  # the parent raises it
        outcome = error
    results.send_bytes(pickle.dumps(outcome))  # whole: torch would share tensors with a process that ends
    results.close()
    os._exit(isinstance(outcome, BaseException))
