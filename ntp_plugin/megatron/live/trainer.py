"""What a rank of a live Megatron job does in a walk: where it stands, what comes next, and to stand on that.

`stand_on` may be interrupted anywhere. Parameters and optimizer state are held together by `training/relayout.py`.
Everything else is made from nothing each time: Megatron's own functions are put back first, and then what the new
layout needs is put in their place. So the way does not matter by which a layout was come to, and with nobody lost
Megatron runs by itself again.
"""

import contextlib
import functools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from megatron.core.distributed import finalize_model_grads

from ntp_plugin.comm.agreement import Agreed
from ntp_plugin.comm.membership import Report
from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.copies.pieces import Piece
from ntp_plugin.copies.replicator import Part
from ntp_plugin.errors import BelowMinimum, Refused, StateLost
from ntp_plugin.megatron import hooks
from ntp_plugin.megatron.batch_share import BatchShare
from ntp_plugin.megatron.job import Job, nominal_job, share_units
from ntp_plugin.megatron.lane_groups import wanted_groups
from ntp_plugin.megatron.lane_sync import LaneSync, named
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live.anatomy import Anatomy
from ntp_plugin.megatron.live.copies import JobCopies
from ntp_plugin.megatron.live.counts import Counts, adopt, count
from ntp_plugin.megatron.live.loop import Loop
from ntp_plugin.megatron.live.ranks import MegatronRanks
from ntp_plugin.megatron.live.samples import Samples
from ntp_plugin.megatron.replacements import apply_all
from ntp_plugin.megatron.shards import (
    Naming,
    Stepped,
    make_room,
    megatrons_shards,
    parts,
    shards_of_lanes,
    whole_parameters,
)
from ntp_plugin.megatron.uneven_layers import UnevenLayers, describe
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.topology import Slot, Standing, Topology
from ntp_plugin.recovery.rank import ElasticRank
from ntp_plugin.telemetry import Recovered, Teller
from ntp_plugin.training.cuts import local_shape
from ntp_plugin.training.rebuilding import MAIN, WEIGHT
from ntp_plugin.training.relayout import relayout
from ntp_plugin.training.relayout_plan import Held, RelayoutPlan, digest_of, plan_relayout
from ntp_plugin.training.sharded_state import ShardedState

_UNITS = "units of all stages"
_CONNECT_S = 5.0
"""For a member to come into a lane; a death ends that at once, so that this is only for trouble that nobody detects."""


