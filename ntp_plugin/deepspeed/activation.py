"""Installs the hooks: an editable process group, and the engine when it is built.

The plugin must make the process group before DeepSpeed or the script does, so that it can be edited, whatever the
configuration will say. The configuration is read when an engine is built. If it does not enable the plugin, the plugin
releases the group, and the job runs as it would without it.
"""

import functools
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import deepspeed
import torch.distributed as dist

from ntp_plugin.deepspeed.autotp_layers import remembered
from ntp_plugin.deepspeed.autotp_vocabulary import remembered_padding
from ntp_plugin.deepspeed.full_width_replicas import AskedOfGroups
from ntp_plugin.deepspeed.job import DeepSpeedJob
from ntp_plugin.deepspeed.loaders import dealt
from ntp_plugin.deepspeed.settings import read_policy
from ntp_plugin.deepspeed.unsupported import adapters_are_named
from ntp_plugin.errors import ConfigError, Refused, in_one_line
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.tested_versions.comparison import require_tested

_HALF_AN_HOUR = timedelta(minutes=30)
_FIRST = "import ntp_plugin.deepspeed before the first torch.distributed.init_process_group"


class _DeepSpeedHooks:
    hooks = False
    late = False


def install(*, late_is_refused: bool = False) -> None:
    """Install the hooks for the rest of this process; a second call does nothing.

    Args:
        late_is_refused: Whether to raise `Refused` where the process group was made before the hooks were installed.
    """
    if not _DeepSpeedHooks.hooks:
        _DeepSpeedHooks.late = dist.is_initialized()
        # It bypasses the process groups, and its first use compiles for minutes.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        apply_all(TABLE)
        sys.excepthook = in_one_line(sys.excepthook)
    _DeepSpeedHooks.hooks = True
    if late_is_refused and _DeepSpeedHooks.late:
        raise Refused("ntp_plugin.deepspeed.enable() is called too late: the process group is made", fix=_FIRST)


def end() -> None:
    """End the ranks of a job together, after a script that ended well."""
    if DeepSpeedJob.now is not None:
        DeepSpeedJob.now.end()


def _that_can_be_edited(original: Any) -> Any:
    """`init_process_group`."""

    @functools.wraps(original)
    def make(
        backend: str | None = None, init_method: Any = None, timeout: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if ElasticRank.is_there or not RankContext.is_elastic():  # another adapter's group, or our own call
            return original(backend, init_method, timeout, *args, **kwargs)
        DeepSpeedJob.now = DeepSpeedJob(backend or _default_backend(), timeout or _HALF_AN_HOUR)
        return None

    return make


def _default_backend() -> str:
    return str(deepspeed.accelerator.get_accelerator().communication_backend_name())


def _that_can_lose_ranks(original: Callable[..., None]) -> Callable[..., None]:
    """`DeepSpeedEngine.__init__`, which every way to build an engine calls."""

    @functools.wraps(original)
    def build(engine: Any, *args: Any, **kwargs: Any) -> None:
        config = kwargs.get("config_class")
        policy = read_policy(getattr(config, "_param_dict", {}))
        job = DeepSpeedJob.now
        if not policy.enabled:
            if job is not None and job.engine is None:
                job.let_go_of_the_group()
            original(engine, *args, **kwargs)
            return
        if job is None:
            raise _not_ours()
        require_tested("deepspeed", reports=job.rank.place.slot == 0)
        mpu = kwargs.get("mpu")
        job.refuse(engine, config, policy, kwargs.get("model"), mpu)
        if mpu is not None:
            kwargs["mpu"] = AskedOfGroups(mpu)
        with adapters_are_named(engine, config):
            original(engine, *args, **kwargs)
        job.take(engine, policy)

    return build


def _not_ours() -> ConfigError | Refused:
    if not RankContext.is_elastic():
        return ConfigError(
            "ntp.enabled is true, and this process was not started by `ntp run`",
            fix="ntp run takes torchrun's flags: ntp run --nproc-per-node 4 train.py ...",
        )
    assert dist.is_initialized(), "an engine has a process group"
    return Refused(
        "ntp.enabled is true, and the process group was made before the plugin was imported",
        fix=_FIRST,
    )


TABLE = (
    Replacement(
        target="torch.distributed:init_process_group",
        why="the world, and all groups made later, must be editable",
        make=_that_can_be_edited,
    ),
    Replacement(
        target="deepspeed.runtime.engine:DeepSpeedEngine.__init__",
        why="the configuration is known here, and an earlier `from deepspeed import initialize` also ends here",
        make=_that_can_lose_ranks,
    ),
    Replacement(
        target="deepspeed.module_inject.auto_tp:AutoTP.update_mp_params",
        why="AutoTP overwrites the number of heads of an attention layer with this slot's",
        make=remembered,
    ),
    Replacement(
        target="deepspeed.module_inject.layers:VocabParallelEmbedding.__init__",
        why="only the slot that holds the padding row knows where it is",
        make=remembered_padding,
    ),
    Replacement(
        target="torch.utils.data:DataLoader.__iter__",
        why="a loader must go back to the step in flight, and yield a lost rank's micro-batches",
        make=dealt,
    ),
)
