"""What is copied of a Megatron job besides tensors: how far the job has come (`recovery/job_copies.py`).

The copied tensors are what a rank's optimizer steps, and all that it keeps for it (`megatron/reduction/shards.py`). The
weights follow from them. The recovery rebuilds everything else in a Megatron job, or it belongs to no single rank
(`INVENTORY`). A model may have more: buffers that its checkpoints hold, weights that nobody steps. These are refused.

Going back. Sections that are over stay over, with what they have reported. The missing steps are taken again when the
next section begins (`training_step.py`), before anything else uses the state.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.copies.inventory import EXACT, LEFT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live import generators
from ntp_plugin.megatron.live.expert_bias import ExpertBias
from ntp_plugin.megatron.live.loss_scale import numbers_of, set_numbers
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild
from ntp_plugin.megatron.reduction.lane_sync import bare
from ntp_plugin.recovery.job_copies import WhoTrains
from ntp_plugin.training import optimizers

_LOG = logging.getLogger(__name__)

_OF_THE_ARGUMENTS = ("max_lr", "min_lr", "lr_*", "start_wd", "end_wd", "wd_incr_*")
"""Attributes of the schedule besides its position."""
INVENTORY = (
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="main weights", becomes=EXACT, why="copied: what is stepped"),
    *optimizers.INVENTORY,
    Item(pattern="the buffer *_extra_state", becomes=LEFT, why="FP8's scales: a resumed job begins with new ones"),
    Item(pattern="the buffer *expert_bias", becomes=EXACT, why="recorded with each copy, stage by stage"),
    Item(pattern="drawn *", becomes=EXACT, why="random number generators, if the slot survives"),
    Item(pattern="samples consumed_*", becomes=EXACT, why="recorded with each copy"),
    Item(pattern="samples skipped_*", becomes=RESET, why="only logged"),
    Item(pattern="loss scale *", becomes=EXACT, why="recorded with each copy"),
    Item(pattern="schedule num_steps", becomes=EXACT, why="recorded with each copy"),
    *(Item(pattern=f"schedule {of}", becomes=RECOMPUTE, why="follows from the arguments") for of in _OF_THE_ARGUMENTS),
    Item(pattern="steps", becomes=EXACT, why="the version of each copy"),
)
"""How each part of the state is restored. Every job also has gradients, buckets and lanes of the step in flight, timers
and the rerun machine: these are as when the section began."""

FRAMEWORK = "megatron"
"""The framework of the state, for readers that find only the copies."""


class LoopProgress:
    """How far the job has come, and the state of its random number generators."""

    def __init__(self, args: Any, model_rebuild: ModelRebuild, bias: ExpertBias, *, slot: int) -> None:
        self._args, self._model_rebuild, self._bias, self._slot = args, model_rebuild, bias, slot
        self.consumed = 0
        """Consumed samples in the state, if it is from copies."""
        self._found: Mapping[str, Any] = {}

    def extras(self) -> dict[str, Any]:
        """Return the current progress."""
        return {
            "framework": FRAMEWORK,
            "consumed": self._args.consumed_train_samples,
            "validated": self._args.consumed_valid_samples,
            "operations": float(getattr(self._args, "num_floating_point_operations_so_far", 0)),
            "scheduled": self._model_rebuild.scheduler.num_steps,
            "scaler": numbers_of(self._model_rebuild.optimizer),
            "bias": self._bias.values(),
            "random": {"slot": self._slot, **generators.states()},
        }

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """Restore this progress, except for what the job has counted, which is over."""
        self.consumed, self._found = extras["consumed"], extras
        scheduler = self._model_rebuild.scheduler
        scheduler.num_steps = extras["scheduled"]
        scheduler.step(increment=0)  # which sets the optimizer to it
        set_numbers(self._model_rebuild.optimizer, extras["scaler"])
        self._bias.set_values(extras["bias"])
        if extras["random"]["slot"] == self._slot:
            generators.put_back(extras["random"])

    def count_from(self, steps: int) -> None:
        """Set the counters of a resumed job to those of the state."""
        args, extras = self._args, self._found
        args.iteration = args.curr_iteration = steps
        args.consumed_train_samples, args.consumed_valid_samples = extras["consumed"], extras["validated"]
        args.num_floating_point_operations_so_far = extras["operations"]


def who_trains(layout: Layout) -> WhoTrains:
    """Return which slots of a layout train."""
    return WhoTrains(trains=tuple(layout.slots), present=tuple(layout.present), lost_nodes=layout.surviving.lost_nodes)


def refuse_unknown(args: Any, model_rebuild: ModelRebuild, *, strict: bool) -> None:
    """Raise, or warn, if the job has state that the inventory does not cover."""
    found = (*_in_the_model(model_rebuild), *_beside_it(model_rebuild), *_counted(args))
    for name in require_known(found, INVENTORY, strict=strict):
        _LOG.warning("copies: %s is not copied", name)


def _in_the_model(model_rebuild: ModelRebuild) -> Iterator[str]:
    """Yield the state in the user's model."""
    for chunk in map(bare, model_rebuild.chunks):
        parameters = dict(chunk.named_parameters())
        for name, parameter in parameters.items():
            yield f"weight {name}" if parameter.requires_grad else f"the weight {name}, which nobody steps,"
        for name, value in chunk.state_dict().items():
            if name not in parameters and isinstance(value, torch.Tensor) and value.numel():
                yield f"the buffer {name}"


def _beside_it(model_rebuild: ModelRebuild) -> Iterator[str]:
    """Yield the state of the optimizer, the schedule and the random number generators."""
    yield from generators.names()
    for optimizer in model_rebuild.optimizer.chained_optimizers:
        if any(getattr(optimizer, f"{kind}_from_float16_groups", ()) for kind in ("fp32", "shard_fp32")):
            yield "main weights"
        yield from optimizers.kept(optimizer.optimizer)
        yield from (f"loss scale {name}" for name in numbers_of(optimizer))
    yield from (f"schedule {name}" for name in model_rebuild.scheduler.state_dict())


def _counted(args: Any) -> Iterator[str]:
    """Yield the counters of the job."""
    yield "steps"
    yield from (f"samples {name}" for name in vars(args) if name.startswith(("consumed_", "skipped_")))
