"""State beside the state: what proves that it is what it was, and later what brings it back.

    digest.py   a number for a tensor that does not depend on how the tensor is cut

Not built yet: the store of copies in host memory, and the replicator.
"""
