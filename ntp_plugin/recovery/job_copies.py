"""Copies of unreplicated state in a live job, for any framework: made beside the training, restored in a recovery.

When: a snapshot begins after a step, and is usually complete during the next one. The vote of each step says whether
all ranks have completed it. So a loss costs the step in flight, and the step before it if the lost rank's copy of that
was not complete; with `copies.lag_steps` as many more.

What: slices of what the rank's optimizer steps (`reduction/stepped.py`), and the progress of the job that the adapter
adds (`Carried`).

Restoring: the restored state may be of an earlier step than the job has reached. Each framework runs the missing steps
again in its own way.
"""

import contextlib
import dataclasses
import functools
import logging
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch.distributed as dist

from ntp_plugin import telemetry
from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.copies import restore
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.restore import Restoration
from ntp_plugin.copies.store import Store
from ntp_plugin.copies.wire import Address, Peer, Server
from ntp_plugin.errors import StateLost
from ntp_plugin.membership.store import own_address
from ntp_plugin.planning.copy_placement import parity_hosts, place_copies
from ntp_plugin.planning.parity_groups import share_parities
from ntp_plugin.planning.survival import VERSIONS
from ntp_plugin.planning.topology import Slot, Topology
from ntp_plugin.private_folders import require_private
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.telemetry import CopyTrouble, EventWriter

_LOG = logging.getLogger(__name__)
_TIMEOUT_S = 10.0
WORDS = 3
"""The number of values that a vote carries about copies."""

type Parts = Callable[[], Sequence[Part]]
type MakeRoom = Callable[[Mapping[str, Any]], Sequence[Part]]


