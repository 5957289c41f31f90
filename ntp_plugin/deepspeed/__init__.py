"""Lets a data-parallel DeepSpeed job lose ranks and go on, in the user's own training loop.

    {"ntp": {"enabled": true}, "train_batch_size": 32, ...}         in the existing ds_config.json
    ntp run --nproc-per-node 4 train.py --deepspeed_config ds_config.json

`ntp run` installs the hooks when the script imports deepspeed. A script that makes its process group before that needs
one line, `import ntp_plugin.deepspeed`, ahead of it. Without `"enabled": true` DeepSpeed runs unchanged.

The loop is the user's: it draws a micro-batch and calls `engine(...)`, `engine.backward(...)`, `engine.step()`. The
plugin cannot rerun a step from inside these calls, because the script may compute the loss between them. So a lost rank
*restarts the accumulation window*: the plugin drops the gradients of the step in flight, and the loader goes back to
the first micro-batch of that step, with the lost rank's micro-batches dealt to the others. The loop does not notice; it
runs a few more iterations. A micro-batch that the loop had already drawn is stale: its forward is computed, and its
backward and step do nothing.

    untested.py             a DeepSpeed that the tests do not know: no hook is installed, and an enabled job refused
    activation.py           installs the hooks: an editable process group, and the engine when it is built
    job.py                  this process in a job that `ntp run` started, from its process group to its end
    settings.py             reads the `ntp` block of a DeepSpeed configuration
    auto_values.py          what a trainer writes in place of "auto", for a check before it has
    job_check.py            what `ntp check` finds out about a configuration: losses, memory, changes
    unsupported.py          options that the plugin does not support, refused when the engine is built
    fingerprints.py         what a rank's training depends on, compared across ranks
    trainer.py              a rank's part in a recovery: report, plan, resume
    accumulation_window.py  wraps the engine's forward, backward and step, and holds the vote
    whose_loop.py           what the window asks of the loop around it: the user's own, or a framework's
    hf/                     the loop of Hugging Face's Trainer, which must not notice a loss
    accelerate_loop/        a user's own loop with Hugging Face Accelerate
    loaders.py              a DataLoader that can go back, and yield a lost rank's micro-batches
    data_epochs.py          tells a joining rank which data epoch the job is in, before it is admitted
    checkpoints.py          saves and loads DeepSpeed checkpoints, through losses and in scripts that join late
    engine_counters.py      the engine's counters when an accumulation window begins, and how to restore them
    inventory.py            how each part of a job's state is restored from copies
    full_width_replicas.py  replicas that leave as a whole: of one slot, or of the slots of a user's mpu
    full_width_state.py     state that every replica holds in full: compares it, and sends it to joining ranks
    half_masters.py         half precision without ZeRO: float32 masters, and the norm
    zero_state.py           ZeRO: shards as slices of tensors, rebuilt for the members, filled from copies
    flat_shards.py          DeepSpeed's three sharded optimizers, as flat shards
    sharded_weights.py      ZeRO-3: parameters that are sharded, cut for other members, and done without
    autotp_layers.py        the layers that AutoTP has cut: their units, and what follows the replica's width
    autotp_vocabulary.py    a vocabulary that AutoTP has cut without gathering: output layer, embedding, loss
    autotp_replicas.py      replicas that AutoTP has cut: who holds what, and how degraded replicas sum gradients
    lane_zero.py            ZeRO-1 and ZeRO-2 of degraded AutoTP replicas, sharded lane by lane
    fault_points.py         the points in a step and in a recovery where faults can be injected

Exactness. DeepSpeed's gradient is the mean over ranks of the sums of `loss / gradient_accumulation_steps`. It stays the
mean over the nominal ranks' micro-batches: `gradient_accumulation_steps` stays the same, the last micro-batch of a
rank's share is the boundary, and the loss is multiplied by (ranks now) / (nominal ranks), so that DeepSpeed's mean over
the present ranks equals the mean over the nominal ones. ZeRO-2 reduces in every backward, which ranks with shares of
different length cannot do together; in a degraded layout it reduces once, as `coalesce_grad_reduction` does. ZeRO-3
gathers weights in every forward and backward: there ranks repeat a micro-batch, with a loss of zero, until all have as
many. With nobody lost none of this is active, and a run has the same bits as without the plugin.

Loops. The share of a rank is longer while others are lost, so a loop must not count its own iterations: it goes by the
loader, or by `engine.global_steps`. The loader is the one that `deepspeed.initialize(training_data=...)` returns, or a
`torch.utils.data.DataLoader` with a `DistributedSampler`.

The public API is `enable`; importing this package is enough. Next: `activation.py`, then `accumulation_window.py`.
"""

from ntp_plugin.deepspeed.untested import install

__all__ = ["enable"]


def enable() -> None:
    """Put the plugin into this process. A script calls it before a process group is made.

    A script that `ntp run` starts need not call it, unless it makes its process group before it imports deepspeed. The
    configuration enables the plugin: without `"ntp": {"enabled": true}` DeepSpeed runs unchanged. With it, `ntp run`
    must have started the job, or `deepspeed.initialize` raises `ConfigError`. A second call does nothing. After the
    call, an uncaught error of the plugin ends the process with one line instead of a traceback.

    Raises:
        Refused: The call comes too late: the process group was made before `ntp_plugin.deepspeed` was imported. With a
            DeepSpeed or torch whose functions are not those that the plugin was tested with, `deepspeed.initialize`
            raises it, where the configuration enables the plugin.

    Examples:
        ```python
        from ntp_plugin.deepspeed import enable

        enable()

        engine, *_ = deepspeed.initialize(model=model, config="ds_config.json")
        ```
    """
    install(late_is_refused=True)


install()  # importing is enough, as for other DeepSpeed plugins; the configuration switches the plugin on
