"""Report, plan, stand on, for a DeepSpeed job.

What the job stands on is its last vote (`recovery/voted_sections.py`). Without ZeRO every replica holds everything:
who had not applied a step that others have applies it, joining ranks are handed the state, and all compare; where
replicas leave whole nothing else is moved, where AutoTP has cut them what the lost slot held is dealt
(`autotp_replicas.py`). With ZeRO a rank takes its shard with it, so all go back to the newest copies, which may be of
the step before: the loop goes through that step again. They are put into whatever layout is planned, cut or not.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

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
from ntp_plugin.telemetry import Recovered, Teller

_LOG = logging.getLogger(__name__)


class EngineProgress:
    """What goes with the copies of shards: what the engine had counted."""

    def __init__(self, engine: Any, topology: Topology) -> None:
        self._engine, self._topology = engine, topology
        self.found: Mapping[str, Any] = {}

    def extras(self) -> dict[str, Any]:
        """As it is now, between two steps."""
        return {
            "framework": "deepspeed",
            "ranks": self._topology.size,
            "replicas": self._topology.dp,
            "each": self._engine.gradient_accumulation_steps(),
            "engine": count(self._engine),
        }

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """The window restarts from it."""
        now = self.extras()
        # The samples of a step are those of replicas and their loaders.
        for what in ("framework", "ranks", "replicas", "each"):
            if extras.get(what) != now[what]:
                raise Refused(
                    f"the copies are of a job with {what} = {extras.get(what)}, and this one has {now[what]}",
                    way_out="resume with the script, the configuration and the number of ranks of that run",
                )
        self.found = extras["engine"]


class EngineTrainer:
    """A `Trainer`; until there is an engine, for a job that cannot go on after a loss."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank, self._joiner = rank, rank.place.joining
        self._engine: Any = None
        self._window: AccumulationWindow
        self._loop: Loop
        self._teller: Teller
        self.topology: Topology
        self._replicas: CutReplicas | FullWidthReplicas
        self._state: FullWidthState
        """Where there is no ZeRO, and replicas leave whole."""
        self._zero: ZeroState | None = None
        self._how_far: EngineProgress
        self._strict: bool
        """Whether state that nobody knows is refused."""
        self.copies: JobCopies | None = None
        """Where there is ZeRO, unless they are switched off."""

    def take(
        self,
        engine: Any,
        policy: TrainingPolicy,
        *,
        window: AccumulationWindow,
        loop: Loop,
        teller: Teller,
        topology: Topology,
    ) -> None:
        """There is an engine now; all founders come together."""
        self._window, self._loop, self._teller, self.topology = window, loop, teller, topology
        if engine.autotp_size() > 1:
            self._replicas = CutReplicas(engine, policy, topology, rank=self._rank, joiner=self._joiner)
        else:
            self._replicas = FullWidthReplicas(engine, topology, rank=self._rank)
        window.replicas = self._replicas
        if int(engine.zero_optimization_stage()):
            self._zero = ZeroState(engine, self._replicas)
            self._copy(engine, policy, self._zero)
        elif isinstance(self._replicas, FullWidthReplicas):
            self._state = FullWidthState(engine, self._replicas)
        self._engine = engine

    def together(self) -> Collection[int]:
        """The slots without which this one cannot train."""
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
            teller=self._teller,
        )
        self._window.copies = self.copies
        if not self._joiner:
            self.copies.settle(self._who_trains(tuple(range(self.topology.size))), zero.parts)

    def resume(self, folder: Path) -> None:
        """Begin from the copies of a run that is dead; all founders come together."""
        if self.copies is None or self._zero is None:
            raise Refused(
                "--ntp-resume: a job without ZeRO, or without copies, has made none that it could begin from",
                way_out="load the last checkpoint",
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
        """What this slot has of the model."""
        replicas = self._replicas
        for name, values in self._engine.module.named_parameters():
            yield Weight(piece=replicas.part(name), values=values, is_cut=replicas.is_cut(name))

    def replicated_state(self) -> ReplicatedState:
        """What every replica has: with ZeRO the weights alone."""
        replicas = self._replicas
        if isinstance(replicas, CutReplicas):
            yield from replicas.replicated_state()
            return
        of, stepped = f"r{self.topology.slot_of(self._rank.place.slot).replica}", set[str]()
        for told in self._state.replicated_state(of) if self._zero is None else ():
            stepped.add(told[0])
            yield told
        for name, values in self._engine.module.named_parameters():
            piece = dataclasses.replace(replicas.part(name), whole=of)
            if piece.tensor not in stepped:
                yield piece.tensor, "", piece, {WEIGHT: values}

    def distrust(self, since: int) -> None:
        """What was copied of later steps than that; the job stops."""
        if self.copies is not None:
            self.copies.distrust_since(since)

    # ------------------------------------------------ a recovery

    def report(self) -> Report:
        """An update is made in place, so there is no way back but to copies."""
        if self._engine is None:
            raise Refused("a rank was lost before there was an engine", way_out="start the job again")
        loop, held = self._loop, ""
        if self.copies is not None:
            held = self.copies.describe()
        elif isinstance(self._replicas, CutReplicas):
            held = self._replicas.held()
        return Report(applied=loop.done, oldest=loop.done, prepared=loop.prepared, joiner=self._joiner, held=held)

    def plan(self, agreed: Agreed) -> str:
        """Who computes what, which follows from the members; and which copies there are."""
        versions, layout = "", self._replicas.plan(agreed)
        if self._zero is not None:
            found = [] if self.copies is None else self.copies.choose(report.held for report in agreed.reports.values())
            if not found:
                raise StateLost(
                    f"{len(agreed.reports)} of {self.topology.size} ranks are left, and there is no version of the"
                    " shards of all of which all parts are copied",
                    way_out="restart from the last checkpoint; before the next run: switch copies on (ntp.copies.mode),"
                    " or set ntp.copies.count higher",
                )
            versions = repr(found)
        told = json.dumps([agreed.view.encode(), repr(agreed.decision), versions, layout])
        return hashlib.blake2b(told.encode(), digest_size=16).hexdigest()

    def resume_from(self, agreed: Agreed) -> None:
        """Roll forward, have the state that all have, and restart the window."""
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
            self._tell_what_is_saved()
        self._joiner = False
        self._have_engine_know()
        self._tell(agreed)
        self._window.checkpoints.refuse_to_end_behind()

    def _tell_what_is_saved(self) -> None:
        told: list[tuple[int, str] | None] = [None] * dist.get_world_size()
        checkpoints = self._window.checkpoints
        dist.all_gather_object(told, checkpoints.saved)
        if self._joiner:
            checkpoints.saved = next((one for one in told if one is not None), None)

    # ------------------------------------------------ without ZeRO

    def _have_all(self, agreed: Agreed) -> None:
        """What the others have, which is compared; and go on, or begin the window again."""
        goes_on = self._window.votes_on == agreed.decision.step
        told: Mapping[str, Any] = {}
        if any(report.joiner for report in agreed.reports.values()):
            told = self._hand_over(knows=not (goes_on or self._joiner))
        self._replicas.resume_from(agreed)
        if isinstance(self._replicas, FullWidthReplicas):
            self._state.compare(agreed.view.slots, agreed.decision.step)
        numbers = self._replicas.numbers
        if goes_on:
            self._window.go_on(numbers)
        elif self._joiner:
            self._window.restart(told["step"], numbers, told["engine"])
        else:
            self._window.restart(self._window.step, numbers)

    def _hand_over(self, *, knows: bool) -> Mapping[str, Any]:
        """To joining ranks, by the first who has the decided step and all that follows it behind it; what they are
        told."""
        lane = self._replicas.lane_of(self._rank.place.slot)
        mine = {"rank": dist.get_rank(), "lane": lane, "step": self._window.step, "engine": self._window.counted()}
        told: list[Mapping[str, Any] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(told, mine if knows else None)
        givers = {one["lane"]: one for one in reversed(told) if one is not None}
        if len(givers) < self._replicas.lanes_apart:  # the driver goes on without joining ranks then
            raise RuntimeError("all members are within a step, and nobody can tell a joining rank where the job stands")
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
            raise StateLost(found.what, way_out="restart from the last checkpoint") from found
        zero.have_weights(giver)
        copies.steps = copies.state_of
        self._window.restart(copies.state_of, self._replicas.numbers, self._how_far.found)
        copies.settle(self._who_trains(slots), zero.parts)

    # ------------------------------------------------ afterwards

    def _have_engine_know(self) -> None:
        """Its rank, and who writes for all."""
        engine, first = self._engine, dist.get_rank() == 0
        became_first = first and engine.global_rank != 0
        engine.global_rank, engine.world_size = dist.get_rank(), dist.get_world_size()
        if became_first:
            engine.monitor = MonitorMaster(engine._config.monitor_config)
        if isinstance(self._replicas, CutReplicas):
            return
        # a checkpoint says of how many shards it is
        engine.seq_dp_world_size = groups._get_sequence_data_parallel_world_size()
        if not engine.use_node_local_storage():
            writes = engine.checkpoint_engine.is_data_parallel_writer
            engine.save_non_zero_checkpoint = writes(groups._get_sequence_data_parallel_rank())

    def _tell(self, agreed: Agreed) -> None:
        slots, everybody, shares = set(agreed.view.slots), range(self.topology.size), self._replicas.shares
        named = {slot: str(self.topology.slot_of(slot)) for slot in everybody}
        seconds, phases = self._rank.walked()
        if self._engine.monitor.enabled and not dist.get_rank():
            told = {"NTP/ranks": len(slots), "NTP/epoch": agreed.view.epoch, "NTP/recovery_s": seconds}
            samples = self._window.counted()["counters"]["global_samples"]
            self._engine.monitor.write_events([(name, value, samples) for name, value in told.items()])
        self._teller.tell(
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
