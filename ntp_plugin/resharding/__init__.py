"""Moves parameters and optimizer state from one layout to the next, tensor by tensor. Adapters call it in a recovery.

When a replica loses a slot, its survivors keep what they hold and the orphans are dealt to them. This package plans
which elements move, rebuilds each tensor beside the old one, and compares digests before anybody trains on it. No more
than one tensor is held twice.

    cuts.py           PURE: where the units of a tensor lie in the part that a slot holds
    reshard_plan.py   PURE: which tensor moves from which layout to which
    rebuild.py        one tensor on one slot: builds its new part, and digests of both parts
    sharded_state.py  the user's parameters and optimizer state, each tensor in the layout of its version
    reshard.py        moves all tensors from one layout to the next

Plain torch, without a framework: adapters say which tensors there are and how they are cut. Next:
`ntp_plugin/reduction`.
"""
