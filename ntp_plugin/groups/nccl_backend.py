"""NCCL's part in a process group. Written from torch 2.15's sources, and not yet run on GPUs.

"nccl" is the class `ProcessGroupNCCL2` in torch 2.15. It can be edited only if it was made with `enable_reconfigure`,
and is then without a communicator until its first edit, which torch leaves to us. In that state it never ends the
process: its own watchdog revokes the communicator where it would else abort, and so does our `abort()`.

A revoke (`ncclCommRevoke`) ends what the communicator has on the device, from any thread and at once. But a wait on
NCCL only orders streams, so that nobody stands in `Work.wait`: the host stands in a synchronise, which a revoke ends
*as if all were well*, with whatever was in the buffers. So there is `failed()`, and `ElasticGroups.confirm()` asks it
between the device's results and their use.

Nothing is ever lost in NCCL as in gloo: after a revoke all its works are done, with an error, and an edit makes a new
communicator. Only the first of the members sends others where to meet, through the group's store; a uuid is used once.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import ErrorType, ReconfigureOptions

from ntp_plugin.groups.substitute_backend import BackendType, nobody_in_the_place_of

_CUDA = torch.device("cuda")
CONNECT_S = 30.0
"""An edit has so long at least: a communicator over many hosts takes seconds to make. Who waits for an id in it is
freed by the store; who waits for the others to connect is not, and no second edit may begin beside the first."""


def device_of(asked: torch.device | None, environment: Mapping[str, str] = os.environ) -> torch.device:
    """The device of this process: the one asked for, or the current one, or the one of its local rank, as in torch."""
    if asked is not None and asked.index is not None:
        return asked
    chosen: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not chosen and "LOCAL_RANK" in environment:
        return torch.device("cuda", int(environment["LOCAL_RANK"]) % torch.cuda.device_count())
    return torch.device("cuda", torch.cuda.current_device())


class NcclBackend:
    """The NCCL backend of one group."""

    def __init__(self, handle: dist.ProcessGroup, device: torch.device) -> None:
        """`device` is bound, because an edit may happen on a thread whose current device is another."""
        backend: Any = handle._get_backend(_CUDA)
        backend.bound_device_id = device
        self._handle, self._backend, self._device = handle, backend, device

    def busy(self) -> bool:
        """Never: after a break-out nothing runs any more."""
        return False

    def break_out(self) -> None:
        """Revoke the communicator; from any thread."""
        self._backend.abort()

    def ready(self, _rank: int, _members: Sequence[int]) -> bool:
        """Wait until the device is through with the broken step, so that nothing of it writes into the next."""
        torch.cuda.synchronize(self._device)
        return False

    def reach(self) -> str:
        """How others reach this process in the next epoch."""
        return str(self._backend.get_reconfigure_handle())

    def edit(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        """Make a new communicator, of these and no others."""
        options = ReconfigureOptions()
        options.uuid, options.handles = uuid, handles
        options.timeout = timedelta(seconds=max(timeout_s, CONNECT_S))
        self._backend.reconfigure(options)

    def failed(self) -> bool:
        """Whether the communicator was revoked, by whomever, since the last edit: torch says so before it revokes."""
        torch.cuda.synchronize(self._device)
        return bool(self._backend.get_error() != ErrorType.SUCCESS)

    def alone(self, rank: int, size: int) -> AbstractContextManager[None]:
        """Until then nobody answers for the others."""
        return nobody_in_the_place_of(self._handle, BackendType.NCCL, _CUDA, rank=rank, size=size, default=True)
