"""The table of all Megatron functions that a live job replaces from its start, with the reason for each.

With nobody lost, they compute nothing but the vote. The recovery (`trainer.py`) installs what a degraded layout needs,
and removes it when all slots are back.
"""

import functools
import inspect
from typing import TYPE_CHECKING, Any

import torch
from megatron.core.rerun_state_machine import RerunMode

from ntp_plugin.megatron.checkpoint.background_writer import BY_A_THREAD
from ntp_plugin.megatron.live.model_rebuild import set_forward_waits
from ntp_plugin.megatron.live.unsynced import no_sync
from ntp_plugin.megatron.router_metrics import only_read
from ntp_plugin.patching import Replacement
from ntp_plugin.recovery.voted_sections import Loop

if TYPE_CHECKING:
    from ntp_plugin.megatron.live.start import MegatronJob

_TRAINING = "megatron.training.training"


def table(job: "MegatronJob") -> tuple[Replacement, ...]:
    """Return the hooks of a live job."""
    return (
        *_what_is_built(job),
        *_sections(job),
        *_saves(job),
        *_between(job),
        *BY_A_THREAD,
        *(job.saves.errors.table() if job.rank.place.export is None else ()),
    )


def _what_is_built(job: "MegatronJob") -> tuple[Replacement, ...]:
    return (
        Replacement(
            target=f"{_TRAINING}:setup_model_and_optimizer",
            why="the model is built again for another layout, by the same recipe",
            make=lambda original: _then(job.model_rebuild.set_up(original), job.model_is_built),
        ),
        Replacement(
            target=f"{_TRAINING}:get_megatron_optimizer",
            why="a sharded optimizer is built again for other shards, by the same recipe",
            make=job.model_rebuild.built_optimizer,
        ),
        Replacement(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.__init__",
            why="its buffers are made again, with its first arguments",
            make=job.model_rebuild.wrapper,
        ),
        Replacement(
            target="megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.no_sync",
            why="a schedule that a loss interrupts leaves it suspended, and garbage collection resumes it later",
            make=lambda _: no_sync,
        ),
        Replacement(
            target="megatron.core.distributed.finalize_model_grads:_update_router_expert_bias",
            why="it changes the bias of experts before the vote of the step, over a group that has idle ranks too",
            make=job.trainer.bias.deferred,
        ),
        Replacement(
            target=f"{_TRAINING}:build_train_valid_test_datasets",
            why="another slot may become the first of its TP group, and only the first reads samples",
            make=job.samples.data_sets,
        ),
        Replacement(
            target=f"{_TRAINING}:build_pretraining_data_loader",
            why="a repeated step needs its samples again, maybe by another share",
            make=job.samples.loader,
        ),
    )


def _sections(job: "MegatronJob") -> tuple[Replacement, ...]:
    return (
        Replacement(
            target=f"{_TRAINING}:get_forward_backward_func",
            why="Megatron calls it once, and the micro-batches to run change with the layout",
            make=lambda original: _schedule(job, original),
        ),
        Replacement(
            target=f"{_TRAINING}:train",
            why="sections begin here, and ranks join before it asks how many iterations are done",
            make=lambda original: _first(job.begin_sections, _then(job.saves.remembering(original), job.end_sections)),
        ),
        Replacement(
            target=f"{_TRAINING}:train_step",
            why="a step that a loss interrupts is taken again",
            make=job.step.section,
        ),
        Replacement(
            target="megatron.core.rerun_state_machine:RerunStateMachine.validate_result",
            why="a rank that raises alone leaves the others waiting: it reports with its vote, and they compare",
            make=lambda original: _rejected(job, original),
        ),
        Replacement(
            target="megatron.core.optimizer.grad_scaler:DynamicGradScaler.update",
            why="a loss may undo the step that it counts: the vote of the step changes the scale",
            make=job.step.loss_scale.deferred,
        ),
        Replacement(
            target=f"{_TRAINING}:disable_forward_pre_hook",
            why="with --overlap-param-gather it gathers the last parameters, before evaluations and at the end",
            make=lambda original: _gathered(job, original),
        ),
        Replacement(
            target="megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync",
            why="an interleaved schedule also gathers what is in place, except in the first step of a joining rank",
            make=_unless_in_place,
        ),
        Replacement(
            target=f"{_TRAINING}:check_param_hashes_across_dp_replicas",
            why="it gathers hashes of even shares over groups of one width",
            make=lambda original: _hashes(job, original),
        ),
        Replacement(
            target=f"{_TRAINING}:evaluate_and_print_results",
            why="before they go on, ranks must know whether all have ended it",
            make=lambda original: _voted(job, original),
        ),
    )


