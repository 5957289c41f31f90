"""Lets accelerate start a DeepSpeed job on a machine without accelerators, as DeepSpeed itself can.

accelerate knows DeepSpeed on accelerators only. Without one, each process of `TrainingArguments(deepspeed=...)` would
believe that it is alone. This module gives it gloo instead, in a process of `ntp run` that asks for DeepSpeed, so that
recipes and tests of the Trainer run on a CPU. Where torch has an accelerator, accelerate's own choice stays.
"""

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

from ntp_plugin.patching import Replacement, apply_all


def install() -> None:
    """Replace accelerate's choice of a backend in this process."""
    apply_all(TABLE)


def _or_gloo(original: Callable[..., Any]) -> Callable[..., Any]:
    """`PartialState._prepare_backend`."""

    @functools.wraps(original)
    def choose(state: Any, cpu: bool = False, *args: Any, **kwargs: Any) -> Any:
        if cpu or not _wants_deepspeed() or torch.accelerator.is_available() or "LOCAL_RANK" not in os.environ:
            return original(state, cpu, *args, **kwargs)
        return original(state, True, *args, **kwargs)

    return choose


def _wants_deepspeed() -> bool:
    return os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"


TABLE = (
    Replacement(
        target="accelerate.state:PartialState._prepare_backend",
        why="without an accelerator it finds no distributed job beside DeepSpeed",
        make=_or_gloo,
    ),
)
