"""Checkpoints that DeepSpeed writes in a live job, `engine.save_checkpoint`.

Each is a section of its own: whoever has left it knows that all have ended it, and a loss in it has it written again,
by those who are there. DeepSpeed writes with ZeRO as many shards as there are ranks, so an attempt of more ranks, or an
older checkpoint under the same tag, leaves shards behind that are of nothing; they are removed.

Going back. With ZeRO a loss may cost a step, and a checkpoint is of the step after which the script has asked for it.
So there are copies of that step first, and then a loss in the writing, which takes longer, costs the writing alone.
Where the step was lost with the rank all the same, nothing is written, which the log says; and if the loop had no step
left to take, the job ends by that.

The same holds for the end of the script. What it does after its last step, by the engine or by itself, is done with the
state of that step. Where a loss takes the state back behind it, nobody takes the step again, and the job ends by that.

Once. Whoever has come through a recovery goes through the end of its loop again without having taken a step, and a loop
that goes by `engine.global_steps` alone asks after each micro-batch, of which ranks may have different numbers. So what
was written of a step is not written again under the same name, and joining ranks are told of it.

Who comes in late. The script of a joining rank, or of a job that is resumed, goes through the turns that are behind
the job in no time, past the checkpoints between them. These have been written; only who is resumed may stand where one
was not. And it reads none: what the others have is newer than any, and the newest there is now is not the one that
this job began from. The script is given what the job's own `engine.load_checkpoint` has given then, so that it counts
its turns alike; where there was none, as if there were none. For who resumes the run that is kept beside its copies.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ntp_plugin.errors import StateLost
from ntp_plugin.plain_data import decode, encode
from ntp_plugin.private_folders import require_private
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.voted_sections import Loop

if TYPE_CHECKING:
    from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow

_LOG = logging.getLogger(__name__)
_NONE = None, None
"""What DeepSpeed gives where there is no checkpoint."""
_LOADED = "loaded-{}.json"
_GIVEN = "what engine.load_checkpoint gave the script (its client_state)"
_SHARDS = "*zero_pp_rank_{}_mp_rank_*_optim_states.pt"


class EngineCheckpoints:
    """Of one engine."""

    def __init__(self, engine: Any, window: "AccumulationWindow", *, rank: ElasticRank, loop: Loop) -> None:
        self._engine, self._window, self._rank, self._loop = engine, window, rank, loop
        self.catches_up = rank.place.joining
        """Whether the script goes through what the job has behind it, up to its first forward with the others."""
        self._loaded: list[tuple[Any, Any]] = []
        """What the script was given, load by load."""
        self._before: list[tuple[Any, Any]] | None = None
        """The same of the run that this one goes on from."""
        self.saved: tuple[int, str] | None = None
        """The newest of the state as it is: the step, and where."""
        self._owed: int | None = None
        """The step whose checkpoint was not written because it was lost, until it is taken again."""
        self._newest, self._has_ended = 0, False
        """The newest step that this rank's loop has gone past; and whether the script is over."""

    def into(self, engine: Any) -> None:
        """In the place of the engine's own."""
        engine.save_checkpoint = self._together(engine.save_checkpoint)
        engine.load_checkpoint = self._as_at_the_start(engine.load_checkpoint)
        engine.save_16bit_model = self._unless_behind(engine.save_16bit_model)

    def _together(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            window, folder = self._window, Path(save_dir) / self._name(tag)
            if self._is_behind or self.saved == (window.step, str(folder)):
                return True
            window.begin()
            of_step, saved = window.step, [None]

            def work() -> Any:
                if window.replicas.why_none_is_saved:
                    _LOG.warning("no checkpoint was written: %s", window.replicas.why_none_is_saved)
                elif window.step != of_step:
                    self._owed = of_step
                    _LOG.warning("no checkpoint was written of step %d, which the loop takes again", of_step)
                else:
                    window.compare()
                    if window.copies is not None:
                        window.copies.catch_up(self._vote_on_copies)
                    saved[:] = [self.write(functools.partial(original, save_dir, tag, *args, **kwargs))]
                    self._remove_what_is_of_nobody(folder)
                return self._loop.vote(lambda _: saved[0], window.no_words())

            result = window.section(work, lambda: saved[0])
            if window.step == of_step:
                self.saved = of_step, str(folder)
            return result

        return save

    def _unless_behind(self, original: Any) -> Any:
        """Of what the others have written before this process came in, and have gone on from since."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            if self._window.step < self._newest:
                self._owed = self._newest
                _LOG.warning("no model was written of step %d, which the loop takes again", self._newest)
                return False
            return self._is_behind or original(*args, **kwargs)

        return save

    def _name(self, tag: Any) -> str:
        return f"global_step{self._engine.global_steps}" if tag is None else str(tag)

    @property
    def _is_behind(self) -> bool:
        """Whether what the script asks for was over before it came to this."""
        return self.catches_up and (self._before is None or not self._window.loop_is_where_the_job_is)

    def write(self, write: Callable[[], Any]) -> Any:
        """Now that there are copies; chaos comes here too."""
        return write()

    def _vote_on_copies(self, words: Sequence[bool]) -> Sequence[bool]:
        return self._loop.vote_again(self._window.are_of_all, torch.tensor(words, dtype=torch.float64))

    def _remove_what_is_of_nobody(self, folder: Path) -> None:
        """By the first rank; nobody writes shards of these numbers."""
        if dist.get_rank():
            return
        number: int = self._engine.seq_dp_world_size
        while shards := list(folder.glob(_SHARDS.format(number))):
            for shard in shards:
                shard.unlink()
            number += 1

    # ------------------------------------------------ reading

    def _as_at_the_start(self, original: Any) -> Any:
        @functools.wraps(original)
        def load(*args: Any, **kwargs: Any) -> Any:
            number, place = len(self._loaded), self._rank.place
            found = self._given_then(number) if self.catches_up else original(*args, **kwargs)
            self.saved = None
            self._loaded.append(found)
            if not (place.slot or place.joining):
                self._rank.leave_word(f"loaded {number}", found)
            if self._window.copies is not None:
                self._keep_beside_copies(place.copies / _LOADED.format(place.slot))
            return found

        return load

    def _given_then(self, number: int) -> Any:
        if self._before is None:
            return self._rank.word_if_left(f"loaded {number}") or _NONE
        return self._before[number] if number < len(self._before) else _NONE

    def _keep_beside_copies(self, path: Path) -> None:
        """For who resumes this run; the folder is its owner's alone."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unnamed = path.with_suffix(".new")
        unnamed.write_text(encode(self._loaded, what=_GIVEN))
        unnamed.rename(path)

    def resumed(self, folder: Path) -> None:
        """This run goes on from the copies there."""
        require_private(folder)
        kept = sorted(folder.glob(_LOADED.format("*")))
        self.catches_up, self._before = True, decode(kept[0].read_text(), what=_GIVEN) if kept else []

    # ------------------------------------------------ by the window

    def committed(self, step: int) -> None:
        """So far the state is, again or for the first time."""
        self.saved, self._newest = None, max(self._newest, step)
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
        self._has_ended = True
        self.refuse_to_end_behind()

    def refuse_to_end_behind(self) -> None:
        """After a recovery: raises `StateLost` where the script is over, so that nobody takes a lost step again."""
        step = self._window.step
        if self._has_ended and step < self._newest:
            raise StateLost(
                f"a rank was lost after the script's last step, {self._newest}, and its part of the optimizer's state"
                f" is copied up to step {step} only: the survivors are there, and nobody goes on",
                way_out="resume from the copies (ntp run --ntp-resume latest), or from the last checkpoint; a script"
                " that ends with engine.save_checkpoint has copies of its last step",
            )
