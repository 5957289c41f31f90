"""Conditions that a job has to bear: kernels, files and numbers that are as on some machine or in some training.

Called in a rank, before Megatron starts, like the negative controls (`spoilt.py`): it stays for the life of the
process. A job under a condition trains as it should.
"""

import os
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ntp_plugin.megatron import cpu_arguments
from ntp_plugin.megatron.live.training_step import TrainingStep
from tests.harness.parity.job import OVERFLOWS

CLEARED_AFTER = 6
"""The step after which files can be written again."""
LARGEST_FILE = 1 << 17
"""Bytes; more than a test writes by itself, and less than a rank's part of a checkpoint."""


def plant(owner: Any, name: str, value: object) -> None:
    """Put something in the place of an attribute of a class or module."""
    setattr(owner, name, value)


def writers_wait() -> None:
    """Have the threads that write a checkpoint wait until two more steps are over, the last one is near, or a rank is
    lost or admitted."""
    from megatron.core.dist_checkpointing.strategies.filesystem_async import FileSystemWriterAsync  # noqa: PLC0415
    from megatron.training import get_args  # noqa: PLC0415

    from ntp_plugin.megatron.live import start  # noqa: PLC0415

    write = FileSystemWriterAsync.write_preloaded_data

    def write_late(*args: Any, **kwargs: Any) -> Any:
        steps, begun, live = get_args(), get_args().curr_iteration, start.Jobs.now
        epoch = live.rank.groups.epoch if live else 0
        while steps.curr_iteration < min(begun + 2, steps.train_iters - 2):
            if live and live.rank.groups.epoch != epoch:
                break
            time.sleep(0.01)
        return write(*args, **kwargs)

    setattr(FileSystemWriterAsync, "write_preloaded_data", staticmethod(write_late))  # noqa: B010


def norms_are_tensors() -> None:
    """Have the norm of gradients be a tensor with one number, as with the kernels of TransformerEngine."""
    result = TrainingStep._step_result

    def with_tensor(step: Any) -> Any:
        step._norm = None if step._norm is None else torch.tensor([float(step._norm)])
        return result(step)

    plant(TrainingStep, "_step_result", with_tensor)


def losses_are_means() -> None:
    """Have the script report the mean over a micro-batch's tokens, and not their sum and number."""
    from megatron.core.pipeline_parallel import schedules  # noqa: PLC0415

    calculate = schedules.forward_step_calc_loss

    def calculated(model: Any, output: Any, loss_func: Any, *args: Any, **kwargs: Any) -> Any:
        def with_mean(values: Any) -> Any:
            loss, tokens, reported = loss_func(values)
            return loss, tokens, {name: pair[0] / pair[1] for name, pair in reported.items()}

        return calculate(model, output, with_mean, *args, **kwargs)

    plant(schedules, "forward_step_calc_loss", calculated)


def gradients_overflow() -> None:
    """Have a gradient of each rank be infinite in some steps, in any layout."""
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer  # noqa: PLC0415
    from megatron.training import get_args  # noqa: PLC0415

    check = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan

    def overflowing(optimizer: Any) -> Any:
        args = get_args()
        gradients = optimizer._collect_main_grad_data_for_unscaling()
        if args.consumed_train_samples // args.global_batch_size + 1 in OVERFLOWS and gradients:
            gradients[0].view(-1)[0] = torch.inf
        return check(optimizer)

    plant(MixedPrecisionOptimizer, "_unscale_main_grads_and_check_for_nan", overflowing)


def no_fused_attention() -> None:
    """The emulation of TransformerEngine has no fused attention."""
    from ntp_plugin.megatron.te_emulation import extension, kernels  # noqa: PLC0415

    def missing(*_: Any) -> Any:
        raise kernels.unsupported("fused attention")

    for name in ("get_fused_attn_backend", "fused_attn_fwd", "fused_attn_bwd"):
        plant(sys.modules[extension.NAME], name, missing)


def attention_is_fused() -> None:
    """The emulation has fused attention without context parallelism, too."""
    plant(cpu_arguments, "_attention", lambda _: "fused")


def small_files_at_first() -> None:
    """Have rank 3 write no file of the size of a checkpoint, until some steps are over: a limit of the system."""
    if os.environ["RANK"] != "3":
        return
    _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE, most))
    _after(CLEARED_AFTER, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most, most)))


def obstacles_at_first() -> None:
    """Have rank 0 remove what a test has put into the way of checkpoints, when some steps are over."""
    from megatron.training import get_args  # noqa: PLC0415

    def remove() -> None:
        folder = Path(get_args().save)
        (folder / "filler").unlink(missing_ok=True)
        for in_the_way in folder.glob("latest_checkpointed_iteration.txt.new"):
            in_the_way.rmdir()

    if os.environ["RANK"] == "0":
        _after(CLEARED_AFTER, remove)


def _after(step: int, then: Callable[[], None]) -> None:
    """Call a function once a step is over."""
    from megatron.training import training  # noqa: PLC0415

    log = training.training_log

    def logged(*args: Any, **kwargs: Any) -> Any:
        if args[3] == step:
            then()
        return log(*args, **kwargs)

    training.training_log = logged