class MegatronTrainer:
    """A `Trainer` of one rank."""

    def __init__(
        self,
        args: Any,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        loop: Loop,
        anatomy: Anatomy,
        samples: Samples,
        newcomer: bool,
        teller: Teller,
    ) -> None:
        self._args, self._policy, self._topology = args, policy, topology
        self._rank, self._groups = rank, rank.groups
        self._loop, self._anatomy, self._samples = loop, anatomy, samples
        self._newcomer, self._teller = newcomer, teller
        self._walking_since: float | None = None
        self.share: BatchShare | None = None
        """Of the global batch, while somebody is lost."""
        self.idle, self.first = False, self._groups.slot == 0
        """Whether this rank trains nothing, its replica being too narrow; and whether it is the first of who trains."""
        self._idle: frozenset[Slot] = frozenset()
        """All of them."""
        self._worlds: dict[int, Any] = {}
        self._nominal: Nominal
        self._state: ShardedState
        self._next: tuple[RelayoutPlan, ...]
        """Of a walk in which state is moved."""
        self._goal: RecoveryPlan
        self.copies: JobCopies | None = None
        """Where this job makes them."""
        self._from_copies = self._put_together = False
        """Whether the state of this walk comes from copies; and whether that was begun and has not ended."""
        self._sharded = bool(args.use_distributed_optimizer)
        self._sync: LaneSync | None = None
        """In a hurt layout."""
        self._alone: Any = None
        self._own: tuple[Any, Any] | None = None
        """The model's configuration, and how Megatron itself ends a backward."""
        self._take_back = _nothing
        self._ranks = MegatronRanks()
        self._lost: Mapping[int, tuple[int, ...]] = {0: ()}

    def layout(self, lost: frozenset[Slot] = frozenset(), idle: frozenset[Slot] = frozenset()) -> Layout:
        """Of those who are members, without the lost."""
        rank = self._groups.rank_of(self._groups.slot)
        return Layout(topology=self._topology, lost=lost, idle=idle, rank=rank)

    @property
    def lost(self) -> frozenset[Slot]:
        """Who is not a member now."""
        newest = self._lost[max(self._lost)]
        return frozenset(map(self._topology.slot_of, newest))

    def begin(self) -> None:
        """Know the model, now that there is one; what could not be cut is refused here. All ranks come together."""
        layout, anatomy = self.layout(), self._anatomy
        layers = UnevenLayers(layout, self._args, granule=self._policy.granule)
        take_back = apply_all(hooks.of_layers(layers), offered=False)
        try:
            anatomy.take_over(anatomy.elsewhere())
        finally:
            take_back()
        parameters = dict(named(anatomy.chunks))
        units = describe(parameters, sequence=self._args.seq_length, last=layout.last)
        if self._newcomer:
            of_all = self._rank.word(_UNITS)
        else:
            of_all = share_units(layout, units)
            if layout.rank == 0:
                self._rank.leave_word(_UNITS, of_all)
        self._nominal = nominal_job(layout, self._policy, self._args, of_all)
        plan_recovery(self._nominal, lost=frozenset())  # what cannot work is refused now, and not when a rank has died
        self._state = ShardedState(
            parameters,
            anatomy.optimizer.optimizer,
            mains=_mains(anatomy.optimizer, parameters),
            newcomer=self._newcomer,
        )
        self._state.refuse_what_cannot_be_cut()
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if not (self._newcomer or self._sharded):
            self._refuse_unequal_replicas()
        self._begin_copies()

    def _begin_copies(self) -> None:
        policy = self._policy.copies
        unique = self._sharded or self._topology.dp == 1 or policy.protect == "all"
        if policy.mode == "off" or not unique:
            return
        self.copies = JobCopies(
            self._args,
            policy,
            self._topology,
            rank=self._rank,
            anatomy=self._anatomy,
            teller=self._teller,
            newcomer=self._newcomer,
        )
        if not self._newcomer:
            self.copies.settle(self.layout(), self._parts)

    def _refuse_unequal_replicas(self) -> None:
        """A move to where everything is already, which compares everything."""
        stages, slot_of = self._nominal.units.stages, self._topology.slot_of
        held = {
            rank: Held(versions=(0,) * len(stages[slot_of(rank).stage].tensors), built=(), lost={0: ()})
            for rank in range(self._topology.size)
        }
        try:
            relayout(plan_relayout(self._nominal, held, 0), self._state, self._groups, step=0)
        except StateLost as found:
            raise Refused(
                f"the replicas do not begin alike: {found.what}",
                way_out="have all of them load one checkpoint, or draw their weights from one seed",
            ) from found

    # ------------------------------------------------ a walk

    def report(self) -> Report:
        """An update is made in place, so there is no way back."""
        self._walking_since = self._walking_since or time.monotonic()
        loop = self._loop
        live = None if self._sharded or self._put_together else self._state.held(self._lost).encode()
        copied = None if self.copies is None else self.copies.describe()
        held = json.dumps([live, copied])
        return Report(applied=loop.done, oldest=loop.done, prepared=loop.prepared, newcomer=self._newcomer, held=held)

    def plan(self, agreed: Agreed) -> str:
        """Who holds what, computes what and sends what, from what everybody reported."""
        try:
            return self._plan(agreed, {rank: json.loads(report.held) for rank, report in agreed.reports.items()})
        except BelowMinimum as found:
            raise BelowMinimum(found.what, way_out=f"{_restart(self._args)}, or lower --ntp-min-tp-width") from found
        except StateLost as found:
            raise StateLost(
                found.what, way_out=f"{_restart(self._args)}; before the next run: {found.way_out}"
            ) from found

    def _plan(self, agreed: Agreed, told: Mapping[int, tuple[str | None, str | None]]) -> str:
        live = {rank: Held.decode(held) for rank, (held, _) in told.items() if held is not None}
        self._from_copies = len(live) < len(told)
        if not self._from_copies:
            try:
                self._next = plan_relayout(self._nominal, live, agreed.view.epoch)
            except StateLost:
                if self.copies is None:
                    raise
                self._from_copies = True
            else:
                self._goal = self._next[0].goal
                return digest_of(self._next)
        lost = frozenset(self._topology.slot_of(rank) for rank in range(self._topology.size) if rank not in told)
        self._goal = plan_recovery(self._nominal, lost=lost, lost_before=lost)
        versions = [] if self.copies is None else self.copies.choose(copied or "" for _, copied in told.values())
        if not versions:
            raise StateLost(
                f"{', '.join(map(str, sorted(lost))) or 'no slot'} lost after {agreed.decision.step} sections, and"
                " with them what only they held: there is no version of it of which all parts are copied",
                way_out="switch copies on (copies.mode)" if self.copies is None else "set copies.count higher",
            )
        return f"{self._goal.digest} {versions}"

    def stand_on(self, agreed: Agreed) -> None:
        """Roll forward, move what changes hands, compare everything, and have Megatron run in the new layout."""
        if agreed.decision.roll_forward:
            mine = self._groups.slot in agreed.decision.roll_forward
            self._loop.roll_forward(mine=mine, newcomer=self._newcomer, really=not self._from_copies)
        self._loop.begin_again()
        self._put_back()
        if self._from_copies:
            self._put_together = True
            self._lose_state(agreed)
        else:
            self._lost = self._next[self.layout().slot.stage].lost
            relayout(self._next, self._state, self._groups, step=agreed.decision.step)
        if any(report.newcomer for report in agreed.reports.values()):
            self._share_counts()
        assert self._loop.done == agreed.decision.step, "all stand on one step"
        self._idle = frozenset(self._goal.idle)
        layout = self.layout(self.lost, self._idle)
        self._ranks.tell(layout, self._make_groups)
        self._args.rank, self._args.world_size = layout.rank, len(layout.present)
        self.idle, self.first = layout.is_idle, layout.slots[0] == layout.slot
        if self.idle:
            self._make_groups(list(wanted_groups(layout, self._goal).values()))
        else:
            self._put_in(layout)
        if self._sharded:
            self._shard_again(layout)
        if self.copies is not None:
            self._settle_copies(self.copies, layout)
        self._newcomer = False
        self._tell(agreed)

    # ------------------------------------------------ state from copies

    def _lose_state(self, agreed: Agreed) -> None:
        """Make room for parts of the size that they will have; whatever lives is of no use."""
        epoch, topology = agreed.view.epoch, self._topology
        gone = tuple(rank for rank in range(topology.size) if rank not in agreed.reports)
        self._lost = {epoch: gone}
        layout = self.layout(self.lost, frozenset(self._goal.idle))
        naming = self._naming(layout)
        for name, tensor in naming.tensors.items():
            shape = (0,) if layout.is_idle else local_shape(tensor, naming.units(tensor))
            entries = {
                entry: torch.empty(shape, dtype=values.dtype, device=values.device)
                for entry, values in self._state.entries(name).items()
                if entry in (WEIGHT, MAIN)
            }
            self._state.build(name, epoch, entries, {})
        self._state.switch()

    def _shard_again(self, layout: Layout) -> None:
        """Have the optimizer be the one that Megatron builds for the shards of now."""
        take_back = apply_all(hooks.of_the_optimizer(self._sync), offered=False) if self._sync else _nothing
        try:
            self.among_those_who_train(self._anatomy.build_optimizer_again)
        finally:
            take_back()
        if not layout.is_idle:
            self._state.optimizer = self._anatomy.optimizer.optimizer

    def _settle_copies(self, copies: JobCopies, layout: Layout) -> None:
        if self._from_copies:
            members = [self._topology.rank_of(slot) for slot in layout.present]
            copies.restore(functools.partial(self._make_room, layout), members)
            self.among_those_who_train(self._have_weights)
            self._put_together = False
        copies.settle(layout, self._parts)

    def _stepped(self, layout: Layout) -> list[Stepped]:
        naming = self._naming(layout)
        if not self._sharded:
            parameters, mains = self._state.parameters, _mains(self._anatomy.optimizer, self._state.parameters)
            return whole_parameters({name: mains.get(name, parameters[name]) for name in parameters}, naming, layout)
        if self._sync is not None:
            return shards_of_lanes(self._sync, naming)
        (optimizer,) = self._anatomy.optimizer.chained_optimizers
        names = {parameter: name for name, parameter in self._state.parameters.items()}
        return megatrons_shards(optimizer, names, naming, layout)

    def _naming(self, layout: Layout) -> Naming:
        return Naming(layout, self._nominal.units.stages[layout.slot.stage])

    def _parts(self) -> list[Part]:
        layout = self.layout(self.lost, self._idle)
        return parts(self._stepped(layout), self._anatomy.optimizer.optimizer)

    def _make_room(self, layout: Layout, kinds: Mapping[str, Any]) -> list[Part]:
        if layout.is_idle:
            return []
        return make_room(self._stepped(layout), self._anatomy.optimizer.optimizer, kinds)

    @torch.no_grad()
    def _have_weights(self) -> None:
        """Of what is stepped, on all who train."""
        if not self._sharded:
            for name, main in _mains(self._anatomy.optimizer, self._state.parameters).items():
                self._state.parameters[name].data.copy_(main)
        elif self._sync is not None:
            for lanes in self._sync.shards:
                lanes.begin_spread()
                lanes.finish_spread()
        else:
            self._anatomy.optimizer.chained_optimizers[0]._copy_main_params_to_model_params()
            for chunk in self._anatomy.chunks:
                chunk.start_param_sync(force_sync=True)

    def _tell(self, agreed: Agreed) -> None:
        """Whoever looks on hears that this rank goes on, and in which layout."""
        topology, lost = self._topology, self.lost
        since, self._walking_since = self._walking_since or time.monotonic(), None
        standing = Standing(topology=topology, lost=lost, min_tp_width=self._policy.min_tp_width)
        stages, shares = range(topology.pp), {share.replica: share.count for share in self._goal.batch.shares}
        back = [rank for rank, report in agreed.reports.items() if report.newcomer]
        self._teller.tell(
            Recovered(
                epoch=agreed.view.epoch,
                seconds=time.monotonic() - since,
                lost=[str(slot) for slot in sorted(lost)],
                back=[str(topology.slot_of(rank)) for rank in sorted(back)],
                widths=[
                    [topology.tp - len(standing.pattern(replica, stage)) for stage in stages]
                    for replica in range(topology.dp)
                ],
                micro_batches=[shares.get(replica, 0) for replica in range(topology.dp)],
            )
        )

    def _share_counts(self) -> None:
        """What the job has counted so far, from who was there to newcomers."""
        told: list[Counts | None] = [None] * len(self._groups.members)
        dist.all_gather_object(told, None if self._newcomer else count(self._args, self._anatomy, self._loop))
        if self._newcomer:
            adopt(next(counts for counts in told if counts), self._args, self._anatomy, self._loop)
            if self.copies is not None:
                self.copies.steps = self.copies.state_of = self._args.iteration

    @property
    def slot_number(self) -> int:
        return self._groups.slot

    def held_alike(self) -> Iterator[tuple[Piece, dict[str, torch.Tensor]]]:
        """What every replica has, by the pieces that this rank has of it."""
        layout = self.layout(self.lost, self._idle)
        naming, slot = self._naming(layout), layout.slot
        for name, tensor in naming.tensors.items() if not layout.is_idle else ():
            whole = f"r{slot.replica}{naming.stage(name)}" + f"t{slot.tp}" * (not tensor.family)
            entries = self._state.entries(name)
            piece = naming.piece(name, naming.places(name), 0, entries[WEIGHT].numel(), whole)
            yield piece, {WEIGHT: entries[WEIGHT]} if self._sharded else entries

    @torch.no_grad()
    def wait_for_weights(self) -> None:
        """With `--overlap-param-gather` they are on their way when a step ends."""
        for chunk in self._anatomy.chunks if self._sharded else ():
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)

    # ------------------------------------------------ while some stand idle

    def among_those_who_train[Result](self, work: Callable[[], Result]) -> Result | None:
        """Something that Megatron does with the whole world, done by those who train as if they were that; all members
        call this, and it does nothing on the others."""
        if not self._idle:
            return work()
        world = self._world_of_those_who_train()
        if self.idle:
            return None
        with _instead_of_the_world(world):
            return work()

    def _world_of_those_who_train(self) -> Any:
        """A group, made once in an epoch."""
        if self._worlds.keys() != {self._groups.epoch}:
            layout = self.layout(self.lost, self._idle)
            (made,) = self._make_groups([layout.slots])
            self._worlds = {self._groups.epoch: made or self._alone}
        return self._worlds[self._groups.epoch]

    # ------------------------------------------------ Megatron's functions

    def _put_back(self) -> None:
        self._take_back()
        self._take_back = _nothing
        self.share, self._sync, self._samples.make_training = None, None, _as_it_is
        if self._own is not None:
            config, finalize = self._own
            config.finalize_model_grads_func = finalize

    def _put_in(self, layout: Layout) -> None:
        anatomy, args = self._anatomy, self._args
        if self._own is None:  # Megatron sets it when training begins, which a newcomer comes in before
            config = anatomy.chunks[0].config
            self._own = config, config.finalize_model_grads_func or finalize_model_grads
        job = Job(
            layout,
            self._policy,
            args,
            make_groups=self._make_groups,
            alone=lambda: self._alone,
            plan=self._goal,
        )
        sync, layers = LaneSync(job), UnevenLayers(layout, args, granule=self._policy.granule)
        hurt = layout.hurt
        self._sync = sync if hurt else None
        self._take_back = apply_all(
            hooks.of_a_layout(job, layers, sync) if hurt else hooks.of_layers(layers), offered=False
        )
        anatomy.take_over(anatomy.elsewhere())
        if not hurt:
            self._take_back()
            self._take_back = _nothing
        anatomy.wrap_again()
        if hurt:
            self.share = BatchShare(job, sync)
            self._samples.make_training = self.share.by_share
        if anatomy.masks is not None:
            anatomy.masks.stand_in(layout, self.share.places if self.share else hooks.nominal_places(layout))

    def _make_groups(self, wanted: Sequence[Sequence[Slot]]) -> list[Any]:
        tuples = [tuple(sorted(map(self._topology.rank_of, slots))) for slots in wanted]
        return list(self._groups.make_lanes(tuples, timeout_s=_CONNECT_S))


