"""Where the loop of the other ranks is, for a joining rank, whose script starts at the beginning.

The script of a joining rank runs through the steps that the job has behind it, one iteration each, on one batch and
without computing: the engine returns what it has returned for that batch, and `accelerator.backward` only says that a
step is taken. So the script's own counters, its progress bar and its data epochs come to where those of the other ranks
are. It is admitted when it has come as far as the job had reported, and makes up for the steps since then.
"""

import dataclasses
from typing import Any

import torch.distributed as dist

from ntp_plugin.recovery.elastic_rank import ElasticRank

_EVERY = 50
"""Steps from one report to the next."""
_STEPS, _LOADER = "accelerate: {} steps", "accelerate: the training loader"


@dataclasses.dataclass(frozen=True, kw_only=True)
class AcceleratePosition:
    """Where the loops of the other ranks are: before they draw the first micro-batch of a step."""

    step: int
    """Steps that are taken."""
    newest: int
    """Steps that the scripts have counted. A step that a recovery has undone is one of them: it is taken again."""
    draws: dict[int, Any]
    """Data epoch -> the random number generators before its batches were drawn."""
    rates: dict[int, Any]
    """Step -> the learning rates, and what else the optimizer's groups had."""
    schedules: list[Any]
    """The states of schedulers that the script steps."""


class Reports:
    """How far the job is, published through the store for ranks that are not admitted yet."""

    def __init__(self, rank: ElasticRank) -> None:
        self._rank, self._reported, self._newest = rank, -1, 0

    def report(self, step: int, loader: int) -> None:
        """Publish, on the first rank, that so many steps are taken, and which of accelerate's loaders they are of; a
        new first rank publishes what the one before may not have."""
        if dist.get_rank() or step // _EVERY == self._reported:
            return
        if self._reported < 0:
            self._rank.share_with_joiners(_LOADER, loader)
        for number in range(max(self._reported, 0) + 1, step // _EVERY + 1):
            self._rank.share_with_joiners(_STEPS.format(number * _EVERY), True)
        self._reported = step // _EVERY

    def newest(self) -> int:
        """Return a number of steps that the job has taken, at least."""
        while self._rank.shared_value_or_none(_STEPS.format(self._newest + _EVERY)) is not None:
            self._newest += _EVERY
        return self._newest

    @property
    def loader(self) -> int | None:
        """Which of accelerate's loaders the job trains on, as it prepared them."""
        found: int | None = self._rank.shared_value_or_none(_LOADER)
        return found
