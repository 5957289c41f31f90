"""The adapter for DeepSpeed: a data-parallel job that loses ranks and goes on, in the user's own training loop.

    {"ntp": {"enabled": true}, "train_batch_size": 32, ...}         in the ds_config.json that is there already
    ntp run --nproc-per-node 4 train.py --deepspeed_config ds_config.json

`ntp run` puts the hooks in when the script imports deepspeed; where nobody else does, `import ntp_plugin.deepspeed`
before the process group is made is the one line that a script needs. Without `"enabled": true` DeepSpeed runs as ever.

The loop is the user's: it draws a micro-batch, calls `engine(...)`, `engine.backward(...)`, `engine.step()`. Nothing
can be run again from inside of these calls, because the loss may be computed between them. So a loss *restarts the
window*: the gradients of the step in flight are dropped, the loader goes back to the first micro-batch of that step,
with the lost rank's dealt out, and the loop, which notices nothing, goes through a few more iterations. A micro-batch
that the loop had in hand is stale: its forward is computed, and its backward and step do nothing.

    activation.py      the world, made so that it can be edited, and the engine, taken when it is built
    job.py             this process in a job, from its process group to its end
    settings.py        the `ntp` block of a configuration
    fingerprints.py    what the training of a rank depends on, which all ranks compare
    unsupported.py        what does not work, and is refused at start
    loaders.py         a DataLoader that follows `training/stream.py`, forward and back
    accumulation_window.py          what is put around the engine's forward, backward and step; the vote
    checkpoints.py     what is written and read, through losses and by scripts that come in late
    data_epochs.py           which turn through the data the job is in, for those
    engine_counters.py         what the engine has counted, as a window begins
    inventory.py       what becomes of every piece of state that comes from copies
    autotp_layers.py      what AutoTP has cut: in which units, and what of a layer follows the width of its replica
    autotp_vocabulary.py  an output layer, its embedding and the loss, cut without gathering
    autotp_replicas.py    replicas that AutoTP has cut: who holds what, how gradients are summed while somebody is lost
    full_width_replicas.py  replicas that leave whole: of one slot, or of those of a user's mpu
    half_masters.py    half precision without ZeRO: a parameter's master moves with it
    full_width_state.py     every replica holds everything: compared after a loss, handed to who comes in
    zero_state.py      ZeRO-1 and ZeRO-2: shards, told as pieces, built anew for other members, filled from copies
    flat_shards.py     DeepSpeed's two optimizers that are sharded, told as flat shards
    lane_zero.py       ZeRO-1 and ZeRO-2 of replicas that AutoTP has cut, while somebody is lost: sharded lane by lane
    trainer.py         report, plan, stand on
    fault_points.py         where in a step and in a recovery something can be made to happen

Exactness. DeepSpeed's gradient is the mean over ranks of the sums of `loss / gradient_accumulation_steps`. It stays
the mean over the nominal ranks' micro-batches: `gradient_accumulation_steps` stays what it is, the last micro-batch of
a rank's share is the boundary, and the loss is multiplied by (ranks now) / (nominal ranks), which makes the framework's
mean over those who are there the mean over the nominal ones. ZeRO-2 reduces in every backward, which ranks with shares
of different length cannot do together; in a degraded layout it reduces once, as `coalesce_grad_reduction` does. With
nobody lost nothing of this is in place, and a run has the bits that it has without us.

Loops. The share of a rank is longer while others are lost, so a loop must not count its own iterations: it goes by the
loader, or by `engine.global_steps`. The loader is the one that `deepspeed.initialize(training_data=...)` returns, or a
`torch.utils.data.DataLoader` with a `DistributedSampler`.

Public is `enable`, and that the import of this package is enough.
"""

from ntp_plugin.deepspeed.activation import enable, install

__all__ = ["enable"]

install()  # the import is the switch, as for other plugins of DeepSpeed; what it means is said in the configuration
