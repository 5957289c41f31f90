"""Observes the operations of process groups as Python starts them.

All operations that `torch.distributed`'s functions start, and so the frameworks', go through the methods of
`ProcessGroup` that return a `Work`. These methods are replaced while this is attached, as `Work.wait` is (`waits.py`).
They are found by torch's own signatures, so that none is forgotten when torch adds one.

torch has hooks for this, but a hook that does nothing costs 15 us of the thread that starts an operation, half as much
again as a small operation costs, and several times that if processes share a core. A healthy job pays this for each
operation; the replaced methods cost it 1 us.

Operations that C++ starts by itself (a compiled graph, the reducer of DistributedDataParallel) are not observed. C++
also waits for them itself, so no wait of ours could be interrupted there either.
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
"""Receives an operation: the name of the method, its work, and its arguments."""


class Operations:
    """Observes the operations of chosen groups."""

    def __init__(self) -> None:
        self._originals: dict[str, Any] = {}
        """Taken from the class's `__dict__`: obtained by attribute they would not bind when they are restored."""
        self._heard_by: dict[dist.ProcessGroup, Started] = {}

    def attach(self) -> None:
        """Replace the methods of `ProcessGroup`."""
        assert not self._originals, "operations are attached once"
        self._originals = {name: vars(dist.ProcessGroup)[name] for name in methods()}
        for name in self._originals:
            setattr(dist.ProcessGroup, name, self._observed(name, getattr(dist.ProcessGroup, name)))

    def detach(self) -> None:
        """Restore the methods."""
        for name, original in self._originals.items():
            setattr(dist.ProcessGroup, name, original)
        self._originals.clear()
        self._heard_by.clear()

    def observe(self, group: dist.ProcessGroup, started: Started) -> None:
        """Call `started` for each operation of a group from now on."""
        self._heard_by[group] = started

    def stop_observing(self, group: dist.ProcessGroup) -> None:
        """Stop observing a group that is about to be destroyed."""
        self._heard_by.pop(group, None)

    def _observed(self, name: str, original: Any) -> Any:
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
    """The methods of a process group that start an operation."""
    found = {name: method.__doc__ or "" for name, method in vars(dist.ProcessGroup).items()}
    return [name for name, signature in found.items() if _GIVES_WORK in signature and name != _NO_OPERATION]


WAIT_WHOLE = POINT_TO_POINT | {name for name in methods() if _REDUCE_SCATTER in name}
"""Operations whose waits cannot be sliced with gloo."""


def kind_of_device(args: Iterable[Any]) -> str | None:
    """The type of device of an operation, by its arguments; None for a barrier, which has no tensor."""
    for value in args:
        found: str | None = value.device.type if isinstance(value, torch.Tensor) else None
        if found is None and isinstance(value, list | tuple):
            found = kind_of_device(value)
        if found is not None:
            return found
    return None
