"""Attention of a context group that is smaller than the two levels it was divided in.

With `--cp-comm-type a2a+p2p` a context group is divided in groups of fixed sizes, which exchange heads inside and rows
between them. Where a replica is lost, all context groups exchange rows in one ring, which computes the same.
"""

import functools
from typing import Any

_LEVELS, _RING = "a2a+p2p", "p2p"


def in_one_ring(original: Any) -> Any:
    """`TEDotProductAttention.__init__`, with a ring in the place of two levels."""

    @functools.wraps(original)
    def init(*args: Any, cp_comm_type: str | None = None, **kwargs: Any) -> None:
        original(*args, cp_comm_type=_RING if cp_comm_type == _LEVELS else cp_comm_type, **kwargs)

    return init
