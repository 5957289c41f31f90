"""Copies of what data parallelism does not hold twice, in a live Megatron job.

When. A snapshot begins where a step is over, and is through some time in the next one, as a rule; whether everybody is,
is told with the vote. So a loss costs the step in flight and the one before it, where the lost rank's copy of that was
not through; with `copies.lag_steps` as many more.

What. What the optimizer of a rank steps, and all that it keeps for it (`megatron/shards.py`), and how far the job had
come. The weights follow from that. Everything else in a Megatron job is made anew by the walk or is nobody's own
(`INVENTORY`). A model may have more: buffers that its checkpoints hold, weights that nobody steps. That is refused.

Going back. The state that is put together may be of an earlier step than the one the job has come to. The sections that
are over stay over, with what they have told. The steps that are missing are taken again when the next section begins
(`training_step.py`), before anything else is done with the state.
"""

import contextlib
import functools
import logging
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ntp_plugin import telemetry
from ntp_plugin.comm.store import own_address
from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.copies import restore
from ntp_plugin.copies.inventory import EXACT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.copies.manifest import Version
from ntp_plugin.copies.replicator import Part, Replicator, Snapshot
from ntp_plugin.copies.restore import Restoration
from ntp_plugin.copies.store import Store
from ntp_plugin.copies.wire import Address, Peer, Server
from ntp_plugin.errors import StateLost
from ntp_plugin.megatron.lane_sync import bare
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live import generators
from ntp_plugin.megatron.live.anatomy import Anatomy
from ntp_plugin.planning.copy_placement import keepers, place_copies
from ntp_plugin.planning.parity_groups import share_parities
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.rank import ElasticRank
from ntp_plugin.telemetry import CopyTrouble, Teller

_LOG = logging.getLogger(__name__)
_SECRET = "what those know who may ask for copies"
_TIMEOUT_S = 10.0

INVENTORY = (
    Item(pattern="main weights and all that the optimizer keeps for them", becomes=EXACT, why="copied"),
    Item(pattern="samples consumed, schedule, loss scale", becomes=EXACT, why="told with each copy"),
    Item(pattern="drawn *", becomes=EXACT, why="generators of random numbers, where the slot is still there"),
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="gradients, buckets, lanes", becomes=RESET, why="of the step in flight"),
    Item(pattern="timers, the machine for repeated steps", becomes=RESET, why="as when the section began"),
)
"""What becomes of all that a Megatron job has. What a user's model may have more of is found by the patterns."""

FRAMEWORK = "megatron"
"""Whose state it is, for those who find only the copies."""

type Parts = Callable[[], Sequence[Part]]
type MakeRoom = Callable[[Mapping[str, Any]], Sequence[Part]]


