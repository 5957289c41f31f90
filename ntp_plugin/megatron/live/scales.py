"""FP8's scales in a live job: as a section began, and the same on all ranks after a recovery.

A section that runs again begins with the scales that it had. After a recovery one rank of each pipeline stage that has
trained gives its own to all others of its stage: to a rank that has joined, to one that was idle. If no such rank is
left, the stage begins with new scales, as a new job does.

Where the state comes from copies, which are a step older, scales stay those of the interrupted step: they are not part
of the copies, and any scales will do for a repeated step.
"""

from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ntp_plugin.megatron.fp8_scales import (
    Scales,
    copy_of,
    forget_recomputations,
    is_delayed,
    make_room,
    set_scales,
)
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild


class JobScales:
    """The scales of this rank; nothing if the job keeps none."""

    def __init__(self, args: Any, model_rebuild: ModelRebuild, *, stage: int, joiner: bool) -> None:
        self._model_rebuild, self._stage = model_rebuild, stage
        self._are_kept = is_delayed(args)
        self._are_newest = not joiner
        """Whether this rank has trained since it last had the others' scales."""
        self.is_idle: Callable[[], bool] = lambda: False
        """Returns whether this rank trains nothing."""

    def recall(self) -> Scales:
        """Return the current scales."""
        return copy_of(self._model_rebuild.chunks) if self._are_kept else {}

    def restore(self, scales: Scales) -> None:
        """Take back what an interrupted section has changed."""
        if self._are_kept:
            forget_recomputations()
            set_scales(self._model_rebuild.chunks, scales)

    def agree(self) -> None:
        """Take the scales of a rank of this stage that has trained; all members call this together."""
        if not self._are_kept:
            return
        members = _gathered((self._stage, self._are_newest))
        givers = {stage: rank for rank, (stage, newest) in reversed(list(enumerate(members))) if newest}
        giver = givers.get(self._stage)
        values = _gathered(self.recall() if giver == dist.get_rank() else {})
        wanted: Scales = {} if giver is None else values[giver]
        make_room(self._model_rebuild.chunks, {name: value.numel() for name, value in wanted.items()})
        set_scales(self._model_rebuild.chunks, wanted)
        self._are_newest = not self.is_idle()


def _gathered(mine: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    return found
