"""The interface of a process group to its backends: all that differs between gloo and NCCL."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class GroupBackend(Protocol):
    """One backend of one group."""

    def busy(self) -> bool:
        """Return True if an operation that an interrupt should have ended is still running."""

    def ready(self, rank: int, members: Sequence[int]) -> bool:
        """Prepare for an edit after an interrupt; return True if the backend had to be replaced."""

    def address(self) -> str:
        """The address by which others connect to this process in the next epoch."""

    def edit(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        """Connect to these members and no others, in this order; a uuid is used once."""

    def alone(self, rank: int, size: int) -> AbstractContextManager[None]:
        """Replace the backend by a fake one, which answers at once, until the context ends
        (`substitute_backend.py`)."""
