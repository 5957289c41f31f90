"""A rank's part in a recovery of a live Megatron job: report, plan, resume.

A loss may interrupt `resume_from` anywhere. `resharding/reshard.py` keeps parameters and optimizer state consistent.
Everything else is rebuilt each time: Megatron's own functions are restored first, then what the new layout needs is
installed. So the result does not depend on the layouts before, and with nobody lost Megatron runs unchanged again.
"""

import contextlib
import functools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from megatron.core.distributed import finalize_model_grads

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.megatron import hooks
from ntp_plugin.megatron.batch_schedule import batch_schedule
from ntp_plugin.megatron.batch_share import BatchShare
from ntp_plugin.megatron.job import JobPlan, nominal_job, share_units
from ntp_plugin.megatron.job_shape import makes_copies
from ntp_plugin.megatron.layers.uneven_experts import UnevenExperts
from ntp_plugin.megatron.layers.uneven_layers import UnevenLayers
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live.copies import LoopProgress, refuse_unknown, who_trains
from ntp_plugin.megatron.live.counts import Counts, adopt, count
from ntp_plugin.megatron.live.expert_bias import ExpertBias
from ntp_plugin.megatron.live.group_caches import forget_groups, forget_quantized_weights
from ntp_plugin.megatron.live.logs import into_logs
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild, stages_in_config
from ntp_plugin.megatron.live.next_plan import NextPlan, restart
from ntp_plugin.megatron.live.ranks import MegatronRanks
from ntp_plugin.megatron.live.samples import SampleHooks
from ntp_plugin.megatron.live.state import TrainedState
from ntp_plugin.megatron.live.trained_parameters import Trainees
from ntp_plugin.megatron.live.unfinished_save import UnfinishedSave
from ntp_plugin.megatron.moved_layers import have_own_stages, layers_of, why_none_moves
from ntp_plugin.megatron.reduction.lane_groups import wanted_groups
from ntp_plugin.megatron.reduction.lane_sync import LaneSync, bare, described, named
from ntp_plugin.megatron.switched_off import SwitchedOff
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report
from ntp_plugin.patching import apply_all
from ntp_plugin.planning.expert_groups import require_experts_in_all_stages
from ntp_plugin.planning.layer_cuts import Layers
from ntp_plugin.planning.topology import Slot, Topology
from ntp_plugin.planning.units import OF_UNITS
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.job_copies import JobCopies
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.resharding.reshard import refuse_unequal_replicas, relayout, relayout_weights
from ntp_plugin.resharding.reshard_plan import AvailableVersions, plan_relayout
from ntp_plugin.telemetry import CopyTrouble, EventWriter, Recovered

_LOG = logging.getLogger(__name__)
_UNITS = "units of all stages"
_CONNECT_S = 5.0
"""Time for a member to connect to a lane. A death ends the wait at once, so this is only for undetected trouble."""