def _saves(job: "MegatronJob") -> tuple[Replacement, ...]:
    asks = job.args.exit_duration_in_mins or job.args.exit_signal_handler
    return (
        Replacement(
            target=f"{_TRAINING}:save_checkpoint_and_time",
            why="a section, after a comparison of replicas; Megatron caches how groups share the writing",
            make=lambda original: _voted(
                job, job.saves.scheduling(_by_groups_of_now(job, original)), before=_compared(job, original)
            ),
        ),
        Replacement(
            target=f"{_TRAINING}:save_checkpoint",
            why="a file that cannot be written ends the job, or leaves the other ranks waiting",
            make=job.saves.attempted,
        ),
        Replacement(
            target="megatron.training.checkpointing:cleanup_old_non_persistent_checkpoint",
            why="it keeps the folder with the highest number, which a loss may have made void, and removes the newest",
            make=job.saves.removing_older,
        ),
        Replacement(
            target=f"{_TRAINING}:maybe_finalize_async_save",
            why="it asks all ranks whether they have written their parts of a checkpoint, and a loss makes that void",
            make=job.saves.finalize,
        ),
        Replacement(
            target=f"{_TRAINING}:checkpoint_and_decide_exit",
            why="a void checkpoint is saved again; with some flags it asks all ranks whether to go on",
            make=lambda original: job.saves.decide(_voted(job, original) if asks else original),
        ),
    )


def _between(job: "MegatronJob") -> tuple[Replacement, ...]:
    loop = job.loop
    return (
        Replacement(
            target="torch.distributed:barrier",
            why="Megatron's timers and messages wait for all ranks between steps, and need not; in a save they also ask"
            " each other for errors",
            make=lambda original: job.saves.errors.asking(_left_out(loop, original)),
        ),
        *(
            Replacement(
                target=f"megatron.core.timers:Timers.{name}",
                why="it asks all ranks for their times",
                make=lambda original: _left_out(loop, original),
            )
            for name in ("log", "write")
        ),
        Replacement(
            target=f"{_TRAINING}:calc_params_l2_norm",
            why="a loss may keep some ranks from it; the log of that step leaves it out",
            make=lambda original: _left_out(job.loop, _by_those_who_train(job, original)),
        ),
        Replacement(
            target="megatron.core.transformer.moe.moe_logging:MoEMetricsTracker.report",
            why="it sums the losses of routers, where some ranks may be missing; they are summed before the vote",
            make=only_read,
        ),
        Replacement(
            target="megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper.track_mtp_metrics",
            why="as above, and what a lost rank has summed is missing",
            make=job.predictions.tracked,
        ),
        Replacement(
            target=f"{_TRAINING}:reduce_max_stat_across_model_parallel_group",
            why="the log asks for a learning rate that all ranks share",
            make=lambda original: _left_out(loop, original, lambda stat, *_, **__: stat),
        ),
    )


def _then(function: Any, after: Any) -> Any:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        after()
        return result

    return both


def _first(before: Any, function: Any) -> Any:
    @functools.wraps(function)
    def both(*args: Any, **kwargs: Any) -> Any:
        before()
        return function(*args, **kwargs)

    return both


def _schedule(job: "MegatronJob", original: Any) -> Any:
    """`get_forward_backward_func`: by this replica's share while a rank is lost, else Megatron's own."""

    @functools.wraps(original)
    def get(*args: Any, **kwargs: Any) -> Any:
        def run(**run_kwargs: Any) -> Any:
            share = job.trainer.share
            if not run_kwargs.get("forward_only"):
                job.predictions.begin_step()
                job.trainer.bias.begin_step()
            losses = (share.schedule(original) if share else original)(*args, **kwargs)(**run_kwargs)
            if not run_kwargs.get("forward_only"):
                job.step.reported(losses, of_all=share is not None)
            return losses

        return run

    return get


def _voted(job: "MegatronJob", original: Any, *, before: Any = lambda *_, **__: None) -> Any:
    """Make a section that changes nothing of the training; all ranks run `before` in it, also idle ones."""
    loop = job.loop

    @functools.wraps(original)
    def section(*args: Any, **kwargs: Any) -> Any:
        results: list[Any] = []

        def once() -> Any:
            before(*args, **kwargs)
            return job.trainer.among_those_who_train(lambda: original(*args, **kwargs))

        def work() -> Any:
            result = once()
            loop.vote(heard, torch.tensor([float(bool(result)), *job.saves.result()]))
            return results[-1]

        def heard(_: bool) -> None:
            result, *of_a_save = loop.outcome.tolist()
            results.append(bool(result))
            job.saves.heard(of_a_save)

        # A checkpoint before an exit belongs to the section that decides on the exit, whose vote is for both.
        return once() if loop.inside else loop.section(work, lambda: results[-1])

    return section


