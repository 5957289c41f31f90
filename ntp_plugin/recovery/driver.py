"""The recovery: signal, break out, agree, plan, regroup, move, verify, go on.

A watcher thread looks for a newer epoch and breaks the main thread out of whatever collective it is in; it changes
nothing else. The main thread recoveries. A second loss anywhere in the recovery brings a newer view, and the recovery
starts again from the agreement.
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
    """How long the driver waits for what."""

    look_s: float = 0.005
    """Between two looks at the store for a view that is about to come."""
    agree_s: float = 60.0
    """For a whole agreement. Who is frozen or hung in it is put out by the detector, which must come first."""
    agree_at_the_end_s: float = 600.0
    """The same where this member has come to the end: another one may write a model alone before it hears of a loss."""
    regroup_s: float = 5.0
    """For a member to come into the edit of a group; gloo then gives its connections five times as long. A death ends
    the edit at once, so that this is only for trouble that nobody detects."""
    regroup_again: int = 3
    """So often an edit that failed while nobody was lost is tried again, in an epoch of its own."""
    publish_s: float = 2.0
    """From a broken connection to the view that says who is lost; a job's own error is held back as long. Only time in
    which the host's supervisor looks counts: one that is stopped publishes nothing."""


class Driver:
    """Takes one process from epoch to epoch."""

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
        """`newest_epoch` and `looks` tell what the host's supervisor has found, and how often it has looked."""
        self._agreement = agreement
        self._newest_epoch, self._looks, self._wakeup = newest_epoch, looks, wakeup
        self._groups = groups
        self._trainer = trainer
        self._patience = patience or Patience()
        self._is_at_the_end = False
        """Whether this member has nothing left to do but to end with the others."""
        self._walking_since: float | None = None
        self._phases: dict[str, float] = {}
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ntp-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch; a joining rank joins first thing."""
        self._watcher.start()
        if self._agreement.member.phase is not protocol.Phase.RUNNING:
            self._recovery()

    def stop(self) -> None:
        """End the watcher."""
        self._stopping.set()
        self._wakeup.wake()
        self._watcher.join()

    def carry_through[Result](self, step: Callable[[], Result]) -> Result:
        """Run a step, and after each recovery run it again, until it comes through."""
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

    def let_go[Result](self, work: Callable[[], Result]) -> tuple[Result] | None:
        """Run something that may be left out; None where a loss has interrupted it."""
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
        """Run something with all members when nobody has anything else left to do, and end with them, through whatever
        losses; after a loss all run it again, because some may not have come through it. Until all have come nobody
        waits in a collective, where a script that still saves a model would seem to hang."""

        def attempt() -> None:
            with self._waiting() as collective_wait:
                all_have_come = self._agreement.everybody_has_come(collective_wait.poll)
            if not all_have_come:
                raise PeerLost("the membership changes before all have come to the end")
            work()
            if not self._everybody_is_done():
                raise PeerLost("the membership changes before all are done")

        self._is_at_the_end = True
        self.carry_through(attempt)

    def finish(self) -> None:
        """Wait until all members are done, through whatever losses: who just ends is missed by the others, and lost."""
        self._is_at_the_end = True
        while not self._everybody_is_done():
            self._recovery()

    def _everybody_is_done(self) -> bool:
        with self._waiting() as collective_wait:
            return self._agreement.everybody_is_done(collective_wait.poll)

    def _waiting(self) -> contextlib.AbstractContextManager[CollectiveWait]:
        """A wait for others, in which they may take longer where this member has nothing else left to do."""
        waiting = self._groups.waiting()
        return waiting.at_the_end() if self._is_at_the_end else waiting

    @property
    def heading_for(self) -> int:
        """The epoch that a recovery leads to; without one, that of now."""
        return self._agreement.member.view.epoch

    def walked(self) -> tuple[float, dict[str, float]]:
        """As the trainer ends its part of a recovery: the seconds of all of it, and how they were spent."""
        assert self._walking_since is not None, "the trainer is called in a recovery"
        seconds = time.monotonic() - self._walking_since
        return seconds, {**self._phases, "move": seconds - sum(self._phases.values())}

    # ------------------------------------------------ the recovery

    def _recovery(self) -> None:
        failures = 0
        self._walking_since, self._phases = time.monotonic(), dict.fromkeys(("agree", "regroup"), 0.0)
        while True:
            with self._timed("agree"):
                agreed = self._agree()
            if agreed is None:
                continue
            try:
                if self._some_are_put_out(agreed):
                    continue
                with self._timed("regroup"):
                    self._regroup(agreed)
                self._trainer.resume_from(agreed)
                return
            except PeerLost:
                continue
            except RuntimeError:
                failures += 1
                if not self._a_loss_follows() and not self._try_again(agreed, failures):
                    raise

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        since = time.monotonic()
        try:
            yield
        finally:
            self._phases[phase] += time.monotonic() - since

    def _agree(self) -> Agreed | None:
        """None where that takes another epoch, without some of the members."""
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
                self._agreement.go_on_without(found.slots)
            return None

    def _report(self, view: View) -> Report:
        self._groups.break_out(view.epoch)
        return dataclasses.replace(self._trainer.report(), offer=self._groups.offer())

    def _regroup(self, agreed: Agreed) -> None:
        offers = {slot: report.offer for slot, report in agreed.reports.items()}
        self._groups.regroup(agreed.view.epoch, offers, timeout_s=self._patience.regroup_s)

    def _try_again(self, agreed: Agreed, failures: int) -> bool:
        """After an edit that failed while nobody was lost, or groups for the epoch that did not come about in time:
        without joining ranks, who may be what it failed by."""
        reports, came = agreed.reports, agreed.view.joiners
        joiners = [slot for slot, report in reports.items() if report.joiner or slot in came]
        if failures > self._patience.regroup_again or len(joiners) == len(agreed.reports):
            return False
        if joiners:
            _LOG.warning("connecting failed, and goes on without the joining ranks: slots %s", joiners)
        self._agreement.go_on_without(joiners)
        return True

    def _some_are_put_out(self, agreed: Agreed) -> bool:
        """Joiners that did not make the groups that the others have with them: a job must not die of these."""
        unmatched = self._groups.unmatched({slot: report.offer for slot, report in agreed.reports.items()})
        if not unmatched:
            return False
        told = "; ".join(f"slot {slot} lacks {', '.join(names)}" for slot, names in sorted(unmatched.items()))
        if not unmatched.keys() <= set(agreed.view.joiners):
            raise Refused(
                f"this process made groups that others have not made: {told}",
                way_out="make the same groups in the same order in every process before it starts to train, and"
                " destroy those that are made later",
            )
        _LOG.warning("a joining rank did not make all groups, and is left out: %s", told)
        self._agreement.go_on_without(unmatched)
        return True

    # ------------------------------------------------ signals

    def _watch(self) -> None:
        while not self._stopping.is_set():
            self._groups.break_out(self._newest_epoch())  # before any wait: it may have been told when nobody heard
            self._wakeup.wait()

    def _a_loss_follows(self) -> bool:
        """Whether an error is followed by a newer view: connections break a moment before their loss is published.

        An error that is the job's own is raised when no view has come; if it happens beside a loss, it comes back when
        the step is run again.
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
