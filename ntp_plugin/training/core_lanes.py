"""Gradients summed over the replicas by way of core slots: the NTP paper's route.

Every group has as many *cores* as the narrowest group has slots. The other slots lend the cores what they hold
(`core_seats.py`), inside the group and so inside the scale-up domain. Core number c of every replica then has the same
units, and they are summed one to one. What was lent goes back. There is one process group for each core and one for
each group that lends, however many owner tuples there are.

What is lent travels in one all-to-all per reduction and direction. Nobody waits for it while gradients are being
computed: it is under way until the *next* reduction begins (`LaneOrder`), and only then are the cores' sums begun. So
every rank issues everything in one order, with several buckets as with one.

The members of a core's group add the same units in the same order, and a slot that lent gets the sum that its core
has: all replicas have the same bits. Replicated parameters do not come here; they ride on a lane that covers all ranks
(`gradient_lanes.py`).

With sharded optimizer state a core's group shards what it reduces. Sums are not sent back then, but parameters are.
The parts of the parameters cost one more copy of them.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist

from ntp_plugin.training.core_seats import CoreSeat, Slices
from ntp_plugin.training.gradient_lanes import GradientLane, Slice, elements, pack, unpack
from ntp_plugin.training.sharded_optimizer import LaneShard, LaneShards

type Tensors = Mapping[str, torch.Tensor]


class InTurn(Protocol):
    """A reduction that goes on when the next one has begun."""

    def add_up(self) -> None:
        """Have the cores begin their sums, if they have not."""


class LaneOrder:
    """The reductions of a rank, in the order in which they begin."""

    def __init__(self) -> None:
        self._last: InTurn | None = None

    def take(self, reduction: InTurn) -> None:
        """One has begun: what the one before it lent has had all the time until now."""
        if self._last is not None:
            self._last.add_up()
        self._last = reduction


class Crossing:
    """The way to the cores and back. `domain` are the ranks of this group, `members` those with this rank's core."""

    def __init__(
        self,
        seat: CoreSeat,
        *,
        domain: dist.ProcessGroup | None,
        members: dist.ProcessGroup | None,
        turns: LaneOrder | None = None,
    ) -> None:
        """Without a domain nothing is lent; without members this rank is no core, or the only one of its number."""
        assert domain is not None or not seat.moving, "what is lent goes through a group"
        self.seat, self.domain, self.members = seat, domain, members
        self.turns = turns or LaneOrder()

    def only(self, names: Collection[str]) -> "Crossing":
        """The same for these tensors alone; without any of them there is nothing to cross."""
        return Crossing(self.seat.only(names), domain=self.domain, members=self.members, turns=self.turns)

    def go(self, tensors: Tensors, parts: Tensors) -> Callable[[], None]:
        """Begin to fill the parts of all cores; what is returned waits for it."""
        return self._exchange(self.seat.out, tensors, self.seat.into, parts)

    def come_back(self, parts: Tensors, tensors: Tensors) -> Callable[[], None]:
        """Begin to put the parts of all cores back where they came from; what is returned waits for it."""
        return self._exchange(self.seat.into, parts, self.seat.out, tensors)

    def _exchange(
        self, leaving: Sequence[Slices], source: Tensors, arriving: Sequence[Slices], target: Tensors
    ) -> Callable[[], None]:
        here = self.seat.place
        work: dist.Work | None = None
        if self.seat.moving:
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


