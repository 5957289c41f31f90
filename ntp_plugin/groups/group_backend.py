"""What a process group asks of each of its backends: all that differs between gloo and NCCL."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol


class GroupBackend(Protocol):
    """One backend of one group."""

    def busy(self) -> bool:
        """Whether an operation that a break-out should have ended is still there."""

    def ready(self, rank: int, members: Sequence[int]) -> bool:
        """After a break-out: become such that an edit can succeed; whether it took a replacement."""

    def reach(self) -> str:
        """How others reach this process in the next epoch."""

    def edit(self, uuid: int, handles: list[str], timeout_s: float) -> None:
        """Connect anew, to these and no others, in this order; a uuid is used once."""

    def alone(self, rank: int, size: int) -> AbstractContextManager[None]:
        """Until then nobody answers for the others, at once (`substitute_backend.py`)."""
