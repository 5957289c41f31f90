"""Which samples a replica computes. PURE.

Samples are addressed by (seed, step, index): the data set is shuffled by its seed alone, step `s` consumes the next
global batch of it, and a plan says which indices of that batch each replica computes. So all layouts see the same
samples, and a step can run again from its number.

A plan numbers nominal micro-batches replica by replica. A framework may deal them to the replicas one by one, as
Megatron does; then number k of replica r is at place k x replicas + r of the batch, and a full-width replica gets what
it always gets. A replica that splits nominal micro-batches gets them split by split.
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
        """Yield one list for each micro-batch, step after step, as long as there are full global batches."""
        size = self.nominal.total * self.nominal.micro_batch
        for start in range(self.consumed, self.available - size + 1, size):
            for place in places(self.nominal, self.share):
                first = start + place * self.share.size
                yield list(range(first, first + self.share.size))

    def __len__(self) -> int:
        """The samples in the data set, as Megatron's samplers report them."""
        return self.available


def places(nominal: NominalBatch, share: Share) -> list[int]:
    """The places of a replica's micro-batches in a global batch, in the order in which it computes them."""
    splits = nominal.micro_batch // share.size
    rounds = (divmod(number, nominal.per_replica) for number in share.numbers)
    return [
        (round_ * nominal.replicas + replica) * splits + split for replica, round_ in rounds for split in range(splits)
    ]
