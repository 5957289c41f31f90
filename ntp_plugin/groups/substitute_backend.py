"""Replaces a group's backend by a fake one, which answers for all other members with this process's own data.

For a process that runs alone through code that was written for a group, to a result of the right shape that is never
used. It is torch's own fake backend, so it supports every collective, also those that C++ calls.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

BackendType = dist.ProcessGroup.BackendType
_NOBODY = BackendType(15)
"""A type without a name in torch: a group has one backend per type, the first that it was given."""


@contextlib.contextmanager
def fake_backend_for(
    group: dist.ProcessGroup, kind: BackendType, device: torch.device, *, rank: int, size: int, default: bool
) -> Iterator[None]:
    """Replace the backend of this kind and device; with `default` also the one of the group's rank and size."""
    nobody = FakeProcessGroup._create_internal(rank, size)
    group._register_backend(device, _NOBODY, nobody)
    if default:
        group._set_default_backend(_NOBODY)
    try:
        yield
    finally:
        group._register_backend(device, kind, None)  # torch still finds it by its type
        if default:
            group._set_default_backend(kind)
