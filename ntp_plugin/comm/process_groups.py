"""Process groups that are edited in place, so that every handle that a framework keeps stays valid.

torch 2.15 edits a group in place (`ProcessGroup.reconfigure`). This room sees every group being made, at the one place
where all are made, and can then

    break_out   end whatever this process waits for in any group
    offer       say how others reach this process in the next epoch
    regroup     edit all groups at once to the members of a view

Slots are for life; ranks are dense and change with every view. A group is remembered by the slots that it was made of,
and holds those of them that are in the view. `torch`'s own table of ranks is mended after each edit.

What a backend needs for that is its own file's matter (`gloo_backend.py`).

Not built yet: NCCL behind the same interface, and device meshes.
"""

import dataclasses
import threading
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ntp_plugin.comm.gloo_backend import GlooBackend
from ntp_plugin.comm.sockets import connected_since, open_sockets
from ntp_plugin.comm.waits import GRACE_S, BreakableWaits
from ntp_plugin.errors import PeerLost, Refused

_HOOK = 0x4E5450


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
    backend: GlooBackend
    slots: tuple[int, ...]
    members: tuple[int, ...]
    timeout: timedelta


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
        for group in self._groups:
            group.handle.unregister_post_hook(_HOOK)
        self._groups.clear()
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
            timeout = options["timeout"]
            backend = GlooBackend(handle, store, timeout, connected_since(before))
            group = _Group(handle=handle, backend=backend, slots=slots, members=slots, timeout=timeout)
            self._watch_works(group)
            self._groups.append(group)
        return handle, store

    def _watch_works(self, group: _Group) -> None:
        def started(operation: Any) -> None:
            if operation.work is None:
                return
            if self._waits.register(operation.name.name, operation.work, group.timeout):
                group.backend.keep(operation.op_id, operation.work)

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
            return sum(group.backend.break_out() for group in self._groups)

    def check(self) -> None:
        """Raise where a break-out is under way: for loops that enter no collective."""
        if self._broken_for > self.epoch:
            raise PeerLost(f"the membership changes to epoch {self._broken_for}")

    def offer(self) -> dict[str, str]:
        """Group name -> how others reach this process in it. Groups that hold a lost operation are made fresh first."""
        deadline = time.monotonic() + GRACE_S
        while any(group.backend.busy() for group in self._groups) and time.monotonic() < deadline:
            time.sleep(0.002)
        for group in self._groups:
            self.replaced += group.backend.ready(group.members.index(self.slot), group.members)
        return {group.handle.group_name: group.backend.reach() for group in self._groups}

    def regroup(self, epoch: int, offers: Mapping[int, Mapping[str, str]], *, timeout_s: float) -> None:
        """Edit all groups to the slots of `offers`; every member calls this with the same offers."""
        members = tuple(sorted(offers))
        ranks = {slot: rank for rank, slot in enumerate(members)}
        with self._lock:
            self.epoch, self.members = epoch, members
        for group in self._groups:
            group.members = tuple(slot for slot in group.slots if slot in ranks)
            handles = [offers[slot][group.handle.group_name] for slot in group.members]
            group.backend.edit(epoch, handles, timeout_s)
            c10d._world.pg_group_ranks[group.handle] = {ranks[slot]: own for own, slot in enumerate(group.members)}
        with self._lock:
            if self._broken_for <= epoch:
                self._waits.end_break_out()

    def moved(self) -> tuple[int, bool]:
        """How often this process entered and left a wait for others, and whether it stands in one."""
        return self._waits.moved()

    def rank_of(self, slot: int) -> int:
        """The global rank of a slot in this epoch."""
        return self.members.index(slot)
