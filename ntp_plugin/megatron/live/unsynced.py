"""`no_sync` that a loss can interrupt: marks micro-batches whose gradients are not summed yet, as Megatron's does.

`DistributedDataParallel.no_sync` is a generator. The schedule of a pipeline enters it by hand, so a loss leaves it
suspended. Whenever Python collects it, some steps later and in the middle of another one, it marks the last micro-batch
as come. The buckets were then summed too early, without an error: weights were off by half a percent
(tests/megatron/test_live.py covers both). This one does nothing by itself.
"""

from typing import Any


class Unsynced:
    """Replaces the result of `no_sync`."""

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
    """Replaces the method of DDP."""
    return Unsynced(ddp)
