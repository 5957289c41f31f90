"""Lets the replicas of a Megatron job train with different TP widths, so that the job goes on after it loses GPUs. Use
it from your own training script, or start the script with it:

    python -m ntp_plugin.megatron pretrain_gpt.py --ntp-enable --ntp-lost r1.s0.t3 ...     slots missing from the start
    ntp run --nproc-per-node 8 -m ntp_plugin.megatron pretrain_gpt.py --ntp-enable ...      slots lost during training

The adapter replaces some of Megatron's functions when Megatron has parsed its arguments, and only those that a degraded
layout needs. With nobody lost, or without `--ntp-enable`, Megatron runs unchanged. There are two exceptions, since a
later degraded run would differ otherwise: dropouts are replaced from the start (`--ntp-dropout`), and gradients that
Megatron leaves partial in latent attention without `--sequence-parallel` are completed.

    __main__.py         starts a script with the `--ntp-...` flags registered
    activation.py       the `--ntp-...` flags: parsing, checks, and when the hooks are installed
    core_loop.py        `elastic`, by which a hand-written loop over megatron.core joins a job
    recipe_check.py     which options of a command line a live job does not support
    job_check.py        what `ntp check` finds out about a command line: losses, memory, changes
    checkpoint_arguments.py  the arguments that Megatron takes from a checkpoint, for these checks
    recipe_file.py      PURE: the command line of a recipe in the form of Megatron-LM's functional tests
    unsupported.py      options that a degraded layout does not support, refused at start
    unsupported_experts.py  those of layers of experts
    option_checks.py    which of them a job has, and the error
    refusals.py         PURE: a row of such a table
    switched_off.py     options that make a step faster, which a degraded layout leaves out
    degraded_changes.py options that work in a degraded layout, and differently
    flag_table.py       writes the page that has all flags of Megatron's parser
    layout.py           PURE: which slots are lost, which torch rank is which slot, what a slot holds
    groups.py           Megatron's process groups, without the lost ranks
    job.py              the recovery plan that all ranks compute and compare
    job_shape.py        PURE: what planning needs to know of Megatron's arguments
    batch_schedule.py   which global batch a step has
    batch_share.py      runs each replica's own micro-batches, and reports the losses of the global batch
    padding.py          micro-batches that weigh nothing, so that all replicas of an expert group run alike many
    router_metrics.py   what routers log of a step, summed over uneven replicas
    muon.py             steps each expert of a slot by itself (--optimizer muon)
    chained.py          Megatron's optimizers of one model as one optimizer of torch
    prediction_losses.py  the losses of multi-token prediction in the log, over replicas of different width
    context_loss.py     weighs the tokens of a sequence as with nobody lost, where fewer replicas share it
    fp8_scales.py       FP8's delayed scaling where replicas run different numbers of micro-batches
    stage_links.py      PURE: which slots of two pipeline stages send to each other, and which rows
    stage_layers.py     PURE: reads which layers each stage nominally has
    moved_layers.py     PURE: tells Megatron which layers the stages of a replica have that has lost one
    pipeline.py         sends activations and gradients between stages of different width
    hooks.py            the table of all Megatron functions that a degraded job replaces, with the reason for each
    expert_hooks.py     the part of this table for experts
    cpu_emulation.py    CPU emulation: unmodified Megatron on CPU and gloo (NTP_CPU=1)
    cpu_arguments.py    what the emulation makes of arguments that a CPU cannot have
    cpu_fused_gradients.py  apex's kernel for the gradients of weights, in torch
    delta_net_emulation.py  the kernels of gated delta nets, in torch
    te_emulation/       TransformerEngine's own Python modules on a CPU, with torch in the place of its kernels

    layers/             Megatron's layers in a degraded layout
        uneven_layers.py     layers of any width from unmodified classes, and how each parameter is cut
        uneven_experts.py    MoE layers whose slots have any number of experts
        uneven_delta_net.py  gated delta nets of any width
        expert_dispatch.py   sends tokens to experts that are not spread evenly
        context_ring.py      attention of a context group that is smaller than its two levels
        latent_attention.py  a gradient of latent attention that Megatron leaves partial
        token_prediction.py  multi-token prediction: joins columns that slots hold different numbers of
        uneven_sequence.py   sequence parallelism where the width does not divide the sequence
        dropout.py           dropout masks that do not depend on the layout
    reduction/          Megatron's gradient buckets and its distributed optimizer, lane by lane
        lane_groups.py       PURE: which process groups the lanes of a layout need
        core_groups.py       this rank's exchange over core slots
        buckets.py           Megatron's gradient buckets, reduced in lanes
        lane_sync.py         sums gradients lane by lane, with the exact scale and one norm for all ranks
        lane_optimizer.py    Megatron's optimizer on lane shards
        logged_numbers.py    the zeros and norms that Megatron logs, over lane shards
        shards.py            what this rank's optimizer steps, as slices of tensors
    checkpoint/         checkpoints of a degraded layout, in Megatron's own format
        checkpoints.py       checkpoints of a degraded layout, equal to those of the nominal one
        lane_checkpoints.py  the distributed optimizer's checkpoint entries, from lane shards
        expert_checkpoints.py  saves experts that are not spread evenly, in the entries of the nominal layout
        background_writer.py writes the checkpoints of --async-save on a thread of the rank
        save_errors.py       makes an error of the file system known to all ranks, which give the save up together
    live/               a job under `ntp run` that loses ranks during training, and takes them back

How it works. Megatron's arguments keep the nominal layout: TP degree, data-parallel size, padded vocabulary, global
batch. Three things follow the real layout. The process groups are Megatron's own without the lost ranks. The layers get
*virtual* sizes, (what this slot holds) x (the width of its group), so that every division by the width gives what the
slot holds; `planning/` decides which slot holds what. And where Megatron reduces gradients over replicas, lanes do it.
Between pipeline stages, a slot of the narrower stage sends to several slots of the wider one. The adapter finds layers
by their types and cut parameters by Megatron's own attributes, never by name.

Exactness. A gradient is (sum over the tokens of the global batch) / (their number), or, as is Megatron's default, the
mean over all micro-batches; it is never a mean of replicas' means. Cut parameters are summed lane by lane, replicated
ones once per replica, after their TP group has added its parts. All ranks clip by the same norm, bit for bit. Initial
weights equal those of a nominal run, unit for unit; before the first step, a digest of every tensor verifies this.

The public API is `enable`, `check` and `elastic`. Next: `layout.py`, then `hooks.py`; for losses during training,
`live/__init__.py`.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ntp_plugin.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from ntp_plugin.megatron.core_loop import ElasticCoreLoop, elastic
    from ntp_plugin.planning.job_check import UnsupportedOption
else:
    __getattr__, __dir__ = lazy_exports(__name__, {"ntp_plugin.megatron.core_loop": ("ElasticCoreLoop", "elastic")})

__all__ = ["ElasticCoreLoop", "check", "elastic", "enable"]


def check(flags: Sequence[str]) -> "tuple[UnsupportedOption, ...]":
    """Find the options of a Megatron command line that a live job does not support.

    It builds no model and needs no GPU. In a process without a GPU it switches the CPU emulation on.

    Args:
        flags: The words behind the script, `--ntp-enable` among them. Flags that neither Megatron nor the plugin knows
            are taken for the script's own.

    Returns:
        Each unsupported option once, with `.flag`, `.why` and `.fix`. Empty if the job is accepted, or if the flags do
        not enable the plugin.

    Raises:
        ConfigError: Megatron's parser refuses the flags.

    Examples:
        ```python
        from ntp_plugin.megatron import check

        for option in check(["--te-rng-tracker", "--ntp-enable"]):
            print(option.flag, option.why, option.fix)
        ```
    """
    from ntp_plugin.megatron import recipe_check  # noqa: PLC0415  (it imports torch)

    return recipe_check.check(flags)


def enable() -> None:
    """Put the plugin into this process. A script calls it before it imports Megatron's `pretrain`.

    A script that `ntp run` or `python -m ntp_plugin.megatron` starts need not call it. Megatron's parser then knows the
    `--ntp-...` flags; without `--ntp-enable` Megatron runs unchanged. Only a job that `ntp run` has started survives a
    loss; for a layout that is planned at the start (`--ntp-lost`) torchrun is enough. A second call does nothing. After
    the call, an uncaught error of the plugin ends the process with one line instead of a traceback.

    Raises:
        Refused: The call comes too late: Megatron has parsed its arguments, a module has imported `pretrain`, or the
            process group exists.
        ConfigError: `NTP_CPU` has an unknown value.

    Examples:
        ```python
        from ntp_plugin.megatron import enable

        enable()

        from megatron.training import pretrain
        ```
    """
    from ntp_plugin.megatron import activation  # noqa: PLC0415  (it imports torch)

    activation.enable()
