"""A live job's checkpoints: what all ranks know of one that is written while the training goes on, or that has failed.

Megatron schedules such a save in one step, asks in the next steps whether all ranks have written their parts, and then
finishes the checkpoint: metadata, and the number of the latest one. Here these questions are sections, so that all
ranks know the same of it.

A loss makes the save void: a lost rank's part is missing, and the others may have others to write. All ranks learn that
in the next question. Then the checkpoint is saved again at the end of the same step, by Megatron's own loop, or at once
if there is no further step. The folder of the void one stays without metadata, and is not the latest. Nobody waits for
the threads that still write there, unless their folder is to be written anew.

An error of the file system makes a save void as well, on all ranks (`checkpoint/save_errors.py`). It is reported, and
the training goes on: the next save that is due comes as usual. If no later save succeeds, the job ends with an error.
"""

import dataclasses
import functools
import inspect
import logging
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.training import async_utils, checkpointing, training

from ntp_plugin.megatron.checkpoint.background_writer import LOOK_S, WriterThread
from ntp_plugin.megatron.checkpoint.save_errors import SaveErrors
from ntp_plugin.megatron.live.failed_save import folder_of, newest_in, report
from ntp_plugin.megatron.live.save_progress import SaveProgress, SaveResult

if TYPE_CHECKING:
    from ntp_plugin.megatron.live.start import MegatronJob

_LOG = logging.getLogger(__name__)


