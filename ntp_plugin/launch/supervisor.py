"""Watches the processes and heartbeats of a host, publishes which ranks are lost, and announces new epochs to the rest.

It sees the end of a process at once, through a pidfd. It looks at heartbeats every `LOOK_S`, and at the job's store as
often, or less often where there are many hosts. One look serves all ranks of the host, which read the newest epoch in
shared memory. What the failure detector finds is published as the next view, the one signal that every survivor waits
for. Of several hosts that publish at once, the first wins.

On a job of one host the supervisor judges hangs alone; otherwise together with the other `Hosts`.
"""

import dataclasses
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Set

from ntp_plugin.errors import NtpError, StoreLost
from ntp_plugin.launch.hosts import Hosts
from ntp_plugin.launch.script_errors import BESIDE_S, ScriptErrors
from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import publish_lost
from ntp_plugin.membership.failure_detector import (
    Pulse,
    RankFailure,
    Thresholds,
    after_heartbeat,
    after_stop_query,
    find_lost,
    hung,
    is_done,
    is_stop_query_due,
    judge,
    left_over,
    standstill,
)
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.membership.store import KeyStore

_LOG = logging.getLogger(__name__)
LOOK_S = 0.005
"""Seconds between two looks at heartbeats, and at the store as well, unless there are many hosts."""
ASK_S_PER_HOST = 0.00005
"""Seconds between two requests to the store, per host of the job. A request takes 11 us of a processor at the store, so
any number of hosts takes a fifth of a processor."""
_PAUSE_S = 1.0
"""A gap in this thread from which it must have been stopped: longer than any pause while it runs, and four heartbeats
of a rank."""
_BEGINNING = 128
"""Bytes of /proc/PID/stat to read: the pid, a name of 64 bytes at most, and the state."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Worker:
    member_id: MemberId
    pid: int
    pidfd: int
    exit_code: Callable[[], int]
    pulse: Pulse
    beats: int
    been_in: bool = False
    """Whether it was in a view. A joining rank is in none until it announces itself."""


class Supervisor:
    """Watches the workers of one host, on a thread of its own."""

    def __init__(
        self,
        store: KeyStore,
        first: View,
        heartbeats: HeartbeatFile,
        *,
        thresholds: Thresholds,
        report: Callable[[MemberId, RankFailure], None],
        reported_hung: Callable[[int], None],
        hosts: Hosts | None = None,
        script_errors: ScriptErrors | None = None,
        ask_s: float = 0.0,
    ) -> None:
        """Make a supervisor, which `start` starts.

        Args:
            store: The job's store.
            first: The first view of the job.
            heartbeats: The shared memory with the heartbeats of this host's ranks.
            thresholds: The timeouts of the failure detector.
            report: Called on the supervisor's thread with each rank that it finds lost, and with each rank of this host
                that another host finds lost.
            reported_hung: Called on that thread, once in an epoch, with the number of ranks, if all wait for each
                other.
            hosts: The other hosts; None on a job of one host.
            script_errors: Decides whether a failed rank ends the job.
            ask_s: Least seconds between two requests to the store.
        """
        self._store, self._heartbeats, self._hosts = store, heartbeats, hosts
        self._script_errors, self._lost_at = script_errors, -BESIDE_S
        self._thresholds, self._report = thresholds, report
        self._ask_s, self._asks_at = ask_s, 0.0
        self._reported_hung, self._hung_in = reported_hung, -1
        self._judged_at = self._judges_again_at = time.monotonic()
        self._judged_epoch = first.epoch
        self._over_since: float | None = None
        self.view, self._founders = first, frozenset(first.member_ids)
        """The newest view that it has read."""
        self.answered_at = time.monotonic()
        """When the store last answered."""
        self.trouble: NtpError | None = None
        """Why it has stopped watching: the store is lost, or another machine has taken the place of this host."""
        self.last = first
        """The newest view with members."""
        self.has_heard_heartbeats = False
        self.over = False
        """Whether the workers of all hosts have ended."""
        self._ended = False
        self._ended_at: float | None = None
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntp-supervisor", daemon=True)

    def watch(self, member_id: MemberId, pid: int, exit_code: Callable[[], int]) -> None:
        """Watch a process, in place of an earlier one in the same slot. `exit_code` is called once it has ended."""
        beats = self._heartbeats.read(member_id.slot).count
        worker = _Worker(
            member_id=member_id,
            pid=pid,
            pidfd=os.pidfd_open(pid),
            exit_code=exit_code,
            pulse=Pulse(started_at=time.monotonic(), joining=member_id not in self._founders),
            beats=beats,
        )
        with self._lock:
            old = self._workers.pop(member_id.slot, None)
            self._workers[member_id.slot] = worker
        if old is not None:
            os.close(old.pidfd)
            if self._script_errors is not None:
                self._script_errors.forget(old.pid)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def has_reported_all(self) -> bool:
        """Whether all workers that ended too early have been reported, so that none has still to be replaced."""
        with self._lock:
            return all(is_done(worker.pulse) or not _has_ended(worker.pidfd) for worker in self._workers.values())

    def unreachable(self) -> tuple[int, ...]:
        """Return the other hosts with members that this one cannot connect to."""
        return self._hosts.unreachable(self.view) if self._hosts is not None else ()

    def finish(self) -> None:
        """Note that all workers of this host have ended. `over` becomes true once those of all hosts have."""
        self._ended = True

    def stop(self, *, wait: bool = True) -> None:
        """End the thread, and leave the processes as they are. Pass `wait=False` if a lost store blocks the thread."""
        self._stopping.set()
        if not wait:
            return
        if self._thread.ident is not None:  # it was not started if the workers could not be
            self._thread.join()
        for worker in self._workers.values():
            os.close(worker.pidfd)
        self._workers.clear()
        if self._hosts is not None:
            self._hosts.close()

    # ------------------------------------------------ one look

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                with self._lock:
                    workers = dict(self._workers)
                self._wait_for_ends(workers)
                now = time.monotonic()
                for slot, worker in workers.items():
                    self._listen(slot, worker, now)
                self._look(workers, now)
                self._heartbeats.count_look()
                self._conclude()
        except NtpError as error:
            self.trouble = error
        except Exception as error:  # otherwise this thread would end silently, and no loss would be noticed
            _LOG.exception("the supervisor of this host has failed")
            self.trouble = StoreLost(
                f"the supervisor of this host has failed: {type(error).__name__}: {error}",
                fix="if other hosts go on, start the same command here again; report the traceback",
            )

    def _wait_for_ends(self, workers: Mapping[int, _Worker]) -> None:
        poll = select.poll()
        by_pidfd = {worker.pidfd: worker for worker in workers.values() if worker.pulse.ended is None}
        for pidfd in by_pidfd:
            poll.register(pidfd, select.POLLIN)
        for pidfd, _ in poll.poll(LOOK_S * 1000):
            worker = by_pidfd[pidfd]
            over = protocol.newest_view(self._store.read, self.view).over
            worker.pulse = dataclasses.replace(worker.pulse, ended=worker.exit_code(), over=over)
            if worker.pulse.ended:
                self._ask_script(worker)

    def _ask_script(self, worker: _Worker) -> None:
        if self._script_errors is not None:
            is_member = worker.been_in or worker.member_id in self.view.member_ids
            beside = time.monotonic() - self._lost_at < BESIDE_S
            with self._lock:
                others = [other.pulse for other in self._workers.values() if other is not worker]
            self._script_errors.judge(
                worker.member_id,
                worker.pid,
                is_member=is_member,
                beside_a_loss=beside,
                others_are_done=self.view.over or any(pulse.done for pulse in others),
            )

    def _listen(self, slot: int, worker: _Worker, now: float) -> None:
        beat = self._heartbeats.read(slot)
        if beat.count != worker.beats:
            worker.beats = beat.count
            self.has_heard_heartbeats = True
            worker.pulse = after_heartbeat(
                worker.pulse,
                now=now,
                moved_at=beat.moved_at,
                polled_at=beat.polled_at,
                done=beat.done,
                leaving=beat.leaving,
            )
        if is_stop_query_due(worker.pulse, self._thresholds, now=now):
            worker.pulse = after_stop_query(worker.pulse, self._thresholds, now=now, stopped=_is_stopped(worker.pid))

    def _look(self, workers: Mapping[int, _Worker], now: float) -> None:
        """Find lost ranks, publish the view without them, announce its epoch to the ranks, and report the losses."""
        found = self._judge(workers, now)
        for slot in found.keys() & workers.keys():  # a process that has not ended yet may have reported its failure
            if workers[slot].pulse.ended is None:
                self._ask_script(workers[slot])
        if self._script_errors is not None:
            self._script_errors.look(now)
        before = self.view
        self._publish(
            {worker.member_id for slot, worker in workers.items() if slot in found}, found.keys() - workers.keys(), now
        )
        for slot, worker in workers.items():
            inside = worker.member_id in self.view.member_ids
            if slot in found or (worker.been_in and not inside and not self.view.over):
                self._let_go(worker, found.get(slot) or _left_behind(slot))
            worker.been_in = worker.been_in or inside
        if set(before.member_ids) - set(self.view.member_ids):
            self._lost_at = now
            self._refuse_to_begin_without(set(before.member_ids) - set(self.view.member_ids), workers, found)
        for member_id in set(before.member_ids) - set(self.view.member_ids):
            if member_id.slot in found and member_id.slot not in workers:
                self._report(member_id, found[member_id.slot])

    def _refuse_to_begin_without(
        self, lost: Set[MemberId], workers: Mapping[int, _Worker], found: Mapping[int, RankFailure]
    ) -> None:
        """End the job if a founder has not begun to train: nothing would interrupt its wait for a lost rank.

        A rank without a heartbeat has not begun to train.
        """
        waits = any(
            worker.pulse.heartbeat_at is None
            and worker.pulse.ended is None
            and worker.member_id in self._founders & {*self.view.member_ids}
            for worker in workers.values()
        )
        if self._script_errors is not None and waits and not self.view.over:
            slot = min(member_id.slot for member_id in lost)
            reason = found[slot].reason if slot in found else "its own host has reported it"
            self._script_errors.refuse_to_begin(slot, reason)

    def _judge(self, workers: Mapping[int, _Worker], now: float) -> dict[int, RankFailure]:
        pulses = {slot: worker.pulse for slot, worker in workers.items()}
        if self.view.over:  # the remaining processes are about to end
            joined = {slot for slot, worker in workers.items() if worker.been_in}
            return {
                verdict.slot: verdict
                for verdict in left_over(pulses, joined, self._thresholds, over_for=self._over_for(now))
            }
        found = find_lost(pulses, self._thresholds, now=now)
        # A joining rank delays no other, and no other waits for it: not while it imports, nor while it asks to join.
        members = {slot: worker.pulse for slot, worker in workers.items() if worker.member_id in self.view.member_ids}
        still = standstill(members, self._thresholds) if self._may_judge(now) else None
        if self._hosts is not None:
            found += self._hosts.tick(self.view, still)
            self._report_hung(self._hosts.hung)
        elif not found:  # otherwise ranks that wait for a dead rank would seem to wait for a hung one
            found = judge({0: still}, {0: members}, self._thresholds)
            self._report_hung(hung({0: still}))
        return {verdict.slot: verdict for verdict in found}

    def _over_for(self, now: float) -> float:
        self._over_since = now if self._over_since is None else self._over_since
        return now - self._over_since

    def _may_judge(self, now: float) -> bool:
        """Whether hangs may be judged now. Not for a while after this process was stopped itself, when ranks that use
        its store could not poll, nor after a change of the view, when all ranks are about to move."""
        before, self._judged_at = self._judged_at, now
        if now - before > _PAUSE_S:
            self._judges_again_at = max(self._judges_again_at, now + _PAUSE_S)
        if self.view.epoch != self._judged_epoch:
            self._judged_epoch, self._judges_again_at = self.view.epoch, now + self._thresholds.hung_s
        return now >= self._judges_again_at

    def _report_hung(self, waiting: int) -> None:
        if waiting > 1 and self._hung_in != self.view.epoch:
            self._hung_in = self.view.epoch
            self._reported_hung(waiting)

    def _publish(self, mine: set[MemberId], elsewhere: Set[int], now: float) -> None:
        """Publish the view without the lost ranks, or read the newest view if none is lost."""
        lost = mine | {member_id for member_id in self.view.member_ids if member_id.slot in elsewhere}
        if lost:
            self.view = publish_lost(self._store, self.view, lost)
        elif now < self._asks_at:
            return
        else:
            self.view = protocol.newest_view(self._store.read, self.view)
        self.answered_at, self._asks_at = time.monotonic(), now + self._ask_s
        if self.view.member_ids:
            self.last = self.view
        if not self.view.over:  # after the end of the job no collective may be interrupted
            self._heartbeats.announce_epoch(self.view.epoch, list(self._workers))

    def _conclude(self) -> None:
        """Set `over` once all hosts have ended: where the job is over, all hosts of the last view with members.

        After the end of the job no host watches another, so the wait for a host that does not report its end is limited
        to the time after which a silent host is lost.
        """
        if not self._ended:
            return
        now = time.monotonic()
        self._ended_at = self._ended_at or now
        tired = self.view.over and now - self._ended_at > self._thresholds.host_s
        hosts_of = self.last if self.view.over else self.view
        self.over = self._hosts is None or self._hosts.all_ended(hosts_of) or tired

    def _let_go(self, worker: _Worker, why: RankFailure) -> None:
        with self._lock:
            watched = self._workers.get(worker.member_id.slot) is worker
            if watched:
                del self._workers[worker.member_id.slot]
        if watched:
            os.close(worker.pidfd)
            self._report(worker.member_id, why)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _left_behind(slot: int) -> RankFailure:
    return RankFailure(slot=slot, kind="left behind", reason="the others went on without it")


def _is_stopped(pid: int) -> bool:
    """Whether a process is stopped: the state after its name in /proc/PID/stat is T or t."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # called often, and a third of the cost of a `Path`
        try:
            state = os.read(file, _BEGINNING).rpartition(b")")[2].split()[0]
        finally:
            os.close(file)
    except OSError:
        return False
    return state in (b"T", b"t")
