"""Where the Trainer is, for a joining rank, whose script starts at the beginning.

The joining rank is admitted once its engine is built, before its first data epoch. Its Trainer then skips the data
epochs that the job has behind it, and the micro-batches of the current one, and has the counters, log, schedule and
callbacks of the others.
"""

import dataclasses
from typing import TYPE_CHECKING, Any

from accelerate.utils import DeepSpeedSchedulerWrapper
from transformers.trainer_callback import ExportableState

from ntp_plugin.deepspeed.hf.steps import Step

if TYPE_CHECKING:
    from ntp_plugin.deepspeed.hf.trainer_loop import TrainerLoop

_COUNTERS = ("_globalstep_last_logged", "_total_loss_scalar", "_initial_global_step", "_initial_num_input_tokens_seen")
_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint", "stateful_callbacks"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Progress:
    """Where the Trainer of the other ranks is: at the first micro-batch of a step."""

    done: int
    steps: tuple[Step, ...]
    """The newest ones, the last of which begins."""
    draws: dict[int, Any]
    """Data epoch -> the random number generators before its batches were drawn."""
    state: dict[str, Any]
    counters: dict[str, Any]
    schedule: Any
    """The state of a scheduler that the Trainer steps itself; None if the engine has it."""
    unlogged: float

    @classmethod
    def of(cls, loop: "TrainerLoop") -> "Progress":
        """Describe where a Trainer is."""
        trainer = loop.trainer
        _note_callbacks(trainer)
        scheduler = trainer.lr_scheduler
        return cls(
            done=loop.done,
            steps=tuple(step.without_inputs() for step in loop.steps),
            draws=dict(loop.book.draws),
            state={name: getattr(trainer.state, name) for name in _STATE},
            counters={name: getattr(trainer, name) for name in _COUNTERS},
            schedule=None if isinstance(scheduler, DeepSpeedSchedulerWrapper) else scheduler.state_dict(),
            unlogged=loop.unlogged,
        )

    @property
    def data_epoch(self) -> int:
        """The data epoch of the step that begins."""
        return self.steps[-1].data_epoch

    @property
    def first(self) -> int:
        """The first micro-batch of that step in the data epoch."""
        return self.steps[-1].first

    def adopt(self, loop: "TrainerLoop") -> None:
        """Bring a Trainer there, before its first data epoch."""
        trainer = loop.trainer
        for name, value in self.state.items():
            setattr(trainer.state, name, value)
        restore_callbacks(trainer)
        if self.schedule is not None:
            trainer.lr_scheduler.load_state_dict(self.schedule)
        loop.book.draws.update(self.draws)
        loop.unlogged, loop.logged_in = self.unlogged, -1

    def adopt_counters(self, trainer: Any) -> None:
        """Set what the Trainer resets when its training begins."""
        for name, value in self.counters.items():
            setattr(trainer, name, value)


def _note_callbacks(trainer: Any) -> None:
    """Write the state of callbacks where the Trainer has it in a checkpoint."""
    known = trainer.state.stateful_callbacks
    seen: set[str] = set()
    for callback in (*trainer.callback_handler.callbacks, trainer.control):
        if isinstance(callback, ExportableState):
            name, found = type(callback).__name__, callback.state()
            known[name] = [*known[name], found] if name in seen and isinstance(known[name], list) else found
            seen.add(name)


def restore_callbacks(trainer: Any) -> None:
    """Have the Trainer's callbacks continue from the state in `trainer.state`."""
    args = trainer.args
    restores, args.restore_callback_states_from_checkpoint = args.restore_callback_states_from_checkpoint, True
    try:
        trainer._load_callback_state()
    finally:
        args.restore_callback_states_from_checkpoint = restores
