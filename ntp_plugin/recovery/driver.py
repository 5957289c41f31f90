"""The walk: signal, break out, agree, plan, regroup, move, verify, go on.

A watcher thread looks for a newer view and breaks the main thread out of whatever collective it is in; it changes
nothing else. The main thread walks. A second loss anywhere in the walk brings a newer view, and the walk starts again
from the agreement.
"""

import dataclasses
import threading
import time
from collections.abc import Callable

from ntp_plugin.comm import membership
from ntp_plugin.comm.agreement import Agreed, Agreement
from ntp_plugin.comm.membership import Report, View
from ntp_plugin.comm.process_groups import ElasticGroups
from ntp_plugin.comm.store import KeyStore
from ntp_plugin.errors import PeerLost
from ntp_plugin.recovery.trainer import Trainer


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Patience:
    """How long the driver waits for what."""

    watch_s: float = 0.005
    """Between two looks at the store for a newer view: a look takes 20 us."""
    agree_s: float = 60.0
    """For a whole agreement, frozen members being put out by the detector included."""
    regroup_s: float = 2.0
    """For the edit of all groups: a member that dies in it is noticed after so long at the latest."""
    publish_s: float = 2.0
    """From a broken connection to the view that says who is lost; a job's own error is held back as long."""


class Driver:
    """Takes one process from epoch to epoch."""

    def __init__(
        self,
        *,
        agreement: Agreement,
        watched: KeyStore,
        groups: ElasticGroups,
        trainer: Trainer,
        patience: Patience | None = None,
    ) -> None:
        self._agreement = agreement
        self._watched = watched
        self._groups = groups
        self._trainer = trainer
        self._patience = patience or Patience()
        self._stopping = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="ntp-watcher", daemon=True)

    def start(self) -> None:
        """Begin to watch; a newcomer joins first thing."""
        self._watcher.start()
        if self._agreement.member.phase is not membership.Phase.RUNNING:
            self._walk()

    def stop(self) -> None:
        """End the watcher."""
        self._stopping.set()
        self._watcher.join()

    def carry_through[Result](self, step: Callable[[], Result]) -> Result:
        """Run a step, and after each recovery run it again, until it comes through."""
        while True:
            try:
                self._groups.check()
                return step()
            except PeerLost:
                self._walk()
            except RuntimeError:
                if not self._a_loss_follows():
                    raise
                self._walk()

    def finish(self) -> None:
        """Wait until all members are done, through whatever losses: who just ends is missed by the others, and lost."""
        while not self._agreement.everybody_is_done():
            self._walk()

    # ------------------------------------------------ the walk

    def _walk(self) -> None:
        while True:
            agreed = self._agree()
            try:
                self._regroup(agreed)
                self._trainer.stand_on(agreed)
                return
            except PeerLost:
                continue
            except RuntimeError:
                if not self._a_loss_follows():
                    raise

    def _agree(self) -> Agreed:
        return self._agreement.run(
            lost=frozenset, report=self._report, plan=self._trainer.plan, timeout_s=self._patience.agree_s
        )

    def _report(self, view: View) -> Report:
        self._groups.break_out(view.epoch)
        return dataclasses.replace(self._trainer.report(), offer=self._groups.offer())

    def _regroup(self, agreed: Agreed) -> None:
        offers = {slot: report.offer for slot, report in agreed.reports.items()}
        self._groups.regroup(agreed.view.epoch, offers, timeout_s=self._patience.regroup_s)

    # ------------------------------------------------ signals

    def _watch(self) -> None:
        epoch = self._agreement.member.view.epoch
        while not self._stopping.wait(self._patience.watch_s):
            while (text := self._watched.read(membership.view_key(epoch + 1))) is not None:
                epoch += 1
                if not View.decode(text).over:  # after the end of the job the groups are the user's
                    self._groups.break_out(epoch)

    def _a_loss_follows(self) -> bool:
        """Whether an error is followed by a newer view: connections break a moment before their loss is published.

        An error that is the job's own is raised when no view has come; if it happens beside a loss, it comes back when
        the step is run again.
        """
        deadline = time.monotonic() + self._patience.publish_s
        while time.monotonic() < deadline:
            if self._agreement.newer_view_exists():
                return True
            time.sleep(self._patience.watch_s)
        return False
