"""Run a function as several rank processes, with a real store and a supervisor that publishes deaths.

Ranks are forked from a server that has imported torch once, so that one starts in some ten milliseconds; `NTP_PRELOAD`
names more modules that it imports, as it does for `ntp run`'s spares. What they run is a module-level function
`play(rank)`; what it returns comes back pickled. The supervisor sees a process end at once and creates the view without
it, which is the one signal that everybody waits for. A process that ends, with whatever code, is lost unless all had
said that they were done (`Driver.finish`).

`Ranks` ends what it started, by process, and nothing else. Leaving it is an error where a rank is still running, where
a fault was planned and never injected, and where anything is left behind (`leaks.py`).
"""

import contextlib
import ctypes
import dataclasses
import json
import multiprocessing
import os
import pickle
import signal
import threading
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any

from torch._C._distributed_c10d import TCPStore

from ntp_plugin.errors import ConfigError
from ntp_plugin.launch.run_folder import RunFolder
from ntp_plugin.launch.supervisor import Supervisor
from ntp_plugin.membership.failure_detector import RankFailure, Thresholds
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.membership.store import TorchStore
from ntp_plugin.recovery.rank_context import RankContext, corner, first_view
from ntp_plugin.testing.faults import Fault
from ntp_plugin.testing.leaks import ProcessResources, end_what_they_started, left_behind

__all__ = ["Fault", "Rank", "Ranks"]

