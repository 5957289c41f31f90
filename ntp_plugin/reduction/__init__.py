"""Reduces gradients over replicas of different width, lane by lane, and steps optimizers that are sharded by lane.

Adapters use it for the steps of a degraded layout, where replicas differ in width and a framework's own reduction does
not fit. A lane is the process group of the ranks that own the same units in each replica.

    gradient_lanes.py     sums gradients over the replicas, lane by lane
    direct_lanes.py       makes one process group for each lane: the `direct` route
    core_slices.py        PURE: which slices a slot sends to the cores of its group
    core_lanes.py         sums gradients over core slots: the `via_core` route of the NTP paper
    sharded_optimizer.py  shards optimizer state over the members of each lane (ZeRO-1)
    sharded_step.py       steps such an optimizer: sums, one gradient norm, the weights back
    stepped.py            describes what an optimizer steps as tensor slices, to copy and restore them

Plain torch, without a framework. Next: `ntp_plugin/copies`.
"""
