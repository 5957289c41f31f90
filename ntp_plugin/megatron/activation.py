"""The `--ntp-...` flags: parsing, checks, and when the hooks are installed.

Megatron's parser gets the keys of `[ntp]` as `--ntp-...` flags, and `--ntp-config FILE`. The plugin reads them when
Megatron checks its arguments: all that a layout depends on is known then, and nothing is built. It then refuses a
degraded layout, or exact masks, or installs their hooks. The check itself sees the nominal number of processes, and so
do all numbers that it derives: data-parallel size, micro-batches, padded vocabulary.
"""

import dataclasses
import functools
import sys
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import TrainingFile, TrainingPolicy
from ntp_plugin.errors import ConfigError, Refused, in_one_line
from ntp_plugin.megatron import cpu_emulation
from ntp_plugin.megatron.layout import lost_stages, plan_start
from ntp_plugin.megatron.moved_layers import have_own_stages, layers_of
from ntp_plugin.megatron.option_checks import draws_exact_masks, refuse_live, refuse_what_does_not_work
from ntp_plugin.megatron.switched_off import SwitchedOff
from ntp_plugin.megatron.unsupported import has_partial_latent_keys
from ntp_plugin.patching import Replacement, apply_all
from ntp_plugin.recovery.rank_context import RankContext
from ntp_plugin.tested_versions.comparison import require_present, require_tested

_PREFIX = "ntp-"


class _MegatronHooks:
    flags = False
    ends = False


def install() -> None:
    """Register the flags for the rest of this process; a second call does nothing."""
    if not _MegatronHooks.flags:
        _MegatronHooks.flags = True  # first: importing the replaced modules may call this again, under `ntp run`
        require_present([replacement.target for replacement in FLAGS])
        apply_all(FLAGS)


def enable() -> None:
    """Implement `ntp_plugin.megatron.enable`; see its docstring."""
    if _MegatronHooks.ends:
        return
    sys.excepthook = in_one_line(sys.excepthook)
    _refuse_too_late()
    cpu_emulation.install(cpu_emulation.wanted(), sys.argv)
    install()
    apply_all(ENDS)
    _MegatronHooks.ends = True


def _refuse_too_late() -> None:
    """Raise `Refused` if the hooks would have no effect, because the script already holds what they replace."""
    for found, what in (
        (dist.is_initialized(), "the process group is made"),
        (_arguments_are_parsed(), "Megatron has parsed its arguments"),
        (bool(holders := _holders_of_pretrain()), f"pretrain is imported already, by {', '.join(holders)}"),
        (_is_no_longer_for_cpu(), f"Megatron is imported already, and {cpu_emulation.VARIABLE} is set"),
    ):
        if found:
            raise Refused(
                f"ntp_plugin.megatron.enable() is called too late: {what}",
                fix="make it the first lines of the script: from ntp_plugin.megatron import enable; enable()",
            )


def _arguments_are_parsed() -> bool:
    return getattr(sys.modules.get("megatron.training.global_vars"), "_GLOBAL_ARGS", None) is not None


def _holders_of_pretrain() -> list[str]:
    """Return the modules outside of Megatron that hold its `pretrain` under that name."""
    pretrain = getattr(sys.modules.get("megatron.training.training"), "pretrain", None)
    holders = {
        module.__name__
        for module in list(sys.modules.values())
        if pretrain is not None and getattr(module, "__dict__", {}).get("pretrain") is pretrain
    }
    return sorted(name for name in holders if not name.startswith("megatron."))


def _is_no_longer_for_cpu() -> bool:
    return (
        cpu_emulation.wanted() != cpu_emulation.OFF
        and not cpu_emulation.is_installed()
        and "megatron.core" in sys.modules
    )


