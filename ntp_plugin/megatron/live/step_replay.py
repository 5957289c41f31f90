"""Saves and restores what a section changes before its vote, apart from gradients.

A loss can interrupt a section anywhere. Then some of Megatron's timers still run that nobody stopped, or are stopped
and should run; its rerun machine believes that it is in a step; an evaluation has switched off dropouts and timers and
has counted samples. FP8's scales have moved with each micro-batch. Loaders are at some sample, and after a recovery
they must follow another share of the batch. Steps that are repeated have the global batches of their time, and
Megatron's calculator of micro-batches follows them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.num_microbatches_calculator import update_num_microbatches
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training.global_vars import get_timers

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.megatron.fp8_scales import Scales
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild, forward_waits, set_forward_waits
from ntp_plugin.megatron.live.samples import SampleHooks
from ntp_plugin.megatron.live.scales import JobScales


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionSnapshot:
    """The state of the loop when a section began."""

    args: Any
    model_rebuild: ModelRebuild
    running: frozenset[str]
    machine: tuple[int, Any]
    consumed_in_validation: int
    timers: Any
    training: tuple[bool, ...]
    waiting: tuple[bool, ...]
    job_scales: JobScales
    scales: Scales

    def restore(self) -> None:
        """Restore this state."""
        for name, timer in get_timers()._timers.items():
            if name not in self.running:
                timer._started = False
            elif not timer._started:
                timer.start()
        machine = get_rerun_state_machine()
        machine.state = RerunState.NOT_RUNNING_YET
        machine.current_iteration, machine.mode = self.machine
        self.args.consumed_valid_samples = self.consumed_in_validation
        self.model_rebuild.chunks[0].config.timers = self.timers
        for chunk, training, waiting in zip(self.model_rebuild.chunks, self.training, self.waiting, strict=True):
            chunk.train(training)
            set_forward_waits(chunk, waits=waiting)
        self.job_scales.restore(self.scales)


class LoopState:
    """Takes snapshots of the loop, and rewinds loaders in a new epoch."""

    def __init__(
        self, args: Any, model_rebuild: ModelRebuild, samples: SampleHooks, groups: ElasticGroups, scales: JobScales
    ) -> None:
        self._args, self._model_rebuild, self._samples, self._groups = args, model_rebuild, samples, groups
        self._scales = scales
        self._epoch = 0
        self.consumed: Callable[[], int] = lambda: args.consumed_train_samples
        """Returns the consumed samples in the state, which may be older than the job if it is from copies."""
        self.catch_up: Callable[[], None] = _nothing
        """Brings the state up to the job."""

    def recall(self) -> SectionSnapshot:
        """Return a snapshot of the current state."""
        machine, config = get_rerun_state_machine(), self._model_rebuild.chunks[0].config
        return SectionSnapshot(
            args=self._args,
            model_rebuild=self._model_rebuild,
            running=frozenset(name for name, timer in get_timers()._timers.items() if timer._started),
            machine=(machine.current_iteration, machine.mode),
            consumed_in_validation=self._args.consumed_valid_samples,
            timers=config.timers,
            training=tuple(chunk.training for chunk in self._model_rebuild.chunks),
            waiting=tuple(forward_waits(chunk) for chunk in self._model_rebuild.chunks),
            job_scales=self._scales,
            scales=self._scales.recall(),
        )

    def begin_work(self) -> None:
        """Begin a section, for the first time or again; after a recovery, from the consumed samples."""
        self._samples.drawn.clear()
        come_to, self._args.consumed_train_samples = self._args.consumed_train_samples, self.consumed()
        try:
            if self._epoch != self._groups.epoch:
                self._samples.rewind()
                self._scales.agree()
                self._epoch = self._groups.epoch
            self.catch_up()
            assert self._args.consumed_train_samples == come_to, "repeated steps consume the same samples"
        finally:
            self._args.consumed_train_samples = come_to  # also where a loss interrupts it
            update_num_microbatches(come_to, consistency_check=False)


def _nothing() -> None:
    """Do nothing, without copies."""
