"""The gloo backend of a process group.

Gloo's `abort()` does nothing, so its sockets are shut instead (`sockets.py`). And gloo can lose a send or receive on a
broken connection: it never ends, and occupies one of the backend's two worker threads until its time limit. A backend
with such an operation is replaced by a fresh one before the edit; its peers only see another address. So is one whose
edit was left behind: a member that waits for the connection of a peer that has just died would wait for five time
limits, and nothing in gloo can end that.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch._C._distributed_c10d import ReconfigureOptions

from ntp_plugin.groups.substitute_backend import BackendType, fake_backend_for
from ntp_plugin.groups.waits import InterruptibleWaits

_CPU = torch.device("cpu")
_FIRST_FRESH_TYPE = 16
"""Backend types without a name in torch: `setBackend` confuses a second backend of a known type with the first."""


class GlooBackend:
    """The gloo backend of one group, and its state between edits."""

    def __init__(
        self,
        handle: dist.ProcessGroup,
        store: Any,
        timeout: timedelta,
        *,
        waits: InterruptibleWaits,
        default: bool = True,
    ) -> None:
        """`default`: the group's rank, size and barrier are this backend's."""
        self._handle, self._store, self._timeout = handle, store, timeout
        self._waits, self._default = waits, default
        self._backend: Any = handle._get_backend(_CPU)
        self._generation = 0
        self._half_edited = False
        """An edit was left behind, and a thread may still be in it."""

    def busy(self) -> bool:
        """Return True if an operation, or an edit, still occupies a thread."""
        return self._half_edited or self._waits.busy(self)

    def ready(self, rank: int, members: Sequence[int]) -> bool:
        """Replace this backend if it is still busy; return whether that was so."""
        replaced = self.busy()
        if replaced:
            self._make_fresh(rank, members)
        self._waits.forget(self)
        return replaced

    def address(self) -> str:
        """The address by which others connect to this process in the next epoch."""
        return str(self._backend.get_reconfigure_handle())

    def edit(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        """Connect to these members and no others."""
        options = ReconfigureOptions()
        options.uuid, options.handles, options.timeout = uuid, handles, timedelta(seconds=timeout_s)
        self._half_edited = True
        self._waits.beside(lambda: self._backend.reconfigure(options))
        self._half_edited = False

    def alone(self, rank: int, size: int) -> AbstractContextManager[None]:
        """Replace this backend by a fake one, which answers for the other members, until the context ends."""
        default = self._default
        return fake_backend_for(self._handle, self._kind, _CPU, rank=rank, size=size, default=default)

    @property
    def _kind(self) -> BackendType:
        """The type under which torch knows the current backend."""
        return BackendType(_FIRST_FRESH_TYPE + self._generation) if self._generation else BackendType.GLOO

    def _make_fresh(self, rank: int, members: Sequence[int]) -> None:
        self._generation += 1
        handle, name = self._handle, self._handle.group_name
        inner_store = c10d.PrefixStore("cpu/", self._store)
        backend = c10d.ProcessGroupGloo(inner_store, rank, len(members), self._timeout, enable_reconfigure=True)
        backend.options.global_ranks_in_group = list(members)
        backend.options.group_name = name
        description = handle.group_desc
        handle._register_backend(_CPU, self._kind, backend)
        if self._default:
            handle._set_default_backend(self._kind)
        handle._set_group_name(name)
        handle._set_group_desc(description)
        self._backend, self._half_edited = backend, False
