"""ZeRO-1 and ZeRO-2 of degraded AutoTP replicas, sharded lane by lane.

DeepSpeed cuts its flat buffers evenly over the slots that hold the same; with replicas of different widths no two slots
do. So in a degraded layout, the object that the script, the engine and the scheduler hold changes to this class
(`zero_state.py`). It offers what the engine calls, and its step is that of `reduction/sharded_step.py`. Gradients are
added up in the parameters and reduced once a step, for ZeRO-2 as well.

Other methods of DeepSpeed's class raise `Refused`, or do not exist.
"""

from collections.abc import Callable
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.base_optimizer import ZeROOptimizer
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler
from deepspeed.runtime.utils import is_invalid_grad_norm
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer

from ntp_plugin.deepspeed.flat_shards import Groups
from ntp_plugin.errors import Refused
from ntp_plugin.reduction.sharded_step import ShardedStep


class LaneZero(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    """A sharded optimizer on lane shards, as one rank sees it."""

    def __init__(
        self,
        init_optimizer: Any,
        *_: Any,
        shards: Callable[[Groups], ShardedStep],
        clip_grad: float,
        compute_grad_norm: bool,
        check_grad_overflow: bool,
        static_loss_scale: float,
        dynamic_loss_scale: bool,
        dynamic_loss_args: Any,
        **__: Any,
    ) -> None:
        ZeROOptimizer.__init__(self)
        self.optimizer = init_optimizer
        self.bit16_groups: Groups = [list(group["params"]) for group in init_optimizer.param_groups]
        self.shards = shards(self.bit16_groups)
        for group, mine in zip(init_optimizer.param_groups, self.shards.groups, strict=True):
            group["params"] = mine
        self.dtype, self.device = self.bit16_groups[0][0].dtype, get_accelerator().current_device_name()
        self.clip_grad, self.compute_grad_norm = clip_grad, compute_grad_norm
        self.check_grad_overflow = check_grad_overflow or (compute_grad_norm and self.dtype != torch.bfloat16)
        self.loss_scaler = CreateLossScaler(
            dtype=self.dtype,
            static_loss_scale=static_loss_scale,
            dynamic_scaling=dynamic_loss_scale,
            dynamic_loss_args=dynamic_loss_args,
        )
        self.dynamic_loss_scale = self.loss_scaler.dynamic
        self.custom_loss_scaler, self.external_loss_scale = False, None
        self.torch_autocast_gradscaler: Any = None
        self.use_grad_accum_attribute = self.overflow = False
        self._global_grad_norm: Any = 0.0

    def destroy(self) -> None:
        """Do nothing: there are no hooks in the model."""

    # ------------------------------------------------ called by the engine

    def reduce_gradients(self, pipeline_parallel: bool = False) -> None:
        """Reduce at the end of a step, for ZeRO-1."""
        del pipeline_parallel
        self.shards.sum()

    def overlapping_partition_gradients_reduce_epilogue(self) -> None:
        """Reduce at the end of the last backward of a step, for ZeRO-2."""
        if self.is_gradient_accumulation_boundary():
            self.shards.sum()

    def step(self, closure: Any = None) -> None:
        """Step as DeepSpeed's own does: skip the step if the norm is not finite."""
        del closure
        # In float32, as in DeepSpeed, so that gradients are clipped by the same number.
        norm = self.shards.norm().float() if self.compute_grad_norm or self.check_grad_overflow else None
        scale = self.loss_scale
        self.overflow = self.check_grad_overflow and is_invalid_grad_norm(norm)
        self._update_scale(self.overflow)
        if self.overflow:
            self._global_grad_norm = float("inf")
            return
        self._global_grad_norm = norm / scale if norm is not None and self.compute_grad_norm else None
        self.unscale_and_clip_grads(self.shards.gradients, norm)
        self.shards.step(self.optimizer.step)
        self.shards.spread()

    # ------------------------------------------------ not available

    @property
    def dp_process_group(self) -> Any:
        """The group for reading and writing checkpoints; its members would hold the same parts."""
        raise _not_while_degraded("no slots hold the same")

    def state_dict(self) -> Any:
        """Refuse: DeepSpeed alone could not load these shards."""
        raise _not_while_degraded("its state cannot be saved")

    def load_state_dict(self, *_: Any, **__: Any) -> None:
        """Refuse: no checkpoint can be loaded."""
        raise _not_while_degraded("no checkpoint can be loaded")


def _not_while_degraded(what: str) -> Refused:
    return Refused(
        f"while a rank is lost the optimizer is sharded lane by lane, and {what}",
        fix="engine.save_checkpoint and load_checkpoint once all ranks are back",
    )
