"""The NCCL backend of a process group. Written from torch 2.15's sources, and not yet run on GPUs.

"nccl" is the class `ProcessGroupNCCL2` in torch 2.15. It can be edited only if it was made with `enable_reconfigure`,
and then has no communicator until its first edit, which torch leaves to us. In that state it never ends the process:
its own watchdog revokes the communicator where it would otherwise abort, and so does our `abort()`.

A revoke (`ncclCommRevoke`) ends the communicator's work on the device, from any thread and at once. But a wait on NCCL
only orders streams, so the host never blocks in `Work.wait`: it blocks in a synchronise, which a revoke ends *as if all
were well*, with arbitrary data in the buffers. So there is `failed()`, and `ElasticGroups.confirm()` asks it between
the device's results and their use.

NCCL never loses operations as gloo does: after a revoke all its works are done, with an error, and an edit makes a new
communicator. Only the first member publishes the meeting address, through the group's store; a uuid is used once.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, ReconfigureOptions

from ntp_plugin.groups.substitute_backend import BackendType, fake_backend_for

_CUDA = torch.device("cuda")
CONNECT_S = 30.0
"""Least time limit of an edit: a communicator over many hosts takes seconds to make. The store ends a wait for an id; a
wait for the others to connect has no such end, and no second edit may begin beside the first."""


def device_of(asked: torch.device | None, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this process: the requested one, the current one, or the one of its local rank, as in torch."""
    if asked is not None and asked.index is not None:
        return asked
    chosen: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not chosen and "LOCAL_RANK" in environment:
        return torch.device("cuda", int(environment["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


class NcclBackend:
    """The NCCL backend of one group."""

    def __init__(self, handle: dist.ProcessGroup, device: torch.device) -> None:
        """`device` is bound, because an edit may run on a thread whose current device is another one."""
        backend: Any = handle._get_backend(_CUDA)
        backend.bound_device_id = device
        self._handle, self._backend, self._device = handle, backend, device

    def busy(self) -> bool:
        """Return False: after an interrupt nothing runs any more."""
        return False

    def interrupt(self) -> None:
        """Revoke the communicator, from any thread."""
        self._backend.abort()

    def ready(self, _rank: int, _members: Sequence[int]) -> bool:
        """Wait until the device has finished the interrupted step, so that nothing of it writes into the next."""
        torch.cuda.synchronize(self._device)
        return False

    def address(self) -> str:
        """The address by which others connect to this process in the next epoch."""
        return str(self._backend.get_reconfigure_handle())

    def edit(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        """Make a new communicator with these members and no others."""
        options = ReconfigureOptions()
        options.uuid, options.handles = uuid, handles
        options.timeout = timedelta(seconds=max(timeout_s, CONNECT_S))
        self._backend.reconfigure(options)

    def failed(self) -> bool:
        """Return True if any process has revoked the communicator since the last edit: torch records it before."""
        torch.cuda.synchronize(self._device)
        return bool(self._backend.get_error() != ErrorType.SUCCESS)

    def alone(self, rank: int, size: int) -> AbstractContextManager[None]:
        """Replace this backend by a fake one, which answers for the other members, until the context ends."""
        return fake_backend_for(self._handle, BackendType.NCCL, _CUDA, rank=rank, size=size, default=True)
