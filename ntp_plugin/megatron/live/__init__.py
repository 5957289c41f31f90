"""A Megatron job that loses ranks and goes on: the `Trainer` for the recovery of `recovery/`.

    ntp run --nproc-per-node 8 -m ntp_plugin.megatron pretrain_gpt.py --ntp-enable ...

While nobody is lost Megatron runs as ever, with three things of ours around it: its training loop is divided into
sections that end with a vote, its loaders can be made again from any sample on, and its process groups are ones that
can be edited. When a slot is lost, the recovery brings everybody to `trainer.py`, which does, in this order:

    the update that others have applied, if this rank only held it ready
    Megatron's lists of ranks, of the groups that were edited                       ranks.py
    parameters and optimizer state, tensor by tensor, into the new layout           resharding/reshard.py
    the same model once more, on the meta device, as the new layout has it          model_rebuild.py
    ... whose sizes the real modules take over, and what DDP keeps is made anew     model_rebuild.py
    lanes, shares and hooks of a degraded layout, as if the job had begun so            hooks.py of the room above

so that a run that is degraded at step s has, from there on, the very hooks, buckets and lanes of one that was planned
so. The user's objects stay: the modules, the parameters, DDP, the optimizer and its groups, the scheduler.

    start.py        what happens when Megatron has parsed its arguments
    fingerprints.py what the training of a rank depends on, which all ranks compare
    training_step.py  the section that is a step: what is applied after the vote, what is told if it was interrupted
    samples.py      loaders that are made when they are asked, and made again
    counts.py       what a job counts outside of its model and optimizer
    ranks.py        Megatron's lists of ranks, after groups were edited
    model_rebuild.py      a model that is built again elsewhere, and sizes that are taken over from it
    unsynced.py     micro-batches whose gradients are not summed yet, in a form that can be broken off
    next_plan.py    what to do next, from what everybody has reported
    step_replay.py       what a section changes before its vote, and how it is had back for another try
    trainer.py      report, plan, stand on
    state.py        what this rank trains, moved from peers or put in anew from copies
    copies.py       what goes with the copies of what only one rank holds: how far the job had come
    export.py       Megatron's side of a run that is there only to write copies as a checkpoint
    generators.py   what random numbers are drawn from, told and put back
    trained_parameters.py     the world of those who train, where some stand idle
    logs.py         a recovery in Megatron's own logs
    fault_points.py      where in a step and in a recovery something can be made to happen
    hooks.py        everything of Megatron's that a live job has replaced from its start, with the reason of each

Sections. Two ranks are never further apart than one vote: who has left a section knows that all others have ended its
work. A loss in a section means that all do it again, unless somebody has left it: then all have. Between two sections
Megatron has a few collectives more, for timers and logs. Where a loss interrupts one of these, it is left out, with all
that follow up to the next section: others may have come through it, and do not come back.
"""
