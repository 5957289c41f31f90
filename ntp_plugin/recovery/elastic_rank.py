"""This process in its job: connections opened, groups attached, a driver for its trainer, and a heart.

rank = ElasticRank(Place.read())
driver = rank.drive(trainer)        # the trainer may need rank.groups
rank.start()
... driver.carry_through(step) ...
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
from ntp_plugin.membership.admission import AdmissionControl, wait_to_be_let_in
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
    """What every elastic process has, whatever it trains."""

    is_there = False
    """Whether this process has one: its world is made already, or just now."""

    def __init__(
        self, place: RankContext, *, backend: str = "gloo", timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        """`backend` and `timeout` are torch's own, of the world and of groups made from it."""
        self.place, ElasticRank.is_there = place, True
        # One connection for each use, all opened now and none while recovering.
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
        """The digest of what this process trains by, once it was found to be that of all others."""

    def drive(self, trainer: Trainer) -> Driver:
        """The driver for a trainer; a joining rank announces itself here, so do it when all is ready."""
        place = self.place
        joined = Agreement.joining if place.joining else Agreement.founding
        agreement = joined(self._agreeing, place.first_view, place.member_id)
        self.doorkeeper = AdmissionControl(self._agreeing, lambda: self.groups.epoch, agreement.newer_view_exists)
        self.doorkeeper.settings = self.settings
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

    def leave_word(self, name: str, value: object) -> None:
        """For joining ranks, by one founder: what all of them know alike, and a joining rank cannot find out by itself.

        Raises:
            NotData: The value is of a type that cannot be written as data (`plain_data.py`).
        """
        self._agreeing.create(f"word/{name}", encode(value, what=name))

    def word(self, name: str, *, kinds: tuple[type, ...] = ()) -> Any:
        """What was left, as a joining rank reads it; `kinds` are the data classes that may be in it."""
        value = self.word_if_left(name, kinds=kinds)
        assert value is not None, "joiners come when founders have begun"
        return value

    def word_if_left(self, name: str, *, kinds: tuple[type, ...] = ()) -> Any:
        """The same, or None."""
        value = self._agreeing.read(f"word/{name}")
        return None if value is None else decode(value, what=name, kinds=kinds)

    def wait_to_be_let_in(self, together: Collection[int] = ()) -> None:
        """As a joining rank, before it is driven: until the members open for it, and for those with whom alone it can
        train."""
        wait_to_be_let_in(
            self._agreeing,
            self.place.first_view,
            slot=self.place.slot,
            together=together,
            settings=self.settings,
        )

    def trains_by(self, settings: str) -> None:
        """All others train by the settings of this digest as well; a process that asks under another one is not
        admitted."""
        self.settings = settings
        if self._driver is not None:
            self.doorkeeper.settings = settings

    def walked(self) -> tuple[float, dict[str, float]]:
        """How long the recovery under way has taken, and by phases."""
        assert self._driver is not None, "it is a driver that recoveries"
        return self._driver.walked()

    def start(self) -> None:
        """Begin to beat and to watch; a joining rank comes in."""
        self.beat()
        self.watch()

    def watch(self) -> None:
        """Begin to watch for losses; a joining rank comes in."""
        assert self._driver is not None, "there is a trainer to drive"
        self._driver.start()

    def beat(self) -> None:
        """Begin to beat: from now on a process that stands still is taken for lost."""
        self._heartbeat.start()

    def leave(self) -> None:
        """End the threads, and leave torch as it was."""
        if self._driver is not None:
            self._driver.stop()
        self._wakeup.close()
        self._heartbeat.stop()
        self.groups.detach()
        ElasticRank.is_there = False
