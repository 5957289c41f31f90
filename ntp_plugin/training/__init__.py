"""Training state in uneven layouts: how it moves into one, and how gradients flow in it.

    samples.py            PURE: which samples a replica computes
    stream.py             PURE: which micro-batches a rank draws, where ranks draw them by themselves
    dropout.py            masks that do not depend on who computes what
    gradient_lanes.py     gradients summed over the replicas, lane by lane
    direct_lanes.py       a group for each lane, where there is no way over cores
    core_seats.py         PURE: what each slot lends to the cores of its group
    core_lanes.py         gradients summed over the replicas by way of cores
    sharded_optimizer.py  optimizer state sharded over the members of each lane
    sharded_step.py       a step by an optimizer whose state is so: sums, one norm, the weights back
    stepped.py            what an optimizer steps, told as pieces of whole tensors
    optimizers.py         which are element-wise, and what each keeps for a parameter
    cuts.py               PURE: where the units of a tensor stand in a part of it
    relayout_plan.py      PURE: which tensor goes from which layout to which
    rebuilding.py         one tensor: its new part, and digests of both to compare
    sharded_state.py      the user's objects, whose tensors change
    relayout.py           all parameters and optimizer state from one layout to the next

Plain torch, without a framework: the adapters say which tensors there are and how they are cut.
"""
