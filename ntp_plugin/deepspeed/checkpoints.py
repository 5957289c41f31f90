"""Saves and loads DeepSpeed checkpoints in a live job (`engine.save_checkpoint`, `engine.load_checkpoint`).

Each save is a section of its own: a rank that has left it knows that all have ended it, and after a loss in it the
present ranks write it again. With ZeRO, DeepSpeed writes one shard per rank. So an attempt of more ranks, or an older
checkpoint under the same tag, leaves extra shards behind; the first rank removes them.

Going back. With ZeRO a loss may cost a step, and a checkpoint belongs to the step after which the script asked for it.
So that step is copied first; then a loss during the writing, which takes longer, costs only the writing. If the step
was lost with the rank all the same, nothing is written, and the log says so. If the loop had no step left, the job ends
with an error.

The same holds for the end of the script. What the script does after its last step uses the state of that step. If a
loss takes the state back behind it, nobody takes the step again, and the job ends with an error.

Once. A rank that has come through a recovery runs the end of its loop again without having taken a step. And a loop
that goes by `engine.global_steps` alone asks after each micro-batch, of which ranks may have different numbers. So a
checkpoint of a step is not written again under the same name, and joining ranks learn which were written.

With ZeRO-3 `engine.save_16bit_model` gathers the weights from all ranks, so it is a section as well.

Late scripts. The script of a joining rank, or of a resumed job, runs quickly through the data epochs that the job has
behind it, past the checkpoints between them. These have been written; only a resumed job may need one that was not. A
late script reads no checkpoint: the state of the other ranks is newer than any, and the newest checkpoint now is not
the one that this job began from. The script gets what the job's own `engine.load_checkpoint` returned at that point, so
that it counts its data epochs alike; if there was none, it gets what DeepSpeed returns without a checkpoint. For a
resumed run these results are kept beside the copies.
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
"""What DeepSpeed returns if there is no checkpoint."""
_LOADED = "loaded-{}.json"
_GIVEN = "what engine.load_checkpoint gave the script (its client_state)"
_SHARDS = "*zero_pp_rank_{}_mp_rank_*_states.pt"


class WentBack(Exception):
    """The state is at an earlier step than a section is for. All ranks leave the section without a vote: some may not
    have come to it, and take the step again, as this rank has to."""


class EngineCheckpoints:
    """The checkpoints of one engine."""

    def __init__(self, engine: Any, window: "AccumulationWindow", *, rank: ElasticRank, loop: Loop) -> None:
        self._engine, self._window, self._rank, self._loop = engine, window, rank, loop
        self.catches_up = rank.place.joining
        """Whether the script runs through what the job has behind it, up to its first forward with the others."""
        self._loaded: list[tuple[Any, Any]] = []
        """What the script got, load by load."""
        self._before: list[tuple[Any, Any]] | None = None
        """What the script of the resumed run got, load by load; None if this run resumes none."""
        self.saved: tuple[int, tuple[str, ...]] | None = None
        """The step of the current state, and where it has been written, if anywhere."""
        self._owed: int | None = None
        """The step whose checkpoint was not written because the step was lost, until it is taken again."""
        self._newest, self._has_ended = 0, False
        """The newest step that this rank's loop has passed; whether the script is over."""

    def into(self, engine: Any) -> None:
        """Replace the engine's own methods."""
        engine.save_checkpoint = self._together(engine.save_checkpoint)
        engine.load_checkpoint = self._as_at_the_start(engine.load_checkpoint)
        engine.save_16bit_model = self._as_model(engine.save_16bit_model)

    def _together(self, original: Any) -> Any:
        @functools.wraps(original)
        def save(save_dir: Any, tag: Any = None, *args: Any, **kwargs: Any) -> Any:
            folder = Path(save_dir) / self._name(tag)

            def write() -> Any:
                saved = original(save_dir, tag, *args, **kwargs)
                self._remove_what_is_of_nobody(folder)
                return saved

            return self._section(write, folder)

        return save

    def _section(self, write: Callable[[], Any], path: Path) -> Any:
        """Have all ranks write, and write again after a loss; not what is written already."""
        window = self._window
        if self._is_behind or self._has_saved(window.step, path):
            return True
        window.begin()
        of_step, saved = window.step, [None]

        def work() -> Any:
            if window.replicas.why_none_is_saved:
                _LOG.warning("no checkpoint was written: %s", window.replicas.why_none_is_saved)
            elif window.step != of_step:
                raise WentBack
            else:
                window.compare()
                if window.copies is not None:
                    window.copies.catch_up(self._vote_on_copies)
                saved[:] = [self.write(write)]
            return self._loop.vote(lambda _: saved[0], window.no_words())

        try:
            result = window.section(work, lambda: saved[0])
        except WentBack:
            self._owed = of_step
            _LOG.warning("no checkpoint was written of step %d, which the loop takes again", of_step)
            return None
        if window.step == of_step:
            before = self.saved[1] if self.saved is not None and self.saved[0] == of_step else ()
            self.saved = of_step, (*before, str(path))
        return result

    def _has_saved(self, step: int, path: Path) -> bool:
        return self.saved is not None and self.saved[0] == step and str(path) in self.saved[1]

    def _as_model(self, original: Any) -> Any:
        """`save_16bit_model`."""
        if not self._window.gathers_weights:
            return self._unless_behind(original)

        @functools.wraps(original)
        def save(save_dir: Any, save_filename: str = "pytorch_model.bin", *args: Any, **kwargs: Any) -> Any:
            write = functools.partial(original, save_dir, save_filename, *args, **kwargs)
            return self._section(write, Path(save_dir) / save_filename)

        return save

    def _unless_behind(self, original: Any) -> Any:
        """Skip what the other ranks have written before this process joined, and have continued from since."""

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
        """Whether what the script asks for was done before it got here."""
        return self.catches_up and (self._before is None or not self._window.loop_is_where_the_job_is)

    def write(self, write: Callable[[], Any]) -> Any:
        """Write the checkpoint, now that its step is copied. Faults can be injected here."""
        return write()

    def _vote_on_copies(self, words: Sequence[bool]) -> Sequence[bool]:
        return self._loop.vote_again(self._window.are_of_all, torch.tensor(words, dtype=torch.float64))

    def _remove_what_is_of_nobody(self, folder: Path) -> None:
        """Remove, on the first rank, shards with numbers that no rank writes."""
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
                self._rank.share_with_joiners(f"loaded {number}", found)
            if self._window.copies is not None:
                self._keep_beside_copies(place.copies / _LOADED.format(place.slot))
            return found

        return load

    def _given_then(self, number: int) -> Any:
        if self._before is None:
            return self._rank.shared_value_or_none(f"loaded {number}") or _NONE
        return self._before[number] if number < len(self._before) else _NONE

    def _keep_beside_copies(self, path: Path) -> None:
        """Keep what was loaded for a run that resumes this one; only its owner can read the folder."""
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        unnamed = path.with_suffix(".new")
        unnamed.write_text(encode(self._loaded, what=_GIVEN))
        unnamed.rename(path)

    def resumed(self, folder: Path) -> None:
        """Prepare for a run that resumes from the copies in `folder`."""
        require_private(folder)
        kept = sorted(folder.glob(_LOADED.format("*")))
        self.catches_up, self._before = True, decode(kept[0].read_text(), what=_GIVEN) if kept else []

    # ------------------------------------------------ called by the accumulation window

    def committed(self, step: int) -> None:
        """Note that the state is now at this step, again or for the first time."""
        self.saved, self._newest = None, max(self._newest, step)
        if self._owed == step:
            self._owed = None

    @property
    def owes(self) -> bool:
        """Whether a checkpoint that the script asked for was not written, since its step was lost."""
        return self._owed is not None

    def refuse_to_end(self) -> None:
        """Raise `StateLost` if the job ends with less than the script has asked for."""
        if self._owed is not None:
            raise StateLost(
                f"the checkpoint of step {self._owed} was not written: a rank was lost before there were copies of that"
                f" step; the state is now at step {self._window.step}, and the loop has ended",
                fix="resume from the copies (ntp run --ntp-resume latest), or from the checkpoint before",
            )
        self._has_ended = True
        self.refuse_to_end_behind()

    def refuse_to_end_behind(self) -> None:
        """Raise `StateLost`, after a recovery, if the script is over and nobody takes a lost step again."""
        step = self._window.step
        if self._has_ended and step < self._newest:
            raise StateLost(
                f"a rank was lost after the script's last step, {self._newest}, and its part of the optimizer's state"
                f" is copied only up to step {step}: the survivors cannot go on",
                fix="resume from the copies (ntp run --ntp-resume latest), or from the last checkpoint; a script"
                " that ends with engine.save_checkpoint has copies of its last step",
            )