def _then_end(original: Any) -> Any:
    """`pretrain`."""

    @functools.wraps(original)
    def pretrain(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        end()
        return result

    return pretrain


def end() -> None:
    """End the ranks of a live job together, after a script that ended well."""
    if "ntp_plugin.megatron.live.start" in sys.modules:
        sys.modules["ntp_plugin.megatron.live.start"].end()


def _with_flags(original: Any) -> Any:
    """`add_megatron_arguments`."""

    @functools.wraps(original)
    def add(parser: Any) -> Any:
        parser = original(parser)
        group = parser.add_argument_group("ntp", "degraded replicas (ntp_plugin)")
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
            raise ConfigError("--ntp-lost names slots, and the plugin is off", fix="--ntp-enable")
        if policy.enabled:
            require_tested("megatron", reports=args.rank == 0)
        if policy.enabled and args.ckpt_format == "torch":
            from ntp_plugin.megatron import hooks  # noqa: PLC0415  (it imports the rest of Megatron)

            apply_all(hooks.FORMATS)
        if policy.enabled and not policy.lost and RankContext.is_elastic():
            from ntp_plugin.megatron.live import start  # noqa: PLC0415  (it imports the rest of Megatron)

            refuse_live(args, policy)
            validated = original(args, *rest, **kwargs)
            start.begin(args, policy)
            return validated
        if not policy.lost and not draws_exact_masks(args, policy) and not _completes_gradients(args, policy):
            return original(args, *rest, **kwargs)
        layout = plan_start(
            policy.lost,
            tp=args.tensor_model_parallel_size,
            pp=args.pipeline_model_parallel_size,
            processes=args.world_size,
            rank=args.rank,
        )
        refuse_what_does_not_work(args, policy, layout)
        if layout.degraded:
            args.num_distributed_optimizer_instances = 1  # lanes are sharded over all replicas
            SwitchedOff(args).for_layout(degraded=True, reports=layout.rank == 0)
        args.world_size = layout.topology.size
        try:
            validated = original(args, *rest, **kwargs)
        finally:
            args.world_size = len(layout.slots)
        if lost_stages(layout):
            _know_vocabulary(args)
            layout = dataclasses.replace(layout, layers=layers_of(args, policy, layout.topology))
            have_own_stages(args, layout)
        from ntp_plugin.megatron import hooks  # noqa: PLC0415  (as above)

        apply_all(hooks.table(layout, policy, args))
        return validated

    return validate


def _know_vocabulary(args: Any) -> None:
    """Have Megatron count the rows of the vocabulary now, since the output layer is a part of a stage's work. Megatron
    itself does so once it initializes, and then keeps this number."""
    if args.padded_vocab_size is None:
        from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer  # noqa: PLC0415

        build_tokenizer(args)


def _completes_gradients(args: Any, policy: TrainingPolicy) -> bool:
    return policy.enabled and has_partial_latent_keys(args)


def read_policy(args: Any) -> TrainingPolicy:
    """Return the policy that the flags and the file set. What rows depend on that see arguments alone is set there."""
    policy = _policy(args)
    args.ntp_gpu_memory_gb = policy.gpu_memory_gb
    return policy


def _policy(args: Any) -> TrainingPolicy:
    flags = schema.flag_values(TrainingPolicy, args, prefix=_PREFIX)
    if args.ntp_config is None:
        return schema.build(
            TrainingPolicy, flags, name=lambda path: schema.flag_name(TrainingPolicy, path, prefix=_PREFIX)
        )
    path = Path(args.ntp_config)
    name = schema.dotted(f"{path}: ntp.")
    written = schema.check(
        TrainingFile, read_file(path, least="write at least [ntp] and enabled = true"), name=schema.dotted(f"{path}: ")
    )
    return schema.build(TrainingPolicy, flags, written.get("ntp", {}), name=name)


FLAGS: tuple[Replacement, ...] = (
    Replacement(
        target="megatron.training.arguments:add_megatron_arguments",
        why="so that a script needs no extra_args_provider for our flags",
        make=_with_flags,
    ),
    Replacement(
        target="megatron.training.arguments:validate_args",
        why="the layout is known here, and nothing is built yet",
        make=_with_layout,
    ),
)

ENDS: tuple[Replacement, ...] = tuple(
    Replacement(
        target=f"{module}:pretrain",
        why="the ranks of a live job end together, and a script that the plugin did not start does not report its end",
        make=_then_end,
    )
    for module in ("megatron.training", "megatron.training.training")
)
