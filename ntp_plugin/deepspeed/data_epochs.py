"""Which turn through the data a job is in, told to joining ranks before they are let in.

A joining rank's script goes through the turns that are behind the job. What it does after each of them, an evaluation
or a collective of its own, would have the others wait for it, or meet something else of theirs, were it one of them
already.

While a joining rank waits at the door the job may begin another turn. So it looks again once the door is open: the
others stand still there until it comes in, at the beginning of a step, and have said which turn that is of. Those that
are behind them by then it goes through alone as well.
"""

from collections.abc import Callable, Sequence

import torch.distributed as dist

from ntp_plugin.deepspeed.loaders import Followed
from ntp_plugin.errors import Excluded
from ntp_plugin.recovery.elastic_rank import ElasticRank

_TURN = "turn {}"


class DataEpochs:
    """Those that were begun, a word for each."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank, self._told, self._newest = rank, 0, 0

    def begun(self, turn: int) -> None:
        """By the first rank; who has become it says it all again."""
        while self._told < turn and not dist.get_rank():
            self._told += 1
            self._rank.leave_word(_TURN.format(self._told), True)

    def newest(self) -> int:
        """That somebody has begun."""
        while self._rank.word_if_left(_TURN.format(self._newest + 1)) is not None:
            self._newest += 1
        return self._newest

    def gone_past(self, followed: Followed, numbers: Sequence[int], wait_to_be_let_in: Callable[[], None]) -> bool:
        """As a joining rank, before it comes in: whether the loop's turn is behind the job, before it asks to be let
        in or after. Then the turn ends with the batch that the loop has drawn, which counts for nothing."""
        stream = followed.stream
        if stream.peek().turn >= self.newest():
            wait_to_be_let_in()
        turn = self.newest()
        if stream.peek().turn >= turn:
            return False
        stream.restart(stream.first_step_of(turn), numbers)
        followed.hand_over()
        return True


def refuse_to_come_too_late(followed: Followed, step: int) -> None:
    """As a joining rank that has just come in: what its script does after a turn the others have behind them."""
    if not followed.is_in_the_turn:
        raise Excluded(
            f"this process comes in at step {step}, in a turn that its script has not come to: the others have gone on"
            " after they had opened for it",
            way_out="this process ends; a new one may join in its slot",
        )