@contextlib.contextmanager
def _instead_of_the_world(group: Any) -> Iterator[None]:
    """Its ranks are the global ones then."""
    everybody, ranks = dist.group.WORLD, c10d._world.pg_group_ranks[group]
    c10d._world.pg_group_ranks[group] = {own: own for own in ranks.values()}
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(everybody)
        c10d._world.pg_group_ranks[group] = ranks


def _mains(optimizer: Any, parameters: Mapping[str, Any]) -> dict[str, torch.nn.Parameter]:
    """The float32 copies that are stepped instead of parameters in bf16, by the parameters' names."""
    names = {parameter: name for name, parameter in parameters.items()}
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    if len(chained) != 1:
        raise Refused(
            f"Megatron made {len(chained)} optimizers for this model, and only one can be taken through a loss",
            way_out="leave out what some parameters have an optimizer of their own for, or start by torchrun",
        )
    (optimizer,) = chained
    groups = zip(
        getattr(optimizer, "float16_groups", ()), getattr(optimizer, "fp32_from_float16_groups", ()), strict=True
    )
    pairs = [pair for halves, mains in groups for pair in zip(halves, mains, strict=True)]
    return {names[half]: main for half, main in pairs}


def _restart(args: Any) -> str:
    saved = f"the last checkpoint in {args.save}" if args.save else "the last checkpoint (this job saves none: --save)"
    return f"restart from {saved}"


def _nothing() -> None:
    """There is nothing to take back."""


def _as_it_is(even: Any) -> Any:
    return even