_CONTEXT = multiprocessing.get_context("forkserver")
# The last one because torch imports it, for three seconds, when a process makes its first optimizer.
_PRELOADED = ("ntp_plugin.testing.ranks", "ntp_plugin.recovery.elastic_rank", "torch._dynamo")
_CORNER, _TOKEN = corner("ranks"), "ranks"
_SET_PARENT_DEATH_SIGNAL = 1  # PR_SET_PDEATHSIG
PATIENCE_S = 600.0
"""How long a test waits for what must come: only one that hangs ends by it, and no busy processor does that."""
_STORE_TIMEOUT = timedelta(seconds=PATIENCE_S)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """What a process that plays a rank is given. `Ranks` makes it."""

    first: View
    member_id: MemberId
    port: int
    faults: tuple[Fault, ...]
    folder: str
    heartbeat_s: float
    hung_s: float

    @property
    def slot(self) -> int:
        return self.member_id.slot

    @property
    def joining(self) -> bool:
        return self.member_id not in self.first.member_ids

    @property
    def place(self) -> RankContext:
        return RankContext(
            slot=self.slot,
            slots=len(self.first.member_ids),
            incarnation=self.member_id.incarnation,
            store_host="127.0.0.1",
            store_port=self.port,
            corner=_CORNER,
            token=_TOKEN,
            heartbeats=Path(self.folder) / "heartbeats",
            heartbeat_s=self.heartbeat_s,
            hung_s=self.hung_s,
            per_host=len(self.first.member_ids),
            copies=Path(self.folder) / "copies",
        )

    def environment(self, *, per_host: int = 0) -> dict[str, str]:
        """Return the environment variables that `ntp run` would set for this rank.

        `os.environ.update(rank.environment())` makes `elastic_job` and the adapters work in it.

        Args:
            per_host: How many ranks share a host, by these variables; 0 for all.
        """
        place = self.place
        return {
            "RANK": str(self.slot),
            "LOCAL_RANK": str(self.slot),
            "WORLD_SIZE": str(place.slots),
            "LOCAL_WORLD_SIZE": str(per_host or place.slots),
            "MASTER_ADDR": place.store_host,
            "MASTER_PORT": str(self.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": Path(place.corner).name,
            "NTP_TOKEN": place.token,
            "NTP_HEARTBEATS": str(place.heartbeats),
            "NTP_HEARTBEAT_S": str(place.heartbeat_s),
            "NTP_HUNG_S": str(place.hung_s),
            "NTP_INCARNATION": self.member_id.incarnation,
        }

    def write(self, rows: Sequence[Any]) -> None:
        """Add rows to the list that all ranks share, `Ranks.rows`. They stay, whatever happens to this process.

        Args:
            rows: Values that JSON can hold.
        """
        with (Path(self.folder) / "record").open("ab", buffering=0) as record:
            record.write(b"".join(json.dumps(row).encode() + b"\n" for row in rows))

    def reached(self, fault_point: str, step: int | None = None, *, epoch: int | None = None) -> None:
        """Say where this rank is. A fault that is planned for it here happens now.

        Args:
            fault_point: A name of your own, which a fault gives as `during`.
            step: The step that the rank is in.
            epoch: Inside a recovery, the epoch that it leads to.
        """
        for index, fault in enumerate(self.faults):
            if (fault.epoch is not None or not self.joining) and fault.is_for(self.slot, fault_point, step, epoch):
                with (Path(self.folder) / "injected").open("ab", buffering=0) as injected:
                    injected.write(b"%d\n" % index)
                fault.inject()


@dataclasses.dataclass(kw_only=True, slots=True)
class _RunningRank:
    process: Any
    results: connection.Connection
    member_id: MemberId
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def exit_code(self) -> int:
        """Wait for the end. One thread at a time: the exit code comes through a pipe, and can be read once."""
        with self.lock:
            self.process.join()
            return int(self.process.exitcode)


class Ranks:
    """Starts ranks, each a process that runs one function, with a real store and a supervisor. A context manager.

    Leaving it ends the processes. It is an AssertionError where one still ran, a planned fault never happened, or a
    process, a socket or a file was left behind.

    Examples:
        ```python
        with Ranks(3, play, faults=[kill(1, during="forward", step=5)]) as ranks:
            results = ranks.wait()
        ```
    """

    def __init__(
        self,
        count: int,
        play: Callable[[Rank], Any],
        *,
        faults: Sequence[Fault] = (),
        fault_points: Collection[str] | None = None,
        thresholds: Thresholds | None = None,
    ) -> None:
        """Prepare the ranks; the `with` statement starts them.

        Args:
            count: How many ranks.
            play: What each runs: a function at the top of a module. Its result and its arguments are pickled.
            faults: What happens to whom, and when.
            fault_points: All names that `play` gives to `Rank.reached`. Without them a fault with a wrong name is
                found when the ranks have ended.
            thresholds: After how long a rank counts as hung or silent.

        Raises:
            ConfigError: A fault is for a rank or a fault point that does not exist.
        """
        _refuse_impossible(faults, count, fault_points)
        _CONTEXT.set_forkserver_preload([*_PRELOADED, *filter(None, os.environ.get("NTP_PRELOAD", "").split(","))])
        self._before = ProcessResources.look()
        self._server = TCPStore("127.0.0.1", 0, None, True, _STORE_TIMEOUT, wait_for_workers=False)
        client = TCPStore("127.0.0.1", self._server.port, None, False, _STORE_TIMEOUT)
        self.first = first_view(count)
        self._play, self._faults, self._thresholds = play, tuple(faults), thresholds or Thresholds()
        self._own_folder = RunFolder("ntp-ranks-")
        self._folder = self._own_folder.path
        self._heartbeats = HeartbeatFile(self._folder / "heartbeats", count)
        self.hung: list[int] = []
        """How many waited for each other, whenever all did."""
        self._supervisor = Supervisor(
            TorchStore(client, corner=_CORNER, token=_TOKEN),
            self.first,
            self._heartbeats,
            thresholds=self._thresholds,
            report=self._record_loss,
            reported_hung=self.hung.append,
        )
        self._running: dict[int, _RunningRank] = {}
        self._former: list[_RunningRank] = []
        self._births = 0
        self.verdicts: dict[int, RankFailure] = {}
        """Slot -> what the supervisor said of its last process that was lost."""
        self.deaths: dict[int, float] = {}
        """Slot -> when it said so, on the monotonic clock."""
        self.rows: list[Any] = []
        """What the ranks wrote down, once all are ended."""

    def __enter__(self) -> "Ranks":
        for member_id in self.first.member_ids:
            self._start(member_id)
        self._supervisor.start()
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        self._supervisor.stop()
        everybody = [*self._running.values(), *self._former]
        left = [running for running in everybody if running.process.is_alive()]
        for running in left:
            running.process.kill()
        for running in everybody:
            running.exit_code()
            running.results.close()
        record = self._folder / "record"
        self.rows = [json.loads(line) for line in record.read_text().splitlines()] if record.exists() else []
        injected = self._folder / "injected"
        indices = {int(line) for line in injected.read_text().splitlines()} if injected.exists() else set()
        self._heartbeats.close()
        self._own_folder.remove()
        del self._supervisor, self._server  # their connections close with them
        started = [running.process.pid for running in everybody]
        found = left_behind(self._before, started, self._folder)
        end_what_they_started(started)
        if kind is None:
            forgotten = [running.member_id.slot for running in left]
            assert not forgotten, f"slots {forgotten} were still running at the end"
            missed = [str(fault) for i, fault in enumerate(self._faults) if i not in indices and not fault.may_miss]
            assert not missed, f"planned, and never injected: {'; '.join(missed)}"
            assert not found, f"left behind: {', '.join(found)}"

    # ------------------------------------------------ what a test does to them

    def kill(self, slot: int) -> float:
        """Send SIGKILL and wait for the end. Returns when it was sent, on the monotonic clock."""
        sent = self._signal(slot, signal.SIGKILL)
        self._running[slot].exit_code()
        return sent

    def freeze(self, slot: int) -> float:
        """Send SIGSTOP. Returns when, on the monotonic clock."""
        return self._signal(slot, signal.SIGSTOP)

    def thaw(self, slot: int) -> float:
        """Send SIGCONT. Returns when, on the monotonic clock."""
        return self._signal(slot, signal.SIGCONT)

    def start_again(self, slot: int) -> None:
        """Start a new process for a slot; it joins by itself. A frozen one that had the slot stays as it is."""
        self._births += 1
        self.deaths.pop(slot, None)
        self._start(MemberId(slot=slot, incarnation=f"{slot}/{self._births}"))

    def wait_for_death(self, slot: int, timeout_s: float = PATIENCE_S) -> float:
        """Wait until the newest process of a slot is seen to have ended. Returns when that was."""
        deadline = time.monotonic() + timeout_s
        while slot not in self.deaths:
            assert time.monotonic() < deadline, f"slot {slot} is alive after {timeout_s} s"
            time.sleep(0.001)
        return self.deaths[slot]

    def wait_for_rows(self, count: int, first: Any, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the ranks have written `count` rows that begin with `first`."""
        deadline, record = time.monotonic() + timeout_s, self._folder / "record"
        begins = tuple(json.dumps([first])[:-1].encode() + end for end in (b",", b"]"))
        record.touch()
        with record.open("rb") as rows:  # each is read once, and none is decoded: this runs beside the ranks
            found, unfinished = 0, b""
            while found < count:
                *lines, unfinished = (unfinished + rows.read()).split(b"\n")
                found += sum(line.startswith(begins) for line in lines)
                assert time.monotonic() < deadline, f"{count} rows of {first!r} were not written within {timeout_s} s"
                time.sleep(0.002)

    def wait(self, timeout_s: float = PATIENCE_S, *, but: Sequence[int] = ()) -> dict[int, Any]:
        """Wait for the ends of all ranks.

        Args:
            timeout_s: How long one may take.
            but: Slots that are not waited for.

        Returns:
            Slot -> what its newest process returned; ranks that were killed are absent.

        Raises:
            TimeoutError: A rank has not ended.
            Exception: What a rank raised.
        """
        deadline, results = time.monotonic() + timeout_s, {}
        for slot, running in sorted(self._running.items()):
            if slot in but:
                continue
            try:
                if not running.results.poll(max(0.0, deadline - time.monotonic())):
                    raise TimeoutError(f"slot {slot} did not finish within {timeout_s} s")
                outcome = pickle.loads(running.results.recv_bytes())
            except EOFError:
                continue
            running.exit_code()  # it has sent its last word, and ends
            if isinstance(outcome, BaseException):
                raise outcome
            results[slot] = outcome
        return results

    # ------------------------------------------------ supervision

    def _start(self, member_id: MemberId) -> None:
        receiving, sending = _CONTEXT.Pipe(duplex=False)
        rank = Rank(
            first=self.first,
            member_id=member_id,
            port=self._server.port,
            faults=self._faults,
            folder=str(self._folder),
            heartbeat_s=self._thresholds.heartbeat_interval_s,
            hung_s=self._thresholds.hung_s,
        )
        process = _CONTEXT.Process(target=_run, args=(self._play, rank, sending), name=f"rank{member_id.slot}")
        process.start()
        assert process.pid is not None
        sending.close()
        old = self._running.get(member_id.slot)
        if old is not None:
            self._former.append(old)
        running = self._running[member_id.slot] = _RunningRank(process=process, results=receiving, member_id=member_id)
        self._supervisor.watch(member_id, process.pid, running.exit_code)

    def _record_loss(self, member_id: MemberId, verdict: RankFailure) -> None:
        if verdict.kind in ("hung", "silent"):  # it would never find out by itself that it is out
            for running in (*self._running.values(), *self._former):
                if running.member_id == member_id:
                    with contextlib.suppress(ProcessLookupError):  # or it has just ended
                        os.kill(running.process.pid, signal.SIGKILL)
        self.verdicts[member_id.slot] = verdict
        self.deaths[member_id.slot] = time.monotonic()

    def _signal(self, slot: int, number: signal.Signals) -> float:
        now = time.monotonic()
        os.kill(self._running[slot].process.pid, number)
        return now


def _refuse_impossible(faults: Sequence[Fault], count: int, fault_points: Collection[str] | None) -> None:
    for fault in faults:
        if fault.slot not in range(count):
            raise ConfigError(f"{fault}: there are {count} slots, from 0 on")
        if fault_points is not None and fault.fault_point not in fault_points:
            raise ConfigError(f"{fault}: there is no such moment", fix=f"one of {', '.join(fault_points)}")


def _end_with_the_fork_server() -> None:
    """Which ends with the test that started it, however that ends; ranks alone would spin for ever.

    It ends once nobody holds its pipe, of which every rank was given an end: to start processes of its own by it.
    """
    ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL)
    server: Any = forkserver._forkserver
    if server._forkserver_alive_fd is not None:
        os.close(server._forkserver_alive_fd)
        server._forkserver_alive_fd = None


def _run(play: Callable[[Rank], Any], rank: Rank, results: connection.Connection) -> None:
    import torch  # noqa: PLC0415  (the fork server has it already)

    _end_with_the_fork_server()
    os.setpgid(0, 0)  # so that whatever it starts is found at the end
    torch.set_num_threads(1)
    try:
        outcome: Any = play(rank)
    except BaseException as error:  # the parent raises it
        error.add_note(
            f"in {rank.member_id.incarnation}:\n{traceback.format_exc()}"
        )  # which does not go over by itself
        outcome = error
    results.send_bytes(pickle.dumps(outcome))  # whole: torch would share tensors with a process that ends
    results.close()
    os._exit(isinstance(outcome, BaseException))
