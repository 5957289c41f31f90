"""Reduces gradients over replicas of different width, lane by lane, and steps optimizers that are sharded by lane.

    gradient_lanes.py     sums gradients over the replicas, lane by lane
    direct_lanes.py       one process group for each lane: the `direct` route
    core_slices.py        PURE: which slices a slot sends to the cores of its group
    core_lanes.py         sums over core slots: the `via_core` route of the NTP paper
    sharded_optimizer.py  optimizer state sharded over the members of each lane (ZeRO-1)
    sharded_step.py       a step of such an optimizer: sums, one gradient norm, the weights back
    stepped.py            what an optimizer steps, as slices of full tensors, so that it can be copied and restored

Plain torch, without a framework. A lane is the process group of the ranks that own the same units in each replica.
"""
