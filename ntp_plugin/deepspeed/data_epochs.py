"""Tells a joining rank which data epoch the job is in, before it is admitted.

A joining rank's script runs through the data epochs that the job has behind it. If the rank were a member already, what
the script does after each of them, such as an evaluation or a collective of its own, would make the other ranks wait,
or would meet another collective of theirs.

The job may begin another data epoch while a joining rank waits for admission. So the rank looks again when it is
admitted: the other ranks then wait for it at the beginning of a step, and have reported that step's data epoch. It
skips the data epochs before that one alone as well.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from ntp_plugin.deepspeed.loaders import Followed
from ntp_plugin.errors import Excluded
from ntp_plugin.recovery.elastic_rank import ElasticRank

_DATA_EPOCH = "data epoch {}"


class DataEpochs:
    """The data epochs that the job has begun, published through the store."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank, self._reported, self._newest = rank, 0, 0

    def report(self, data_epoch: int) -> None:
        """Publish all data epochs up to this one, on the first rank; a new first rank publishes all of them again."""
        while self._reported < data_epoch and not dist.get_rank():
            self._reported += 1
            self._rank.share_with_joiners(_DATA_EPOCH.format(self._reported), True)

    def newest(self) -> int:
        """Return the newest data epoch that the job has begun."""
        while self._rank.shared_value_or_none(_DATA_EPOCH.format(self._newest + 1)) is not None:
            self._newest += 1
        return self._newest

    def skip_if_behind(
        self, followed: Followed, numbers: Sequence[int], wait_for_admission: Callable[[], None]
    ) -> bool:
        """Skip the loop's data epoch, on a joining rank, if the job has it behind it before or after the admission. The
        data epoch then ends with the batch that the loop has drawn, which counts for nothing. Returns whether it was
        skipped."""
        stream = followed.stream
        if stream.peek().data_epoch >= self.newest():
            wait_for_admission()
        data_epoch = self.newest()
        if stream.peek().data_epoch >= data_epoch:
            return False
        stream.restart(stream.first_step_of(data_epoch), numbers)
        followed.hand_over()
        return True


def refuse_to_come_too_late(followed: Followed, step: int) -> None:
    """Raise `Excluded` on a joining rank if the job has begun a data epoch that the script has not reached."""
    if not followed.has_begun_the_data_epoch:
        raise Excluded(
            f"this process joins at step {step}, in a data epoch that its script has not reached: the others have gone"
            " on after they had admitted it",
            fix="this process ends; a new one may join in its slot",
        )