def _empty_parts(seat: CoreSeat, like: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """The parts of a core, side by side in one buffer."""
    sizes = [math.prod(shape) for shape in seat.parts.values()]
    filled = sum(elements(slices, seat.parts) for slices in seat.into)
    assert filled == sum(sizes), f"a core of {sum(sizes)} elements is lent {filled}"
    flat = like.new_empty(filled)
    views = zip(seat.parts.items(), torch.split(flat, sizes), strict=True)
    return flat, {name: values.view(shape) for (name, shape), values in views}


class Lending:
    """What one reduction lends: under way until the next one has begun, or until it is waited for."""

    flat: torch.Tensor
    parts: dict[str, torch.Tensor]

    def __init__(self, crossing: Crossing, arrived: Callable[[], object]) -> None:
        """`arrived` begins what the cores do with it."""
        self._crossing, self._arrived = crossing, arrived
        self._arrive: Callable[[], None] | None = None

    def begin(self, gradients: Tensors) -> None:
        """Lend; until they have arrived the gradients stay as they are."""
        assert self._arrive is None, "one step at a time"
        self.flat, self.parts = _empty_parts(self._crossing.seat, next(iter(gradients.values())))
        self._arrive = self._crossing.go(gradients, self.parts)
        self._crossing.turns.take(self)

    def add_up(self) -> None:
        """Have it, and begin what comes of it, unless that is begun."""
        if self._arrive is not None:
            self._arrive()
            self._arrive = None
            self._arrived()

    def let_go(self) -> None:
        """Of the parts."""
        del self.flat, self.parts


class CoreSums:
    """The sums of some gradients, step after step."""

    def __init__(self, crossing: Crossing) -> None:
        self._crossing = crossing
        self._lending = Lending(crossing, self._sum)
        self._work: dist.Work | None = None

    def begin(self, gradients: Tensors) -> "CoreSums":
        """Lend; until `finish` the gradients stay as they are."""
        self._gradients = gradients
        self._lending.begin(gradients)
        return self

    def _sum(self) -> None:
        if self._crossing.members is not None and self._lending.flat.numel():
            self._work = dist.all_reduce(self._lending.flat, group=self._crossing.members, async_op=True)

    def finish(self) -> None:
        """Wait, and replace the gradients by their sums."""
        self._lending.add_up()
        if self._work is not None:
            self._work.wait()
        self._crossing.come_back(self._lending.parts, self._gradients)()
        self._lending.let_go()
        del self._gradients
        self._work = None


class CoreShards(LaneShards):
    """Optimizer state of what the cores reduce, sharded over the members of each core's group."""

    def __init__(self, crossing: Crossing) -> None:
        seat = crossing.seat
        whole = tuple(
            Slice(name=name, dim=0, ranges=((0, shape[0]),), places=seat.places[name])
            for name, shape in seat.parts.items()
        )
        super().__init__([GradientLane(group=crossing.members, slices=whole)])
        self._crossing = crossing
        self._lent: list[tuple[Crossing, Tensors, Tensors, list[LaneShard]]] = []
        self._returning = False
        self._lending = Lending(crossing, self._sum)

    def shard(self, names: Collection[str], parameters: Tensors, *, dtype: torch.dtype) -> list[LaneShard]:
        """Shards of the parts of these parameters; all ranks of a group call this together."""
        crossing = self._crossing.only(names)
        _, parts = _empty_parts(crossing.seat, next(iter(parameters.values())))
        with torch.no_grad():
            crossing.go(parameters, parts)()
        fresh = super().shard(names, parts, dtype=dtype)
        self._lent.append((crossing, parts, parameters, fresh))
        return fresh

    def gather(self, mine: Callable[[LaneShard], torch.Tensor], into: Tensors) -> None:
        """Have there, in the shape of the parameters, what the cores have each shards of."""
        for crossing, _, _, shards in self._lent:
            _, parts = _empty_parts(crossing.seat, next(iter(into.values())))
            for shard in shards:
                shard.gather(mine(shard), parts)
            crossing.come_back(parts, into)()

    def cut(self, tensors: Tensors) -> Iterator[tuple[LaneShard, torch.Tensor]]:
        """The shards of what is lent to the cores now."""
        for crossing, _, _, shards in self._lent:
            _, parts = _empty_parts(crossing.seat, next(iter(tensors.values())))
            crossing.go(tensors, parts)()
            for shard in shards:
                yield shard, shard.cut(parts)

    def begin(self, gradients: Tensors) -> "CoreShards":
        """Lend."""
        self._lending.begin(gradients)
        return self

    def _sum(self) -> None:
        super().begin(self._lending.parts)

    def finish(self) -> None:
        """Have every shard's sums; nobody else needs them."""
        self._lending.add_up()
        super().finish()
        self._lending.let_go()

    def begin_spread(self) -> None:
        """Begin to give every core the parameters of its parts."""
        super().begin_spread()
        self._returning = True

    @property
    def on_its_way(self) -> bool:
        """Whether parameters are; who only lends has none of its own under way, and waits for them too."""
        return self._returning

    def finish_spread(self) -> None:
        """Have them in place, and give those of a core to whoever lent them; all ranks of a group in one order."""
        if not self._returning:
            return
        super().finish_spread()
        for crossing, parts, parameters, _ in self._lent:
            crossing.come_back(parts, parameters)()
        self._returning = False
