"""Micro-batches whose gradients are not summed yet, as Megatron marks them, in a form that can be broken off.

`DistributedDataParallel.no_sync` is a generator. The schedule of a pipeline enters it by hand, so a loss leaves it
suspended, and whenever Python comes to collect what was left of that step, some steps later and in the middle of
another one, it says then and there that the last micro-batch has come. The buckets were summed too early, without an
error: weights were off by half a percent (tests/megatron/test_live.py has both). This one says nothing by itself.
"""

from typing import Any


class Unsynced:
    """In the place of what `no_sync` gives."""

    def __init__(self, ddp: Any) -> None:
        self._ddp = ddp

    def __enter__(self) -> None:
        self._have(last=False)

    def __exit__(self, *_: object) -> None:
        self._have(last=True)

    def _have(self, *, last: bool) -> None:
        for group in self._ddp.bucket_groups + self._ddp.expert_parallel_bucket_groups:
            group.is_last_microbatch = last


def no_sync(ddp: Any) -> Unsynced:
    """A method of DDP."""
    return Unsynced(ddp)
