"""Bytes per slot: weights, gradients, optimizer state, and the buffers that lanes pack into.

Activations are not counted: they depend on the micro-batch and on recompute, which a loss does not change; leave
room for them in `gpu_memory_gb`.
"""

import dataclasses

from ntp_plugin.config.sections import State
from ntp_plugin.planning.shard_layout import slot_elements
from ntp_plugin.planning.topology import Pattern
from ntp_plugin.planning.units import StageUnits

PACKED_BUCKET = 40_000_000
"""Parameters of one bucket that is packed for its lanes (Megatron's default bucket); two are in flight."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MemoryUse:
    """Bytes of the fullest slot of a group."""

    weights: int
    gradients: int
    optimizer: int
    packing: int

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.packing


def memory_use(
    units: StageUnits, tp: int, pattern: Pattern, state: State, *, replicas: int, packing: bool
) -> MemoryUse:
    """The fullest slot of a group with that pattern; `packing` where its stage reduces over uneven lanes."""
    elements = max(slot_elements(units, tp, pattern))
    sharers = replicas if state.distributed_optimizer else 1
    return MemoryUse(
        weights=elements * state.weight_bytes,
        gradients=elements * state.gradient_bytes,
        optimizer=-(-elements * state.optimizer_bytes // sharers),
        packing=2 * min(elements, PACKED_BUCKET) * state.gradient_bytes if packing else 0,
    )
