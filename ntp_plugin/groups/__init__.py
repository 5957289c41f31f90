"""Process groups that are edited in place, so that every handle a framework has cached stays valid.

A lost rank leaves the survivors blocked in collectives. This package interrupts these, edits each group to the new
membership, and moves tensors between ranks in the edited groups.

    process_groups.py    edits groups in place, and makes lanes for one epoch
    waits.py             makes waits on collectives interruptible
    helper_threads.py    threads that wait in place of the main thread, and may be left behind
    operations.py        observes the operations of groups as Python starts them
    sockets.py           finds the sockets that a group opened, and shuts them from outside
    group_backend.py     the interface to a group's backends: what differs between gloo and NCCL
    gloo_backend.py      gloo
    nccl_backend.py      NCCL
    nccl_requirements.py checks the versions and environment variables that NCCL needs
    substitute_backend.py  a fake backend, for a rank that runs alone through code written for a group
    rendezvous_store.py  the store through which the members of a group find each other
    device_meshes.py     keeps torch's device meshes in step with the groups
    exchange.py          sends and receives tensors between ranks, as a plan says
    small_sums.py        sums a few numbers over the world in one message

Builds on `membership/`. Next: `copies/` and `resharding/`, which move state through these groups.
"""