class Carried(Protocol):
    """The state that an adapter copies besides tensors."""

    def extras(self) -> dict[str, Any]:
        """Return its current value, of JSON types and bytes; bytes are written as hexadecimal digits."""

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """Restore that value."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WhoTrains:
    """The slots that hold parts of the state in an epoch, the slots that are present, and the lost hosts."""

    trains: tuple[Slot, ...]
    present: tuple[Slot, ...]
    lost_nodes: tuple[int, ...]


class JobCopies:
    """This rank's copies, the copies that it keeps for other ranks, and the steps that the state has reached."""

    def __init__(
        self,
        policy: CopyPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        carried: Carried,
        steps: int,
        event_writer: EventWriter,
    ) -> None:
        self._policy, self._topology, self._rank = policy, topology, rank
        self._carried, self._event_writer = carried, event_writer
        place = rank.place
        self._slot, self._run = place.slot, place.corner
        self._host = topology.node_of(topology.slot_of(place.slot))
        most = None if policy.max_host_gb is None else int(policy.max_host_gb * 1e9)
        self._store = Store(place.copies / f"host-{self._host}", at_most=most)
        self._secret = rank.place.secret_for("copies")
        self._server = Server(
            self._store,
            run=self._run,
            secret=self._secret,
            host=own_address((place.store_host, place.store_port)),
            report=self._trouble,
        )
        self._replicator = Replicator(
            self._store,
            run=self._run,
            secret=self._secret,
            slot=place.slot,
            bytes_per_s=None if policy.gb_per_s is None else policy.gb_per_s * 1e9,
            timeout_s=_TIMEOUT_S,
            trouble=self._trouble,
            done=event_writer.write,
        )
        self._parts: Parts = list
        self._holders: tuple[int, ...] = ()
        self._may_begin, self._epoch = True, 0
        self._last: int | None = None
        self._complete = 0
        self._chosen: list[Version] = []
        self._resumed: Path | None = None
        """The folder of the copies that this run resumed from, until it has copies of its own."""
        self.steps = steps
        """Training steps that are over on all ranks."""
        self.state_of = steps
        """Training steps that are in this rank's state."""

    @property
    def are_near_only(self) -> bool:
        """Whether no copy is on another host."""
        if self._policy.sharers:
            return False
        return self._policy.mode == "near" or self._policy.count == 0 or self._topology.nodes == 1

    # ------------------------------------------------ beside the training

    def settle(self, who: WhoTrains, parts: Parts) -> None:
        """Set the parts that make up this rank's state in an epoch; all members call this together, in each epoch."""
        self._parts, self._epoch = parts, self._rank.groups.epoch
        self._holders = tuple(sorted(map(self._topology.rank_of, who.trains)))
        present: dict[int, Address] = dict(_all_gather((self._slot, self._server.address)))
        parity_hosts, members = self._parity_hosts(who) if self._slot in self._holders else ([], [])
        self._replicator.send_to([present[slot] for slot in parity_hosts], members=members)
        self._may_begin, self._last = True, None

    def _parity_hosts(self, who: WhoTrains) -> tuple[list[int], list[int]]:
        """The slots that keep this slot's far copy; if that is a parity, also the slots that share it."""
        if self.are_near_only:
            return [], []
        mine, members = self._topology.slot_of(self._slot), list[int]()
        if self._policy.sharers:
            group = share_parities(self._topology, self._policy, who.lost_nodes).group_of(mine)
            hosts = [] if group is None else [group.parity_host]
            members = [] if group is None else sorted(map(self._topology.rank_of, {*group.members} & {*who.trains}))
        else:
            hosts = place_copies(self._topology, self._policy, who.lost_nodes).holders(self._host)
        found = parity_hosts(self._topology, hosts, mine, who.present)
        return [self._topology.rank_of(slot) for slot in found], members if len(members) > 1 else []

    def begin(self) -> None:
        """Begin a copy of the state, if the state is new and no copy is under way. Called when a section begins."""
        due = self._last is None or self.state_of - self._last > self._policy.lag_steps
        if not (self._may_begin and due) or self._slot not in self._holders:
            return
        first = not self._epoch and self._last is None
        self._may_begin, self._last = False, self.state_of
        self._replicator.begin(
            Snapshot(
                version=Version(step=self.state_of, epoch=self._epoch),
                holders=self._holders,
                parts=self._parts(),
                extras=self._carried.extras(),
            )
        )
        if first:  # the job has no earlier copy to restore
            self._replicator.wait_until_late()

    def catch_up(self, vote: Callable[[Sequence[bool]], Sequence[bool]]) -> None:
        """Copy the current state and wait for the copy, before long work, so that a loss then costs no extra step.

        All members call this together; `vote` returns which values are true on all ranks. A late copy is not waited
        for, and with `copies.lag_steps` the copy may still be of an earlier step.
        """
        for _ in range(2):  # the copy under way, and the one after it
            self.begin()
            self._replicator.wait_until_late()
            self.heard(vote(self.words()))

    def words(self) -> tuple[bool, ...]:
        """The values for the vote: no copy is under way here, the newest is in this host's memory, and it is on all
        hosts."""
        made = self._replicator
        through = made.through
        return through, through and made.near, through and made.ok

    def heard(self, words: Sequence[bool]) -> None:
        """Act on the values of a vote: those that are true on all ranks."""
        through, near, ok = words
        if not through or self._may_begin or self._last is None:
            return
        self._may_begin = True
        if self._slot not in self._holders:
            return
        if ok:
            self._replicator.commit()
            self._remove_resumed()
            self._report_memory()
        elif near:
            self._replicator.keep()

    def _report_memory(self) -> None:
        """Once, when as many versions are complete as are kept: say how much memory of this host copies take."""
        self._complete += 1
        if self._complete == VERSIONS and self._is_first_here:
            used, ranks = self._store.used, sum(self._host_of(slot) == self._host for slot in self._holders)
            _LOG.warning(
                "copies take %.1f MB of the memory of host %d, which has %d ranks", used / 1e6, self._host, ranks
            )

    @property
    def _is_first_here(self) -> bool:
        return self._slot == min(slot for slot in self._holders if self._host_of(slot) == self._host)

    def _remove_resumed(self) -> None:
        if self._resumed is not None and self._is_first_here:
            shutil.rmtree(self._resumed, ignore_errors=True)
        self._resumed = None

    def stepped(self, apply: Callable[[], Any]) -> Any:
        """Change the state, after the copy under way has been taken."""
        self._replicator.wait_until_taken()
        result = apply()
        self.state_of += 1
        return result

    def _trouble(self, what: str) -> None:
        _LOG.warning("copies: %s", what)
        self._event_writer.write(CopyTrouble(what=what))

    # ------------------------------------------------ in a recovery

    def describe(self) -> str:
        """Describe this host's copies for the report, after the copy under way has been taken."""
        self._replicator.hold()
        return restore.describe(self._store)

    def choose(self, descriptions: Iterable[str]) -> list[Version]:
        """Choose the versions that all members can resume from, newest first, by their descriptions."""
        self._chosen = restore.restorable(descriptions)
        return self._chosen

    def restore(self, make_room: MakeRoom, members: Sequence[int]) -> None:
        """Restore the newest version that has sound copies; all members call this together."""
        self._restore(make_room, members, self._store, self._server.address)

    def _restore(self, make_room: MakeRoom, members: Sequence[int], store: Store, address: Address) -> None:
        @functools.cache
        def peer(address: Address) -> Peer:
            return opened.enter_context(
                contextlib.closing(Peer(address, run=self._run, secret=self._secret, timeout_s=_TIMEOUT_S))
            )

        host_leader = min(slot for slot in members if self._host_of(slot) == self._host)
        with contextlib.ExitStack() as opened:
            self._restore_newest(
                make_room,
                lambda version: Restoration(
                    version,
                    store,
                    slot=self._slot,
                    host=self._host,
                    is_host_leader=host_leader == self._slot,
                    all_gather=_all_gather,
                    address=address,
                    peer=peer,
                    trouble=self._trouble,
                ),
            )

    def _restore_newest(self, make_room: MakeRoom, restoration_of: Callable[[Version], Restoration]) -> None:
        failed: StateLost | None = None
        for version in self._chosen:
            restoration = restoration_of(version)
            try:
                parts = make_room(restoration.kinds())
                done = restoration.fill(parts)
                restoration.verify(parts)
            except StateLost as error:
                failed = error
                self._trouble(str(error))
                continue
            self.state_of = version.step
            self._carried.go_back(restoration.extras(self._of_own_stage()))
            self._event_writer.write(
                telemetry.Restored(
                    step=version.step,
                    again=max(0, self.steps - version.step),  # a joining rank has taken none
                    own=done.own,
                    here=done.here,
                    elsewhere=done.elsewhere,
                    rebuilt=list(done.rebuilt),
                )
            )
            return
        assert failed is not None, "there was a version to restore"
        raise StateLost(failed.what, fix="restart from the last checkpoint") from failed

    def _of_own_stage(self) -> list[int]:
        stage = self._topology.slot_of(self._slot).stage
        return [slot for slot in range(self._topology.size) if self._topology.slot_of(slot).stage == stage]

    def resume(self, folder: Path, make_room: MakeRoom, members: Sequence[int]) -> int:
        """Resume from the copies of a dead run, in any layout, and return the step that they were made after.

        All members call this together, before the first section.
        """
        require_private(folder)
        there = Store(_of_this_host(folder, self._host))
        self._chosen = restore.restorable(_all_gather(restore.describe(there)))
        if not self._chosen:
            raise StateLost(
                f"no version in {folder} has copies of all its parts",
                fix="begin without --ntp-resume, from the last checkpoint",
            )
        server = Server(there, run=self._run, secret=self._secret, host=self._server.address[0], report=self._trouble)
        try:
            self._restore(make_room, members, there, server.address)
        finally:
            server.close()
            there.close()
        self.steps = self.state_of
        self._resumed = folder
        return self.steps

    def distrust_since(self, step: int) -> None:
        """Remove this host's copies of steps later than this one, because the job stops.

        No copies arrive meanwhile: the last process of this host removes what others have still received.
        """
        self._replicator.close()
        self._server.close()
        self._store.forget_since(step)

    def _host_of(self, slot: int) -> int:
        return self._topology.node_of(self._topology.slot_of(slot))

    def close(self) -> None:
        """Stop the threads at the end of the job; the copies stay."""
        self._replicator.close()
        self._server.close()
        self._store.close()


def _of_this_host(folder: Path, host: int) -> Path:
    """The copies in this host's memory, whatever its number in the dead run; a CPU emulation may have several hosts."""
    hosts = list(folder.glob("host-*"))
    return hosts[0] if len(hosts) == 1 else folder / f"host-{host}"


def _all_gather(value: Any) -> list[Any]:
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, value)
    return gathered
