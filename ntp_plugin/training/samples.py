"""Which samples a replica computes. PURE.

Samples are addressed by (seed, step, index): the data set is shuffled by its seed alone, step `s` consumes the next
global batch of it, and a plan says which indices of that batch each replica computes. So all layouts see the same
samples, and a step can run again from its number.

A plan numbers nominal micro-batches replica by replica. A framework may deal them to the replicas one by one, as
Megatron does; then number k of replica r is at place k x replicas + r of the batch, and a full-width replica gets what
it always gets. A replica that splits nominal micro-batches gets them split by split.
"""

import dataclasses
from collections.abc import Callable, Iterator

from ntp_plugin.planning.batch_split import NominalBatch, Share

type BatchAt = Callable[[int], tuple[NominalBatch, Share]]
"""(consumed samples) -> the global batch of the step that begins there, and the replica's share of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ReplicaSamples:
    """The samples of one replica, micro-batch by micro-batch, from the sample after the first `consumed` ones.

    A loader reads ahead of the training, so the size of a batch is asked for by the samples before it, and never of the
    step that is under way.
    """

    batch_at: BatchAt
    consumed: int
    available: int

    def __iter__(self) -> Iterator[list[int]]:
        """Yield one list for each micro-batch, step after step, as long as there are full global batches."""
        start = self.consumed
        while True:
            nominal, share = self.batch_at(start)
            end = start + nominal.total * nominal.micro_batch
            if end > self.available:
                return
            for place in places(nominal, share):
                first = start + place * share.size
                yield list(range(first, first + share.size))
            start = end

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
