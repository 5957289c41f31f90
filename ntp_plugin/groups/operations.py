"""Operations of process groups, seen as Python starts them.

All that the functions of `torch.distributed` start, and so the frameworks, goes through the methods of `ProcessGroup`
that give a `Work`; they are replaced while this is attached, as `Work.wait` is (`waits.py`). Which they are is read
from torch's own signatures, so that none is forgotten when torch adds one.

torch has hooks for this, but one that does nothing costs 15 us of the thread that starts an operation, half as much
again as a small operation costs, and several times that where processes share a core. A healthy job pays that in each
operation; what stands here costs it 1 us.

What C++ starts by itself (a compiled graph, the reducer of DistributedDataParallel) is not seen. It is waited for in
C++ as well, so that no wait of ours could be broken off there either.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

POINT_TO_POINT = frozenset(("send", "recv", "recv_anysource"))
_REDUCE_SCATTER = "reduce_scatter"
_GIVES_WORK = "-> c10d::Work"
_NO_OPERATION = "reconfigure"

type Started = Callable[[str, Work, tuple[Any, ...]], None]
"""Hears of an operation: the name of the method, what it gave, and what it was given."""


class Operations:
    """Those of the groups that somebody asked for."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}
        """As they stand in the class: asked of it by name, they would not bind when they are put back."""
        self._heard_by: dict[dist.ProcessGroup, Started] = {}

    def attach(self) -> None:
        """Replace the methods."""
        assert not self._originals, "operations are attached once"
        self._originals = {name: vars(dist.ProcessGroup)[name] for name in methods()}
        for name in self._originals:
            setattr(dist.ProcessGroup, name, self._told_of(name, getattr(dist.ProcessGroup, name)))

    def detach(self) -> None:
        """Give them back."""
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()
        self._heard_by.clear()

    def tell(self, group: dist.ProcessGroup, started: Started) -> None:
        """Of each operation of a group from now on."""
        self._heard_by[group] = started

    def tell_no_more(self, group: dist.ProcessGroup) -> None:
        """It is about to be destroyed."""
        self._heard_by.pop(group, None)

    def _told_of(self, name: str, original: Any) -> Any:
        heard_by = self._heard_by

        @functools.wraps(original)
        def operation(group: dist.ProcessGroup, *args: Any, **options: Any) -> Any:
            work = original(group, *args, **options)
            started = heard_by.get(group)
            if started is not None and work is not None:
                started(name, work, args)
            return work

        return operation


def methods() -> list[str]:
    """Of a process group: those that start an operation."""
    found = {name: method.__doc__ or "" for name, method in vars(dist.ProcessGroup).items()}
    return [name for name, told in found.items() if _GIVES_WORK in told and name != _NO_OPERATION]


WAIT_WHOLE = POINT_TO_POINT | {name for name in methods() if _REDUCE_SCATTER in name}
"""Whose waits cannot be sliced, with gloo."""


def kind_of_device(args: Iterable[Any]) -> str | None:
    """On which an operation is, by what it was given; None for a barrier, which is given no tensor."""
    for value in args:
        found: str | None = value.device.type if isinstance(value, torch.Tensor) else None
        if found is None and isinstance(value, list | tuple):
            found = kind_of_device(value)
        if found is not None:
            return found
    return None
