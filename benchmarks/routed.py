"""Reduce gradients of known values on plain ranks, with lanes and cores: for tests and timings."""

import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from ntp_plugin.config import schema
from ntp_plugin.config.sections import Job
from ntp_plugin.planning.core_route import plan_core_route
from ntp_plugin.planning.lanes import plan_lanes
from ntp_plugin.planning.recovery_plan import Nominal
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.spans import Spans
from ntp_plugin.planning.topology import Slot
from ntp_plugin.planning.units import Tensor
from ntp_plugin.reduction.core_lanes import CoreExchange
from ntp_plugin.reduction.core_slices import CoreSlices, find_core_slices
from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice
from ntp_plugin.resharding.cuts import global_ranges, local_ranges
from ntp_plugin.testing.ranks import Rank

type Tensors = dict[str, torch.Tensor]
type Spoil = Callable[[CoreSlices, Slot], CoreSlices]


def small_nominal(tp: int, dp: int, *, width: int = 1) -> Nominal:
    """A model whose units do not divide evenly over fewer slots, with all kinds of cuts; `width` times as wide."""
    tables = {
        "parallel": {"tp": tp, "dp": dp},
        "model": {"layers": 1, "hidden": 4 * tp * width, "heads": 2 * tp, "groups": tp, "ffn": 5 * tp * width}
        | {"vocab": 7 * tp * width + 1, "vocab_multiple": 1, "seq": 4, "gated": True, "bias": True},
        "batch": {"micro_batch": 1, "global_batch": dp},
        "ntp": {"granule": 1, "copies": {"count": 0}},
    }
    return Nominal.of(schema.read(Job, tables, where=""))


def cut_tensors(nominal: Nominal) -> list[Tensor]:
    """Tensors of which a slot holds a part."""
    return [tensor for tensor, _ in nominal.units.stages[0].tensors if tensor.family]


@functools.cache
def whole(tensor: Tensor, salt: int) -> torch.Tensor:
    """The full gradient of a replica, or the weights."""
    generator = torch.Generator().manual_seed(zlib.crc32(tensor.name.encode()) + salt)
    return torch.randn(tensor.shape, dtype=torch.float64, generator=generator)


def connect(rank: Rank, size: int) -> None:
    """An ordinary default group of so many ranks."""
    store = TCPStore("127.0.0.1", rank.port, None, False)
    dist.init_process_group("gloo", store=PrefixStore("routed/", store), rank=rank.slot, world_size=size)


class Routed:
    """One rank in one layout. All ranks make these together, the lost ones too, in one order."""

    def __init__(self, nominal: Nominal, lost: frozenset[Slot], rank: int, spoil: Spoil | None = None) -> None:
        self.topology, self.surviving = nominal.topology, nominal.surviving(lost)
        self.slot = self.topology.slot_of(rank)
        self.lives = self.slot not in lost
        self.tensors = cut_tensors(nominal)
        self._units, self._spoil = nominal.units.stages[0], spoil
        self._pattern = self.surviving.pattern(self.slot.replica, 0)
        self._held: dict[str, Spans] = {
            family.name: lay_out(family, self.topology.tp, self._pattern).holdings[self.slot.tp]
            for family in self._units.families
        }
        self.lanes = self._make_lanes()
        self.core_exchange = self._make_core_exchange()

    def index(self, tensor: Tensor) -> torch.Tensor:
        """The places along its cut dim that this slot holds."""
        ranges = global_ranges(tensor, self._held[tensor.family])
        return torch.cat([torch.arange(start, stop) for start, stop in ranges])

    def mine(self, salt: int) -> Tensors:
        """This slot's parts."""
        return {
            tensor.name: whole(tensor, salt).index_select(tensor.dim, self.index(tensor)) for tensor in self.tensors
        }

    def gradients(self) -> Tensors:
        """Each replica has its own."""
        return self.mine(1 + self.slot.replica)

    def _group(self, slots: Sequence[Slot]) -> Any:
        return dist.new_group([self.topology.rank_of(slot) for slot in slots])

    def _make_lanes(self) -> list[GradientLane]:
        mine = []
        for lane in plan_lanes(self.surviving, self._units, 0).lanes:
            members = lane.members(self.surviving)
            group = self._group(members)
            if self.slot in members:
                mine.append(GradientLane(group=group, slices=self._slices(dict(lane.units))))
        return mine

    def _slices(self, units: dict[str, Spans]) -> tuple[Slice, ...]:
        return tuple(
            Slice(name=tensor.name, dim=tensor.dim, ranges=local_ranges(tensor, self._held[name], units[name]))
            for tensor in self.tensors
            if (name := tensor.family) in units
        )

    def _make_core_exchange(self) -> CoreExchange | None:
        route, domain, members = plan_core_route(self.surviving, self._units, 0), None, None
        for replica in self.surviving.replicas:
            living = [slot for slot in self.topology.group(replica, 0) if slot not in self.surviving.lost]
            group = self._group(living)
            domain = group if self.slot in living else domain
        for core in range(len(route.cores)):
            alike = route.members(core, self.surviving)
            group = self._group(alike)
            members = group if self.slot in alike else members
        if not self.lives:
            return None
        core_slices = find_core_slices(
            route, self._units, tp=self.topology.tp, pattern=self._pattern, slot=self.slot.tp
        )
        return CoreExchange(
            self._spoil(core_slices, self.slot) if self._spoil else core_slices, domain=domain, members=members
        )
