"""Lets a Megatron job under `ntp run` lose ranks and go on: the `Trainer` that `recovery/` drives.

    ntp run --nproc-per-node 8 -m ntp_plugin.megatron pretrain_gpt.py --ntp-enable ...

While nobody is lost Megatron runs unchanged, except for three things. Its training loop is divided into sections that
end with a vote. Its loaders can be rebuilt from any sample on. Its process groups can be edited. When a slot is lost,
the recovery calls `trainer.py` on every rank, which does, in this order:

    apply the update that others have applied, if this rank had only prepared it
    update Megatron's lists of ranks for the edited groups                              ranks.py
    move parameters and optimizer state, tensor by tensor, into the new layout          resharding/reshard.py
    build the same model again, on the meta device, as the new layout has it            model_rebuild.py
    copy its sizes into the real modules, and rebuild DDP's buffers                     model_rebuild.py
    install the lanes, shares and hooks of a degraded layout, as at a degraded start    megatron/hooks.py

So a run that degrades at step s has, from there on, the same hooks, buckets and lanes as one that was planned that way.
The user's objects stay: the modules, the parameters, DDP, the optimizer and its groups, the scheduler.

    start.py               builds the live job when Megatron has parsed its arguments, and ends it
    hooks.py               the table of all Megatron functions that a live job replaces from its start
    training_step.py       the section that is a training step: votes, then applies; rebuilds the result if interrupted
    trainer.py             a rank's part in a recovery: report, plan, resume
    next_plan.py           computes the next plan from what all ranks report
    step_replay.py         saves and restores what a section changes before its vote
    unfinished_save.py     checkpoints that are written beside the training, or have failed, through losses
    save_progress.py       PURE: what all ranks know of them
    failed_save.py         reports a checkpoint that could not be written
    samples.py             loaders that are built on demand, and again from another sample
    unsynced.py            `no_sync` that a loss can interrupt
    ranks.py               Megatron's lists of ranks, after its groups were edited
    model_rebuild.py       builds the model again for a new layout, and copies the sizes into the real one
    moved_modules.py       gives a model the layers of the stage that it is now
    scales.py              FP8's scales: as a section began, and the same on all ranks after a recovery
    group_caches.py        makes TransformerEngine and Megatron forget what belonged to the layout before
    trained_parameters.py  runs work among the ranks that train, where other ranks are idle
    state.py               this rank's weights and optimizer state, moved from peers or restored from copies
    copies.py              what is copied besides tensors: how far the job has come
    counts.py              what a job counts outside of its model and optimizer, for joining ranks
    generators.py          saves and restores random number generators
    export.py              writes copies as a Megatron checkpoint (`ntp copies export`)
    expert_bias.py         the bias of experts: changes it where a step is over, and restores it
    loss_scale.py          changes the loss scale of fp16 where a step is over
    logs.py                writes a recovery to Megatron's own logs
    prediction_log.py      the losses of multi-token prediction in the log, where a rank is lost
    fingerprints.py        what a rank's training depends on, compared across ranks
    fault_points.py        the points in a step and in a recovery where faults can be injected

Sections. Two ranks are never further apart than one vote: a rank that has left a section knows that all others have
ended its work. After a loss within a section all ranks do it again, unless one has left it: then all have. Between two
sections Megatron runs a few more collectives, for timers and logs. If a loss interrupts one of these, the rank skips it
and all that follow up to the next section: others may have completed it, and do not repeat it.

`core_loop.py` of the package above runs a hand-written loop in the same job, through Megatron's `train_step`.

Next: `start.py`, then `trainer.py` and `training_step.py`.
"""
