"""What a Megatron job has copied (`recovery/job_copies.py`), and what goes with it.

What the optimizer of a rank steps, and all that it keeps for it (`megatron/shards.py`), and how far the job had come.
The weights follow from that. Everything else in a Megatron job is made anew by the walk or is nobody's own
(`INVENTORY`). A model may have more: buffers that its checkpoints hold, weights that nobody steps. That is refused.

Going back. The sections that are over stay over, with what they have told. The steps that are missing are taken again
when the next section begins (`training_step.py`), before anything else is done with the state.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from ntp_plugin.copies.inventory import EXACT, RECOMPUTE, RESET, Item, require_known
from ntp_plugin.megatron.lane_sync import bare
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.live import generators
from ntp_plugin.megatron.live.anatomy import Anatomy
from ntp_plugin.recovery.job_copies import WhoTrains

_LOG = logging.getLogger(__name__)

INVENTORY = (
    Item(pattern="main weights and all that the optimizer keeps for them", becomes=EXACT, why="copied"),
    Item(pattern="samples consumed, schedule, loss scale", becomes=EXACT, why="told with each copy"),
    Item(pattern="drawn *", becomes=EXACT, why="generators of random numbers, where the slot is still there"),
    Item(pattern="weight *", becomes=RECOMPUTE, why="what is stepped, rounded"),
    Item(pattern="gradients, buckets, lanes", becomes=RESET, why="of the step in flight"),
    Item(pattern="timers, the machine for repeated steps", becomes=RESET, why="as when the section began"),
)
"""What becomes of all that a Megatron job has. What a user's model may have more of is found by the patterns."""

FRAMEWORK = "megatron"
"""Whose state it is, for those who find only the copies."""


class HowFar:
    """How far the job had come, and what it draws random numbers from."""

    def __init__(self, args: Any, anatomy: Anatomy, *, slot: int) -> None:
        self._args, self._anatomy, self._slot = args, anatomy, slot
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
            "scheduled": self._anatomy.scheduler.num_steps,
            "scaler": None if scaler is None else {key: float(value) for key, value in scaler.state_dict().items()},
            "random": {"slot": self._slot, **generators.states()},
        }

    def go_back(self, extras: Mapping[str, Any]) -> None:
        """Have it so again, but for what the job has counted, which is over."""
        self.consumed, self._found = extras["consumed"], extras
        scheduler = self._anatomy.scheduler
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
        return self._anatomy.optimizer.chained_optimizers[0]


def who_trains(layout: Layout) -> WhoTrains:
    """In a layout."""
    return WhoTrains(trains=tuple(layout.slots), present=tuple(layout.present), lost_nodes=layout.standing.lost_nodes)


def refuse_unknown(anatomy: Anatomy, *, strict: bool) -> None:
    """State of which nobody knows what becomes of it when it comes from copies."""
    for name in require_known(_found(anatomy), INVENTORY, strict=strict):
        _LOG.warning("copies: %s is not copied", name)


def _found(anatomy: Anatomy) -> Iterator[str]:
    """What there is in this process that others may not have: in the user's model, and to draw from."""
    yield from generators.names()
    for chunk in map(bare, anatomy.chunks):
        parameters = dict(chunk.named_parameters())
        for name, parameter in parameters.items():
            yield f"weight {name}" if parameter.requires_grad else f"the weight {name}, which nobody steps,"
        for name, value in chunk.state_dict().items():
            if name not in parameters and isinstance(value, torch.Tensor) and value.numel():
                yield f"the buffer {name}"