class UnfinishedSave:
    """Wraps the functions in which Megatron saves, asks for the end of a save, and decides whether to save."""

    def __init__(self, job: "MegatronJob") -> None:
        self._job = job
        self.progress = SaveProgress()
        self.errors = SaveErrors(str(job.topology.slot_of(job.rank.place.slot)))
        self._result = SaveResult()
        self._reasons: tuple[str, ...] = ()
        """Why the newest save has failed, on ranks that took part in it."""
        self._epoch = 0
        """The epoch in which this rank has scheduled what Megatron's queue holds."""
        self._abandoned: list[WriterThread] = []
        """What may still write for void saves."""
        self._save: Callable[[int], None] | None = None
        self._step = 0
        """The step of the checkpoint that was begun last."""
        self.failures = 0
        """Saves that have failed since this process began."""

    # ------------------------------------------------ what is scheduled

    def remembering(self, original: Any) -> Any:
        """`train`: remember what a save needs, for one that is taken when the loop is over."""

        @functools.wraps(original)
        def train(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._save = functools.partial(self._save_after, given)
            return original(*args, **kwargs)

        return train

    def scheduling(self, original: Any) -> Any:
        """`save_checkpoint_and_time`, inside of its section."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> Any:
            given = inspect.signature(original).bind(*args, **kwargs).arguments
            self._step = iteration = given["iteration"]
            self._abandon_what_is_void()
            self._wait_for_the_folder_of(iteration)
            self.errors.begin()
            self._reasons = ()
            if self._job.args.async_save:
                calls = async_utils._get_async_calls_queue()
                calls.call_idx = iteration - 1  # all ranks must number the save alike; a joining one has counted none
            result = original(*args, **kwargs)
            if self._reasons:
                found = SaveResult(failed=iteration)
            elif not self._job.args.async_save:
                found = SaveResult(written=iteration)
            else:
                calls.async_calls[-1].async_caller.iteration = iteration
                found = SaveResult(scheduled=iteration)
            self._result = dataclasses.replace(found, non_persistent=bool(given.get("non_persistent_ckpt")))
            return result

        return save

    def attempted(self, original: Any) -> Any:
        """`save_checkpoint`: returns as if it had saved, also where a file could not be written."""

        @functools.wraps(original)
        def save(*args: Any, **kwargs: Any) -> None:
            if not self._job.loop.inside:  # a run that only exports
                original(*args, **kwargs)
                return
            self._reasons = self.errors.attempt(functools.partial(original, *args, **kwargs))

        return save

    def removing_older(self, original: Any) -> Any:
        """`cleanup_old_non_persistent_checkpoint`: keep the newest complete one, and the one that is begun.

        Megatron keeps the one with the highest number, which a loss may have made void. What cannot be removed now,
        because an abandoned thread still writes there, is removed with the next checkpoint.
        """

        @functools.wraps(original)
        def remove(save_dir: Any, leave_ckpt_num: int = 1, do_async: bool = False) -> None:  # noqa: ARG001
            newest = newest_in(save_dir)
            if dist.get_rank() or newest is None:
                return
            stay = {
                Path(checkpointing.get_checkpoint_name(save_dir, int(step), return_base_dir=True))
                for step in (newest, self._step)
            }
            older = [folder for folder in Path(save_dir).glob("iter_*") if folder not in stay]
            if do_async:
                threading.Thread(target=_remove, args=(older,), name="ntp-cleanup", daemon=True).start()
            else:
                _remove(older)

        return remove

    def result(self) -> list[float]:
        """Return what this rank knows of a save in the section in flight; all ranks learn it by the section's vote."""
        return self._result.numbers(counts=self._job.trainer.first)

    def heard(self, numbers: Sequence[float]) -> None:
        """Note that a section is over, and what has become of a save in it."""
        result, self._result = SaveResult.of(numbers), SaveResult()
        self.progress = self.progress.begun(result, self._job.loop.voted_in)
        self._note(result)

    def _note(self, result: SaveResult) -> None:
        self.progress = self.progress.ended(result)
        if not result.failed:
            return
        self.failures += 1
        removed, job = self.errors.remove_what_was_made(), self._job
        if job.trainer.first:
            folder = folder_of(job.args, non_persistent=result.non_persistent)
            why = "; ".join(self._reasons) or "the rank that knows the reason was lost"
            report(result.failed, folder, why, removed=removed, event_writer=job.event_writer)

    # ------------------------------------------------ what is asked

    def finalize(self, original: Any) -> Any:
        """`maybe_finalize_async_save`."""

        @functools.wraps(original)
        def finalize(blocking: bool = False, terminate: bool = False) -> None:
            loop = self._job.loop
            if loop.driver is not None and loop.has_begun:
                while self.progress.scheduled_in is not None:
                    loop.section(functools.partial(self._ask, original), _nothing)
                    if not blocking:
                        return
                    if self.progress.again and self._save is not None:
                        self._save(self._job.step.over)
                    time.sleep(LOOK_S)
            original(blocking, terminate)  # nothing is being written: it asks nobody

        return finalize

    def _ask(self, original: Any) -> None:
        job = self._job
        void, result = self.progress.scheduled_in != job.rank.groups.epoch, SaveResult()
        if void:
            self._abandon_what_is_void()
        else:
            result = job.trainer.among_those_who_train(functools.partial(self._finish, original)) or result
        numbers = [float(void), float(not async_utils.is_empty_async_queue())]
        numbers += result.numbers(counts=job.trainer.first)
        job.loop.vote(lambda _: self._answered(), torch.tensor(numbers))

    def _finish(self, original: Any) -> SaveResult:
        """Finish what all ranks have written; return what has become of it."""
        before = _steps_in_the_queue()
        self._reasons = self.errors.attempt(original)
        over = before[: len(before) - len(_steps_in_the_queue())]
        if not over:
            return SaveResult()
        self._reasons = self._reasons or self.errors.own()
        found = SaveResult(failed=over[-1]) if self._reasons else SaveResult(written=over[-1])
        return dataclasses.replace(found, non_persistent=self.progress.non_persistent)

    def _answered(self) -> None:
        void, unfinished, *numbers = self._job.loop.outcome.tolist()
        if void and dist.get_rank() == 0:
            _LOG.warning(
                "ranks were lost or admitted while a checkpoint was written (epoch %s, now %d), so it is void; it is"
                " saved again after this step",
                self.progress.scheduled_in,
                self._job.loop.voted_in,
            )
        self.progress = self.progress.asked(void=bool(void), unfinished=bool(unfinished))
        self._note(SaveResult.of(numbers))

    def decide(self, original: Any) -> Any:
        """`checkpoint_and_decide_exit`."""

        @functools.wraps(original)
        def decide(*args: Any, **kwargs: Any) -> Any:
            with self._at_every_step():
                return original(*args, **kwargs)

        return decide

    @contextmanager
    def _at_every_step(self) -> Iterator[None]:
        """Have Megatron save at this step, if a save is to be taken again."""
        args = self._job.args
        name = "non_persistent_save_interval" if self.progress.non_persistent else "save_interval"
        interval = getattr(args, name)
        if self.progress.again:
            setattr(args, name, 1)
        try:
            yield
        finally:
            setattr(args, name, interval)

    def _save_after(self, given: dict[str, Any], iteration: int) -> None:
        training.save_checkpoint_and_time(
            iteration,
            given["model"],
            given["optimizer"],
            given["opt_param_scheduler"],
            self._job.args.num_floating_point_operations_so_far,
            given["checkpointing_context"],
            non_persistent_ckpt=self.progress.non_persistent,
            train_data_iterator=given["train_data_iterator"],
        )

    def _abandon_what_is_void(self) -> None:
        """Forget what this rank has scheduled in an earlier epoch."""
        calls, epoch = async_utils._async_calls_queue, self._job.rank.groups.epoch
        while calls is not None and calls.async_calls and self._epoch != epoch:
            self._abandoned.append(calls.async_calls.popleft().async_caller)
        self._result, self._epoch = SaveResult(), epoch

    def _wait_for_the_folder_of(self, iteration: int) -> None:
        """Wait until nothing writes any more into the folder of the save that begins."""
        self._abandoned = [writer for writer in self._abandoned if writer.writes]
        with self._job.rank.groups.waiting() as wait:
            while any(writer.writes for writer in self._abandoned if writer.iteration == iteration):
                wait.poll()
                time.sleep(LOOK_S)


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _steps_in_the_queue() -> list[int]:
    calls = async_utils._async_calls_queue
    return [] if calls is None else [call.async_caller.iteration for call in calls.async_calls]


def _nothing() -> None:
    """The result of a question."""
