"""Watches the processes and heartbeats of a host, publishes who is gone, and tells the host's ranks of new epochs.

A process that ends is seen at once, through its pidfd. Beats are looked at every `LOOK_S`, and so is the job's store,
less often where many hosts look: one look serves all ranks of the host, who read the newest epoch in shared memory.
What the detector finds is published as the next view, which is the one signal that every survivor waits for; whoever
publishes first wins.

On a job of one host the supervisor judges hangs alone; else it takes the word of all `Hosts`.
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
    answered,
    gone,
    heard,
    hung,
    is_done,
    is_to_be_asked_about,
    judge,
    left_over,
    standstill,
)
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.membership.store import KeyStore

_LOG = logging.getLogger(__name__)
LOOK_S = 0.005
"""Between two looks at beats, and at the store as well, unless many hosts ask it."""
ASK_S_PER_HOST = 0.00005
"""A question takes 11 us of a processor where the store is: many hosts, however many, take a fifth of one."""
_PAUSE_S = 1.0
"""Of this thread: longer than it ever pauses while it runs, and four beats of a rank."""
_BEGINNING = 128
"""Of a /proc/PID/stat: its number, a name of 64 bytes at most, and the state."""


@dataclasses.dataclass(kw_only=True, slots=True)
class _Worker:
    member_id: MemberId
    pid: int
    pidfd: int
    exit_code: Callable[[], int]
    pulse: Pulse
    beats: int
    been_in: bool = False
    """It has been in a view: a joining rank is not, until it announces itself."""


class Supervisor:
    """One for each host; runs on a thread of its own."""

    def __init__(
        self,
        store: KeyStore,
        first: View,
        heartbeats: HeartbeatFile,
        *,
        thresholds: Thresholds,
        told: Callable[[MemberId, RankFailure], None],
        reported_hung: Callable[[int], None],
        hosts: Hosts | None = None,
        script_errors: ScriptErrors | None = None,
        ask_s: float = 0.0,
    ) -> None:
        """`ask_s` goes by between two questions to the store, at the least. On the supervisor's thread `told` hears of
        everybody whom it finds gone, and of its own whom others do; `reported_hung`, once in an epoch, how many wait
        for each other, where all do."""
        self._store, self._heartbeats, self._hosts = store, heartbeats, hosts
        self._script_errors, self._lost_at = script_errors, -BESIDE_S
        self._thresholds, self._told = thresholds, told
        self._ask_s, self._asks_at = ask_s, 0.0
        self._reported_hung, self._hung_in = reported_hung, -1
        self._judged_at = self._judges_again_at = time.monotonic()
        self._judged_epoch = first.epoch
        self._over_since: float | None = None
        self.view, self._founders = first, frozenset(first.member_ids)
        """The newest that it has seen."""
        self.answered_at = time.monotonic()
        """When the store last answered."""
        self.trouble: NtpError | None = None
        """Why it watches no longer: the store is lost, or this host's place was taken."""
        self.last = first
        """The newest view that somebody was in."""
        self.has_heard_heartbeats = False
        self.over = False
        """The workers of all hosts have ended."""
        self._ended = False
        self._ended_at: float | None = None
        self._workers: dict[int, _Worker] = {}
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="ntp-supervisor", daemon=True)

    def watch(self, member_id: MemberId, pid: int, exit_code: Callable[[], int]) -> None:
        """Look after a process; it takes the place of the one that had the slot. `exit_code` is asked once it ended."""
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
        """Begin to watch."""
        self._thread.start()

    def has_told_all(self) -> bool:
        """Whether everybody who has ended too early was told of, so that nobody is still to be replaced."""
        with self._lock:
            return all(is_done(worker.pulse) or not _has_ended(worker.pidfd) for worker in self._workers.values())

    def unreachable(self) -> tuple[int, ...]:
        """The other hosts with members that this one cannot connect to."""
        return self._hosts.unreachable(self.view) if self._hosts is not None else ()

    def finish(self) -> None:
        """The workers of this host have all ended; `over` follows."""
        self._ended = True

    def stop(self, *, wait: bool = True) -> None:
        """End the thread; the processes are left as they are. A thread that a dead store holds is not waited for."""
        self._stopping.set()
        if not wait:
            return
        if self._thread.ident is not None:  # workers that cannot be started are not watched
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
        except Exception as error:  # else this thread would be gone without a word, and nobody would notice a loss
            _LOG.exception("the supervisor of this host has failed")
            self.trouble = StoreLost(
                f"the supervisor of this host has failed: {type(error).__name__}: {error}",
                way_out="start the same command here again where other hosts go on; report the traceback",
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
            worker.pulse = heard(
                worker.pulse,
                now=now,
                moved_at=beat.moved_at,
                polled_at=beat.polled_at,
                done=beat.done,
                leaving=beat.leaving,
            )
        if is_to_be_asked_about(worker.pulse, self._thresholds, now=now):
            worker.pulse = answered(worker.pulse, self._thresholds, now=now, stopped=_is_stopped(worker.pid))

    def _look(self, workers: Mapping[int, _Worker], now: float) -> None:
        """Judge, publish, and tell: the ranks of the newest epoch, and `told` of who is out."""
        found = self._judge(workers, now)
        for slot in found.keys() & workers.keys():  # one that takes long to end has reported already
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
                self._told(member_id, found[member_id.slot])

    def _refuse_to_begin_without(
        self, lost: Set[MemberId], workers: Mapping[int, _Worker], found: Mapping[int, RankFailure]
    ) -> None:
        """Who has never beaten has not begun to train, and nothing interrupts what it waits in."""
        waits = any(
            worker.pulse.heartbeat_at is None
            and worker.pulse.ended is None
            and worker.member_id in self._founders & {*self.view.member_ids}
            for worker in workers.values()
        )
        if self._script_errors is not None and waits and not self.view.over:
            slot = min(member_id.slot for member_id in lost)
            reason = found[slot].reason if slot in found else "as its own host says"
            self._script_errors.refuse_to_begin(slot, reason)

    def _judge(self, workers: Mapping[int, _Worker], now: float) -> dict[int, RankFailure]:
        pulses = {slot: worker.pulse for slot, worker in workers.items()}
        if self.view.over:  # whoever still runs is on the way out
            joined = {slot for slot, worker in workers.items() if worker.been_in}
            return {
                verdict.slot: verdict
                for verdict in left_over(pulses, joined, self._thresholds, over_for=self._over_for(now))
            }
        found = gone(pulses, self._thresholds, now=now)
        # A joining rank holds nobody up, and nobody waits for it: not while it imports, nor while it asks to be let in.
        members = {slot: worker.pulse for slot, worker in workers.items() if worker.member_id in self.view.member_ids}
        still = standstill(members, self._thresholds) if self._may_judge(now) else None
        if self._hosts is not None:
            found += self._hosts.tick(self.view, still)
            self._report_hung(self._hosts.hung)
        elif not found:  # else those who wait for a dead rank would seem to wait for a hung one
            found = judge({0: still}, {0: members}, self._thresholds)
            self._report_hung(hung({0: still}))
        return {verdict.slot: verdict for verdict in found}

    def _over_for(self, now: float) -> float:
        self._over_since = now if self._over_since is None else self._over_since
        return now - self._over_since

    def _may_judge(self, now: float) -> bool:
        """False for a while after this process was stopped itself, when ranks that asked its store could not poll, and
        after the view has changed, as all are about to move."""
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
        """Look for the newest view; where somebody of it is lost, make the one without them."""
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
        if not self.view.over:  # after the end of the job nobody is to be broken out
            self._heartbeats.announce_epoch(self.view.epoch, list(self._workers))

    def _conclude(self) -> None:
        """Whether all hosts have ended: those of the last view that somebody was in, where the job is over. Then nobody
        looks after hosts any more, so one that does not say it is waited for as long as a silent one would be."""
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
            self._told(worker.member_id, why)


def _has_ended(pidfd: int) -> bool:
    return bool(select.select([pidfd], [], [], 0)[0])


def _left_behind(slot: int) -> RankFailure:
    return RankFailure(slot=slot, kind="left behind", reason="the others went on without it")


def _is_stopped(pid: int) -> bool:
    """Whether the system says that a process is stopped: the state after its name in /proc/PID/stat is T or t."""
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)  # read often, and a third of the price of a `Path`
        try:
            state = os.read(file, _BEGINNING).rpartition(b")")[2].split()[0]
        finally:
            os.close(file)
    except OSError:
        return False
    return state in (b"T", b"t")