class JobCopies:
    """The copies of this rank, those that it keeps for others, and how far the state has come."""

    def __init__(
        self,
        args: Any,
        policy: CopyPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        anatomy: Anatomy,
        teller: Teller,
        newcomer: bool,
    ) -> None:
        """All founders come together."""
        for name in require_known(_found(anatomy), INVENTORY, strict=policy.strict):
            _LOG.warning("copies: %s is not copied", name)
        self._args, self._policy, self._topology = args, policy, topology
        self._rank, self._anatomy, self._teller = rank, anatomy, teller
        place = rank.place
        self._slot, self._run = place.slot, place.corner
        self._host = topology.node_of(topology.slot_of(place.slot))
        most = None if policy.max_host_gb is None else int(policy.max_host_gb * 1e9)
        self._store = Store(place.copies / f"host-{self._host}", at_most=most)
        self._secret = self._share_secret(newcomer=newcomer)
        self._server = Server(
            self._store,
            run=self._run,
            secret=self._secret,
            host=own_address((place.store_host, place.store_port)),
            told=self._trouble,
        )
        self._replicator = Replicator(
            self._store,
            run=self._run,
            secret=self._secret,
            slot=place.slot,
            bytes_per_s=None if policy.gb_per_s is None else policy.gb_per_s * 1e9,
            timeout_s=_TIMEOUT_S,
            trouble=self._trouble,
            done=teller.tell,
        )
        self._parts: Parts = list
        self._holders: tuple[int, ...] = ()
        self._may_begin, self._epoch = True, 0
        self._last: int | None = None
        self._chosen: list[Version] = []
        self._extras_found: Mapping[str, Any] = {}
        self._resumed: Path | None = None
        """What is not needed any more once there are copies of this run."""
        self.steps: int = args.iteration
        """Training steps that are over, everywhere."""
        self.state_of: int = args.iteration
        """Those that this rank's state has in it."""
        self.consumed = 0
        """Samples in these, where the state is from copies."""

    def _share_secret(self, *, newcomer: bool) -> str:
        if newcomer:
            known: str = self._rank.word(_SECRET)
            return known
        secret: str = _tell_all(secrets.token_hex(16))[0]
        if dist.get_rank() == 0:
            self._rank.leave_word(_SECRET, secret)
        return secret

    @property
    def are_near_only(self) -> bool:
        """Whether no copy is on another host."""
        if self._policy.sharers:
            return False
        return self._policy.mode == "near" or self._policy.count == 0 or self._topology.nodes == 1

    # ------------------------------------------------ beside the training

    def settle(self, layout: Layout, parts: Parts) -> None:
        """From now on the state of this rank is these parts; all members come together, in each epoch."""
        self._parts, self._epoch = parts, self._rank.groups.epoch
        self._holders = tuple(sorted(self._topology.rank_of(slot) for slot in layout.slots))
        present: dict[int, Address] = dict(_tell_all((self._slot, self._server.address)))
        keepers, members = ([], []) if layout.is_idle else self._keepers(layout)
        self._replicator.send_to([present[slot] for slot in keepers], members=members)
        self._may_begin, self._last = True, None

    def _keepers(self, layout: Layout) -> tuple[list[int], list[int]]:
        """The slots that keep what is far of this one's, and where that is a parity, those that share it."""
        if self.are_near_only:
            return [], []
        lost, members = layout.standing.lost_nodes, list[int]()
        if self._policy.sharers:
            group = share_parities(self._topology, self._policy, lost).group_of(layout.slot)
            hosts = [] if group is None else [group.keeper]
            members = [] if group is None else sorted(map(self._topology.rank_of, {*group.members} & {*layout.slots}))
        else:
            hosts = place_copies(self._topology, self._policy, lost).holders(self._host)
        found = keepers(self._topology, hosts, layout.slot, layout.present)
        return [self._topology.rank_of(slot) for slot in found], members if len(members) > 1 else []

    def begin(self) -> None:
        """A section begins: copy the state, if it is new and nothing is under way."""
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
                extras=self._extras(),
            )
        )
        if first:  # the job has nothing to go back to yet
            self._replicator.wait()

    def words(self) -> tuple[bool, bool]:
        """For the vote: whether nothing is under way here, and all that was is where it belongs."""
        through = self._replicator.through
        return through, through and self._replicator.ok

    def heard(self, *, through: bool, ok: bool) -> None:
        """What all said in the vote."""
        if through and not self._may_begin and self._last is not None:
            self._may_begin = True
            if ok and self._slot in self._holders:
                self._replicator.commit()
                self._let_go_of_what_it_resumed()

    def _let_go_of_what_it_resumed(self) -> None:
        first_here = min(slot for slot in self._holders if self._host_of(slot) == self._host)
        if self._resumed is not None and self._slot == first_here:
            shutil.rmtree(self._resumed, ignore_errors=True)
        self._resumed = None

    def stepped(self, apply: Callable[[], Any]) -> Any:
        """The state changes."""
        self._replicator.wait_until_taken()
        result = apply()
        self.state_of += 1
        return result

    def _trouble(self, what: str) -> None:
        _LOG.warning("copies: %s", what)
        self._teller.tell(CopyTrouble(what=what))

    # ------------------------------------------------ in a walk

    def describe(self) -> str:
        """Which copies this host has, for the report; what is being copied is copied to its end first."""
        self._replicator.hold()
        return restore.describe(self._store)

    def choose(self, told: Iterable[str]) -> list[Version]:
        """The versions that everybody can stand on, newest first, by what all have described."""
        self._chosen = restore.standable(told)
        return self._chosen

    def restore(self, make_room: MakeRoom, members: Sequence[int]) -> None:
        """Have the newest version of which sound copies are there; all members come together."""
        self._restore(make_room, members, self._store, self._server.address)

    def _restore(self, make_room: MakeRoom, members: Sequence[int], store: Store, address: Address) -> None:
        @functools.cache
        def peer(address: Address) -> Peer:
            return opened.enter_context(
                contextlib.closing(Peer(address, run=self._run, secret=self._secret, timeout_s=_TIMEOUT_S))
            )

        teller = min(slot for slot in members if self._host_of(slot) == self._host)
        with contextlib.ExitStack() as opened:
            self._put_together(
                make_room,
                lambda version: Restoration(
                    version,
                    store,
                    slot=self._slot,
                    host=self._host,
                    teller=teller == self._slot,
                    tell_all=_tell_all,
                    address=address,
                    peer=peer,
                    trouble=self._trouble,
                ),
            )

    def _put_together(self, make_room: MakeRoom, restoration_of: Callable[[Version], Restoration]) -> None:
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
            self._extras_found = restoration.extras()
            self._go_back_to(version.step, self._extras_found)
            self._teller.tell(
                telemetry.Restored(
                    step=version.step,
                    again=self.steps - version.step,
                    own=done.own,
                    here=done.here,
                    elsewhere=done.elsewhere,
                    rebuilt=list(done.rebuilt),
                )
            )
            return
        assert failed is not None, "there was a version"
        raise StateLost(failed.what, way_out="restart from the last checkpoint") from failed

    def resume(self, folder: Path, make_room: MakeRoom, members: Sequence[int]) -> int:
        """Begin from the copies of a dead run, whatever its layout was; the step that they were made after. All members
        come together, before the first section."""
        there = Store(_of_this_host(folder, self._host))
        self._chosen = restore.standable(_tell_all(restore.describe(there)))
        if not self._chosen:
            raise StateLost(
                f"in {folder} there is no version of which all parts are copied",
                way_out="begin without --ntp-resume, from the last checkpoint",
            )
        server = Server(there, run=self._run, secret=self._secret, host=self._server.address[0], told=self._trouble)
        try:
            self._restore(make_room, members, there, server.address)
        finally:
            server.close()
            there.close()
        self.steps = self.state_of
        self._resumed = folder
        return self.steps

    def _host_of(self, slot: int) -> int:
        return self._topology.node_of(self._topology.slot_of(slot))

    def count_from(self) -> None:
        """Have the job begin where the state is that it resumes from."""
        args, extras = self._args, self._extras_found
        args.iteration = args.curr_iteration = self.steps
        args.consumed_train_samples, args.consumed_valid_samples = extras["consumed"], extras["validated"]
        args.num_floating_point_operations_so_far = extras["operations"]

    def close(self) -> None:
        """The job is over."""
        self._replicator.close()
        self._server.close()
        self._store.close()

    # ------------------------------------------------ what goes with the tensors

    def _extras(self) -> dict[str, Any]:
        scaler = getattr(self._optimizer, "grad_scaler", None)
        return {
            "framework": FRAMEWORK,
            "consumed": self._args.consumed_train_samples,
            "validated": self._args.consumed_valid_samples,
            "operations": float(getattr(self._args, "num_floating_point_operations_so_far", 0)),
            "scheduled": self._anatomy.scheduler.num_steps,
            "scaler": None if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()},
            "random": {"slot": self._slot, **generators.states()},
        }

    def _go_back_to(self, step: int, extras: Mapping[str, Any]) -> None:
        self.state_of = step
        self.consumed = extras["consumed"]
        scheduler = self._anatomy.scheduler
        scheduler.num_steps = extras["scheduled"]
        scheduler.step(increment=0)  # which sets the optimizer to it
        scaler = getattr(self._optimizer, "grad_scaler", None)
        if scaler is not None and extras["scaler"] is not None:
            device = scaler.scale.device
            like = scaler.state_dict()
            told = {
                key: torch.tensor([value], device=device) if isinstance(like[key], torch.Tensor) else int(value)
                for key, value in extras["scaler"].items()
            }
            scaler.load_state_dict(told)
        if extras["random"]["slot"] == self._slot:
            generators.put_back(extras["random"])

    @property
    def _optimizer(self) -> Any:
        """Megatron's only one."""
        return self._anatomy.optimizer.chained_optimizers[0]


def _of_this_host(folder: Path, host: int) -> Path:
    """What is in memory here, whatever number this host had in the run that is dead; a rehearsal may have several."""
    hosts = list(folder.glob("host-*"))
    return hosts[0] if len(hosts) == 1 else folder / f"host-{host}"


def _found(anatomy: Anatomy) -> Iterator[str]:
    """What there is in this process that others may not have: in the user's model, and to draw from."""
    yield from generators.names()
    for chunk in map(bare, anatomy.chunks):
        parameters = dict(chunk.named_parameters())
        for name, parameter in parameters.items():
            yield f"weight {name}" if parameter.requires_grad else f"the weight {name}, which nobody steps,"
        for name, value in chunk.state_dict().items():
            if name not in parameters and isinstance(value, torch.Tensor) and value.numel():
                yield f"the buffer {name}"


def _tell_all(what: Any) -> list[Any]:
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, what)
    return told
