"""Nobody in the place of a group's backend: what this process says is taken for what all others say as well.

For who goes alone through code that was written for a group, to something of the right shape that nobody will use. It
is torch's own backend for such, so that every collective is known to it, also those that C++ calls.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

BackendType = dist.ProcessGroup.BackendType
_NOBODY = BackendType(15)
"""A type that torch has no name for: of each type a group has one backend, the first that it was given."""


@contextlib.contextmanager
def nobody_in_the_place_of(
    group: dist.ProcessGroup, kind: BackendType, device: torch.device, *, rank: int, size: int, default: bool
) -> Iterator[None]:
    """Of the backend of this kind, which serves a type of device; `default`: the group's rank and size are its too."""
    nobody = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(device, _NOBODY, nobody)
    if default:
        group._set_default_backend(_NOBODY)
    try:
        yield
    finally:
        group._register_backend(device, kind, None)  # torch has it still, by its type
        if default:
            group._set_default_backend(kind)
