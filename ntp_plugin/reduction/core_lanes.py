"""Sums gradients over the replicas by way of core slots: the `via_core` route of the NTP paper.

Every group has as many *cores* as the narrowest group has slots. The other slots send what they hold to the cores
(`core_slices.py`), inside the group and so inside the scale-up domain. Core number c of every replica then has the same
units, and they are summed one to one. Then the sums go back to the slots. There is one process group for each core and
one for each group that sends, however many owner tuples there are.

A reduction uses one all-to-all in each direction. Nobody waits for it while gradients are being computed: it is under
way until the *next* reduction begins (`LaneOrder`), and only then do the cores begin their sums. So every rank issues
everything in one order, with several buckets as with one.

The members of a core's group add the same units in the same order, and a slot that sent units gets its core's sum: all
replicas have the same bits. Replicated parameters do not use this route; they use a lane that covers all ranks
(`gradient_lanes.py`).

With sharded optimizer state a core's group shards what it reduces. Then parameters are sent back instead of sums. The
parts of the parameters cost one more copy of them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ntp_plugin.reduction.core_slices import CoreSlices, Slices
from ntp_plugin.reduction.gradient_lanes import GradientLane, Slice, elements, pack, unpack
from ntp_plugin.reduction.sharded_optimizer import LaneShard, LaneShards

type Tensors = Mapping[str, torch.Tensor]


class Continuing(Protocol):
    """A reduction that continues when the next one has begun."""

    def add_up(self) -> None:
        """Begin the cores' sums, unless they have begun."""


class LaneOrder:
    """The reductions of a rank, in the order in which they begin."""

    def __init__(self) -> None:
        self._last: Continuing | None = None

    def take(self, reduction: Continuing) -> None:
        """Register a reduction that has begun, and begin the sums of the one before it."""
        if self._last is not None:
            self._last.add_up()
        self._last = reduction


class CoreExchange:
    """Sends tensors to the cores and back. `domain` is this group's ranks, `members` the ranks with this rank's
    core."""

    def __init__(
        self,
        core_slices: CoreSlices,
        *,
        domain: dist.ProcessGroup | None,
        members: dist.ProcessGroup | None,
        order: LaneOrder | None = None,
    ) -> None:
        """Without a domain nothing is sent; without members this rank is no core, or the only one of its number."""
        assert domain is not None or not core_slices.moving, "what is sent goes through a group"
        self.core_slices, self.domain, self.members = core_slices, domain, members
        self.order = order or LaneOrder()

    def only(self, names: Collection[str]) -> "CoreExchange":
        """The same exchange for these tensors alone; without any of them nothing is exchanged."""
        return CoreExchange(self.core_slices.only(names), domain=self.domain, members=self.members, order=self.order)

    def go(self, tensors: Tensors, parts: Tensors) -> Callable[[], None]:
        """Begin to fill the parts of all cores; the returned function waits for it."""
        return self._exchange(self.core_slices.out, tensors, self.core_slices.into, parts)

    def come_back(self, parts: Tensors, tensors: Tensors) -> Callable[[], None]:
        """Begin to put the parts of all cores back where they came from; the returned function waits for it."""
        return self._exchange(self.core_slices.into, parts, self.core_slices.out, tensors)

    def _exchange(
        self, leaving: Sequence[Slices], source: Tensors, arriving: Sequence[Slices], target: Tensors
    ) -> Callable[[], None]:
        here = self.core_slices.place
        work: dist.Work | None = None
        if self.core_slices.moving:
            nothing = next(iter({**source, **target}.values())).new_empty(0)
            sent = [
                pack(slices, source) if slices and place != here else nothing for place, slices in enumerate(leaving)
            ]
            shapes = {name: tensor.shape for name, tensor in target.items()}
            sizes = [elements(slices, shapes) if place != here else 0 for place, slices in enumerate(arriving)]
            received = nothing.new_empty(sum(sizes))
            work = dist.all_to_all_single(
                received, torch.cat(sent), sizes, [part.numel() for part in sent], group=self.domain, async_op=True
            )

        def finish() -> None:
            if leaving[here]:
                unpack(arriving[here], target, pack(leaving[here], source))
            if work is not None:
                work.wait()
                for place, values in enumerate(torch.split(received, sizes)):
                    if values.numel():
                        unpack(arriving[place], target, values)

        return finish


