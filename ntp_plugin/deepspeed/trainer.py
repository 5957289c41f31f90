"""A rank's part in a recovery of a DeepSpeed job: report, plan, resume.

The job resumes from its last vote (`recovery/voted_sections.py`). Without ZeRO every replica holds everything: a rank
that has not applied a step that others have applies it, joining ranks receive the state, and all compare. If replicas
leave as a whole, nothing else is moved; if AutoTP has cut them, the lost slot's units are dealt to the others
(`autotp_replicas.py`). With ZeRO a lost rank takes its shard with it, so all ranks go back to the newest copies, which
may be one step older: the loop takes that step again. Copies are restored into any planned layout, cut or not.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.utils import groups

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow
from ntp_plugin.deepspeed.autotp_replicas import CutReplicas
from ntp_plugin.deepspeed.engine_counters import count
from ntp_plugin.deepspeed.full_width_replicas import FullWidthReplicas
from ntp_plugin.deepspeed.full_width_state import FullWidthState, hand_over
from ntp_plugin.deepspeed.inventory import refuse_unknown
from ntp_plugin.deepspeed.sharded_weights import is_sharded, slice_of
from ntp_plugin.deepspeed.zero_state import ZeroState
from ntp_plugin.errors import Refused, StateLost
from ntp_plugin.membership.agreement import Agreed
from ntp_plugin.membership.protocol import Report
from ntp_plugin.planning.topology import SurvivingReplicas, Topology
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.fault_points import Weight
from ntp_plugin.recovery.job_copies import JobCopies, WhoTrains
from ntp_plugin.recovery.replica_comparison import ReplicatedState
from ntp_plugin.recovery.voted_sections import Loop
from ntp_plugin.resharding.rebuild import WEIGHT
from ntp_plugin.telemetry import EventWriter, Recovered

_LOG = logging.getLogger(__name__)


class EngineProgress:
    """What goes with the copies of shards: the engine counters."""

    def __init__(self, engine: Any, topology: Topology) -> None:
        self._engine, self._topology = engine, topology
        self.found: Mapping[str, Any] = {}

    def extras(self) -> dict[str, Any]:
        """Return the current counters, between two steps."""
        return {
            "framework": "deepspeed",
            "ranks": self._topology.size,
            "replicas": self._topology.dp,
            "each": self._engine.gradient_accumulation_steps(),
            "engine": count(self._engine),
        }

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """Keep the counters of the copies, from which the accumulation window restarts."""
        now = self.extras()
        # The samples of a step depend on the replicas and their loaders.
        for what in ("framework", "ranks", "replicas", "each"):
            if extras.get(what) != now[what]:
                raise Refused(
                    f"the copies are of a job with {what} = {extras.get(what)}, and this one has {now[what]}",
                    fix="resume with the script, the configuration and the number of ranks of that run",
                )
        self.found = extras["engine"]


class EngineTrainer:
    """A `Trainer` for DeepSpeed. Until there is an engine, its job cannot go on after a loss."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank, self._joiner = rank, rank.place.joining
        self._engine: Any = None
        self._window: AccumulationWindow
        self._loop: Loop
        self._event_writer: EventWriter
        self.topology: Topology
        self._replicas: CutReplicas | FullWidthReplicas
        self._state: FullWidthState
        """Set if there is no ZeRO, and replicas leave as a whole."""
        self._zero: ZeroState | None = None
        self._how_far: EngineProgress
        self._strict: bool
        """Whether unknown state is refused."""
        self.copies: JobCopies | None = None
        """Set with ZeRO, unless copies are switched off."""

    def take(
        self,
        engine: Any,
        policy: TrainingPolicy,
        *,
        window: AccumulationWindow,
        loop: Loop,
        event_writer: EventWriter,
        topology: Topology,
    ) -> None:
        """Take the engine; all founders take part."""
        self._window, self._loop, self._event_writer, self.topology = window, loop, event_writer, topology
        if engine.autotp_size() > 1:
            self._replicas = CutReplicas(engine, policy, topology, rank=self._rank, joiner=self._joiner)
        else:
            self._replicas = FullWidthReplicas(engine, topology, rank=self._rank)
        window.replicas = self._replicas
        if int(engine.zero_optimization_stage()):
            everybody = range(topology.size)
            alone = functools.partial(self._rank.groups.alone, everybody)
            self._zero = ZeroState(engine, self._replicas, built_alone=alone)
            self._copy(engine, policy, self._zero)
        elif isinstance(self._replicas, FullWidthReplicas):
            self._state = FullWidthState(engine, self._replicas)
        self._engine = engine

    def together(self) -> Collection[int]:
        """Return the slots without which this one cannot train."""
        return self._replicas.others_of_mine if isinstance(self._replicas, FullWidthReplicas) else ()

    def _copy(self, engine: Any, policy: TrainingPolicy, zero: ZeroState) -> None:
        if policy.copies.mode == "off":
            if not self._rank.place.slot:
                _LOG.warning(
                    "ZeRO without copies (ntp.copies.mode): a lost rank takes its shard with it, and ends the job"
                )
            return
        refuse_unknown(engine, strict=policy.copies.strict)
        self._strict = policy.copies.strict
        self._how_far = EngineProgress(engine, self.topology)
        self.copies = JobCopies(
            policy.copies,
            self.topology,
            rank=self._rank,
            carried=self._how_far,
            steps=self._window.step,
            event_writer=self._event_writer,
        )
        self._window.copies = self.copies
        if not self._joiner:
            self.copies.settle(self._who_trains(tuple(range(self.topology.size))), zero.parts)

    def resume(self, folder: Path) -> None:
        """Begin from the copies of a dead run; all founders take part."""
        if self.copies is None or self._zero is None:
            raise Refused(
                "--ntp-resume: a job without ZeRO, or without copies, has made none that it could begin from",
                fix="load the last checkpoint",
            )
        refuse_unknown(self._engine, strict=self._strict, resumes=True)
        slots = tuple(range(self.topology.size))
        step = self.copies.resume(folder, self._zero.make_room, slots)
        self._zero.have_weights(self._replicas.lane_of(self._rank.place.slot))  # from the first of each lane
        self._window.restart(step, self._replicas.numbers, self._how_far.found)
        self._window.checkpoints.resumed(folder)
        _LOG.warning("resumed from the copies in %s: %d steps are done", folder, step)

    def _who_trains(self, slots: tuple[int, ...]) -> WhoTrains:
        everybody = [self.topology.slot_of(rank) for rank in range(self.topology.size)]
        there = tuple(everybody[slot] for slot in slots)
        surviving = SurvivingReplicas(topology=self.topology, lost=frozenset(everybody) - set(there), min_tp_width=1)
        return WhoTrains(trains=there, present=there, lost_nodes=surviving.lost_nodes)

    def weights(self) -> Iterator[Weight]:
        """Yield what this slot holds of the model."""
        replicas = self._replicas
        for name, values in self._whole_parameters():
            yield Weight(tensor_slice=replicas.part(name), values=values, is_cut=replicas.is_cut(name))
        for name, parameter in self._engine.module.named_parameters():
            for _, start, stop, at in slice_of(parameter).overlaps() if is_sharded(parameter) else ():
                yield Weight(
                    tensor_slice=dataclasses.replace(replicas.part(name), start=start, stop=stop),
                    values=slice_of(parameter).values[at : at + stop - start],
                    is_cut=False,
                    shared_by="all ranks",
                )

    def _whole_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter]]:
        named = self._engine.module.named_parameters()
        yield from ((name, parameter) for name, parameter in named if not is_sharded(parameter))

    def replicated_state(self) -> ReplicatedState:
        """Yield what every replica holds: with ZeRO only the weights, with ZeRO-3 nothing."""
        replicas = self._replicas
        if isinstance(replicas, CutReplicas):
            yield from replicas.replicated_state()
            return
        of, stepped = f"r{self.topology.slot_of(self._rank.place.slot).replica}", set[str]()
        for entry in self._state.replicated_state(of) if self._zero is None else ():
            stepped.add(entry[0])
            yield entry
        for name, values in self._whole_parameters():
            tensor_slice = dataclasses.replace(replicas.part(name), whole=of)
            if tensor_slice.tensor not in stepped:
                yield tensor_slice.tensor, "", tensor_slice, {WEIGHT: values}

    def distrust(self, since: int) -> None:
        """Discard copies of later steps than `since`, before the job stops."""
        if self.copies is not None:
            self.copies.distrust_since(since)

    # ------------------------------------------------ a recovery

    def report(self) -> Report:
        """Report what this rank holds. An update is made in place, so there is no way back except to copies."""
        if self._engine is None:
            raise Refused("a rank was lost before there was an engine", fix="start the job again")
        loop, held = self._loop, ""
        if self.copies is not None:
            held = self.copies.describe()
        elif isinstance(self._replicas, CutReplicas):
            held = self._replicas.held()
        return Report(applied=loop.done, oldest=loop.done, prepared=loop.prepared, joiner=self._joiner, held=held)

    def plan(self, agreed: Agreed) -> str:
        """Plan who computes what, which follows from the members, and which copies to restore."""
        versions, layout = "", self._replicas.plan(agreed)
        if self._zero is not None:
            found = [] if self.copies is None else self.copies.choose(report.held for report in agreed.reports.values())
            if not found:
                raise StateLost(
                    f"{len(agreed.reports)} of {self.topology.size} ranks are left, and no version of the"
                    " shards is copied completely",
                    fix="restart from the last checkpoint; before the next run: switch copies on (ntp.copies.mode),"
                    " or set ntp.copies.count higher",
                )
            versions = repr(found)
        fields = json.dumps([agreed.view.encode(), repr(agreed.decision), versions, layout])
        return hashlib.blake2b(fields.encode(), digest_size=16).hexdigest()

    def resume_from(self, agreed: Agreed) -> None:
        """Roll forward, get the agreed state, and restart the accumulation window."""
        loop, slots = self._loop, agreed.view.slots
        if agreed.decision.roll_forward:
            rolls = self._rank.groups.slot in agreed.decision.roll_forward
            loop.roll_forward(mine=rolls, joiner=self._joiner, really=self._zero is None)
        loop.begin_again()
        loop.done = agreed.decision.step
        if self._zero is not None:
            self._replicas.resume_from(agreed)
            self._put_together(self._zero, slots, self._rank.groups.rank_of(self._replicas.who_was_there(agreed)))
        else:
            self._have_all(agreed)
        if any(report.joiner for report in agreed.reports.values()):
            self._share_saved(agreed)
        self._joiner = False
        self._have_engine_know()
        self._window.around.line_up()
        self._record_recovery(agreed)
        self._window.checkpoints.refuse_to_end_behind()

    def _share_saved(self, agreed: Agreed) -> None:
        checkpoints, around = self._window.checkpoints, self._window.around
        is_giver = self._rank.place.slot == min(slot for slot, report in agreed.reports.items() if not report.joiner)
        gathered: list[tuple[Any, Any]] = [(None, None)] * dist.get_world_size()
        dist.all_gather_object(gathered, (checkpoints.saved, around.progress() if is_giver else None))
        if self._joiner:
            checkpoints.saved = next((saved for saved, _ in gathered if saved is not None), None)
            around.take_progress(next((progress for _, progress in gathered if progress is not None), None))

    # ------------------------------------------------ without ZeRO

    def _have_all(self, agreed: Agreed) -> None:
        """Get and compare the state of the others; then go on, or restart the accumulation window."""
        goes_on = self._window.votes_on == agreed.decision.step
        progress: Mapping[str, Any] = {}
        if any(report.joiner for report in agreed.reports.values()):
            progress = self._hand_over(knows=not (goes_on or self._joiner))
        self._replicas.resume_from(agreed)
        if isinstance(self._replicas, FullWidthReplicas):
            self._state.compare(agreed.view.slots, agreed.decision.step)
        numbers = self._replicas.numbers
        if goes_on:
            self._window.go_on(numbers)
        elif self._joiner:
            self._window.restart(progress["step"], numbers, progress["engine"])
        else:
            self._window.restart(self._window.step, numbers)

    def _hand_over(self, *, knows: bool) -> Mapping[str, Any]:
        """Send the state to joining ranks, from the first rank that is fully at the decided step; return its
        progress."""
        lane = self._replicas.lane_of(self._rank.place.slot)
        mine = {"rank": dist.get_rank(), "lane": lane, "step": self._window.step, "engine": self._window.counted()}
        gathered: list[Mapping[str, Any] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, mine if knows else None)
        givers = {one["lane"]: one for one in reversed(gathered) if one is not None}
        if len(givers) < self._replicas.lanes_apart:  # the driver then goes on without joining ranks
            raise RuntimeError("all members are within a step, and none can send its progress to a joining rank")
        giver: Mapping[str, Any] = givers[lane]
        if isinstance(self._replicas, FullWidthReplicas):
            self._state.hand_over(giver["rank"], joiner=self._joiner)
        else:  # the rest is moved in parts
            hand_over(self._engine.module.buffers(), giver["rank"], joiner=self._joiner)
        return giver

    # ------------------------------------------------ with ZeRO

    def _put_together(self, zero: ZeroState, slots: tuple[int, ...], giver: int) -> None:
        copies = self.copies
        assert copies is not None, "without copies there is no plan"
        zero.build_again()
        try:
            copies.restore(zero.make_room, slots)
        except StateLost as found:
            raise StateLost(found.what, fix="restart from the last checkpoint") from found
        zero.have_weights(giver)
        copies.steps = copies.state_of
        self._window.restart(copies.state_of, self._replicas.numbers, self._how_far.found)
        copies.settle(self._who_trains(slots), zero.parts)

    # ------------------------------------------------ afterwards

    def _have_engine_know(self) -> None:
        """Update the engine: its rank, and who writes for all."""
        engine, first = self._engine, dist.get_rank() == 0
        became_first = first and engine.global_rank != 0
        engine.global_rank, engine.world_size = dist.get_rank(), dist.get_world_size()
        if became_first:
            engine.monitor = MonitorMaster(engine._config.monitor_config)
        if isinstance(self._replicas, CutReplicas):
            return
        # a checkpoint records its number of shards
        engine.seq_dp_world_size = groups._get_sequence_data_parallel_world_size()
        if not (engine.use_node_local_storage() or self._window.gathers_weights):  # with ZeRO-3 each rank writes
            writes = engine.checkpoint_engine.is_data_parallel_writer
            engine.save_non_zero_checkpoint = writes(groups._get_sequence_data_parallel_rank())

    def _record_recovery(self, agreed: Agreed) -> None:
        slots, everybody, shares = set(agreed.view.slots), range(self.topology.size), self._replicas.shares
        named = {slot: str(self.topology.slot_of(slot)) for slot in everybody}
        seconds, phases = self._rank.recovery_times()
        if self._engine.monitor.enabled and not dist.get_rank():
            numbers = {"NTP/ranks": len(slots), "NTP/epoch": agreed.view.epoch, "NTP/recovery_s": seconds}
            samples = self._window.counted()["counters"]["global_samples"]
            self._engine.monitor.write_events([(name, value, samples) for name, value in numbers.items()])
        self._event_writer.write(
            Recovered(
                epoch=agreed.view.epoch,
                seconds=seconds,
                phases=phases,
                lost=[named[slot] for slot in everybody if slot not in slots],
                back=[named[slot] for slot, report in sorted(agreed.reports.items()) if report.joiner],
                widths=self._replicas.widths,
                micro_batches=[len(shares.get(replica, ())) for replica in range(self.topology.dp)],
            )
        )
