"""Model the time of a step on a layout: compute, collectives in the domain, pipeline, lanes over the NIC, optimizer.

    stage      3 x FLOPs of the widest slot / speed (a backward is two forwards)
               + 8 collectives per layer in the domain (sequence parallel: gathers and scatters of attention and MLP,
               forward and backward), each (w - 1) / w of the activations and a start
    replica    sum of its stages + (n - 1) x its slowest stage, and a transfer between stages: 1F1B with n
               micro-batches, exact also where stages differ
    step       the slowest replica + what does not hide of the reduction of the widest slot's gradients + the optimizer

The widest slot rules because every block ends in a collective. The FLOPs are those of the real units and granules; with
`even=True` work divides by the width instead, as if heads could be cut: what the NTP paper takes for granted.
"""

import dataclasses
from collections.abc import Sequence
from fractions import Fraction

from ntp_plugin.config.sections import Batch, Model, State
from ntp_plugin.planning.batch_split import ReplicaPace
from ntp_plugin.planning.pace import stage_work
from ntp_plugin.planning.shard_layout import slot_elements
from ntp_plugin.planning.topology import WHOLE, Pattern
from ntp_plugin.planning.units import ModelUnits
from ntp_plugin.simulator.machine import GpuModel

COLLECTIVES_PER_LAYER = 8
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
    tp: int
    depths: tuple[int, ...]
    """Layers of each stage."""
    even: bool = False

    def pace(self, stages: Sequence[int]) -> UnevenPace:
        """Return the pace of a replica, from the nanoseconds of its stages."""
        return UnevenPace(ns=max(stages), fill_ns=sum(stages) + (len(stages) - 1) * self.hand_over_ns())

    def stage_ns(self, stage: int, lost: int, *, boosted: bool = False) -> int:
        """One micro-batch in one stage, forward and backward; `boosted`: a degraded group takes the most power."""
        model, machine = self.model, self.machine
        tokens = model.seq * self.batch.micro_batch
        speed = machine.tflops * 1e12 * machine.matmul_efficiency * (machine.boosted_speed if boosted and lost else 1)
        compute = 3 * float(self._work(stage, lost)) * tokens / speed
        width = self.tp - lost
        size = tokens * model.hidden * ACTIVATION_BYTES * (width - 1) / width
        each = size / (machine.domain_gb_per_s * 1e9) + (machine.domain_us * 1e-6 if width > 1 else 0)
        return round((compute + COLLECTIVES_PER_LAYER * self.depths[stage] * each) * 1e9)

    def hand_over_ns(self) -> int:
        """Activations from one stage to the next, and their gradients back."""
        size = self.model.seq * self.batch.micro_batch * self.model.hidden * ACTIVATION_BYTES / self.tp
        return round(2 * (size / (self.machine.nic_gb_per_s * 1e9) + self.machine.nic_us * 1e-6) * 1e9)

    def tail_ns(self, most_lost: int, replicas: int) -> int:
        """After the last micro-batch: what does not hide of the reduction, and the optimizer, on the fullest slot."""
        elements = max(self._widest(stage, most_lost) for stage in range(len(self.depths)))
        machine, state = self.machine, self.state
        sent = 2 * (replicas - 1) / replicas * elements * state.gradient_bytes
        exposed = (1 - machine.overlap) * sent / (machine.nic_gb_per_s * 1e9)
        sharers = replicas if state.distributed_optimizer else 1
        touched = elements * (state.gradient_bytes + 2 * state.optimizer_bytes + state.weight_bytes) / sharers
        return round((exposed + touched / (machine.memory_gb_per_s * 1e9)) * 1e9)

    def moved_s(self, lost: int) -> float:
        """For the fullest survivor to receive what it is dealt, weights and optimizer state, over its NIC."""
        more = max(self._widest(stage, lost) - self._widest(stage, 0) for stage in range(len(self.depths)))
        return more * (self.state.weight_bytes + self.state.optimizer_bytes) / (self.machine.nic_gb_per_s * 1e9)

    def _work(self, stage: int, lost: int) -> Fraction:
        units = self.units.stages[stage]
        if self.even:
            return Fraction(stage_work(units, self.tp, WHOLE) * self.tp, self.tp - lost)
        return Fraction(stage_work(units, self.tp, pattern_of(lost)))

    def _widest(self, stage: int, lost: int) -> int:
        return max(slot_elements(self.units.stages[stage], self.tp, pattern_of(lost)))


def pattern_of(lost: int) -> Pattern:
    """Any pattern with so many lost slots: all are as wide."""
    return tuple(range(lost))
