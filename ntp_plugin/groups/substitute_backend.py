"""Replaces a group's backend by a fake one, which answers for all other members with this process's own data.

For a process that runs alone through code that was written for a group, to a result of the right shape that is never
used. It is torch's own fake backend, so it supports every collective, also those that C++ calls.
"""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FakeProcessGroup

BackendType = dist.ProcessGroup.BackendType
_LAST = 255
_types: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, int], Any]] = weakref.WeakKeyDictionary()
"""The type of each group's fake backends, by rank and size. A group keeps one backend per type, the first that it was
given; so each rank and size has a type of its own, without a name in torch, counted down from the last."""


@contextlib.contextmanager
def fake_backend_for(
    group: dist.ProcessGroup, kind: BackendType, device: torch.device, *, rank: int, size: int, default: bool
) -> Iterator[None]:
    """Replace the backend of this kind and device; with `default` also the one of the group's rank and size."""
    types = _types.setdefault(group, {})
    nobody = types.setdefault((rank, size), BackendType(_LAST - len(types)))
    group._register_backend(device, nobody, FakeProcessGroup._create_internal(rank, size))
    if default:
        group._set_default_backend(nobody)
    try:
        yield
    finally:
        group._register_backend(device, kind, None)  # torch still finds it by its type
        if default:
            group._set_default_backend(kind)
