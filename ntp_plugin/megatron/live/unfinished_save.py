"""The checkpoint that is being written while the training goes on (`--async-save`), through losses.

Megatron schedules such a save in one step, asks in the next steps whether all ranks have written their parts, and then
finishes the checkpoint: metadata, and the number of the latest one. Here these questions are sections, so that all
ranks know the same of it.

A loss makes the save void: a lost rank's part is missing, and the others may have others to write. All ranks learn that
in the next question. Then the checkpoint is saved again at the end of the same step, by Megatron's own loop, or at once
if there is no further step. The folder of the void one stays without metadata, and is not the latest. Nobody waits for
the threads that still write there, unless their folder is to be written anew.
"""

import dataclasses
import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.training import async_utils, training

from ntp_plugin.megatron.checkpoint.background_writer import LOOK_S, WriterThread

if TYPE_CHECKING:
    from ntp_plugin.megatron.live.start import MegatronJob

_LOG = logging.getLogger(__name__)
_VOID, _UNFINISHED = range(2)
"""Positions in the vector that the vote sums."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SaveProgress:
    """What all ranks know of the save."""

    scheduled_in: int | None = None
    """The epoch in which it was scheduled; None if nothing is being written."""
    again: bool = False
    """Whether it was void, and is to be taken again when the step is over."""


class UnfinishedSave:
    """Wraps the functions in which Megatron saves, asks for the end of a save, and decides whether to save."""

    def __init__(self, job: "MegatronJob") -> None:
        self._job = job
        self.progress = SaveProgress()
        self._scheduled = False
        self._epoch = 0
        """The epoch in which this rank has scheduled what Megatron's queue holds."""
        self._abandoned: list[WriterThread] = []
        """What may still write for void saves."""
        self._save: Callable[[int], None] | None = None

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
            iteration = inspect.signature(original).bind(*args, **kwargs).arguments["iteration"]
            self._abandon_what_is_void()
            self._wait_for_the_folder_of(iteration)
            if not self._job.args.async_save:
                return original(*args, **kwargs)
            calls = async_utils._get_async_calls_queue()
            calls.call_idx = iteration - 1  # all ranks must number the save alike, and a joining one has counted none
            result = original(*args, **kwargs)
            calls.async_calls[-1].async_caller.iteration, self._scheduled = iteration, True
            return result

        return save

    def scheduled(self) -> bool:
        """Whether this rank has scheduled a save in the section in flight; all ranks learn it by the section's vote."""
        return self._scheduled

    def heard(self, scheduled: bool) -> None:
        """Note that a section is over, and whether it has scheduled a save."""
        if scheduled:
            self.progress = SaveProgress(scheduled_in=self._job.loop.voted_in)
        self._scheduled = False

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
        void = self.progress.scheduled_in != job.rank.groups.epoch
        if void:
            self._abandon_what_is_void()
        else:
            job.trainer.among_those_who_train(original)
        numbers = torch.tensor([float(void), float(not async_utils.is_empty_async_queue())])
        job.loop.vote(lambda _: self._answered(), numbers)

    def _answered(self) -> None:
        void, unfinished = (bool(number) for number in self._job.loop.outcome.tolist())
        if void and dist.get_rank() == 0:
            _LOG.warning(
                "ranks were lost or admitted while a checkpoint was written (epoch %s, now %d), so it is void; it is"
                " saved again after this step",
                self.progress.scheduled_in,
                self._job.loop.voted_in,
            )
        if void or not unfinished:
            self.progress = SaveProgress(again=void)

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
        interval = args.save_interval
        if self.progress.again:
            args.save_interval = 1
        try:
            yield
        finally:
            args.save_interval = interval

    def _save_after(self, given: dict[str, Any], iteration: int) -> None:
        training.save_checkpoint_and_time(
            iteration,
            given["model"],
            given["optimizer"],
            given["opt_param_scheduler"],
            self._job.args.num_floating_point_operations_so_far,
            given["checkpointing_context"],
            train_data_iterator=given["train_data_iterator"],
        )

    def _abandon_what_is_void(self) -> None:
        """Forget what this rank has scheduled in an earlier epoch."""
        calls, epoch = async_utils._async_calls_queue, self._job.rank.groups.epoch
        while calls is not None and calls.async_calls and self._epoch != epoch:
            self._abandoned.append(calls.async_calls.popleft().async_caller)
        self._scheduled, self._epoch = False, epoch

    def _wait_for_the_folder_of(self, iteration: int) -> None:
        """Wait until nothing writes any more into the folder of the save that begins."""
        self._abandoned = [writer for writer in self._abandoned if writer.writes]
        with self._job.rank.groups.waiting() as wait:
            while any(writer.writes for writer in self._abandoned if writer.iteration == iteration):
                wait.poll()
                time.sleep(LOOK_S)


def _nothing() -> None:
    """The result of a question."""
