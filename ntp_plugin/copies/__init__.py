"""Copies of training state that only one rank holds, and digests that prove what state is.

Each rank copies its state into shared memory beside the training. After a loss, or when a run resumes, a version of the
state is restored from these copies, in any layout. `ntp_plugin/recovery/job_copies.py` uses this package in a live job.

    digest.py           a number for a tensor that does not depend on how the tensor is cut
    runs.py             where the elements of a part lie in the full tensor, and the keys of these places
    machine.py          native code for the work on every byte, with NumPy in its place where it is missing
    table.py            the native code's input for many values at once, made once for all versions
    sketch.py           numbers for a model that show whether two runs agree but for rounding
    slices.py           which elements of a tensor a process holds, and what two holders have in common
    layout.py           which slices a copy has, and where in its bytes: the same from version to version
    manifest.py         describes a copy: whose state, of which step, in which layout, with its digests
    verify.py           checks the values of a copy against its digests
    store.py            copies in the memory of a host, which outlive processes
    parity.py           one parity in place of a far copy of each of several slots
    handshake.py        both ends of a connection prove that they have the job's key
    wire.py             sends and serves copies between hosts
    replicator.py       makes this slot's copies beside the training
    restore.py          puts a version of the state together from copies, in any layout
    inventory.py        PURE: what becomes of every part of a job's state
    excerpt.py          takes one version out of a live run's store, to read it undisturbed
    replica_digests.py  PURE: finds the slots whose bits differ from those of other replicas

A *version* is the state after a step, in the layout of an epoch. Its parts are with its *holders*, the slots that
trained then. Each holder's part is copied *near*, into its own host's memory, and *far*, into that of hosts in other
failure domains, or into their parity there. A process that can read the copies of all parts can put the version
together: the copies' manifests describe the layout.

A version is begun, taken (near, with digests), sent and verified there, and *committed* when all slots have reported
that. Two versions are kept. The older one is given up when a newer one is begun, and by then the other is committed.

Next: `ntp_plugin/recovery`.
"""
