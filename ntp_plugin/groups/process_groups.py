"""Edits process groups in place, so that every handle that a framework keeps stays valid.

torch 2.15 edits a group in place (`ProcessGroup.reconfigure`). `ElasticGroups` registers every group at the one place
where all are made, and can then

    interrupt   interrupt whatever this process waits for in any group
    offer       return the addresses by which others connect to this process in the next epoch
    regroup     edit all groups at once to the members of a view
    make_lanes  make groups that live until the next regroup, unless they exist already
    alone       run code that was written for a group without the other members

Slots are permanent; ranks are dense and change with every view. A group is registered by the slots that it was made of,
and contains those of them that are in the view. `torch`'s own table of ranks is updated after each edit.

A group has a backend for each kind of device, at most one of gloo and one of NCCL, and all are edited. The details of
a backend are in its own file (`gloo_backend.py`, `nccl_backend.py`); `GroupBackend` is their common interface.
`device_meshes.py` updates device meshes.

Lanes change with every view, so they are not edited but made anew: unconnected, then connected by addresses that are
exchanged over the world. So no counter of groups has to agree on a joining rank. The next regroup destroys them; one
with a lost operation is put aside until the operation has ended, because gloo would block in its destruction.
"""

import contextlib
import dataclasses
import functools
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import Work

from ntp_plugin.errors import PeerLost, Refused
from ntp_plugin.groups.device_meshes import DeviceMeshes
from ntp_plugin.groups.gloo_backend import GlooBackend
from ntp_plugin.groups.group_backend import GroupBackend
from ntp_plugin.groups.nccl_backend import NcclBackend, device_of
from ntp_plugin.groups.nccl_requirements import require_nccl
from ntp_plugin.groups.operations import POINT_TO_POINT, WAIT_WHOLE, Operations, kind_of_device
from ntp_plugin.groups.rendezvous_store import RendezvousStore
from ntp_plugin.groups.sockets import Connections
from ntp_plugin.groups.waits import InterruptibleWaits, Manner
from ntp_plugin.membership.wait_progress import CollectiveWait, Movement

_GROUPS_IN_AN_EPOCH = 10_000
"""More groups than a job makes between two changes of the membership."""


