"""How ranks agree on who they are.

membership.py   PURE: the protocol by which survivors agree on epoch, members and the step to stand on
store.py        the small store that the protocol needs, on torch's TCPStore
agreement.py    the protocol on a live store
"""
