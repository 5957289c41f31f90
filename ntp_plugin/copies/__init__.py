"""State beside the state: what proves that it is what it was, and what brings it back.

    digest.py       a number for a tensor that does not depend on how the tensor is cut
    runs.py         where the elements of a part stand in the whole tensor, and the keys of these places
    machine.py      machine code for what is done with every byte
    table.py        what it is told of many values at once, made once for all versions
    sketch.py       numbers for a model by which two runs are told to agree but for rounding
    slices.py       which elements of a tensor somebody holds, and what two holders have in common
    layout.py       which pieces a copy has, and where in its bytes: the same from version to version
    manifest.py     what a copy says of itself
    verify.py       whether its values are what was written
    store.py        copies in the memory of a host, which outlive processes
    parity.py       one far copy for several slots, from which any one of theirs is had again
    handshake.py    both ends of a connection prove that they have the job's key
    wire.py         copies from host to host
    replicator.py   makes them beside the training
    restore.py      puts a version of the state together from them, in whatever layout
    inventory.py    what becomes of every piece of state
    excerpt.py      one version of a run that lives, for who reads it in peace
    replica_digests.py        who holds other bits than the others, of what all hold alike

A *version* is the state after a step, in the layout of an epoch. Its parts are with its *holders*, the slots that
trained then. Each holder's part is copied *near*, into its own host's memory, and *far*, into that of hosts in other
failure domains, or their parity there. Whoever can read the copies of all parts can put the version together, and needs
nothing of the layout that it was made in but what the copies say of themselves.

The way of one version:  begun -> taken (near, with digests) -> sent, verified there -> all have said so: committed.
Two are kept. The older of them is given up when the newer is begun, and by then the newer one is committed.
"""
