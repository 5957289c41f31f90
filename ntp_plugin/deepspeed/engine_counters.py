"""What the engine has counted as a window begins, and how it is had back.

Steps, samples, the schedule of the learning rate, the loss scale. A window that restarts begins from the same numbers
again; who comes in is told them; and they go with each copy of the state, as JSON has them. What a user's scheduler
keeps is written as data (`plain_data.py`); where it keeps something that is none, it is refused. What random numbers
are drawn from belongs to a rank, and is had back where that rank restarts.
"""

import functools
from collections.abc import Mapping
from typing import Any

import torch

from ntp_plugin.plain_data import decode, encode

_SCHEDULE, _GROUPS = "the state_dict of the learning rate's scheduler", "the optimizer's param_groups"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
_OF_A_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def count(engine: Any) -> dict[str, Any]:
    """As it is now."""
    scheduler = engine.lr_scheduler
    return {
        "counters": {name: getattr(engine, name) for name in _COUNTERS},
        "scheduler": encode(scheduler.state_dict() if hasattr(scheduler, "state_dict") else None, what=_SCHEDULE),
        "groups": encode(
            [
                {name: value for name, value in group.items() if name != "params"}
                for group in engine.basic_optimizer.param_groups
            ],
            what=_GROUPS,
        ),
        "scaler": {name: getattr(_scaler(engine), name, None) for name in _OF_A_SCALER},
    }


def adopt(engine: Any, counted: Mapping[str, Any]) -> None:
    """Have it so again, or as another rank has told it."""
    for name, value in counted["counters"].items():
        setattr(engine, name, value)
    scheduled = decode(counted["scheduler"], what=_SCHEDULE)
    if scheduled is not None:
        engine.lr_scheduler.load_state_dict(scheduled)
    groups = decode(counted["groups"], what=_GROUPS)
    for group, told in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        group.update(told)
    scaler = _scaler(engine)
    for name, value in counted["scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)


def _scaler(engine: Any) -> Any:
    """Where the wrapper of the optimizer keeps its loss scale; none, in float32, is an object without any of it."""
    wrapper = engine.optimizer
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def drawn_from() -> list[torch.Tensor]:
    """The state of torch's generators: the CPU's, and the device's if there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _has_device() else [])]


def draw_from(states: list[torch.Tensor]) -> None:
    """Have them so again."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@functools.cache
def _has_device() -> bool:
    """The driver would be asked in each step: without one that takes a quarter of a millisecond."""
    return torch.cuda.is_available()
