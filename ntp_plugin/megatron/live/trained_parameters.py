"""Runs work among the ranks that train, where other ranks are idle, as if they were the whole world.

Slots of a replica that is too narrow to go on are members of the job, and train nothing. Megatron does not know such
ranks: it sums over the world, and waits for all of it.
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
    """The ranks that train in the current layout."""

    def __init__(self, make_groups: MakeGroups, alone: Callable[[], Any]) -> None:
        """`alone` returns the group of this rank alone."""
        self._make_groups, self._alone = make_groups, alone
        self._worlds: dict[int, Any] = {}

    def do[Result](self, work: Callable[[], Result], layout: Layout, epoch: int) -> Result | None:
        """Run `work` on the ranks that train; all members call this."""
        if not layout.idle:
            return work()
        world = self._world(layout, epoch)
        if layout.is_idle:
            return None
        with _instead_of_the_world(world):
            return work()

    def _world(self, layout: Layout, epoch: int) -> Any:
        """Return the group of the ranks that train, made once in an epoch."""
        if self._worlds.keys() != {epoch}:
            (made,) = self._make_groups([layout.slots])
            self._worlds = {epoch: made or self._alone()}
        return self._worlds[epoch]


@contextlib.contextmanager
def _instead_of_the_world(group: Any) -> Iterator[None]:
    """Make a group the world; its ranks become the global ones."""
    everybody, ranks = dist.group.WORLD, c10d._world.pg_group_ranks[group]
    c10d._world.pg_group_ranks[group] = {own: own for own in ranks.values()}
    c10d._update_default_pg(group)
    try:
        yield
    finally:
        c10d._update_default_pg(everybody)
        c10d._world.pg_group_ranks[group] = ranks
