"""The adapter for Megatron: replicas of different TP width train together, in the user's own script.

    python -m ntp_plugin.megatron pretrain_gpt.py --ntp-enable --ntp-lost r1.s0.t3 ...

What a degraded layout needs, and nothing else, is put in place of Megatron's functions when the arguments have been
parsed; with nobody lost, or without `--ntp-enable`, Megatron runs as if we were not there. The one exception has to
be asked for: `--ntp-dropout exact` replaces the dropouts from the start, or a later run would draw other masks.

    __main__.py         starts a script with the flags made known
    activation.py       the flags, what they mean together, and when the hooks go in
    cpu_emulation.py              the rehearsal mode: real Megatron on CPU (NTP_CPU=1)
    unsupported.py         what does not work in a degraded layout, and is refused at start
    layout.py           PURE: who is lost, which torch rank is which slot, what it holds
    groups.py           Megatron's process groups, without the lost
    megatron/layers/uneven_layers.py    layers of any width from unmodified classes; how each parameter is cut
    megatron/layers/uneven_sequence.py  sequence parallelism where the width does not divide the sequence
    job.py              the plan that all ranks have made alike
    stage_links.py      PURE: who sends which rows between two stages
    pipeline.py         activations between stages of different width
    megatron/reduction/buckets.py          Megatron's buckets, reduced in lanes
    megatron/reduction/lane_sync.py        which lanes, the exact scale, what is replicated, and one norm for all
    megatron/reduction/lane_groups.py      PURE: which process groups the lanes of a layout need
    megatron/reduction/core_groups.py      this rank's way over core slots, in the groups that were made for it
    megatron/reduction/lane_optimizer.py   Megatron's optimizer on the shards of lanes
    megatron/reduction/shards.py           what the optimizer of this rank steps, and which elements of which tensors
    that is megatron/checkpoint/lane_checkpoints.py what Megatron's distributed optimizer saves, of shards of lanes
    batch_share.py      each replica's own micro-batches, and losses that are those of the global batch
    megatron/checkpoint/checkpoints.py      what a degraded layout saves and loads is what the nominal one does
    megatron/layers/dropout.py          masks that do not depend on the layout, healthy or degraded
    hooks.py            the table of all hooks, with the reason of each
    live/               a job under `ntp run` that comes to a degraded layout, and out of it, while it runs

The idea. Megatron's arguments go on saying the nominal layout: TP degree, data-parallel size, padded vocabulary,
global batch. Only three things are told the truth. The process groups are Megatron's own with the lost struck out.
The layers are given *virtual* sizes, (what this slot holds) x (the width of its group), so that every division by the
width gives what it holds; which slot holds what is `planning/`'s decision. And where Megatron reduces gradients over
replicas, lanes do it. Between the stages of a pipeline a slot of the narrower one sends to several of the wider. Layers
are found by their types, cut parameters by Megatron's own attributes, nothing by its name.

Exactness. A gradient is (sum over the tokens of the global batch) / (their number), or with Megatron's default the
mean over all micro-batches; never a mean of replicas' means. Cut parameters are summed lane by lane, replicated ones
once for each replica, after what their TP group has to add. The norm is one number for all, so clipping is the same
bits everywhere. Weights begin as a nominal run's, unit for unit, and a digest of every tensor says so before the
first step.

Public is `enable`.
"""

__all__ = ["enable"]


def enable() -> None:
    """Put the plugin into this process. A script calls it before it imports Megatron's `pretrain`.

    A script that `ntp run` or `python -m ntp_plugin.megatron` starts need not: they do it. Megatron's parser then knows
    the `--ntp-...` flags, and without `--ntp-enable` Megatron runs as it would without the plugin. Only a job that
    `ntp run` has started survives a loss; for a layout that is planned at the start (`--ntp-lost`) torchrun is enough.
    A second call does nothing. From here on an error of the plugin that nobody catches ends the process with one line.

    Raises:
        Refused: It is called too late: Megatron has parsed its arguments, a module has imported `pretrain`, or the
            process group is made.
        ConfigError: `NTP_CPU` has a value that is not known.

    Examples:
        ```python
        from ntp_plugin.megatron import enable

        enable()

        from megatron.training import pretrain
        ```
    """
    from ntp_plugin.megatron import activation  # noqa: PLC0415  (it imports torch)

    activation.enable()
