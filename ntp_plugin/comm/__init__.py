"""How ranks agree on who they are, and how their process groups follow.

membership.py       PURE: the protocol by which survivors agree on epoch, members and the step to stand on
store.py            the small store that the protocol needs, on torch's TCPStore
agreement.py        the protocol on a live store
sockets.py          the sockets that a group opened, found again and shut from outside
waits.py            waits that a break-out can end
gloo_backend.py     gloo's part in a group
process_groups.py   groups that are edited in place
"""
