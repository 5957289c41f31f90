"""The engine's counters when an accumulation window begins, and how to restore them.

The counters are steps, samples, the learning-rate schedule, the loss scale, and how many tokens random LTD keeps. An
accumulation window that restarts begins from the same counters; a joining rank receives them; and each copy of the
state carries them, as JSON. What a user's scheduler keeps is written as data (`plain_data.py`), and refused if it is
not plain data. The state of the random number generators belongs to a rank, and is restored where that rank restarts.
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
    """Return the current counters."""
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
        "autocast": None if (autocast := _autocast_scaler(engine)) is None else autocast.state_dict(),
        "random_ltd": dict(engine.random_ltd_scheduler.state_dict()) if engine.random_ltd_enabled() else None,
    }


def adopt(engine: Any, counted: Mapping[str, Any]) -> None:
    """Set the counters to these, of this rank or of another one."""
    for name, value in counted["counters"].items():
        setattr(engine, name, value)
    scheduled = decode(counted["scheduler"], what=_SCHEDULE)
    if scheduled is not None:
        engine.lr_scheduler.load_state_dict(scheduled)
    groups = decode(counted["groups"], what=_GROUPS)
    for group, counted_group in zip(engine.basic_optimizer.param_groups, groups, strict=True):
        group.update(counted_group)
    scaler = _scaler(engine)
    for name, value in counted["scaler"].items():
        if hasattr(scaler, name):
            setattr(scaler, name, value)
    autocast = _autocast_scaler(engine)
    if autocast is not None:
        autocast.load_state_dict(counted["autocast"])
        autocast._per_optimizer_states.clear()  # else a step that is taken again has unscaled its gradients twice
    if engine.random_ltd_enabled():
        engine.random_ltd_scheduler.load_state_dict(counted["random_ltd"])


def _scaler(engine: Any) -> Any:
    """Return the object that keeps the loss scale; in float32 it has none of the attributes."""
    wrapper = engine.optimizer
    return getattr(wrapper, "loss_scaler", None) or getattr(wrapper, "loss_scale_config", None)


def _autocast_scaler(engine: Any) -> Any:
    """Return the scaler of `torch_autocast` in fp16, which is the optimizer's own with ZeRO; else None."""
    with_zero = getattr(engine.optimizer, "torch_autocast_gradscaler", None)
    return with_zero or engine.torch_autocast_z0_gradscaler


def drawn_from() -> list[torch.Tensor]:
    """Return the state of torch's generators: the CPU's, and the device's if there is one."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if _has_device() else [])]


def draw_from(states: list[torch.Tensor]) -> None:
    """Restore the state of the generators."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])


@functools.cache
def _has_device() -> bool:
    """Cached, because each step would ask the driver, which takes a quarter of a millisecond without a device."""
    return torch.cuda.is_available()
