"""Which global batch a step has: one size, or several by `--step-batch-size-schedule`.

Megatron decides by the samples that were consumed before the step. Its calculator of micro-batches knows the size of
the step under way. A loader reads ahead of it, planning needs all sizes at the start, and `ntp check` has no
calculator, so the schedule is read here as well, by Megatron's own parser.
"""

import dataclasses
from typing import Any

from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator

from ntp_plugin.errors import ConfigError, Refused

FLAG = "--step-batch-size-schedule"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class BatchSchedule:
    """The sizes of the global batch, each with the consumed samples from which on it applies, in ascending order."""

    steps: tuple[tuple[int, int], ...]

    def __str__(self) -> str:
        return " ".join(f"{threshold}:{size}" for threshold, size in self.steps)

    @property
    def sizes(self) -> tuple[int, ...]:
        return tuple(size for _, size in self.steps)

    @property
    def largest(self) -> int:
        """The size that memory is planned for."""
        return max(self.sizes)

    def at(self, consumed: int) -> int:
        """Return the size of the step that begins after this number of samples."""
        reached = [size for threshold, size in self.steps if threshold <= consumed]
        return reached[-1] if reached else self.steps[0][1]

    def require_equal_replicas(self, micro_batch: int, replicas: int) -> None:
        """Raise `Refused` unless each size gives all full-width replicas as many micro-batches.

        Megatron asks that only when training comes to the size.
        """
        divisor = micro_batch * replicas
        for size in self.sizes:
            if size % divisor:
                raise Refused(
                    f"a global batch of {size} does not divide over {replicas} replicas in micro-batches of"
                    f" {micro_batch}",
                    fix=f"sizes that are multiples of {divisor}; a size that the training is past may change too",
                )


def batch_schedule(args: Any) -> BatchSchedule:
    """Return the sizes of a job's global batch.

    Raises:
        ConfigError: Megatron cannot read the schedule.
    """
    text = getattr(args, "step_batch_size_schedule", None)
    if text is None:
        return BatchSchedule(steps=((0, args.global_batch_size),))
    try:
        steps = StepBatchsizeNumMicroBatchesCalculator._parse_schedule(text, args.seq_length)
    except ValueError as error:
        raise ConfigError(f"{FLAG} {text!r}: {error}", fix="TOKENS:SIZE TOKENS:SIZE ...") from error
    if not steps or any(size < 1 for _, size in steps):
        raise ConfigError(f"{FLAG} {text!r}: a size is missing or below 1", fix="TOKENS:SIZE TOKENS:SIZE ...")
    return BatchSchedule(steps=tuple(steps))
