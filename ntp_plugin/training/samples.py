"""Which samples a replica computes. PURE.

Samples are addressed by (seed, step, index): the data set is shuffled by its seed alone, step `s` consumes the next
global batch of it, and a plan says which indices of that batch each replica computes. So no layout sees other samples
than another, and a step can be taken again from its number.

A plan numbers nominal micro-batches replica by replica. A framework may deal them one to each replica in turn, as
Megatron does; then number k of replica r stands at place k x replicas + r of the batch, and a whole replica gets what
it always gets. A replica that runs nominal micro-batches in pieces gets them piece by piece.
"""

import dataclasses
from collections.abc import Iterator

from ntp_plugin.planning.batch_split import NominalBatch, Share


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSamples:
    """The samples of one replica, micro-batch by micro-batch, from the sample after the first `consumed` ones."""

    nominal: NominalBatch
    share: Share
    consumed: int
    available: int

    def __iter__(self) -> Iterator[list[int]]:
        """One list for each micro-batch, step after step, as far as there are whole global batches."""
        size = self.nominal.total * self.nominal.micro_batch
        for start in range(self.consumed, self.available - size + 1, size):
            for place in places(self.nominal, self.share):
                first = start + place * self.share.size
                yield list(range(first, first + self.share.size))

    def __len__(self) -> int:
        """As Megatron's samplers tell it: the samples in the data set."""
        return self.available


def places(nominal: NominalBatch, share: Share) -> list[int]:
    """Where a replica's micro-batches stand in a global batch of such, in the order in which it computes them."""
    pieces = nominal.micro_batch // share.size
    turns = (divmod(number, nominal.per_replica) for number in share.numbers)
    return [(turn * nominal.replicas + replica) * pieces + piece for replica, turn in turns for piece in range(pieces)]
