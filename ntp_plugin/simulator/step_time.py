"""Model the time of a step on a layout: compute, collectives in the domain, pipeline, lanes over the NIC, optimizer.

    stage      3 x FLOPs of the widest slot / speed (a backward is two forwards)
               + 8 collectives per layer in the domain (sequence parallel: gathers and scatters of attention and MLP,
               forward and backward), each (w - 1) / w of the activations and a start; a layer of routed experts has
               four exchanges of tokens in place of those of the MLP, over the NIC where the expert group is wider than
               the domain
    replica    sum of its stages + (n - 1) x its slowest stage, and a transfer between stages: 1F1B with n
               micro-batches, exact also where stages differ
    step       the slowest replica + what does not hide of the reduction of the widest slot's gradients + the optimizer

The widest slot rules because every block ends in a collective. The FLOPs are those of the real units and granules; with
`even=True` work divides by the width instead, as if heads could be cut: what the NTP paper takes for granted.

In a job with experts or context groups no width changes. There a `GroupLoad` says what the replicas of a group hold and
compute once others of it are lost (`planning/expert_groups.py`).
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from ntp_plugin.config.sections import Batch, Model, State
from ntp_plugin.planning.batch_split import ReplicaPace
from ntp_plugin.planning.expert_groups import NOMINAL_LOAD, GroupLoad
from ntp_plugin.planning.pace import stage_work
from ntp_plugin.planning.shard_layout import place_elements, slot_elements
from ntp_plugin.planning.topology import WHOLE, Pattern, Topology
from ntp_plugin.planning.units import ModelUnits
from ntp_plugin.simulator.machine import GpuModel

COLLECTIVES_PER_LAYER = 8
COLLECTIVES_OF_MLP = 4
EXCHANGES_PER_LAYER = 4
"""Of tokens with experts: there and back, forward and backward."""
ACTIVATION_BYTES = 2

type Losses = tuple[int, ...]
"""How many slots each stage of a replica has lost. Which ones does not matter to its pace."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnevenPace(ReplicaPace):
    """`ns` of the slowest stage, and what the other stages take less than it, once."""

    fill_ns: int
    """The sum of all stages and of the transfers between them, for the first micro-batch."""

    def step_ns(self, micro_batches: int, stages: int) -> int:  # noqa: ARG002 - the fill knows them
        return self.fill_ns + (micro_batches * self.splits - 1) * self.ns if micro_batches else 0

    def most_within(self, step_ns: int, stages: int) -> int:  # noqa: ARG002
        return max(0, ((step_ns - self.fill_ns) // self.ns + 1) // self.splits) if step_ns >= self.fill_ns else 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepModel:
    """One job on one machine."""

    model: Model
    units: ModelUnits
    state: State
    batch: Batch
    machine: GpuModel
    topology: Topology
    depths: tuple[int, ...]
    """Layers of each stage."""
    even: bool = False

    @property
    def tp(self) -> int:
        return self.topology.tp

    @property
    def tokens(self) -> float:
        """The tokens of a micro-batch that a replica nominally has."""
        return self.model.seq * self.batch.micro_batch / self.topology.cp

    def pace(self, stages: Sequence[int], load: GroupLoad = NOMINAL_LOAD) -> UnevenPace:
        """Return the pace of a replica, from the nanoseconds of its stages."""
        return UnevenPace(ns=max(stages), fill_ns=sum(stages) + (len(stages) - 1) * self.hand_over_ns(load))

    def stage_ns(self, stage: int, lost: int, *, boosted: bool = False, load: GroupLoad = NOMINAL_LOAD) -> int:
        """One micro-batch in one stage, forward and backward; `boosted`: a degraded group takes the most power."""
        machine = self.machine
        speed = machine.tflops * 1e12 * machine.matmul_efficiency * (machine.boosted_speed if boosted and lost else 1)
        compute = 3 * float(self._work(stage, lost, load)) * self.tokens / speed
        width = self.tp - lost
        size = self.tokens * float(load.tokens) * self.model.hidden * ACTIVATION_BYTES * (width - 1) / width
        each = size / (machine.domain_gb_per_s * 1e9) + (machine.domain_us * 1e-6 if width > 1 else 0)
        return round((compute + self._collectives(stage) * each + self._exchanges_s(stage, load)) * 1e9)

    def hand_over_ns(self, load: GroupLoad = NOMINAL_LOAD) -> int:
        """Activations from one stage to the next, and their gradients back."""
        size = self.tokens * float(load.tokens) * self.model.hidden * ACTIVATION_BYTES / self.tp
        return round(2 * (size / (self.machine.nic_gb_per_s * 1e9) + self.machine.nic_us * 1e-6) * 1e9)

    def tail_ns(self, most_lost: int, replicas: int, load: GroupLoad = NOMINAL_LOAD) -> int:
        """After the last micro-batch: what does not hide of the reduction, and the optimizer, on the fullest slot."""
        return max(self._stage_tail_ns(stage, most_lost, replicas, load) for stage in range(len(self.depths)))

    def _stage_tail_ns(self, stage: int, most_lost: int, replicas: int, load: GroupLoad) -> int:
        machine, state, groups = self.machine, self.state, load.expert_groups
        elements, experts = self._widest(stage, most_lost), self._most_experts(stage, load)
        sent = 2 * (replicas - 1) / replicas * elements * state.gradient_bytes
        sent += 2 * (groups - 1) / groups * experts * state.gradient_bytes
        exposed = (1 - machine.overlap) * sent / (machine.nic_gb_per_s * 1e9)
        per_element = state.gradient_bytes + 2 * state.optimizer_bytes + state.weight_bytes
        sharded = state.distributed_optimizer
        touched = elements * per_element / (replicas if sharded else 1)
        touched += experts * per_element / (groups if sharded else 1)
        return round((exposed + touched / (machine.memory_gb_per_s * 1e9)) * 1e9)

    def moved_s(self, lost: int, load: GroupLoad = NOMINAL_LOAD) -> float:
        """For the fullest survivor to receive what it is dealt, weights and optimizer state, over its NIC."""
        more = max(
            self._widest(stage, lost)
            + self._most_experts(stage, load)
            - self._widest(stage, 0)
            - self._most_experts(stage, NOMINAL_LOAD)
            for stage in range(len(self.depths))
        )
        return more * (self.state.weight_bytes + self.state.optimizer_bytes) / (self.machine.nic_gb_per_s * 1e9)

    def _work(self, stage: int, lost: int, load: GroupLoad) -> Fraction:
        units = self.units.stages[stage]
        if self.even:
            return stage_work(units, self.tp, WHOLE) * self.tp / (self.tp - lost)
        return stage_work(units, self.tp, pattern_of(lost), load)

    def _expert_layers(self, stage: int) -> int:
        begin = sum(self.depths[:stage])
        return sum(self.model.expert_layers[begin : begin + self.depths[stage]])

    def _collectives(self, stage: int) -> int:
        """How many collectives of TP groups a stage has for one micro-batch."""
        without_mlp = 0 if self.model.moe_shared_expert_ffn else self._expert_layers(stage)
        return COLLECTIVES_PER_LAYER * self.depths[stage] - COLLECTIVES_OF_MLP * without_mlp

    def _exchanges_s(self, stage: int, load: GroupLoad) -> float:
        """Seconds in which the busiest slot sends and receives the tokens of a micro-batch to and from experts."""
        layers, machine, places = self._expert_layers(stage), self.machine, self.topology.expert_slots
        if not layers or places == 1:
            return 0.0
        assert self.model.experts is not None, "a layer has some"
        columns = places * self.units.experts_of_slot / self.model.experts
        rows = (
            self.tokens / self.tp * self.model.moe_router_topk * columns * float(max(load.tokens, load.expert_tokens))
        )
        size = rows * self.model.hidden * ACTIVATION_BYTES * (places - 1) / places
        inside = places <= machine.domain_gpus
        speed, start_us = (
            (machine.domain_gb_per_s, machine.domain_us) if inside else (machine.nic_gb_per_s, machine.nic_us)
        )
        return EXCHANGES_PER_LAYER * layers * (size / (speed * 1e9) + start_us * 1e-6)

    def _widest(self, stage: int, lost: int) -> int:
        return max(slot_elements(self.units.stages[stage], self.tp, pattern_of(lost)))

    def _most_experts(self, stage: int, load: GroupLoad) -> int:
        return max(place_elements(self.units.stages[stage], load.lost_places), default=0)


def pattern_of(lost: int) -> Pattern:
    """Any pattern with so many lost slots: all are as wide."""
    return tuple(range(lost))
