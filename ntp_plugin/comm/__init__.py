"""How ranks agree on who they are, and how their process groups follow.

gathering.py        PURE: what all members write, put together on the way to all
membership.py       PURE: the protocol by which survivors agree on epoch, members and the step to stand on
store.py            the small store that the protocol needs, on torch's TCPStore
restored_keys.py    the same, but keys that a stranger deletes are written again
agreement.py        the protocol on a live store
sockets.py          the sockets that a group opened, found again and shut from outside
operations.py       operations of groups, seen as Python starts them
standing.py         what a process shows while it waits for others: that it waits, and that it polls
running_time.py     time in which this process ran, and was not stopped itself
waits.py            waits that a break-out can end
helpers.py          threads that wait in the place of the main thread, and may be left behind
meeting_store.py    the store through which a group's members find each other
group_backend.py    what differs between gloo and NCCL
stand_in.py         nobody in the place of a backend, for who goes on alone
gloo_backend.py     gloo's part in a group
nccl_backend.py     NCCL's part in a group
nccl_requirements.py  the versions and the environment that NCCL's part needs
process_groups.py   groups that are edited in place, and lanes that are made for one epoch
device_meshes.py    torch's device meshes, which follow the groups
transfer.py         tensors from slot to slot, as a plan says
small_sums.py       the sum of a few numbers over the world
"""