class MegatronTrainer:
    """The `Trainer` of one rank."""

    def __init__(
        self,
        args: Any,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        loop: Loop,
        model_rebuild: ModelRebuild,
        samples: SampleHooks,
        joiner: bool,
        event_writer: EventWriter,
    ) -> None:
        self._args, self._policy, self._topology = args, policy, topology
        self._rank, self._groups = rank, rank.groups
        self._loop, self._model_rebuild, self._samples = loop, model_rebuild, samples
        self._joiner, self._event_writer = joiner, event_writer
        self.share: BatchShare | None = None
        """This replica's share of the global batch, while any slot is lost."""
        self.idle, self.first = False, self._groups.slot == 0
        """Whether this rank trains nothing, because its replica is too narrow; whether it is the first rank that
        trains."""
        slot = topology.slot_of(self._groups.slot)
        self.records_samples = slot.stage == 0 and slot.replica % topology.cp == 0
        """Whether this rank records the samples that it draws: one replica of those that draw the same does."""
        self._idle: frozenset[Slot] = frozenset()
        """All idle slots."""
        self._trainees = Trainees(self._make_groups, lambda: self._alone)
        self.bias = ExpertBias(
            lambda: [bare(chunk) for chunk in model_rebuild.chunks],
            lambda: (self.state.sync.stage or self._alone) if self.state.sync else None,
        )
        self._plan: NextPlan
        self.state: TrainedState
        self.copies: JobCopies | None = None
        """The copies, if this job makes them."""
        self.how_far: LoopProgress
        """Goes with the copies."""
        self.saves: UnfinishedSave
        self._held_once = topology.dp == 1
        self._put_together = False
        """Whether restoring state from copies has begun and not ended."""
        self._sharded = bool(args.use_distributed_optimizer)
        self._alone: Any = None
        self._own: tuple[Any, Any] | None = None
        """The model's configuration, and how Megatron itself ends a backward."""
        self._take_back = self._rest = _nothing
        self._ranks, self._switched_off = MegatronRanks(), SwitchedOff(args)
        self._lost: Mapping[int, tuple[int, ...]] = {0: ()}
        self._layers: Layers | None = None
        """Set if layers may move to other stages."""
        self.why_none_moves = ""
        """Why a replica that has lost a stage is dropped; empty if its layers move."""

    def layout(self, lost: frozenset[Slot] = frozenset(), idle: frozenset[Slot] = frozenset()) -> Layout:
        """Return the layout of the members, without the lost slots."""
        rank = self._groups.rank_of(self._groups.slot)
        return Layout(topology=self._topology, lost=lost, idle=idle, rank=rank, layers=self._layers)

    @property
    def too_large_below(self) -> int:
        """Replicas of fewer slots would not fit into the memory limit of the job; 0 if all fit."""
        return self._plan.too_large_below

    @property
    def lost(self) -> frozenset[Slot]:
        """The slots that are not members now."""
        newest = self._lost[max(self._lost)]
        return frozenset(map(self._topology.slot_of, newest))

    def begin(self) -> None:
        """Take the model, once there is one, and refuse what could not be cut; all ranks take part."""
        self.why_none_moves = why_none_moves(self._args, self._policy, self._topology)
        if not self.why_none_moves:
            self._layers = layers_of(self._args, self._policy, self._topology)
            self._samples.on_every_stage = True
        layout, model_rebuild = self.layout(), self._model_rebuild
        layers = UnevenLayers(layout, self._args, granule=self._policy.granule)
        take_back = apply_all(hooks.of_layers(layers), offered=False)
        try:
            model_rebuild.take_over(model_rebuild.elsewhere())
        finally:
            take_back()
        parameters = dict(named(model_rebuild.chunks))
        if self._joiner:
            of_all = self._rank.shared_value(_UNITS, kinds=OF_UNITS)
        else:
            of_all = share_units(layout, described(parameters, layout, self._args.seq_length))
            if layout.rank == 0:
                self._rank.share_with_joiners(_UNITS, of_all)
        if self._topology.expert_slots:
            require_experts_in_all_stages(of_all)
        nominal = nominal_job(layout, self._policy, self._args, of_all)
        self._plan = NextPlan(self._args, self._policy, nominal, slot=self.slot_number, event_writer=self._event_writer)
        self.state = TrainedState(model_rebuild, parameters, nominal, sharded=self._sharded, joiner=self._joiner)
        self._alone = dist.new_group([dist.get_rank()], use_local_synchronization=True)
        if not (self._joiner or self._sharded or self._topology.expert_slots):
            self._refuse_unequal_replicas()
        self._begin_copies()

    def _begin_copies(self) -> None:
        policy = self._policy.copies
        if not makes_copies(policy, self._topology, sharded=self._sharded):
            return
        refuse_unknown(self._args, self._model_rebuild, strict=policy.strict)
        self.how_far = LoopProgress(self._args, self._model_rebuild, self.bias, slot=self.slot_number)
        self.copies = JobCopies(
            policy,
            self._topology,
            rank=self._rank,
            carried=self.how_far,
            steps=self._args.iteration,
            event_writer=self._event_writer,
        )
        if not self._joiner:
            layout = self.layout()
            self.copies.settle(who_trains(layout), functools.partial(self.state.parts, layout))

    def _refuse_unequal_replicas(self) -> None:
        stages, slot_of = self._plan.nominal.units.stages, self._topology.slot_of
        held = {
            rank: AvailableVersions(versions=(0,) * len(stages[slot_of(rank).stage].tensors), built=(), lost={0: ()})
            for rank in range(self._topology.size)
        }
        refuse_unequal_replicas(plan_relayout(self._plan.nominal, held, 0), self.state.live, self._groups)

    def resume(self) -> None:
        """Begin from what a dead run has left in memory, if the user wants that; all founders take part."""
        folder = self._rank.place.resume
        if folder is None or self._joiner:
            return
        if self.copies is None:
            raise Refused(
                "--ntp-resume: this job makes no copies, so there are none to resume from",
                fix="--ntp-copies-protect all in both runs, or begin from the last checkpoint",
            )
        layout = self.layout()
        members = [self._topology.rank_of(slot) for slot in layout.present]
        step = self.copies.resume(folder, functools.partial(self.state.make_room, layout), members)
        self.state.have_weights()
        self.how_far.count_from(step)
        self._samples.rewind()
        _LOG.warning("resumed from the copies in %s: %d steps are done", folder, step)

    # ------------------------------------------------ a recovery

    def report(self) -> Report:
        """Report what this rank holds. An update is made in place, so there is no way back."""
        loop = self._loop
        from_peers = not (self._sharded or self._topology.expert_slots or self._put_together)
        live = self.state.live.held(self._lost).encode() if from_peers else None
        copied = None if self.copies is None else self.copies.describe()
        held = json.dumps([live, copied])
        return Report(applied=loop.done, oldest=loop.done, prepared=loop.prepared, joiner=self._joiner, held=held)

    def plan(self, agreed: Agreed) -> str:
        """Plan who holds, computes and sends what, from what all ranks reported."""
        return self._plan.make(agreed, known=None if self._joiner else self.lost, copies=self.copies)

    def resume_from(self, agreed: Agreed) -> None:
        """Roll forward, move what changes hands, compare everything, and set Megatron up for the new layout."""
        if agreed.decision.roll_forward:
            mine = self._groups.slot in agreed.decision.roll_forward
            self._loop.roll_forward(mine=mine, joiner=self._joiner, really=not self._plan.from_copies)
        self._loop.begin_again()
        self._put_back()
        self._rest = _nothing
        if self._plan.from_copies:
            self._put_together = True
            lost_ranks = tuple(rank for rank in range(self._topology.size) if rank not in agreed.reports)
            self._lost = {agreed.view.epoch: lost_ranks}
            self.state.lose(self.layout(self.lost, frozenset(self._plan.goal.idle)), agreed.view.epoch)
        else:
            self._lost = self._plan.moves[self.layout().slot.stage].lost
            self._move(agreed)
        if any(report.joiner for report in agreed.reports.values()):
            self._share_counts()
        assert self._loop.done == agreed.decision.step, "all ranks resume from one step"
        self._idle = frozenset(self._plan.goal.idle)
        layout = self.layout_now
        self._ranks.tell(layout, self._make_groups, self._alone)
        forget_groups()
        forget_quantized_weights(self._model_rebuild.chunks)
        self._args.rank, self._args.world_size = layout.rank, len(layout.present)
        self.idle, self.first = layout.is_idle, layout.slots[0] == layout.slot
        self.records_samples = layout.first and layout.is_context_leader
        if self.idle:
            self._make_groups(list(wanted_groups(layout, self._plan.goal).values()))
        else:
            self._put_in(layout)
        self.state.shard_again(layout, self.among_those_who_train)
        if self.copies is not None:
            self._settle_copies(self.copies, layout)
        self._joiner = False
        self._record_recovery(agreed)
        self._warn_if_held_once(layout)

    def _move(self, agreed: Agreed) -> None:
        """Move state. A joining rank's optimizer state comes while all train, unless there are copies, which are of
        whole states."""
        ahead = self.copies is None and any(report.joiner for report in agreed.reports.values())
        moved = (relayout_weights if ahead else relayout)(
            self._plan.moves, self.state.live, self._groups, step=agreed.decision.step
        )
        if moved is not None:
            self._rest = moved

    def have_the_rest(self) -> None:
        """Receive the rest of the state, if joining ranks began with weights alone; all members call this before
        anybody steps."""
        if self._rest is not _nothing:
            self.wait_for_the_rest()

    def wait_for_the_rest(self) -> None:
        """Wait for the rest, and compare it on all ranks. Faults can be injected here."""
        self._rest()
        self._rest = _nothing

    def _warn_if_held_once(self, layout: Layout) -> None:
        """Warn once, until there are several replicas again. The number of replicas at the start decides whether copies
        are made."""
        news, self._held_once = layout.is_held_once and not self._held_once, layout.is_held_once
        if self.copies is not None or not (news and self.first):
            return
        what = (
            f"only replica {layout.slots[0].replica} still trains, so no other rank holds what its slots hold, and this"
            " job makes no copies: another loss ends it unless replicas come back before"
            " (--ntp-copies-protect all, at the start, has everything copied)"
        )
        _LOG.warning("copies: %s", what)
        self._event_writer.write(CopyTrouble(what=what))

    def _settle_copies(self, copies: JobCopies, layout: Layout) -> None:
        if self._plan.from_copies:
            members = [self._topology.rank_of(slot) for slot in layout.present]
            try:
                copies.restore(functools.partial(self.state.make_room, layout), members)
            except StateLost as found:
                raise StateLost(found.what, fix=restart(self._args)) from found
            self.among_those_who_train(self.state.have_weights)
            self._put_together = False
        copies.settle(who_trains(layout), functools.partial(self.state.parts, layout))

    def _record_recovery(self, agreed: Agreed) -> None:
        """Record that this rank goes on, and in which layout."""
        topology, lost = self._topology, self.lost
        surviving = self._plan.nominal.surviving(lost)
        size, stages = self._args.micro_batch_size, range(topology.pp)
        split = self._plan.goal.split_of(self._next_batch)
        shares = {share.replica: share.count * share.size // size for share in split.shares}
        back = [rank for rank, report in agreed.reports.items() if report.joiner]
        seconds, phases = self._rank.recovery_times()
        event = Recovered(
            epoch=agreed.view.epoch,
            seconds=seconds,
            phases=phases,
            lost=[str(slot) for slot in sorted(lost)],
            back=[str(topology.slot_of(rank)) for rank in sorted(back)],
            widths=[
                [topology.tp - len(surviving.pattern(replica, stage)) for stage in stages]
                for replica in range(topology.dp)
            ],
            micro_batches=[
                0 if replica in surviving.dropped else shares.get(topology.context_of(replica), 0)
                for replica in range(topology.dp)
            ],
        )
        self._event_writer.write(event)
        into_logs(event, self._args.curr_iteration + 1)

    @property
    def _next_batch(self) -> int:
        """The global batch of the next step, also where this rank has not counted the samples of the last one yet."""
        size = batch_schedule(self._args).at
        consumed = self._args.consumed_train_samples
        return size(consumed + size(consumed) if self._loop.in_step and self._loop.is_over else consumed)

    def _share_counts(self) -> None:
        """Send the counts of the job to joining ranks."""
        gathered: list[Counts | None] = [None] * len(self._groups.members)
        mine = count(self._args, self._model_rebuild, self._loop, self.saves.progress)
        dist.all_gather_object(gathered, None if self._joiner else mine)
        if self._joiner:
            of_a_member = next(counts for counts in gathered if counts)
            adopt(of_a_member, self._args, self._model_rebuild, self._loop)
            self.saves.progress = of_a_member.save
            if self.copies is not None:
                self.copies.steps = self.copies.state_of = self._args.iteration

    @property
    def slot_number(self) -> int:
        """The nominal rank, which stays."""
        return self._groups.slot

    @property
    def optimizer(self) -> Any:
        """Megatron's optimizer of this rank."""
        return self._model_rebuild.optimizer

    @property
    def layout_now(self) -> Layout:
        """The layout of the last recovery."""
        return self.layout(self.lost, self._idle)

    def distrust(self, since: int) -> None:
        """Discard copies of later steps than `since`, before the job stops."""
        if self.copies is not None:
            self.copies.distrust_since(since)

    def replicated_state(self) -> ReplicatedState:
        """Yield what all replicas have, including what is on its way; all members call this."""
        self.have_the_rest()
        if not self.idle:  # an idle rank still has the buckets of the layout before, and those who train do not
            self.state.wait_for_weights()
        yield from self.state.replicated_state(self.layout_now)

    def among_those_who_train[Result](self, work: Callable[[], Result]) -> Result | None:
        """Run something that Megatron does with the whole world; all members call this."""
        return self._trainees.do(work, self.layout_now, self._groups.epoch)

    # ------------------------------------------------ Megatron's functions

    def _put_back(self) -> None:
        self._take_back()
        self._take_back = _nothing
        self.share, self.state.sync, self._samples.make_training = None, None, _as_it_is
        if self._own is not None:
            config, finalize = self._own
            config.finalize_model_grads_func = finalize

    def _put_in(self, layout: Layout) -> None:
        model_rebuild, args = self._model_rebuild, self._args
        if self._own is None:  # Megatron sets it when training begins, and a rank joins before that
            config = model_rebuild.chunks[0].config
            self._own = config, config.finalize_model_grads_func or finalize_model_grads
        configs = [model_rebuild.optimizer_config, *(bare(chunk).config for chunk in model_rebuild.chunks)]
        self._switched_off.for_layout(configs, degraded=layout.degraded, reports=self.first)
        job = JobPlan(
            layout,
            self._policy,
            args,
            make_groups=self._make_groups,
            alone=lambda: self._alone,
            plan=self._plan.goal,
        )
        sync, layers = LaneSync(job), UnevenLayers(layout, args, granule=self._policy.granule)
        self._set_stages(layout)
        degraded = layout.degraded
        self.state.sync = sync if degraded else None
        self._take_back = apply_all(
            hooks.of_a_layout(job, layers, sync) if degraded else hooks.of_layers(layers), offered=False
        )
        model_rebuild.stop_waiting()
        with _nominal_contexts(configs, self._topology.cp, now=layout.context_degree):
            built = model_rebuild.elsewhere()
            model_rebuild.take_over(built)
        if self._layers is not None:
            self.state.have_model(self._groups.epoch)
        if not degraded:
            self._take_back()
            self._take_back = _nothing
        model_rebuild.wrap_again()
        if self._topology.expert_slots:
            UnevenExperts(layers).into(map(bare, model_rebuild.chunks), built, sync.dispatch)
        if degraded:
            self.share = BatchShare(job, sync)
            self._samples.make_training = self.share.by_share
        if model_rebuild.masks is not None:
            model_rebuild.masks.stand_in(
                layout, self.share.firsts if self.share else hooks.nominal_firsts(layout, args)
            )

    def _set_stages(self, layout: Layout) -> None:
        """Have Megatron build the layers that this stage has now."""
        if self._layers is None:
            return
        have_own_stages(self._args, layout)
        for chunk in self._model_rebuild.chunks:
            vars(bare(chunk).config).update(stages_in_config(self._args))

    def _make_groups(self, wanted: Sequence[Sequence[Slot]]) -> list[Any]:
        tuples = [tuple(sorted(map(self._topology.rank_of, slots))) for slots in wanted]
        return list(self._groups.make_lanes(tuples, timeout_s=_CONNECT_S))


@contextlib.contextmanager
def _nominal_contexts(configs: Sequence[Any], nominal: int, *, now: int) -> Iterator[None]:
    """Have layers be built for context groups of the nominal size: with one rank they would keep their old group. Then
    the configurations have the size of `now`, by which a rank finds how long the sequence is."""
    for config in configs:
        vars(config).update(context_parallel_size=nominal)
    yield
    for config in configs:
        vars(config).update(context_parallel_size=now)


def _nothing() -> None:
    """Nothing to undo."""


def _as_it_is(even: Any) -> Any:
    return even