def require_reconfigure() -> None:
    """Raise unless this torch can edit groups in place."""
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        raise Refused(
            f"live recovery needs torch 2.15 or newer, and this is torch {torch.__version__}",
            fix="install torch >= 2.15, or run without live recovery",
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class _Group:
    handle: dist.ProcessGroup
    slots: tuple[int, ...]
    members: tuple[int, ...]
    gloo: GlooBackend | None
    nccl: NcclBackend | None
    connected: tuple[int, ...]
    """Members of the last edit that completed."""

    def busy(self) -> bool:
        return any(backend.busy() for backend in self.backends().values())

    def backends(self) -> dict[str, GroupBackend]:
        both: dict[str, GroupBackend | None] = {"gloo": self.gloo, "nccl": self.nccl}
        return {kind: backend for kind, backend in both.items() if backend is not None}


def kinds_of(backend: Any) -> frozenset[str]:
    """Which of gloo and NCCL serve a group of this backend; refuses all others, which cannot be edited."""
    names = {str(name) for name in c10d.BackendConfig(c10d.Backend(str(backend))).get_device_backend_map().values()}
    unknown = names - {"gloo", "nccl", "nccl2"}
    if unknown:
        raise Refused(
            f"a process group of backend {', '.join(sorted(unknown))} cannot be edited when a rank is lost",
            fix="use gloo, nccl, or cpu:gloo,cuda:nccl",
        )
    return frozenset(name.removesuffix("2") for name in names)


class ElasticGroups:
    """All process groups of this process, from `attach` to `detach`."""

    def __init__(self, slot: int, *, joining: bool = False) -> None:
        require_reconfigure()
        self.slot = slot
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.replaced = 0
        """Number of backends that were replaced because of a lost operation. torch keeps each old one, with its three
        threads and four descriptors, until its group is destroyed."""
        self._joining = joining
        self._broken_for = 0
        self._groups: list[_Group] = []
        self._lanes: list[_Group] = []
        self._lanes_made = 0
        self._put_aside: list[_Group] = []
        self._waits = InterruptibleWaits()
        self._operations = Operations()
        self._connections = Connections()
        """The connections of gloo."""
        self._meshes = DeviceMeshes(slot)
        self._lock = threading.Lock()
        self._make_group: Any = None
        self._device: torch.device | None = None
        self._of_world: tuple[Any, frozenset[str], timedelta] | None = None
        """Backend of the world as requested from torch, its kinds, and its time limit: lanes are made alike."""
        self._meeting: RendezvousStore | None = None
        """Referenced here, because torch's side of a store does not keep Python's alive."""

    # ------------------------------------------------ seeing groups being made

    def attach(self) -> None:
        """Register every group that is made from now on; call it before `init_process_group`."""
        assert self._make_group is None, "groups are attached once"
        self._waits.attach()
        self._operations.attach()
        self._meshes.attach()
        self._make_group = c10d._new_process_group_helper
        c10d._new_process_group_helper = self._make_and_remember  # type: ignore[assignment]

    def detach(self) -> None:
        """Restore torch's functions; the groups stay as they are."""
        assert self._make_group is not None, "groups are attached"
        c10d._new_process_group_helper = self._make_group
        self._make_group = None
        self._groups.clear()
        self._lanes.clear()
        self._operations.detach()
        self._waits.detach()
        self._meshes.detach()

    def _make_and_remember(
        self, size: int, rank: int | None, ranks: list[int], backend: Any, store: Any, *args: Any, **options: Any
    ) -> Any:
        kinds = kinds_of(backend)
        if self._joining or "nccl" in kinds:  # unconnected until an edit; a joining rank is edited with all others
            options["enable_reconfigure"] = True
        if "nccl" in kinds:
            require_nccl()
            self._device = self._device or device_of(options.get("device_id"))
            options["device_id"] = None  # with it torch would split groups off the world, which needs all its ranks
        if not ranks:  # the world; torch derives the stores of all other groups from its store
            store = self._meeting = RendezvousStore(store, self.check)
        with self._connections.made_here():
            handle, store = self._make_group(size, rank, ranks, backend, store, *args, **options)
        if handle is dist.GroupMember.NON_GROUP_MEMBER:
            return handle, store
        if not ranks:
            self.members, self._of_world = tuple(range(size)), (backend, kinds, options["timeout"])
            self._meshes.update(self.members)
        slots = tuple(self.members[other] for other in ranks) if ranks else self.members
        group = self._remember(handle, store, slots, kinds=kinds, timeout=options["timeout"])
        if group.nccl is not None and not self._joining:
            self._connect(group, store, options["timeout"])
        self._groups.append(group)
        return handle, store

    def _remember(
        self,
        handle: dist.ProcessGroup,
        store: Any,
        slots: tuple[int, ...],
        *,
        kinds: frozenset[str],
        timeout: timedelta,
    ) -> _Group:
        nccl = NcclBackend(handle, self._device) if "nccl" in kinds and self._device is not None else None
        gloo = None
        if "gloo" in kinds:
            gloo = GlooBackend(handle, store, timeout, waits=self._waits, default=nccl is None)
        connected = () if self._joining else slots
        group = _Group(handle=handle, slots=slots, members=slots, gloo=gloo, nccl=nccl, connected=connected)
        self._watch_works(group, timeout)
        return group

    def _connect(self, group: _Group, store: Any, timeout: timedelta) -> None:
        """Make the first edit of a group that was made unconnected; its members meet in its store."""
        rank, size = group.members.index(self.slot), len(group.members)
        for kind, backend in group.backends().items():
            store.set(f"ntp/{kind}/{rank}", backend.address())
            handles = [store.get(f"ntp/{kind}/{other}").decode() for other in range(size)]
            backend.edit(self.epoch, handles, timeout.total_seconds())

    def _watch_works(self, group: _Group, timeout: timedelta) -> None:
        """Register gloo's works. The host never waits for NCCL's, and with both a barrier is NCCL's."""
        gloo, only_gloo, limit_s = group.gloo, group.nccl is None, timeout.total_seconds()
        if gloo is None:
            return

        @functools.cache
        def manner_of(name: str) -> Manner:
            holder = None if name in POINT_TO_POINT else gloo
            return Manner(sliced=name not in WAIT_WHOLE, limit_s=limit_s, holder=holder)

        def started(name: str, work: Work, given: tuple[Any, ...]) -> None:
            if only_gloo or kind_of_device(given) == "cpu":
                self._waits.register(work, manner_of(name))

        self._operations.observe(group.handle, started)

    # ------------------------------------------------ leaving, and coming together again

    def interrupt(self, epoch: int) -> int:
        """Interrupt whatever this process waits for, on the way to `epoch`; from any thread, once per epoch.

        Returns the number of gloo's connections that were broken: none if that epoch, or a later one, is reached
        already, so that a late call never hits the new connections.
        """
        with self._lock:
            if epoch <= max(self.epoch, self._broken_for):
                return 0
            self._broken_for = epoch
            self._waits.begin_interrupt()
            self._revoke()
            return self._connections.shut()

    def check(self) -> None:
        """Raise `PeerLost` if an interrupt is under way: for loops that enter no collective."""
        if self._broken_for > self.epoch:
            raise PeerLost(f"the membership changes to epoch {self._broken_for}")

    def confirm(self) -> None:
        """Raise unless all operations started so far completed, on the device as well; with gloo alone they always
        have.

        NCCL breaks off without telling those that wait for the device. So call this before the vote, so that no rank
        calls itself prepared while it holds garbage, and again between the vote and the use of its result.
        """
        failed = [group.nccl.failed() for group in (*self._groups, *self._lanes) if group.nccl is not None]
        if any(failed):
            self.check()
            raise RuntimeError(
                f"NCCL broke off in {sum(failed)} of {len(failed)} groups, and no rank is known to be lost"
            )

    def addresses(self) -> dict[str, str]:
        """Return the address of this process per backend and group. Replaces gloo backends with a lost operation."""
        while any(backend.busy() for backend in self._backends()) and not self._waits.given_up():
            time.sleep(0.002)
        self._drop_lanes()
        self._groups = [group for group in self._groups if group.handle in c10d._world.pg_map]  # others were destroyed
        addresses = {}
        for group in self._groups:
            for kind, backend in group.backends().items():
                self.replaced += backend.ready(group.members.index(self.slot), group.members)
                addresses[f"{kind}/{group.handle.group_name}"] = backend.address()
        return addresses

    def unmatched(self, addresses_by_slot: Mapping[int, Mapping[str, str]]) -> dict[int, list[str]]:
        """Slot -> this process's groups with it that it did not make, because it ran other code before it joined."""
        unmatched: dict[int, list[str]] = {}
        for group in self._groups:
            name = group.handle.group_name
            for slot in addresses_by_slot.keys() & set(group.slots):
                if not all(f"{kind}/{name}" in addresses_by_slot[slot] for kind in group.backends()):
                    unmatched.setdefault(slot, []).append(name)
        return unmatched

    def regroup(self, epoch: int, addresses_by_slot: Mapping[int, Mapping[str, str]], *, timeout_s: float) -> None:
        """Edit all groups to the slots of `offers`; every member calls this with the same offers."""
        members = tuple(sorted(addresses_by_slot))
        ranks = {slot: rank for rank, slot in enumerate(members)}
        with self._lock:
            self.epoch, self.members, self._lanes_made, self._joining = epoch, members, 0, False
            if self._broken_for <= epoch:
                self._waits.end_interrupt()
        with self._connections.made_here(instead=True):
            for group in self._groups:
                group.members = tuple(slot for slot in group.slots if slot in ranks)
                c10d._world.pg_group_ranks[group.handle] = {ranks[slot]: own for own, slot in enumerate(group.members)}
                if group.nccl is None and group.connected == group.members == (self.slot,):  # still alone
                    continue
                for kind, backend in group.backends().items():
                    handles = [addresses_by_slot[slot][f"{kind}/{group.handle.group_name}"] for slot in group.members]
                    backend.edit(epoch, handles, timeout_s)
                group.connected = group.members
        # Torch names groups by a counter, and a joining rank has not made groups that the others had dropped.
        c10d._world.group_count = epoch * _GROUPS_IN_AN_EPOCH
        self._meshes.update(members)
        with self._lock:
            if self._broken_for > epoch:  # it revoked the old communicators; gloo's waits end by themselves
                self._revoke()

    # ------------------------------------------------ groups for one epoch

    def make_lanes(self, slots_of: Sequence[tuple[int, ...]], *, timeout_s: float) -> list[dist.ProcessGroup | None]:
        """Return a group per tuple of slots, None if this slot is alone or not in it; valid until the next regroup.

        Every member of the world calls this with the same tuples; the order of a tuple is the order of its ranks.
        """
        self._lanes_made += 1
        wanted = {index: slots for index, slots in enumerate(slots_of) if self.slot in slots and len(slots) > 1}
        found = {index: self._group_of(slots) for index, slots in wanted.items()}
        there = {index: group.handle for index, group in found.items() if group is not None}
        lanes = {index: self._make_lane(index, slots) for index, slots in wanted.items() if index not in there}
        self._lanes = [*self._lanes, *lanes.values()]
        mine = {
            (index, kind): backend.address()
            for index, lane in lanes.items()
            for kind, backend in lane.backends().items()
        }
        addresses: list[dict[tuple[int, str], str]] = [{}] * len(self.members)
        dist.all_gather_object(addresses, mine)
        with self._connections.made_here():
            for index, lane in lanes.items():  # ascending everywhere, so that no two members wait for each other
                for kind, backend in lane.backends().items():
                    handles = [addresses[self.rank_of(slot)][index, kind] for slot in lane.slots]
                    backend.edit(self.epoch, handles, timeout_s)
        there |= {index: lane.handle for index, lane in lanes.items()}
        return [there.get(index) for index in range(len(slots_of))]

    def _group_of(self, slots: tuple[int, ...]) -> _Group | None:
        """Return an existing group of these slots, as most of a framework's data-parallel groups are; the last one
        made, because the first may be the world itself. None with NCCL: operations on one communicator wait for each
        other, and sends between the stages of a pipeline might be among them."""
        assert self._of_world is not None, "there is a world"
        if "nccl" in self._of_world[1]:
            return None
        return next((group for group in reversed(self._groups) if group.members == slots), None)

    def _make_lane(self, index: int, slots: tuple[int, ...]) -> _Group:
        assert self._of_world is not None, "there is a world"
        backend, kinds, timeout = self._of_world
        # Gloo's members meet in the store under the name and the epoch, so no name may occur twice in an epoch.
        name = c10d.GroupName(f"ntp/lane/{self.epoch}/{self._lanes_made}/{index}/{'-'.join(map(str, slots))}")
        ranks = [self.rank_of(slot) for slot in slots]
        handle, store = self._make_group(
            len(slots),
            slots.index(self.slot),
            ranks,
            backend,
            c10d._get_default_store(),
            group_name=name,
            timeout=timeout,
            enable_reconfigure=True,
        )
        c10d._world.pg_group_ranks[handle] = {rank: own for own, rank in enumerate(ranks)}
        return self._remember(handle, store, slots, kinds=kinds, timeout=timeout)

    def _drop_lanes(self) -> None:
        lanes, self._lanes = [*self._put_aside, *self._lanes], []
        self._put_aside = [lane for lane in lanes if lane.busy()]
        for lane in lanes:
            if lane not in self._put_aside and lane.handle in c10d._world.pg_map:
                self._operations.stop_observing(lane.handle)
                dist.destroy_process_group(lane.handle)

    @contextlib.contextmanager
    def alone(self, slots: Collection[int]) -> Iterator[None]:
        """Run code that these slots run together, without the others: their groups return results of the right shape,
        and wait for no member. Not for groups that other slots are in as well."""
        with contextlib.ExitStack() as until_then:
            for group in self._groups:
                if set(group.slots) <= set(slots):  # also a group of this slot alone: a joining rank's is unconnected
                    rank, size = group.members.index(self.slot), len(group.members)
                    for backend in group.backends().values():
                        until_then.enter_context(backend.alone(rank, size))
            yield

    def moved(self) -> Movement:
        """When this process last entered or left a wait for others, and when its current wait last polled, if any."""
        return self._waits.moved()

    def waiting(self) -> CollectiveWait:
        """A context in which this process waits for others outside of its groups; the wait loop then calls `poll`."""
        return self._waits.collective_wait()

    def _revoke(self) -> None:
        for group in (*self._groups, *self._lanes):
            if group.nccl is not None:
                group.nccl.interrupt()

    def _backends(self) -> list[GroupBackend]:
        return [backend for group in (*self._groups, *self._lanes) for backend in group.backends().values()]

    def rank_of(self, slot: int) -> int:
        """The global rank of a slot in this epoch."""
        return self.members.index(slot)
