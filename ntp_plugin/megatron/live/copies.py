"""What a Megatron job has copied (`recovery/job_copies.py`), and what goes with it.

What the optimizer of a rank steps, and all that it keeps for it (`megatron/reduction/shards.py`), and how far the job
had come. The weights follow from that. Everything else in a Megatron job is made anew by the recovery or is nobody's
own (`INVENTORY`). A model may have more: buffers that its checkpoints hold, weights that nobody steps. That is refused.

Going back. The sections that are over stay over, with what they have told. The steps that are missing are taken again
when the next section begins (`training_step.py`), before anything else is done with the state.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.copies.inventory import EXACT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live import generators
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild
from ntp_plugin.megatron.reduction.lane_sync import bare
from ntp_plugin.recovery.job_copies import WhoTrains
from ntp_plugin.training import optimizers

_LOG = logging.getLogger(__name__)

_OF_THE_ARGUMENTS = ("max_lr", "min_lr", "lr_*", "start_wd", "end_wd", "wd_incr_*")
"""What the schedule has beside the place where it stands."""
INVENTORY = (
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="main weights", becomes=EXACT, why="copied: what is stepped"),
    *optimizers.INVENTORY,
    Item(pattern="drawn *", becomes=EXACT, why="generators of random numbers, where the slot is still there"),
    Item(pattern="samples consumed_*", becomes=EXACT, why="told with each copy"),
    Item(pattern="samples skipped_*", becomes=RESET, why="logged, and nothing else"),
    Item(pattern="loss scale *", becomes=EXACT, why="told with each copy"),
    Item(pattern="schedule num_steps", becomes=EXACT, why="told with each copy"),
    *(Item(pattern=f"schedule {of}", becomes=RECOMPUTE, why="of the arguments") for of in _OF_THE_ARGUMENTS),
    Item(pattern="steps", becomes=EXACT, why="the version of each copy"),
)
"""What becomes of all that is looked for. In every job there are gradients, buckets and lanes besides, of the step in
flight, and timers and the machine for repeated steps: as when the section began."""

FRAMEWORK = "megatron"
"""Whose state it is, for those who find only the copies."""


class LoopProgress:
    """How far the job had come, and what it draws random numbers from."""

    def __init__(self, args: Any, model_rebuild: ModelRebuild, *, slot: int) -> None:
        self._args, self._model_rebuild, self._slot = args, model_rebuild, slot
        self.consumed = 0
        """Samples in the state, where it is from copies."""
        self._found: Mapping[str, Any] = {}

    def extras(self) -> dict[str, Any]:
        """As it is now."""
        scaler = getattr(self._optimizer, "grad_scaler", None)
        return {
            "framework": FRAMEWORK,
            "consumed": self._args.consumed_train_samples,
            "validated": self._args.consumed_valid_samples,
            "operations": float(getattr(self._args, "num_floating_point_operations_so_far", 0)),
            "scheduled": self._model_rebuild.scheduler.num_steps,
            "scaler": None if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()},
            "random": {"slot": self._slot, **generators.states()},
        }

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """Have it so again, but for what the job has counted, which is over."""
        self.consumed, self._found = extras["consumed"], extras
        scheduler = self._model_rebuild.scheduler
        scheduler.num_steps = extras["scheduled"]
        scheduler.step(increment=0)  # which sets the optimizer to it
        scaler = getattr(self._optimizer, "grad_scaler", None)
        if scaler is not None and extras["scaler"] is not None:
            device = scaler.scale.device
            like = scaler.state_dict()
            told = {
                key: torch.tensor([value], device=device) if isinstance(like[key], torch.Tensor) else int(value)
                for key, value in extras["scaler"].items()
            }
            scaler.load_state_dict(told)
        if extras["random"]["slot"] == self._slot:
            generators.put_back(extras["random"])

    def count_from(self, steps: int) -> None:
        """Have the job begin where the state is that it resumes from."""
        args, extras = self._args, self._found
        args.iteration = args.curr_iteration = steps
        args.consumed_train_samples, args.consumed_valid_samples = extras["consumed"], extras["validated"]
        args.num_floating_point_operations_so_far = extras["operations"]

    @property
    def _optimizer(self) -> Any:
        """Megatron's only one."""
        return self._model_rebuild.optimizer.chained_optimizers[0]


def who_trains(layout: Layout) -> WhoTrains:
    """In a layout."""
    return WhoTrains(trains=tuple(layout.slots), present=tuple(layout.present), lost_nodes=layout.surviving.lost_nodes)


def refuse_unknown(args: Any, model_rebuild: ModelRebuild, *, strict: bool) -> None:
    """State of which nobody knows what becomes of it when it comes from copies."""
    found = (*_in_the_model(model_rebuild), *_beside_it(model_rebuild), *_counted(args))
    for name in require_known(found, INVENTORY, strict=strict):
        _LOG.warning("copies: %s is not copied", name)


def _in_the_model(model_rebuild: ModelRebuild) -> Iterator[str]:
    """What there is in this process that others may not have, and in the user's model."""
    for chunk in map(bare, model_rebuild.chunks):
        parameters = dict(chunk.named_parameters())
        for name, parameter in parameters.items():
            yield f"weight {name}" if parameter.requires_grad else f"the weight {name}, which nobody steps,"
        for name, value in chunk.state_dict().items():
            if name not in parameters and isinstance(value, torch.Tensor) and value.numel():
                yield f"the buffer {name}"


def _beside_it(model_rebuild: ModelRebuild) -> Iterator[str]:
    """What steps it, and what random numbers are drawn from."""
    yield from generators.names()
    for optimizer in model_rebuild.optimizer.chained_optimizers:
        if any(getattr(optimizer, f"{kind}_from_float16_groups", ()) for kind in ("fp32", "shard_fp32")):
            yield "main weights"
        yield from optimizers.kept(optimizer.optimizer)
        scaler = getattr(optimizer, "grad_scaler", None)
        yield from (f"loss scale {name}" for name in (scaler.state_dict() if scaler is not None else ()))
    yield from (f"schedule {name}" for name in model_rebuild.scheduler.state_dict())


def _counted(args: Any) -> Iterator[str]:
    """How far the job has come."""
    yield "steps"
    yield from (f"samples {name}" for name in vars(args) if name.startswith(("consumed_", "skipped_")))
