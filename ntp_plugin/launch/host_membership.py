"""Which host of the job this machine is: at the job's founding by rendezvous, later in the place of a lost one.

    founders      how many machines have come so far; as many as the job has hosts meet in the rendezvous
    founded       [hosts, workers of each], once the rendezvous of all hosts is through
    host_incarnation/N/K    the machine that takes host N's place for the K-th time

A machine that comes when the job has been founded waits for a host without members and takes its place: the same
command line makes a spare host, or brings a repaired one back.
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
"""Between two looks for a vacant place."""


class JobIsDone(Exception):
    """This machine waited for a place in a job until there was none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HostMembership:
    """The host that this machine is, and for the how-manieth time it has one."""

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
    """After the rendezvous: host `host` of a new job."""
    membership = HostMembership(host=host, incarnation=0, hosts=hosts, workers=workers)
    if (membership.slots, membership.first_slot) != (slots, first_slot):
        raise Refused(
            f"the hosts have different numbers of workers: this one {workers}, all {hosts} together {slots}",
            way_out="give every host the same --nproc-per-node",
        )
    store.create("founded", json.dumps([hosts, workers]))
    return membership


class Arrival:
    """A machine that comes to a job, and does not know yet whether it founds it."""

    def __init__(
        self, store: TorchStore, *, name: str, workers: int, thresholds: Thresholds, said: Callable[[str], None]
    ) -> None:
        self._store, self._name, self._workers = store, name, workers
        self._thresholds, self._said = thresholds, said

    def join(self, most: int) -> HostMembership | None:
        """A place in a job that runs already, waiting for one if need be; None where this machine is to found it.

        `most` machines found a job; torch would leave any more waiting in its rendezvous, deaf to what follows.
        """
        if self._store.read("founded") is None and self._store.count("founders", 1) <= most:
            return None
        hosts, workers = json.loads(self._await_founding(most))
        if workers != self._workers:
            raise Refused(
                f"the job runs {workers} workers on each host, and this one was to run {self._workers}",
                way_out=f"use --nproc-per-node={workers}",
            )
        try:
            joined = self._await_vacancy(hosts)
        except StoreLost as error:  # with the job, or with its host
            raise JobIsDone from error
        self._said(f"this machine takes the place of host {joined.host}")
        return joined

    def _await_founding(self, most: int) -> str:
        deadline, told = time.monotonic() + self._thresholds.start_s, False
        while (founded := self._store.read("founded")) is None:
            if time.monotonic() > deadline:
                raise Refused(
                    f"{most} machines came first, and did not found the job within {self._thresholds.start_s} s",
                    way_out="end what is left of them, and start them all again with another --rdzv-id",
                )
            if not told:
                self._said(f"{most} machines came first; this one waits until they have founded the job")
                told = True
            time.sleep(LOOK_S)
        return founded

    def _await_vacancy(self, hosts: int) -> HostMembership:
        view, told = protocol.newest_view(self._store.read, first_view(hosts * self._workers)), False
        if view.over:
            raise Refused(
                "a job with this --rdzv-id has ended before this machine came",
                way_out="use another --rdzv-id to run it again",
            )
        while not view.over:
            for host in self._vacant(view, hosts):
                host_incarnation = self._next_host_incarnation(host)
                if self._store.create(f"host_incarnation/{host}/{host_incarnation}", self._name) == self._name:
                    return HostMembership(host=host, incarnation=host_incarnation, hosts=hosts, workers=self._workers)
            if not told:
                self._said(f"all {hosts} hosts of the job are there; this machine waits as a spare")
                told = True
            time.sleep(LOOK_S)
            view = protocol.newest_view(self._store.read, view)
        raise JobIsDone

    def _vacant(self, view: View, hosts: int) -> list[int]:
        """The hosts without members whose supervisor does not beat either."""
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
