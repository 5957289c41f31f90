"""What the Trainer does between two steps, so that it can be done again after a loss."""

from collections.abc import Callable
from typing import Any

from ntp_plugin.deepspeed.hf.world import split_over_present_ranks
from ntp_plugin.deepspeed.job import DeepSpeedJob


def are_possible() -> bool:
    """Whether this process is a member of the job, and its script is not over."""
    job = DeepSpeedJob.now
    return job is not None and job.loop.driver is not None


def evaluate(work: Callable[[], Any], trainer: Any, loader: Any) -> Any:
    """Run an evaluation from its beginning, over the ranks that are there."""
    split_over_present_ranks(loader)
    known = trainer.accelerator.gradient_state.dataloader_references
    before = list(known)
    try:
        return work()
    finally:  # an interrupted one leaves its loader there
        known[:] = before


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
