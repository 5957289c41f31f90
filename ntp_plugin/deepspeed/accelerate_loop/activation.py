"""Installs the hooks in accelerate, once the script has imported it and DeepSpeed.

They do nothing until `Accelerator.prepare` has built an engine with the plugin enabled, and nothing in a job of Hugging
Face's Trainer, which has an `Accelerator` too.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from ntp_plugin.deepspeed.accelerate_loop import collectives, saving
from ntp_plugin.deepspeed.accelerate_loop.user_loop import AccelerateLoop
from ntp_plugin.deepspeed.job import DeepSpeedJob
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.tested_versions.comparison import refusal, require_tested

type Method = Callable[..., Any]


class _AccelerateHooks:
    hooks = False


def install() -> None:
    """Install the hooks for the rest of this process; a second call does nothing.

    With other functions than those that the plugin was tested with, a loop is refused where its engine is built.
    """
    if not _AccelerateHooks.hooks:
        apply_all(TABLE[:1] if refusal("accelerate") is not None else TABLE)
    _AccelerateHooks.hooks = True


def loop_now() -> AccelerateLoop | None:
    """Return the loop of this process, if the job is one of accelerate and not of a Trainer, and is not over."""
    loop = AccelerateLoop.now
    return loop if loop is not None and loop.window.around is loop and DeepSpeedJob.now is not None else None


def _prepared(original: Method) -> Method:
    """`Accelerator.prepare`: the engine is built."""

    @functools.wraps(original)
    def prepare(accelerator: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(accelerator, *args, **kwargs)
        job, wrapped = DeepSpeedJob.now, getattr(accelerator, "deepspeed_engine_wrapped", None)
        if job is None or AccelerateLoop.now is not None or wrapped is None or wrapped.engine is not job.engine:
            return result
        place, topology = job.rank.place, job.trainer.topology
        require_tested("accelerate", reports=place.slot == 0)
        AccelerateLoop.now = AccelerateLoop(
            accelerator, window=job.window, rank=job.rank, loop=job.loop, nominal=topology.dp, tp=topology.tp
        )
        return result

    return prepare


def _iterated(original: Method) -> Method:
    """`DataLoaderShard.__iter__`."""

    @functools.wraps(original)
    def iterate(loader: Any) -> Iterator[Any]:
        loop = loop_now()
        found: Iterator[Any] = original(loader) if loop is None else loop.iterate(loader, original)
        return found

    return iterate


def _synchronized(original: Method) -> Method:
    """`Accelerator._do_sync`."""

    @functools.wraps(original)
    def do_sync(accelerator: Any) -> None:
        loop, work = loop_now(), functools.partial(original, accelerator)
        work() if loop is None else loop.set_sync(work)

    return do_sync


def _reduced_at_the_end(original: Method) -> Method:
    """`Accelerator.no_sync`: the window knows which micro-batch is the last one."""

    @functools.wraps(original)
    @contextlib.contextmanager
    def no_sync(accelerator: Any, model: Any) -> Iterator[None]:
        with original(accelerator, model) if loop_now() is None else contextlib.nullcontext():
            yield

    return no_sync


def _trained(original: Method) -> Method:
    """`Accelerator.backward`."""

    @functools.wraps(original)
    def backward(accelerator: Any, loss: Any, **kwargs: Any) -> None:
        loop, work = loop_now(), functools.partial(original, accelerator, loss, **kwargs)
        work() if loop is None else loop.backward(work)

    return backward


def _through_losses(original: Method, alone: Method) -> Method:
    """A function with a collective, which all ranks call at the same place."""

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        loop = loop_now()
        if loop is None:
            return original(*args, **kwargs)
        return loop.section(functools.partial(original, *args, **kwargs), functools.partial(alone, *args, **kwargs))

    return run


def _saved(original: Method) -> Method:
    """`Accelerator.save_state`."""

    @functools.wraps(original)
    def save(accelerator: Any, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        loop = loop_now()
        if loop is None:
            return original(accelerator, output_dir, *args, **kwargs)
        write = functools.partial(original, accelerator)
        return saving.save_state(loop, lambda folder: write(folder, *args, **kwargs), output_dir)

    return save


def _gathered_weights(original: Method) -> Method:
    """`Accelerator.get_state_dict`: with ZeRO-3 all ranks gather the weights."""

    @functools.wraps(original)
    def get(accelerator: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        loop, work = loop_now(), functools.partial(original, accelerator, model, *args, **kwargs)
        if loop is None or not loop.window.gathers_weights:
            return work()
        return loop.section(work, lambda: None)

    return get


def _kept_group(original: Method) -> Method:
    """`PartialState.destroy_process_group`: the job ends with all ranks when the script is over."""

    @functools.wraps(original)
    def destroy(state: Any, group: Any = None) -> None:
        if loop_now() is None:
            original(state, group)

    return destroy


_ACCELERATOR = "accelerate.accelerator:Accelerator"
TABLE = (
    Replacement(target=f"{_ACCELERATOR}.prepare", why="the engine is built here", make=_prepared),
    Replacement(
        target="accelerate.data_loader:DataLoaderShard.__iter__",
        why="a loader must go back to the step in flight, and yield a lost rank's micro-batches",
        make=_iterated,
    ),
    Replacement(
        target=f"{_ACCELERATOR}._do_sync", why="a rank's share decides which iteration ends a step", make=_synchronized
    ),
    Replacement(
        target=f"{_ACCELERATOR}.no_sync",
        why="the window decides when gradients are reduced",
        make=_reduced_at_the_end,
    ),
    Replacement(
        target=f"{_ACCELERATOR}.backward",
        why="an iteration that counts for nothing takes no step, and the script must see that",
        make=_trained,
    ),
    Replacement(
        target=f"{_ACCELERATOR}.save_state", why="a checkpoint is written again after a loss in it", make=_saved
    ),
    Replacement(
        target=f"{_ACCELERATOR}.get_state_dict",
        why="with ZeRO-3 its collectives must survive a loss",
        make=_gathered_weights,
    ),
    *collectives.table(_through_losses),
    Replacement(
        target="accelerate.state:PartialState.destroy_process_group",
        why="the ranks end together, and one that is still saving needs the group",
        make=_kept_group,
    ),
)
