"""The flags, what they mean together, and when the hooks go in.

Megatron's parser is given the keys of `[ntp]` as `--ntp-...` flags, and `--ntp-config FILE`. They are read when
Megatron checks its arguments: everything that a layout depends on is known then, and nothing is built. A hurt layout,
or exact masks, are refused or their hooks are put in place there. The check itself sees the nominal number of
processes, and so do all numbers that it derives: data-parallel size, micro-batches, padded vocabulary.
"""

import functools
import sys
from pathlib import Path
from typing import Any

from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import TrainingFile, TrainingPolicy
from ntp_plugin.errors import ConfigError, in_one_line
from ntp_plugin.megatron import cpu
from ntp_plugin.megatron.layout import plan_start
from ntp_plugin.megatron.refusals import draws_exact_masks, refuse_live, refuse_what_does_not_work
from ntp_plugin.recovery.place import Place
from ntp_plugin.replacements import Replacement, apply_all

_PREFIX = "ntp-"


class _Installed:
    flags = False


def install() -> None:
    """Make the flags known, for the rest of this process; again is nothing."""
    if not _Installed.flags:
        apply_all(FLAGS)
    _Installed.flags = True


def enable() -> None:
    """The line for a script that `ntp run` does not start.

    Before the script imports `pretrain`. An error of ours then ends it with one line and its exit code.
    """
    cpu.install(cpu.wanted())
    install()
    apply_all(ENDS)
    sys.excepthook = in_one_line(sys.excepthook)


def _then_end(original: Any) -> Any:
    """`pretrain`."""

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        end()
        return result

    return pretrain


def end() -> None:
    """After a script that ended well: the ranks of a live job end together."""
    if "ntp_plugin.megatron.live.start" in sys.modules:
        sys.modules["ntp_plugin.megatron.live.start"].end()


def _with_flags(original: Any) -> Any:
    """`add_megatron_arguments`."""

    @functools.wraps(original)
    def add(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group("ntp", "replicas that are hurt (ntp_plugin)")
        group.add_argument("--ntp-config", metavar="FILE", help="a .toml or .json file with an [ntp] block; flags win")
        schema.add_flags(group, TrainingPolicy, prefix=_PREFIX)
        return parser

    return add


def _with_layout(original: Any) -> Any:
    """`validate_args`."""

    @functools.wraps(original)
    def validate(args: Any, *rest: Any, **kwargs: Any) -> Any:
        policy = read_policy(args)
        if policy.lost and not policy.enabled:
            raise ConfigError("--ntp-lost names slots, and the plugin is off", way_out="--ntp-enable")
        if policy.enabled and not policy.lost and Place.is_told():
            from ntp_plugin.megatron.live import start  # noqa: PLC0415  (it imports the rest of Megatron)

            refuse_live(args, policy)
            validated = original(args, *rest, **kwargs)
            start.begin(args, policy)
            return validated
        if not policy.lost and not draws_exact_masks(args, policy):
            return original(args, *rest, **kwargs)
        layout = plan_start(
            policy.lost,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            processes=args.world_size,
            rank=args.rank,
        )
        refuse_what_does_not_work(args, policy, layout)
        args.world_size = layout.topology.size
        try:
            validated = original(args, *rest, **kwargs)
        finally:
            args.world_size = len(layout.slots)
        from ntp_plugin.megatron import hooks  # noqa: PLC0415  (it imports the rest of Megatron)

        apply_all(hooks.table(layout, policy, args))
        return validated

    return validate


def read_policy(args: Any) -> TrainingPolicy:
    """What the flags and the file say."""
    said = schema.flag_values(TrainingPolicy, args, prefix=_PREFIX)
    if args.ntp_config is None:
        return schema.build(
            TrainingPolicy, said, name=lambda path: schema.flag_name(TrainingPolicy, path, prefix=_PREFIX)
        )
    path = Path(args.ntp_config)
    name = schema.dotted(f"{path}: ntp.")
    written = schema.check(
        TrainingFile, read_file(path, least="write at least [ntp] and enabled = true"), name=schema.dotted(f"{path}: ")
    )
    return schema.build(TrainingPolicy, said, written.get("ntp", {}), name=name)


FLAGS: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.arguments:add_megatron_arguments",
        why="so that a script needs no extra_args_provider for our flags",
        make=_with_flags,
    ),
    Replacement(
        target="megatron.training.arguments:validate_args",
        why="the first moment at which the layout is known, and the last before anything is built",
        make=_with_layout,
    ),
)

ENDS: tuple[Replacement, ...] = tuple(
    Replacement(
        target=f"{module}:pretrain",
        why="the ranks of a live job end together, and a script that is not started by us does not say that it ends",
        make=_then_end,
    )
    for module in ("megatron.training", "megatron.training.training")
)
