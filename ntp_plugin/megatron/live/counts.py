"""What a job counts outside of its model and optimizer, for joining ranks.

A checkpoint holds the same: how far the training has come, how many samples it has consumed, the position of the
learning-rate schedule. A joining rank joins where a step begins, or not at all: its own loop can begin nowhere else.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from megatron.core.rerun_state_machine import get_rerun_state_machine

from ntp_plugin.errors import Excluded
from ntp_plugin.megatron.live.loss_scale import numbers_of, set_numbers
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild
from ntp_plugin.megatron.live.save_progress import SaveProgress
from ntp_plugin.recovery.voted_sections import Loop

_ARGUMENTS = (
    *("consumed_train_samples", "consumed_valid_samples", "skipped_train_samples"),
    *("num_floating_point_operations_so_far", "do_train", "do_valid", "do_test"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """The counts of a member at the beginning of a section."""

    in_step: bool
    iteration: int
    sections: int
    kinds: Mapping[str, int] | None
    arguments: dict[str, Any]
    scheduled: int
    """Samples, as the learning-rate schedule counts them."""
    loss_scale: Mapping[str, float]
    save: SaveProgress


def count(args: Any, model_rebuild: ModelRebuild, loop: Loop, save: SaveProgress) -> Counts:
    """Return the counts of this rank."""
    return Counts(
        in_step=loop.in_step,
        iteration=args.curr_iteration,
        sections=loop.done,
        kinds=loop.kinds,
        arguments={name: getattr(args, name) for name in _ARGUMENTS if hasattr(args, name)},
        scheduled=model_rebuild.scheduler.num_steps,
        loss_scale=numbers_of(model_rebuild.optimizer),
        save=save,
    )


def adopt(counts: Counts, args: Any, model_rebuild: ModelRebuild, loop: Loop) -> None:
    """Continue from these counts, on a joining rank."""
    if not counts.in_step:
        raise Excluded(
            f"the others were not about to take a step, after {counts.iteration} iterations",
            fix="this process ends; a new one may join in its slot",
        )
    vars(args).update(counts.arguments)
    args.iteration = args.curr_iteration = counts.iteration
    get_rerun_state_machine().current_iteration = counts.iteration
    loop.done, loop.kinds = counts.sections, counts.kinds
    model_rebuild.scheduler.num_steps = counts.scheduled  # its settings of the optimizer came with the optimizer
    set_numbers(model_rebuild.optimizer, counts.loss_scale)