def _compared(job: "MegatronJob", original: Any) -> Any:
    """Compare replicas before `save_checkpoint_and_time`: nobody should resume from what only one replica holds."""

    def compare(*args: Any, **kwargs: Any) -> None:
        job.step.watch.before_it_counts(inspect.signature(original).bind(*args, **kwargs).arguments["iteration"])

    return compare


def _rejected(job: "MegatronJob", original: Any) -> Any:
    """`validate_result` of the rerun machine, if it is switched off."""

    @functools.wraps(original)
    def validate(machine: Any, result: Any, rejection_func: Any, message: str, *args: Any, **kwargs: Any) -> None:
        fatal = kwargs.get("fatal", args[2] if len(args) > 2 else True)
        if not (job.loop.in_step and fatal and machine.mode == RerunMode.DISABLED):
            original(machine, result, rejection_func, message, *args, **kwargs)
        elif bool(rejection_func(result)):
            job.step.reject(message)

    return validate


def _gathered(job: "MegatronJob", original: Any) -> Any:
    """`disable_forward_pre_hook`: make it a section, unless it is part of one. An idle rank has nothing to gather."""

    @functools.wraps(original)
    def disable(chunks: Any, optimizer: Any = None, param_sync: bool = True) -> None:
        if job.loop.inside or not param_sync:
            original(chunks, optimizer=optimizer, param_sync=param_sync)
            return
        _voted(job, original)(chunks, optimizer=optimizer)
        for chunk in chunks:
            set_forward_waits(chunk, waits=False)

    return disable


def _unless_in_place(original: Any) -> Any:
    """`start_param_sync`: with `--overlap-param-gather`, gather no parameters that are in place.

    Megatron gathers nothing in the first step of a process. A joining rank takes its first step beside ranks that
    gather, after a recovery that has put all parameters in place. Megatron's forward hooks gather only what is not in
    place. An interleaved schedule gathers everything, unless `--no-align-param-gather` is given: the other ranks would
    wait for the joining rank forever.
    """

    @functools.wraps(original)
    def start(group: Any, force_sync: bool = False) -> None:
        if force_sync or not (group.ddp_config.overlap_param_gather and group.param_gather_dispatched):
            original(group, force_sync=force_sync)

    return start


def _hashes(job: "MegatronJob", original: Any) -> Any:
    """`check_param_hashes_across_dp_replicas`, as a section; in a degraded layout, the plugin's own comparison.

    Megatron also calls it before the first step. A joining rank comes there alone, and has compared its weights.
    """

    def compared(*_: Any, **__: Any) -> None:
        if job.trainer.lost:
            job.step.watch.compare_now(job.args.curr_iteration)

    def differ(*args: Any, **kwargs: Any) -> bool:
        return not (job.trainer.lost or original(*args, **kwargs))

    @functools.wraps(original)
    def match(*args: Any, **kwargs: Any) -> bool:
        if not job.loop.has_begun:
            return bool(job.loop.between(lambda: original(*args, **kwargs), lambda: True))
        return not _voted(job, differ, before=compared)(*args, **kwargs)

    return match


def _by_groups_of_now(job: "MegatronJob", original: Any) -> Any:
    """`save_checkpoint_and_time`: drop cached strategies in a new epoch. Its groups are others then, and a joining rank
    has cached nothing, neither from earlier checkpoints nor from the one that the job began from. So after a save that
    has failed: what it has cached may be incomplete."""
    saved_in = 0, 0

    @functools.wraps(original)
    def save(*args: Any, **kwargs: Any) -> Any:
        nonlocal saved_in
        if saved_in != (now := (job.rank.groups.epoch, job.saves.failures)):
            kept = inspect.signature(original).bind(*args, **kwargs).arguments["checkpointing_context"] or {}
            for what in ("save_strategy", "load_strategy"):
                kept.pop(what, None)
            saved_in = now
        return original(*args, **kwargs)

    return save


def _by_those_who_train(job: "MegatronJob", original: Any) -> Any:
    """`calc_params_l2_norm`, of the current layout."""

    @functools.wraps(original)
    def norm(*args: Any, **kwargs: Any) -> Any:
        if job.trainer.idle:
            return None
        sync = job.trainer.state.sync
        return (sync.parameters_norm(original) if sync else original)(*args, **kwargs)

    return norm


def _left_out(loop: Loop, original: Any, instead: Any = lambda *_, **__: None) -> Any:
    @functools.wraps(original)
    def maybe(*args: Any, **kwargs: Any) -> Any:
        return loop.between(lambda: original(*args, **kwargs), lambda: instead(*args, **kwargs))

    return maybe
