"""Which turn through the data a job is in, told to newcomers before they are let in.

A newcomer's script goes through the turns that are behind the job. What it does after each of them, an evaluation or a
collective of its own, would have the others wait for it, or meet something else of theirs, were it one of them already.

While a newcomer waits at the door the job may begin another turn. So it looks again once the door is open: the others
stand still there until it comes in, at the beginning of a step, and have said which turn that is of. Those that are
behind them by then it goes through alone as well.
"""

import torch.distributed as dist

from ntp_plugin.recovery.rank import ElasticRank

_TURN = "turn {}"


class Turns:
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
