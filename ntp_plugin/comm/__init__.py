"""How ranks agree on who they are, and how their process groups follow.

membership.py       PURE: the protocol by which survivors agree on epoch, members and the step to stand on
store.py            the small store that the protocol needs, on torch's TCPStore
agreement.py        the protocol on a live store
sockets.py          the sockets that a group opened, found again and shut from outside
waits.py            waits that a break-out can end
process_groups.py   groups that are edited in place, and lanes that are made for one epoch
transfer.py         tensors from slot to slot, as a plan says
"""
