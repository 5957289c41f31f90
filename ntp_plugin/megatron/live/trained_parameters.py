"""Those who train, where some stand idle: what Megatron does with the whole world is done by them as if they were that.

Slots of a replica that is too narrow to go on are members of the job, and train nothing. Megatron knows nobody of that
kind: it sums over the world, and asks all of it.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.topology import Slot

type MakeGroups = Callable[[Sequence[Sequence[Slot]]], list[Any]]


class Trainees:
    """Of the layout of now."""

    def __init__(self, make_groups: MakeGroups, alone: Callable[[], Any]) -> None:
        """`alone` is the group of this rank by itself."""
        self._make_groups, self._alone = make_groups, alone
        self._worlds: dict[int, Any] = {}

    def do[Result](self, work: Callable[[], Result], layout: Layout, epoch: int) -> Result | None:
        """All members call this; it does nothing on those who do not train."""
        if not layout.idle:
            return work()
        world = self._world(layout, epoch)
        if layout.is_idle:
            return None
        with _instead_of_the_world(world):
            return work()

    def _world(self, layout: Layout, epoch: int) -> Any:
        """A group, made once in an epoch."""
        if self._worlds.keys() != {epoch}:
            (made,) = self._make_groups([layout.slots])
            self._worlds = {epoch: made or self._alone()}
        return self._worlds[epoch]


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
