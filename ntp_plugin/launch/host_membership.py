"""Decides which host of the job this machine is: a founder by rendezvous, or later the replacement of a lost host.

It uses these keys of the job's store:

    founders                how many machines have arrived; the first ones, one for each host, meet in the rendezvous
    founded                 [hosts, workers of each], once the rendezvous of all hosts is complete
    host_incarnation/N/K    the machine that takes the place of host N for the K-th time

A machine that arrives after the founding waits for a host without members and takes its place. So the same command
line makes a spare host, and brings a repaired one back.
"""

import dataclasses
import json
import time
from collections.abc import Callable

from ntp_plugin.errors import Refused, StoreLost
from ntp_plugin.membership import protocol
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.membership.protocol import View
from ntp_plugin.membership.store import TorchStore
from ntp_plugin.recovery.rank_context import first_view

LOOK_S = 0.5
"""Seconds between two looks for a vacant host."""


class JobIsDone(Exception):
    """The job ended while this machine waited for a vacant host in it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostMembership:
    """The number of this machine's host in the job, and its incarnation: how often that host was replaced before."""

    host: int
    incarnation: int
    hosts: int
    workers: int
    """On each host."""

    @property
    def slots(self) -> int:
        return self.hosts * self.workers

    @property
    def first_slot(self) -> int:
        return self.host * self.workers


def found(store: TorchStore, *, host: int, hosts: int, workers: int, slots: int, first_slot: int) -> HostMembership:
    """Found a new job as host `host`, after the rendezvous.

    Raises:
        Refused: The hosts have different numbers of workers.
    """
    membership = HostMembership(host=host, incarnation=0, hosts=hosts, workers=workers)
    if (membership.slots, membership.first_slot) != (slots, first_slot):
        raise Refused(
            f"the hosts have different numbers of workers: this one {workers}, all {hosts} together {slots}",
            fix="give every host the same --nproc-per-node",
        )
    store.create("founded", json.dumps([hosts, workers]))
    return membership


class Arrival:
    """A machine that has arrived at a job, which it may found or join."""

    def __init__(
        self, store: TorchStore, *, name: str, workers: int, thresholds: Thresholds, log: Callable[[str], None]
    ) -> None:
        self._store, self._name, self._workers = store, name, workers
        self._thresholds, self._log = thresholds, log

    def join(self, most: int) -> HostMembership | None:
        """Take the place of a lost host, waiting for one if need be; return None where this machine founds the job.

        The first `most` machines found a job. torch would let any further machine wait in its rendezvous for ever.

        Raises:
            Refused: The job has another number of workers on a host, was not founded in time, or has ended before.
            JobIsDone: The job ended while this machine waited.
        """
        if self._store.read("founded") is None and self._store.count("founders", 1) <= most:
            return None
        hosts, workers = json.loads(self._await_founding(most))
        if workers != self._workers:
            raise Refused(
                f"the job runs {workers} workers on each host, but this host was to run {self._workers}",
                fix=f"use --nproc-per-node={workers}",
            )
        try:
            joined = self._await_vacancy(hosts)
        except StoreLost as error:  # it ended with the job, or was lost with its host
            raise JobIsDone from error
        self._log(f"this machine takes the place of host {joined.host}")
        return joined

    def _await_founding(self, most: int) -> str:
        deadline, is_logged = time.monotonic() + self._thresholds.start_s, False
        while (founded := self._store.read("founded")) is None:
            if time.monotonic() > deadline:
                raise Refused(
                    f"{most} other machines came first, and did not found the job within {self._thresholds.start_s} s",
                    fix="end the job on all machines, and start it again with another --rdzv-id",
                )
            if not is_logged:
                self._log(f"{most} machines came first; this one waits until they have founded the job")
                is_logged = True
            time.sleep(LOOK_S)
        return founded

    def _await_vacancy(self, hosts: int) -> HostMembership:
        view, is_logged = protocol.newest_view(self._store.read, first_view(hosts * self._workers)), False
        if view.over:
            raise Refused(
                "a job with this --rdzv-id has already ended",
                fix="use another --rdzv-id to run it again",
            )
        while not view.over:
            for host in self._vacant(view, hosts):
                host_incarnation = self._next_host_incarnation(host)
                if self._store.create(f"host_incarnation/{host}/{host_incarnation}", self._name) == self._name:
                    return HostMembership(host=host, incarnation=host_incarnation, hosts=hosts, workers=self._workers)
            if not is_logged:
                self._log(f"all {hosts} hosts of the job are there; this machine waits as a spare")
                is_logged = True
            time.sleep(LOOK_S)
            view = protocol.newest_view(self._store.read, view)
        raise JobIsDone

    def _vacant(self, view: View, hosts: int) -> list[int]:
        """Return the hosts without members whose supervisor has no heartbeat either."""
        taken = {slot // self._workers for slot in view.slots}
        before = {host: self._store.count(f"beat/{host}") for host in range(hosts) if host not in taken}
        if before:
            time.sleep(self._thresholds.host_s)
        return [host for host, count in before.items() if self._store.count(f"beat/{host}") == count]

    def _next_host_incarnation(self, host: int) -> int:
        host_incarnation = 1
        while self._store.present([f"host_incarnation/{host}/{host_incarnation}"]):
            host_incarnation += 1
        return host_incarnation
