"""Process groups that are edited in place, so that every handle that a framework keeps stays valid.

torch 2.15 edits a group in place (`ProcessGroup.reconfigure`). This room sees every group being made, at the one place
where all are made, and can then

    break_out   end whatever this process waits for in any group
    offer       say how others reach this process in the next epoch
    regroup     edit all groups at once to the members of a view
    make_lanes  make groups that live until the next regroup

Slots are for life; ranks are dense and change with every view. A group is remembered by the slots that it was made of,
and holds those of them that are in the view. `torch`'s own table of ranks is mended after each edit.

Gloo can lose a send or receive that stands in a broken connection: nobody ever ends it, and it keeps one of the
group's two worker threads until its time limit. A group with such an operation gets a fresh inner backend before the
edit; its peers see only another handle.

Lanes change with every view, so they are not edited but made anew: unconnected, then connected by handles that are
exchanged over the world. So no store is asked, in which a death would be waited for until the time limit, and no
counter of groups has to be the same in a newcomer. The next regroup destroys them; one that holds a lost operation is
put aside until the operation has ended, because gloo would wait for it right there.

Not built yet: NCCL behind the same interface, and device meshes.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ReconfigureOptions, Work

from ntp_plugin.comm.sockets import SocketId, connected_since, open_sockets, shut
from ntp_plugin.comm.waits import GRACE_S, BreakableWaits
from ntp_plugin.errors import PeerLost, Refused

_HOOK = 0x4E5450
_CPU = torch.device("cpu")
_FIRST_FRESH_TYPE = 16
"""Backend types that torch has no name for: `setBackend` takes a second backend of a known type for the first."""


def require_reconfigure() -> None:
    """Raise unless this torch can edit groups in place."""
    if not hasattr(dist.ProcessGroup, "reconfigure"):
        raise Refused(
            f"live recovery needs torch 2.15 or newer, and this is torch {torch.__version__}",
            way_out="install torch >= 2.15, or run without live recovery",
        )


@dataclasses.dataclass(kw_only=True, slots=True)
class _Group:
    handle: dist.ProcessGroup
    backend: Any
    slots: tuple[int, ...]
    members: tuple[int, ...]
    store: Any
    timeout: timedelta
    sockets: frozenset[SocketId]
    running: dict[int, Work] = dataclasses.field(default_factory=dict)
    generation: int = 0

    def busy(self) -> bool:
        return any(not work.is_completed() for work in list(self.running.values()))


class ElasticGroups:
    """All process groups of this process, from `attach` to `detach`."""

    def __init__(self, slot: int, *, joining: bool = False) -> None:
        require_reconfigure()
        self.slot = slot
        self.epoch = 0
        self.members: tuple[int, ...] = ()
        self.replaced = 0
        """Inner backends that were replaced because they held a lost operation. torch keeps each old one, with its
        three threads and four descriptors, until its group is destroyed."""
        self._joining = joining
        self._broken_for = 0
        self._groups: list[_Group] = []
        self._lanes: list[_Group] = []
        self._lanes_made = 0
        self._put_aside: list[_Group] = []
        self._waits = BreakableWaits()
        self._lock = threading.Lock()
        self._make_group: Any = None

    # ------------------------------------------------ seeing groups being made

    def attach(self) -> None:
        """See every group that is made from now on; call it before `init_process_group`."""
        assert self._make_group is None, "groups are attached once"
        self._waits.attach()
        self._make_group = c10d._new_process_group_helper
        c10d._new_process_group_helper = self._make_and_remember  # type: ignore[assignment]

    def detach(self) -> None:
        """Leave torch as it was; the groups stay as they are."""
        assert self._make_group is not None, "groups are attached"
        c10d._new_process_group_helper = self._make_group
        self._make_group = None
        for group in (*self._groups, *self._lanes):
            group.handle.unregister_post_hook(_HOOK)
        self._groups.clear()
        self._lanes.clear()
        self._waits.detach()

    def _make_and_remember(self, size: int, rank: int | None, ranks: list[int], *args: Any, **options: Any) -> Any:
        if self._joining:  # a newcomer's groups stay unconnected until it is regrouped with the others
            options["enable_reconfigure"] = True
        before = open_sockets()
        handle, store = self._make_group(size, rank, ranks, *args, **options)
        if handle is not dist.GroupMember.NON_GROUP_MEMBER:
            if not ranks:
                self.members = tuple(range(size))
            slots = tuple(self.members[other] for other in ranks) if ranks else self.members
            group = _Group(
                handle=handle,
                backend=handle._get_backend(_CPU),
                slots=slots,
                members=slots,
                store=store,
                timeout=options["timeout"],
                sockets=connected_since(before),
            )
            self._watch_works(group)
            self._groups.append(group)
        return handle, store

    def _watch_works(self, group: _Group) -> None:
        def started(operation: Any) -> None:
            if operation.work is None:
                return
            if self._waits.register(operation.name.name, operation.work, group.timeout):
                group.running[operation.op_id] = operation.work
            if len(group.running) > 64:
                group.running = {key: work for key, work in group.running.items() if not work.is_completed()}

        group.handle.register_post_hook(_HOOK, started)

    # ------------------------------------------------ leaving, and coming together again

    def break_out(self, epoch: int) -> int:
        """End what this process waits for, on the way to `epoch`; from any thread, and once for each epoch.

        Returns the number of connections that were broken: none where that epoch, or a later one, is reached already,
        so that a late call never hits the new connections.
        """
        with self._lock:
            if epoch <= max(self.epoch, self._broken_for):
                return 0
            self._broken_for = epoch
            self._waits.begin_break_out()
            return sum(shut(group.sockets) for group in (*self._groups, *self._lanes))

    def check(self) -> None:
        """Raise where a break-out is under way: for loops that enter no collective."""
        if self._broken_for > self.epoch:
            raise PeerLost(f"the membership changes to epoch {self._broken_for}")

    def offer(self) -> dict[str, str]:
        """Group name -> how others reach this process in it. Groups that hold a lost operation are made fresh first."""
        deadline = time.monotonic() + GRACE_S
        while any(group.busy() for group in (*self._groups, *self._lanes)) and time.monotonic() < deadline:
            time.sleep(0.002)
        self._drop_lanes()
        for group in self._groups:
            if group.busy():
                self._make_fresh(group)
            group.running.clear()
        return {group.handle.group_name: group.backend.get_reconfigure_handle() for group in self._groups}

    def regroup(self, epoch: int, offers: Mapping[int, Mapping[str, str]], *, timeout_s: float) -> None:
        """Edit all groups to the slots of `offers`; every member calls this with the same offers."""
        members = tuple(sorted(offers))
        ranks = {slot: rank for rank, slot in enumerate(members)}
        with self._lock:
            self.epoch, self.members, self._lanes_made = epoch, members, 0
        for group in self._groups:
            group.members = tuple(slot for slot in group.slots if slot in ranks)
            handles = [offers[slot][group.handle.group_name] for slot in group.members]
            self._edit(group, handles, timeout_s)
            c10d._world.pg_group_ranks[group.handle] = {ranks[slot]: own for own, slot in enumerate(group.members)}
        with self._lock:
            if self._broken_for <= epoch:
                self._waits.end_break_out()

    def _edit(self, group: _Group, handles: list[str], timeout_s: float) -> None:
        options = ReconfigureOptions()
        options.uuid, options.handles, options.timeout = self.epoch, handles, timedelta(seconds=timeout_s)
        before = open_sockets()
        group.backend.reconfigure(options)
        group.sockets = connected_since(before)

    # ------------------------------------------------ groups for one epoch

    def make_lanes(self, slots_of: Sequence[tuple[int, ...]], *, timeout_s: float) -> list[dist.ProcessGroup | None]:
        """A group for each tuple of slots, None where this slot is not in it or alone; all end at the next regroup.

        Every member of the world calls this with the same tuples; the order of a tuple is the order of its ranks.
        """
        self._drop_lanes()
        self._lanes_made += 1
        wanted = [(index, slots) for index, slots in enumerate(slots_of) if self.slot in slots and len(slots) > 1]
        lanes = {index: self._make_lane(index, slots) for index, slots in wanted}
        told: list[dict[int, str]] = [{}] * len(self.members)
        dist.all_gather_object(told, {index: lane.backend.get_reconfigure_handle() for index, lane in lanes.items()})
        for index, lane in lanes.items():  # ascending everywhere: nobody waits for who waits for it
            self._edit(lane, [told[self.rank_of(slot)][index] for slot in lane.slots], timeout_s)
        return [lanes[index].handle if index in lanes else None for index in range(len(slots_of))]

    def _make_lane(self, index: int, slots: tuple[int, ...]) -> _Group:
        name = c10d.GroupName(f"ntp/lane/{self.epoch}/{self._lanes_made}/{index}/{'-'.join(map(str, slots))}")
        world, ranks = self._groups[0], [self.rank_of(slot) for slot in slots]
        handle, _ = c10d._new_process_group_helper(
            len(slots),
            slots.index(self.slot),
            ranks,
            "gloo",
            c10d._get_default_store(),
            group_name=name,
            timeout=world.timeout,
            enable_reconfigure=True,
        )
        assert isinstance(handle, dist.ProcessGroup), "this slot is in the lane"
        c10d._world.pg_group_ranks[handle] = {rank: own for own, rank in enumerate(ranks)}
        lane = self._groups.pop()
        self._lanes.append(lane)
        return lane

    def _drop_lanes(self) -> None:
        self._put_aside, lanes = [], [*self._put_aside, *self._lanes]
        self._lanes = []
        for lane in lanes:
            if lane.busy():
                self._put_aside.append(lane)
                continue
            lane.running.clear()
            if lane.handle in c10d._world.pg_map:
                lane.handle.unregister_post_hook(_HOOK)
                dist.destroy_process_group(lane.handle)

    def moved(self) -> tuple[int, bool]:
        """How often this process entered and left a wait for others, and whether it stands in one."""
        return self._waits.moved()

    def rank_of(self, slot: int) -> int:
        """The global rank of a slot in this epoch."""
        return self.members.index(slot)

    def _make_fresh(self, group: _Group) -> None:
        self.replaced += 1
        group.generation += 1
        handle, name = group.handle, group.handle.group_name
        rank, size = group.members.index(self.slot), len(group.members)
        inner_store = c10d.PrefixStore("cpu/", group.store)
        backend = c10d.ProcessGroupGloo(inner_store, rank, size, group.timeout, enable_reconfigure=True)
        backend.options.global_ranks_in_group = list(group.members)
        backend.options.group_name = name
        kind = dist.ProcessGroup.BackendType(_FIRST_FRESH_TYPE + group.generation)
        description = handle.group_desc
        handle._register_backend(_CPU, kind, backend)
        handle._set_default_backend(kind)
        handle._set_group_name(name)
        handle._set_group_desc(description)
        group.backend = backend
