"""What accelerate believes of the world: how many ranks there are, and which one this is.

accelerate reads both once. A script of the user's scales losses, learning rates and numbers of steps by
`accelerator.num_processes`, so this stays the nominal number of ranks. Only a collective, and the loader of an
evaluation, see the ranks that are there. `process_index` is this rank's place among them, so that a new first rank
writes logs and checkpoints.
"""

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from accelerate.state import AcceleratorState, PartialState

from ntp_plugin.recovery.elastic_rank import ElasticRank


class AccelerateWorld:
    """Keeps accelerate's view of the world, in a loop of the user's own."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank = rank
        local = int(PartialState().local_process_index)
        self._slots_here = range(rank.place.slot - local, rank.place.slot + 1)
        """The slots of this host up to this one."""

    def follow(self) -> None:
        """Have accelerate know this rank's place among the present ones."""
        there = self._rank.groups.members
        local = sum(slot in there for slot in self._slots_here) - 1
        set_world(process_index=dist.get_rank(), local_process_index=local)

    def be_nobody(self) -> None:
        """Have a joining rank's script neither log nor save for all, while it runs through what the job has done."""
        set_world(process_index=self._rank.place.slots, local_process_index=self._rank.place.slots)

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Have accelerate know the present number of ranks, for a collective."""
        set_world(num_processes=dist.get_world_size())
        try:
            yield
        finally:
            set_world(num_processes=self._rank.place.slots)


def set_world(**values: int) -> None:
    """Set what accelerate's states share."""
    for state in (PartialState, AcceleratorState):
        state._shared_state.update(values)