def _empty_parts(core_slices: CoreSlices, like: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Allocate the parts of a core, side by side in one buffer."""
    sizes = [math.prod(shape) for shape in core_slices.parts.values()]
    filled = sum(elements(slices, core_slices.parts) for slices in core_slices.into)
    assert filled == sum(sizes), f"a core of {sum(sizes)} elements receives {filled}"
    flat = like.new_empty(filled)
    views = zip(core_slices.parts.items(), torch.split(flat, sizes), strict=True)
    return flat, {name: values.view(shape) for (name, shape), values in views}


class Lending:
    """Sends the tensors of one reduction to the cores; under way until the next reduction begins, or until waited
    for."""

    flat: torch.Tensor
    parts: dict[str, torch.Tensor]

    def __init__(self, core_exchange: CoreExchange, arrived: Callable[[], object]) -> None:
        """`arrived` begins what the cores do with the tensors."""
        self._core_exchange, self._arrived = core_exchange, arrived
        self._arrive: Callable[[], None] | None = None

    def begin(self, gradients: Tensors) -> None:
        """Begin to send; until they have arrived the gradients stay as they are."""
        assert self._arrive is None, "one step at a time"
        self.flat, self.parts = _empty_parts(self._core_exchange.core_slices, next(iter(gradients.values())))
        self._arrive = self._core_exchange.go(gradients, self.parts)
        self._core_exchange.order.take(self)

    def add_up(self) -> None:
        """Wait for the tensors and begin the cores' work on them, unless that has begun."""
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
            self._arrived()

    def let_go(self) -> None:
        """Release the parts."""
        del self.flat, self.parts


class CoreSums:
    """Sums some gradients over the cores, step after step."""

    def __init__(self, core_exchange: CoreExchange) -> None:
        self._core_exchange = core_exchange
        self._lending = Lending(core_exchange, self._sum)
        self._work: dist.Work | None = None

    def begin(self, gradients: Tensors) -> "CoreSums":
        """Begin to send; until `finish` the gradients stay as they are."""
        self._gradients = gradients
        self._lending.begin(gradients)
        return self

    def _sum(self) -> None:
        if self._core_exchange.members is not None and self._lending.flat.numel():
            self._work = dist.all_reduce(self._lending.flat, group=self._core_exchange.members, async_op=True)

    def finish(self) -> None:
        """Wait, and replace the gradients by their sums."""
        self._lending.add_up()
        if self._work is not None:
            self._work.wait()
        self._core_exchange.come_back(self._lending.parts, self._gradients)()
        self._lending.let_go()
        del self._gradients
        self._work = None


class CoreShards(LaneShards):
    """Optimizer state of what the cores reduce, sharded over the members of each core's group."""

    def __init__(self, core_exchange: CoreExchange) -> None:
        core_slices = core_exchange.core_slices
        whole = tuple(
            Slice(name=name, dim=0, ranges=((0, shape[0]),), places=core_slices.places[name])
            for name, shape in core_slices.parts.items()
        )
        super().__init__([GradientLane(group=core_exchange.members, slices=whole)])
        self._core_exchange = core_exchange
        self._lent: list[tuple[CoreExchange, Tensors, Tensors, list[LaneShard]]] = []
        self._returning = False
        self._lending = Lending(core_exchange, self._sum)

    def shard(self, names: Collection[str], parameters: Tensors, *, dtype: torch.dtype) -> list[LaneShard]:
        """Make shards of the parts of these parameters; all ranks of a group call this together."""
        core_exchange = self._core_exchange.only(names)
        _, parts = _empty_parts(core_exchange.core_slices, next(iter(parameters.values())))
        with torch.no_grad():
            core_exchange.go(parameters, parts)()
        fresh = super().shard(names, parts, dtype=dtype)
        self._lent.append((core_exchange, parts, parameters, fresh))
        return fresh

    def gather(self, mine: Callable[[LaneShard], torch.Tensor], into: Tensors) -> None:
        """Gather into these tensors, in the shape of the parameters, what the cores hold shards of."""
        for core_exchange, _, _, shards in self._lent:
            _, parts = _empty_parts(core_exchange.core_slices, next(iter(into.values())))
            for shard in shards:
                shard.gather(mine(shard), parts)
            core_exchange.come_back(parts, into)()

    def cut(self, tensors: Tensors) -> Iterator[tuple[LaneShard, torch.Tensor]]:
        """Yield the shards, with their values of these tensors."""
        for core_exchange, _, _, shards in self._lent:
            _, parts = _empty_parts(core_exchange.core_slices, next(iter(tensors.values())))
            core_exchange.go(tensors, parts)()
            for shard in shards:
                yield shard, shard.cut(parts)

    def begin(self, gradients: Tensors) -> "CoreShards":
        """Begin to send the gradients to the cores."""
        self._lending.begin(gradients)
        return self

    def _sum(self) -> None:
        super().begin(self._lending.parts)

    def finish(self) -> None:
        """Wait for every shard's sums; no other rank needs them."""
        self._lending.add_up()
        super().finish()
        self._lending.let_go()

    def begin_spread(self) -> None:
        """Begin to give every core the parameters of its parts."""
        super().begin_spread()
        self._returning = True

    @property
    def on_its_way(self) -> bool:
        """Whether parameters are under way; a slot that only sends has none of its own, but waits for them too."""
        return self._returning

    def finish_spread(self) -> None:
        """Wait for the parameters, and return them from the cores to their slots; all ranks of a group in one order."""
        if not self._returning:
            return
        super().finish_spread()
        for core_exchange, parts, parameters, _ in self._lent:
            core_exchange.come_back(parts, parameters)()
        self._returning = False
