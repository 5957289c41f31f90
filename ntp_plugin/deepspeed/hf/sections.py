"""What the Trainer does between two steps, so that it can be done again after a loss."""

from collections.abc import Callable
from typing import Any

from ntp_plugin.deepspeed.hf.evaluation import NominalRows, can_be_in_rows
from ntp_plugin.deepspeed.hf.trainer_loop import TrainerLoop
from ntp_plugin.deepspeed.hf.world import split_over_present_ranks
from ntp_plugin.deepspeed.job import DeepSpeedJob


def are_possible() -> bool:
    """Whether this process is a member of the job, and its script is not over."""
    job = DeepSpeedJob.now
    return job is not None and job.loop.driver is not None


def evaluate(work: Callable[[Any], Any], loop: TrainerLoop, loader: Any, gather: Any) -> Any:
    """Run an evaluation from its beginning, over the ranks that are there.

    Args:
        work: Evaluates with a loader.
        loop: The loop between whose steps it is.
        loader: The loader that the Trainer has made.
        gather: What the Trainer gathers with.
    """
    trainer = loop.trainer
    known = trainer.accelerator.gradient_state.dataloader_references
    before, trainer.gather_function = list(known), gather
    split_over_present_ranks(loader)
    if loop.window.degraded and can_be_in_rows(loader):
        loop.rows = NominalRows(loader, trainer, nominal=loop.nominal)
        trainer.gather_function = loop.rows.gather
    try:
        return work(loop.rows or loader)
    finally:  # an interrupted one leaves its loader there
        known[:], loop.rows = before, None


def tokens_in(original: Callable[..., None], trainer: Any, batch: Any) -> int:
    """Return what `Trainer._track_num_input_tokens` counts in a micro-batch, without the other ranks."""
    state, accelerator = trainer.state, trainer.accelerator
    before, accelerator.gather = state.num_input_tokens_seen, _alone
    try:
        original(trainer, batch)
        return int(state.num_input_tokens_seen - before)
    finally:
        state.num_input_tokens_seen = before
        del accelerator.gather


def _alone(tensor: Any) -> Any:
    return tensor


def with_barrier(through: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return what replaces torch.distributed in a module: only its barrier differs."""

    def make(original: Any) -> Any:
        return _Distributed(original, through(original.barrier))

    return make


class _Distributed:
    def __init__(self, original: Any, barrier: Callable[..., Any]) -> None:
        self._original, self.barrier = original, barrier

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)
