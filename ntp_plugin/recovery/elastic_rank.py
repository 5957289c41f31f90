"""One process of the job: its store connections, process groups, driver and heartbeat.

Example:

    rank = ElasticRank(RankContext.read())
    driver = rank.drive(trainer)        # the trainer may need rank.groups
    rank.start()
    ... driver.run_with_recovery(step) ...
    driver.finish()                     # with the others: a process that ends without it is lost, whatever its code
    rank.leave()
"""

import dataclasses
import logging
from collections.abc import Collection
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.membership.admission import AdmissionControl, wait_for_admission
from ntp_plugin.membership.agreement import Agreement
from ntp_plugin.membership.heartbeat import HeartbeatFile, HeartbeatThread
from ntp_plugin.membership.restored_keys import RestoredKeys
from ntp_plugin.membership.store import TorchStore
from ntp_plugin.membership.wakeup import WakeUp
from ntp_plugin.plain_data import decode, encode
from ntp_plugin.recovery.driver import Driver, Patience
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.recovery.trainer import Trainer

_LOG = logging.getLogger(__name__)


class ElasticRank:
    """The connections, groups and threads that every elastic process has, whatever it trains."""

    is_there = False
    """Whether this process has one: its world exists already, or is being made."""

    def __init__(
        self, place: RankContext, *, backend: str = "gloo", timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        """`backend` and `timeout` are those of torch, for the world and for groups made from it."""
        self.place, ElasticRank.is_there = place, True
        # One connection for each use. All are opened now, and none during a recovery.
        agreeing, meeting = (TCPStore(place.store_host, place.store_port, None, False) for _ in range(2))
        store = TorchStore(agreeing, corner=place.corner, token=place.token)
        self._agreeing = RestoredKeys(store, report=lambda _, what: _LOG.warning("%s", what))
        self.groups = ElasticGroups(place.slot, joining=place.joining)
        self.groups.attach()
        rendezvous = PrefixStore(f"{place.corner}/c10d", meeting)
        dist.init_process_group(backend, store=rendezvous, rank=place.slot, world_size=place.slots, timeout=timeout)
        self._heartbeats = HeartbeatFile(place.heartbeats, place.slots)
        self._wakeup = WakeUp(place.heartbeats, place.slot)
        self._heartbeat = HeartbeatThread(
            self._heartbeats, place.slot, every_s=place.heartbeat_s, moved=self.groups.moved
        )
        self._driver: Driver | None = None
        self.settings = ""
        """The digest of this process's training settings, once all ranks have compared theirs."""

    def drive(self, trainer: Trainer) -> Driver:
        """Make the driver for a trainer. A joining rank announces itself here, so call this when all else is ready."""
        place = self.place
        joined = Agreement.joining if place.joining else Agreement.founding
        agreement = joined(self._agreeing, place.first_view, place.member_id)
        self.admission_control = AdmissionControl(
            self._agreeing, lambda: self.groups.epoch, agreement.newer_view_exists
        )
        self.admission_control.settings = self.settings
        newest = self._heartbeats.newest_epoch
        usual = Patience()
        patience = dataclasses.replace(
            usual, agree_s=max(usual.agree_s, 2 * place.hung_s), publish_s=max(usual.publish_s, place.publish_s)
        )
        self._driver = Driver(
            agreement=agreement,
            newest_epoch=newest,
            looks=self._heartbeats.looks,
            wakeup=self._wakeup,
            groups=self.groups,
            trainer=trainer,
            patience=patience,
        )
        return self._driver

    def share_with_joiners(self, name: str, value: object) -> None:
        """Publish a value that all members know and a joining rank cannot find out. One founder calls this.

        Raises:
            NotData: The value is of a type that cannot be written as data (`plain_data.py`).
        """
        self._agreeing.create(f"word/{name}", encode(value, what=name))

    def shared_value(self, name: str, *, kinds: tuple[type, ...] = ()) -> Any:
        """Read a published value on a joining rank; `kinds` are the data classes that may be in it."""
        value = self.shared_value_or_none(name, kinds=kinds)
        assert value is not None, "a joining rank comes after the founders have begun"
        return value

    def shared_value_or_none(self, name: str, *, kinds: tuple[type, ...] = ()) -> Any:
        """Read a published value, or None if there is none."""
        value = self._agreeing.read(f"word/{name}")
        return None if value is None else decode(value, what=name, kinds=kinds)

    def wait_for_admission(self, together: Collection[int] = ()) -> None:
        """Wait on a joining rank, before `drive`, until the members admit it.

        Args:
            together: The slots that it can only train with; they are admitted with it.
        """
        wait_for_admission(
            self._agreeing,
            self.place.first_view,
            slot=self.place.slot,
            together=together,
            settings=self.settings,
        )

    def share_settings(self, settings: str) -> None:
        """Record the settings digest that all ranks share; the members admit no process with another one."""
        self.settings = settings
        if self._driver is not None:
            self.admission_control.settings = settings

    def recovery_times(self) -> tuple[float, dict[str, float]]:
        """The seconds of the recovery under way, in all and by phase."""
        assert self._driver is not None, "only a driver recovers"
        return self._driver.recovery_times()

    def start(self) -> None:
        """Start the heartbeat and the watcher; a joining rank joins the job here."""
        self.beat()
        self.watch()

    def watch(self) -> None:
        """Start to watch for losses; a joining rank joins the job here."""
        assert self._driver is not None, "`drive` comes first"
        self._driver.start()

    def beat(self) -> None:
        """Start the heartbeat: from now on the supervisor takes this process for lost when it hangs."""
        self._heartbeat.start()

    def leave(self) -> None:
        """Stop the threads, and restore torch as it was."""
        if self._driver is not None:
            self._driver.stop()
        self._wakeup.close()
        self._heartbeat.stop()
        self.groups.detach()
        ElasticRank.is_there = False
