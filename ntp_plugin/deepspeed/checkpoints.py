"""Checkpoints that DeepSpeed writes in a live job, `engine.save_checkpoint`.

Each is a section of its own: whoever has left it knows that all have ended it, and a loss in it has it written again,
by those who are there. DeepSpeed writes with ZeRO as many shards as there are ranks, so an attempt of more ranks, or an
older checkpoint under the same tag, leaves shards behind that are of nothing; they are removed.

Going back. With ZeRO a loss may cost a step, and a checkpoint is of the step after which the script has asked for it.
So there are copies of that step first, and then a loss in the writing, which takes longer, costs the writing alone.
Where the step was lost with the rank all the same, nothing is written, which the log says; and if the loop had no step
left to take, the job ends by that.

Who comes in late. The script of a newcomer, or of a job that is resumed, goes through the turns that are behind the job
in no time, past the checkpoints between them. These have been written.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ntp_plugin.errors import StateLost
from ntp_plugin.recovery.loop import Loop

if TYPE_CHECKING:
    from ntp_plugin.deepspeed.window import Window

_LOG = logging.getLogger(__name__)
_SHARDS = "*zero_pp_rank_{}_mp_rank_*_optim_states.pt"


class Checkpoints:
    """Of one engine."""

    def __init__(self, engine: Any, window: "Window", loop: Loop, *, newcomer: bool) -> None:
        self._engine, self._window, self._loop = engine, window, loop
        self.catches_up = newcomer
        """Whether the script goes through what the job has behind it, up to its first forward with the others."""
        self._owed: int | None = None
        """The step whose checkpoint was not written because it was lost, until it is taken again."""

    def into(self, engine: Any) -> None:
        """In the place of the engine's own."""
        engine.save_checkpoint = self._together(engine.save_checkpoint)

    def _together(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            if self.catches_up:
                return True
            window = self._window
            window.begin()
            of_step, saved = window.step, [None]

            def work() -> Any:
                if window.cut is not None and window.cut.why_none_is_saved:
                    _LOG.warning("no checkpoint was written: %s", window.cut.why_none_is_saved)
                elif window.step != of_step:
                    self._owed = of_step
                    _LOG.warning("no checkpoint was written of step %d, which the loop takes again", of_step)
                else:
                    if window.copies is not None:
                        window.copies.catch_up(self._vote_on_copies)
                    saved[:] = [self.write(functools.partial(original, save_dir, tag, *args, **kwargs))]
                    self._remove_what_is_of_nobody(Path(save_dir), tag)
                return self._loop.vote(lambda _: saved[0], window.no_words())

            return window.section(work, lambda: saved[0])

        return save

    def write(self, write: Callable[[], Any]) -> Any:
        """Now that there are copies; chaos comes here too."""
        return write()

    def _vote_on_copies(self, words: Sequence[bool]) -> Sequence[bool]:
        return self._loop.vote_again(self._window.are_of_all, torch.tensor(words, dtype=torch.float64))

    def _remove_what_is_of_nobody(self, save_dir: Path, tag: Any) -> None:
        """By the first rank; nobody writes shards of these numbers."""
        if dist.get_rank():
            return
        folder = save_dir / (f"global_step{self._engine.global_steps}" if tag is None else str(tag))
        number: int = self._engine.seq_dp_world_size
        while shards := list(folder.glob(_SHARDS.format(number))):
            for shard in shards:
                shard.unlink()
            number += 1

    # ------------------------------------------------ by the window

    def committed(self, step: int) -> None:
        """So far the state is, again or for the first time."""
        if self._owed == step:
            self._owed = None

    def refuse_to_end(self) -> None:
        """With less than the script has asked for."""
        if self._owed is not None:
            raise StateLost(
                f"the checkpoint of step {self._owed} was not written: a rank was lost before there were copies of that"
                f" step; what is left is of step {self._window.step}, and the loop has ended",
                way_out="resume from the copies (ntp run --ntp-resume latest), or from the checkpoint before",
            )
