"""What a section changes before its vote besides gradients, and how it is had back for another try.

A section can be left anywhere. Then timers of Megatron's run that nobody stopped, or stand still and should run; its
machine for repeated steps believes to be in one; an evaluation has switched dropouts off and timers away and has
counted samples. Loaders stand somewhere, and after a recovery they are to be those of another share of the batch.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.training.global_vars import get_timers

from ntp_plugin.groups.process_groups import ElasticGroups
from ntp_plugin.megatron.live.model_rebuild import ModelRebuild, forward_waits, set_forward_waits
from ntp_plugin.megatron.live.samples import SampleHooks


@dataclasses.dataclass(frozen=True, kw_only=True)
class SectionSnapshot:
    """What was so when a section began."""

    args: Any
    model_rebuild: ModelRebuild
    running: frozenset[str]
    machine: tuple[int, Any]
    consumed_in_validation: int
    timers: Any
    training: tuple[bool, ...]
    waiting: tuple[bool, ...]

    def restore(self) -> None:
        """Have it so again."""
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


class LoopState:
    """Looks at what is so, and has loaders follow the epochs."""

    def __init__(self, args: Any, model_rebuild: ModelRebuild, samples: SampleHooks, groups: ElasticGroups) -> None:
        self._args, self._model_rebuild, self._samples, self._groups = args, model_rebuild, samples, groups
        self._epoch = 0
        self.consumed: Callable[[], int] = lambda: args.consumed_train_samples
        """Samples that are in the state, which may be older than what the job has come to, where copies had it so."""
        self.catch_up: Callable[[], None] = _nothing
        """Have the state that the job has come to."""

    def recall(self) -> SectionSnapshot:
        """As it is now."""
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
        )

    def begin_work(self) -> None:
        """A section is begun, for the first time or again: after a recovery, from the samples that are consumed."""
        self._samples.drawn.clear()
        come_to, self._args.consumed_train_samples = self._args.consumed_train_samples, self.consumed()
        try:
            if self._epoch != self._groups.epoch:
                self._samples.rewind()
                self._epoch = self._groups.epoch
            self.catch_up()
            assert self._args.consumed_train_samples == come_to, "steps that are taken again consume the same samples"
        finally:
            self._args.consumed_train_samples = come_to  # also where a loss interrupts it


def _nothing() -> None:
    """There are no copies."""
