"""Installs the hooks in transformers' Trainer and in accelerate, once the script has imported them.

They do nothing until an engine of a Trainer is built with the plugin enabled. A class that inherits from Trainer comes
through them as well, as far as its own methods call those of Trainer.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch

from ntp_plugin.deepspeed.hf import sections
from ntp_plugin.deepspeed.hf.joining import Progress
from ntp_plugin.deepspeed.hf.refusals import refuse
from ntp_plugin.deepspeed.hf.trainer_loop import TrainerLoop
from ntp_plugin.deepspeed.job import DeepSpeedJob
from ntp_plugin.deepspeed.settings import read_policy
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.tested_versions.comparison import refusal, require_tested

type Method = Callable[..., Any]
_JOINS = "ntp: this rank joins"
"""Given to the Trainer in place of a checkpoint, so that it skips what the others have drawn."""


class _Installed:
    hooks = False


def install() -> None:
    """Install the hooks for the rest of this process; a second call does nothing.

    With other functions than those that the plugin was tested with, a Trainer is refused where its engine is built.
    """
    if not _Installed.hooks:
        apply_all(TABLE[:1] if refusal("trainer") is not None else TABLE)
    _Installed.hooks = True


def _loop_of(trainer: Any) -> TrainerLoop | None:
    loop = TrainerLoop.now
    return loop if loop is not None and loop.trainer is trainer else None


def _prepared(original: Method) -> Method:
    """`Trainer._prepare_for_training`: the engine is built, and the training begins."""

    @functools.wraps(original)
    def prepare(trainer: Any, max_steps: int, train_dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        job, plugin = DeepSpeedJob.now, getattr(trainer.accelerator.state, "deepspeed_plugin", None)
        if job is not None and plugin is not None and read_policy(plugin.deepspeed_config).enabled:
            place = job.rank.place
            require_tested("trainer", reports=place.slot == 0)
            refuse(trainer, train_dataloader, plugin.deepspeed_config, resumes=place.resume is not None)
        model, loader = original(trainer, max_steps, train_dataloader, *args, **kwargs)
        if job is None or job.engine is None or job.engine is not model:
            return model, loader
        TrainerLoop.now = loop = TrainerLoop(
            trainer, loader, window=job.window, rank=job.rank, loop=job.loop, nominal=job.trainer.topology.dp
        )
        job.window.begin()
        if loop.joins_at is not None:
            loop.joins_at.adopt(loop)
        loop.world.follow()
        return model, loader

    return prepare


def _data_epoch(original: Method) -> Method:
    """`Trainer._run_epoch`; a joining rank skips what the job has behind it."""

    @functools.wraps(original)
    def run_epoch(trainer: Any, **kwargs: Any) -> Any:
        loop, epoch = _loop_of(trainer), kwargs["epoch"]
        if loop is None:
            return original(trainer, **kwargs)
        loop.book.data_epoch, joins_at = epoch, loop.joins_at
        if joins_at is not None:
            if epoch < joins_at.data_epoch:
                return None
            kwargs |= _from_there(joins_at, loop, kwargs["train_dataloader"])
        skips = epoch == kwargs["epochs_trained"] and kwargs["resume_from_checkpoint"] is not None
        loop.drawn = kwargs["steps_trained_in_current_epoch"] if skips and not trainer.args.ignore_data_skip else 0
        return original(trainer, **kwargs)

    return run_epoch


def _from_there(joins_at: Progress, loop: TrainerLoop, loader: Any) -> dict[str, Any]:
    joins_at.adopt_counters(loop.trainer)
    loop.trainer._tr_loss.zero_()
    loader.set_epoch(joins_at.data_epoch)
    return {
        "epochs_trained": joins_at.data_epoch,
        "steps_trained_in_current_epoch": joins_at.first,
        "resume_from_checkpoint": _JOINS,
    }


def _generators_of_checkpoint(original: Method) -> Method:
    """`Trainer._load_rng_state`: a joining rank has no checkpoint."""

    @functools.wraps(original)
    def load(trainer: Any, checkpoint: str | None) -> None:
        if checkpoint != _JOINS:
            original(trainer, checkpoint)

    return load


def _drawn_step(original: Method) -> Method:
    """`Trainer.get_batch_samples`."""

    @functools.wraps(original)
    def draw(trainer: Any, *args: Any) -> Any:
        loop = _loop_of(trainer)
        return original(trainer, *args) if loop is None else loop.draw_step(original, *args)

    return draw


def _counted_items(original: Method) -> Method:
    """`Trainer._get_num_items_in_batch`."""

    @functools.wraps(original)
    def count(trainer: Any, batches: Any, device: Any) -> Any:
        loop = _loop_of(trainer)
        if loop is None:
            return original(trainer, batches, device)
        return (loop.count_items if loop.makes_step else loop.count_row)(original, batches, device)

    return count


def _trained(original: Method) -> Method:
    """`Trainer.training_step`."""

    @functools.wraps(original)
    def train(trainer: Any, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        loop = _loop_of(trainer)
        if loop is None:
            return original(trainer, model, inputs, num_items_in_batch)
        return loop.train(original, num_items_in_batch)

    return train


def _tracked(original: Method) -> Method:
    """`Trainer._track_num_input_tokens`: of all nominal ranks, once a step is taken."""

    @functools.wraps(original)
    def track(trainer: Any, inputs: Any) -> None:
        loop = _loop_of(trainer)
        if loop is None or trainer.args.include_num_input_tokens_seen == "no":
            original(trainer, inputs)
            return
        before = trainer.state.num_input_tokens_seen
        seen = loop.tokens_seen(lambda batch: sections.tokens_in(original, trainer, batch))
        trainer.state.num_input_tokens_seen = before + (seen or 0)

    return track


def _unless_it_joins(original: Method) -> Method:
    """`Trainer._evaluate`: what the script of a joining rank would evaluate before it is there."""

    @functools.wraps(original)
    def evaluate(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        loop = _loop_of(trainer)
        return {} if loop is not None and loop.joins_at is not None else original(trainer, *args, **kwargs)

    return evaluate


def _gathered(original: Method) -> Method:
    """`nested_gather` of a log line's loss."""

    @functools.wraps(original)
    def gather(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        loop = TrainerLoop.now
        if loop is None or not isinstance(tensors, torch.Tensor):
            return original(tensors, *args, **kwargs)
        return loop.mean_loss(lambda: original(tensors, *args, **kwargs))

    return gather


def _through_losses(original: Method) -> Method:
    """A function with collectives, which all ranks call at the same place."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        loop = TrainerLoop.now
        if loop is None or not sections.are_possible():
            return original(*args, **kwargs)
        return loop.section(lambda: original(*args, **kwargs))

    return run


def _evaluated(original: Method) -> Method:
    """`Trainer.evaluation_loop`: from its beginning, over the ranks that are there."""

    @functools.wraps(original)
    def evaluate(trainer: Any, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        loop = _loop_of(trainer)
        if loop is None:
            return original(trainer, dataloader, *args, **kwargs)
        gather = trainer.gather_function

        def work(loader: Any) -> Any:
            return original(trainer, loader, *args, **kwargs)

        return loop.section(lambda: sections.evaluate(work, loop, dataloader, gather))

    return evaluate


def _predicted(original: Method) -> Method:
    """`Trainer.prediction_step`: a loss is scaled by the nominal number of ranks."""

    @functools.wraps(original)
    def predict(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        loop = _loop_of(trainer)
        if loop is None or loop.rows is None:
            return original(trainer, *args, **kwargs)
        with loop.world.nominal():
            return original(trainer, *args, **kwargs)

    return predict


def _saved(original: Method) -> Method:
    """`Trainer._save_checkpoint`: again after a loss, which may be that of the rank that writes for all."""

    @functools.wraps(original)
    def save(trainer: Any, *args: Any, **kwargs: Any) -> None:
        loop = _loop_of(trainer)
        if loop is None:
            original(trainer, *args, **kwargs)
            return
        loop.until_whole(lambda: original(trainer, *args, **kwargs))

    return save


def _kept_group(original: Method) -> Method:
    """`PartialState.destroy_process_group`: the job ends with all ranks when the script is over."""

    @functools.wraps(original)
    def destroy(state: Any, group: Any = None) -> None:
        if TrainerLoop.now is None or DeepSpeedJob.now is None:
            original(state, group)

    return destroy


TABLE = (
    Replacement(
        target="transformers.trainer:Trainer._prepare_for_training",
        why="the engine is built here, and a joining rank comes in before its first data epoch",
        make=_prepared,
    ),
    Replacement(
        target="transformers.trainer:Trainer._run_epoch",
        why="a joining rank skips what the job has behind it",
        make=_data_epoch,
    ),
    Replacement(
        target="transformers.trainer:Trainer._load_rng_state",
        why="a joining rank skips micro-batches without a checkpoint",
        make=_generators_of_checkpoint,
    ),
    Replacement(
        target="transformers.trainer:Trainer.get_batch_samples",
        why="the micro-batches of a step must be known to take it again",
        make=_drawn_step,
    ),
    Replacement(
        target="transformers.trainer:Trainer._get_num_items_in_batch",
        why="the number is that of the nominal global batch, and its collective must survive a loss",
        make=_counted_items,
    ),
    Replacement(
        target="transformers.trainer:Trainer.training_step",
        why="a call computes as much of this rank's share as the Trainer believes is done",
        make=_trained,
    ),
    Replacement(
        target="transformers.trainer:Trainer._track_num_input_tokens",
        why="the number is that of the nominal global batch, and its collective must survive a loss",
        make=_tracked,
    ),
    Replacement(
        target="transformers.trainer:Trainer._evaluate",
        why="a joining rank evaluates nothing before it is there",
        make=_unless_it_joins,
    ),
    Replacement(
        target="transformers.trainer:Trainer.evaluation_loop",
        why="an evaluation runs again after a loss, over the ranks that are there",
        make=_evaluated,
    ),
    Replacement(
        target="transformers.trainer:Trainer.prediction_step",
        why="an evaluation has the rows of the nominal ranks",
        make=_predicted,
    ),
    Replacement(
        target="transformers.trainer:Trainer._save_checkpoint",
        why="a checkpoint is written again after a loss in it",
        make=_saved,
    ),
    Replacement(
        target="transformers.trainer:nested_gather",
        why="a log line has the losses of lost ranks as well",
        make=_gathered,
    ),
    Replacement(
        target="transformers.trainer:distributed_broadcast_scalars",
        why="its collective must survive a loss",
        make=_through_losses,
    ),
    Replacement(
        target="transformers.trainer:dist",
        why="its barrier must survive a loss",
        make=sections.with_barrier(_through_losses),
    ),
    Replacement(
        target="accelerate.state:PartialState.wait_for_everyone",
        why="its barrier must survive a loss",
        make=_through_losses,
    ),
    Replacement(
        target="accelerate.state:PartialState.destroy_process_group",
        why="the ranks end together, and one that is still saving needs the group",
        make=_kept_group,
    ),
)
