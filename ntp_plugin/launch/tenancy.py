"""Which host of the job this machine is: at the job's founding by rendezvous, later in the place of a lost one.

    founded       [hosts, workers of each], once the rendezvous of all hosts is through
    tenant/N/K    the machine that takes host N's place for the K-th time

A machine that comes when the job has been founded waits for a host without members and takes its place: the same
command line makes a spare host, or brings a repaired one back.
"""

import dataclasses
import json
import time
from collections.abc import Callable

from ntp_plugin.comm import membership
from ntp_plugin.comm.membership import View
from ntp_plugin.comm.store import TorchStore
from ntp_plugin.errors import Refused
from ntp_plugin.recovery.detector import Thresholds
from ntp_plugin.recovery.place import first_view

LOOK_S = 0.5
"""Between two looks for a vacant place."""


class JobIsDone(Exception):
    """This machine came, or waited, for a job that is at its end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tenancy:
    """The host that this machine is, and for the how-manieth time it has one."""

    host: int
    tenant: int
    hosts: int
    workers: int
    """On each host."""

    @property
    def slots(self) -> int:
        return self.hosts * self.workers

    @property
    def first_slot(self) -> int:
        return self.host * self.workers


def found(store: TorchStore, *, host: int, hosts: int, workers: int, slots: int, first_slot: int) -> Tenancy:
    """After the rendezvous: host `host` of a new job."""
    tenancy = Tenancy(host=host, tenant=0, hosts=hosts, workers=workers)
    if (tenancy.slots, tenancy.first_slot) != (slots, first_slot):
        raise Refused(
            f"the hosts have different numbers of workers: this one {workers}, all {hosts} together {slots}",
            way_out="give every host the same --nproc-per-node",
        )
    store.create("founded", json.dumps([hosts, workers]))
    return tenancy


def join(
    store: TorchStore, *, name: str, workers: int, thresholds: Thresholds, said: Callable[[str], None]
) -> Tenancy | None:
    """A place in a job that runs already, waiting for one if need be; None where no job has been founded."""
    if (founded := store.read("founded")) is None:
        return None
    hosts, each = json.loads(founded)
    if each != workers:
        raise Refused(
            f"the job runs {each} workers on each host, and this one was to run {workers}",
            way_out=f"use --nproc-per-node={each}",
        )
    view, waited = membership.newest_view(store.read, first_view(hosts * each)), False
    while not view.over:
        vacant = _vacant(store, view, hosts, each, thresholds)
        for host in vacant:
            tenant = _next_tenant(store, host)
            if store.create(f"tenant/{host}/{tenant}", name) == name:
                said(f"this machine takes the place of host {host}")
                return Tenancy(host=host, tenant=tenant, hosts=hosts, workers=each)
        if not waited:
            said(f"all {hosts} hosts of the job are there; this machine waits as a spare")
            waited = True
        time.sleep(LOOK_S)
        view = membership.newest_view(store.read, view)
    raise JobIsDone


def _vacant(store: TorchStore, view: View, hosts: int, workers: int, thresholds: Thresholds) -> list[int]:
    """The hosts without members whose supervisor does not beat either."""
    taken = {slot // workers for slot in view.slots}
    empty = [host for host in range(hosts) if host not in taken]
    before = {host: store.count(f"beat/{host}") for host in empty}
    if empty:
        time.sleep(thresholds.host_s)
    return [host for host, count in before.items() if store.count(f"beat/{host}") == count]


def _next_tenant(store: TorchStore, host: int) -> int:
    tenant = 1
    while store.present([f"tenant/{host}/{tenant}"]):
        tenant += 1
    return tenant
