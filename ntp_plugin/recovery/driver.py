"""The recovery driver: interrupt, agree, plan, regroup, move, verify, go on.

1. Interrupt: a watcher thread sees a newer epoch, and interrupts the collective that the main thread waits in. It
   changes nothing else; the main thread does the rest.
2. Agree: all members report their state, and agree on the view and the step (`membership/agreement.py`).
3. Plan: the trainer plans the new layout, and all members compare the digests of their plans.
4. Regroup: the process groups are edited for the new members (`groups/process_groups.py`).
5. Move and verify: the trainer transfers state and compares its digests (`Trainer.resume_from`).
6. Go on: the step runs again.

A second loss at any point of the recovery brings a newer view, and the recovery starts again from the agreement.
"""

import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator

from ntp_plugin.errors import PeerLost, Refused
from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import Agreed, Agreement
from ntp_plugin.membership.protocol import Report, View
from ntp_plugin.membership.running_time import RunningTime
from ntp_plugin.membership.wait_progress import CollectiveWait
from ntp_plugin.membership.wakeup import WakeUp
from ntp_plugin.recovery.trainer import LeavesOut, Trainer

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the driver waits, and for what."""

    look_s: float = 0.005
    """Seconds between two polls of the store for a view that is about to come."""
    agree_s: float = 60.0
    """Seconds for a whole agreement. The failure detector evicts a frozen or hung member, and must do so earlier."""
    agree_at_the_end_s: float = 600.0
    """The same for a member that has reached the end: another member may write a model alone before it hears of a
    loss."""
    regroup_s: float = 5.0
    """Seconds for a member to enter the edit of a group; gloo then gives its connections five times as long. A loss
    ends the edit at once, so this limit is only for failures that nobody detects."""
    regroup_again: int = 3
    """How often an edit that failed without a loss is tried again, each time in a new epoch."""
    publish_s: float = 2.0
    """Seconds from a broken connection to the view that names the lost rank; the driver holds back an error of the job
    itself for as long. Only time in which the host's supervisor polls counts: a stopped supervisor publishes
    nothing."""


class Driver:
    """Runs one process's steps, and recovers from losses between them."""

    def __init__(
        self,
        *,
        agreement: Agreement,
        newest_epoch: Callable[[], int],
        looks: Callable[[], int],
        wakeup: WakeUp,
        groups: ElasticGroups,
        trainer: Trainer,
        patience: Patience | None = None,
    ) -> None:
        """`newest_epoch` and `looks` return the newest epoch that the supervisor knows, and how often it has polled."""
        self._agreement = agreement
        self._newest_epoch, self._looks, self._wakeup = newest_epoch, looks, wakeup
        self._groups = groups
        self._trainer = trainer
        self._patience = patience or Patience()
        self._is_at_the_end = False
        """Whether this member has only to end with the others."""
        self._recovering_since: float | None = None
        self._phases: dict[str, float] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ntp-watcher", daemon=True)

    def start(self) -> None:
        """Start the watcher; a joining rank joins the job here."""
        self._watcher.start()
        if self._agreement.member.phase is not protocol.Phase.RUNNING:
            self._recovery()

    def stop(self) -> None:
        """Stop the watcher."""
        self._stopping.set()
        self._wakeup.wake()
        self._watcher.join()

    def run_with_recovery[Result](self, step: Callable[[], Result]) -> Result:
        """Run a step, and run it again after each recovery, until it succeeds."""
        while True:
            try:
                self._groups.check()
                return step()
            except PeerLost:
                self._recovery()
            except RuntimeError:
                if not self._a_loss_follows():
                    raise
                self._recovery()

    def run_or_skip[Result](self, work: Callable[[], Result]) -> tuple[Result] | None:
        """Run optional work.

        Returns:
            The result in a tuple; None if a loss interrupted the work.
        """
        try:
            self._groups.check()
            return (work(),)
        except PeerLost:
            return None
        except RuntimeError:
            if not self._a_loss_follows():
                raise
            return None

    def at_the_end(self, work: Callable[[], None]) -> None:
        """Run the last work of the job with all members, and end with them.

        After a loss all members run it again, because some may not have completed it. Until all have arrived nobody
        waits in a collective: a script that still saves a model would seem to hang there.
        """

        def attempt() -> None:
            with self._waiting() as collective_wait:
                all_have_come = self._agreement.all_have_arrived(collective_wait.poll)
            if not all_have_come:
                raise PeerLost("the membership changed before all members reached the end")
            work()
            if not self._everybody_is_done():
                raise PeerLost("the membership changed before all members were done")

        self._is_at_the_end = True
        self.run_with_recovery(attempt)

    def finish(self) -> None:
        """Wait, through any losses, until all members are done. A process that ends without this counts as lost."""
        self._is_at_the_end = True
        while not self._everybody_is_done():
            self._recovery()

    def _everybody_is_done(self) -> bool:
        with self._waiting() as collective_wait:
            return self._agreement.all_are_done(collective_wait.poll)

    def _waiting(self) -> contextlib.AbstractContextManager[CollectiveWait]:
        """A wait for the other members; they may take longer when this member has nothing else to do."""
        waiting = self._groups.waiting()
        return waiting.at_the_end() if self._is_at_the_end else waiting

    @property
    def target_epoch(self) -> int:
        """The epoch that the recovery leads to; outside a recovery, the current one."""
        return self._agreement.member.view.epoch

    def recovery_times(self) -> tuple[float, dict[str, float]]:
        """The seconds of the recovery so far, and the seconds of each phase, as the trainer ends its part."""
        assert self._recovering_since is not None, "the trainer is called in a recovery"
        seconds = time.monotonic() - self._recovering_since
        return seconds, {**self._phases, "move": seconds - sum(self._phases.values())}

    # ------------------------------------------------ the recovery

    def _recovery(self) -> None:
        failures = 0
        self._recovering_since, self._phases = time.monotonic(), dict.fromkeys(("agree", "regroup"), 0.0)
        while True:
            with self._timed("agree"):
                agreed = self._agree()
            if agreed is None:
                continue
            try:
                if self._evicts_joiners(agreed):
                    continue
                with self._timed("regroup"):
                    self._regroup(agreed)
                self._trainer.resume_from(agreed)
                return
            except PeerLost:
                continue
            except RuntimeError as error:
                failures += 1
                if not self._a_loss_follows() and not self._try_again(agreed, failures, error):
                    raise

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self._phases[phase] += time.monotonic() - since

    def _agree(self) -> Agreed | None:
        """None if the agreement needs another epoch, without some of the members."""
        try:
            return self._agreement.run(
                lost=frozenset,
                report=self._report,
                plan=self._trainer.plan,
                waiting=self._waiting,
                timeout_s=self._patience.agree_at_the_end_s if self._is_at_the_end else self._patience.agree_s,
            )
        except LeavesOut as found:
            if not (found.awaits and self._a_newer_view_comes()):
                _LOG.warning("%s", found.why)
                self._agreement.propose_without(found.slots)
            return None

    def _report(self, view: View) -> Report:
        self._groups.interrupt(view.epoch)
        return dataclasses.replace(self._trainer.report(), addresses=self._groups.addresses())

    def _regroup(self, agreed: Agreed) -> None:
        addresses_by_slot = {slot: report.addresses for slot, report in agreed.reports.items()}
        self._groups.regroup(agreed.view.epoch, addresses_by_slot, timeout_s=self._patience.regroup_s)

    def _try_again(self, agreed: Agreed, failures: int, error: RuntimeError) -> bool:
        """Whether to regroup again, in a new epoch and without joining ranks.

        Called after an edit that failed without a loss, or when groups were not ready in time. The joining ranks may be
        the cause.
        """
        reports, came = agreed.reports, agreed.view.joiners
        joiners = [slot for slot, report in reports.items() if report.joiner or slot in came]
        if failures > self._patience.regroup_again or len(joiners) == len(agreed.reports):
            return False
        if joiners:
            _LOG.warning(
                "a recovery failed without a loss (%s); going on without the joining ranks: slots %s", error, joiners
            )
        self._agreement.propose_without(joiners)
        return True

    def _evicts_joiners(self, agreed: Agreed) -> bool:
        """Evict joining ranks that lack some of the others' groups: they must not end the job. True if there are
        any."""
        unmatched = self._groups.unmatched({slot: report.addresses for slot, report in agreed.reports.items()})
        if not unmatched:
            return False
        missing = "; ".join(f"slot {slot} lacks {', '.join(names)}" for slot, names in sorted(unmatched.items()))
        if not unmatched.keys() <= set(agreed.view.joiners):
            raise Refused(
                f"this process made groups that others have not made: {missing}",
                fix="make the same groups in the same order in every process before it starts to train, and"
                " destroy those that are made later",
            )
        _LOG.warning("evicting a joining rank that did not make all groups: %s", missing)
        self._agreement.propose_without(unmatched)
        return True

    # ------------------------------------------------ signals

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._groups.interrupt(self._newest_epoch())  # before any wait: the wake-up may have come earlier
            self._wakeup.wait()

    def _a_loss_follows(self) -> bool:
        """Whether a newer view follows an error: connections break a moment before their loss is published.

        If no view comes, the error is the job's own and is raised. If such an error happens beside a loss, it comes
        back when the step runs again.
        """
        return self._a_newer_view_comes()

    def _a_newer_view_comes(self) -> bool:
        supervised, supervised_s, looks = RunningTime(), 0.0, self._looks()
        with self._groups.waiting() as collective_wait:
            while supervised_s < self._patience.publish_s:
                if self._agreement.newer_view_exists():
                    return True
                collective_wait.poll()
                time.sleep(self._patience.look_s)
                if self._looks() != looks:
                    looks, supervised_s = self._looks(), supervised.seconds()
        return False
