"""Compare the final weights of two runs, from the digests that their slots recorded (`copies/sketch.py`). PURE.

The digests of a replica's sharded weights add up over its slots, those of experts over the slots of their expert group,
and those of ZeRO-3 over all ranks. Those of a replica's replicated weights add up over the stages, for each TP slot. A
sum that lacks a slot, because it was lost after the last step, is not compared.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ntp_plugin.chaos.history import History

_NONE = "all replicas: none recorded all its weights"

type _ReplicaDigests = dict[str, tuple[int, list[float]]]
"""Name -> number of values, and their sums."""


def apart(run: History, reference: History) -> dict[str, float]:
    """Return name -> distance from the reference run's sums, relative to their size."""
    found = dict[str, float]()
    for mine, calm in zip(_replica_digests(run), _replica_digests(reference), strict=True):
        if calm:
            wanted, sums = max(calm.values())
            whole = {name: theirs for name, (many, theirs) in mine.items() if many == wanted}
            size = math.hypot(*sums) or 1.0
            found |= {name: math.dist(theirs, sums) / size for name, theirs in whole.items()} or {_NONE: math.inf}
    return found


def _replica_digests(run: History) -> Iterator[_ReplicaDigests]:
    """Yield the digests of sharded weights, then of replicated ones, then of those that others than a replica share."""
    cut, alike, shared = defaultdict(list), defaultdict(list), defaultdict(list)
    for slot, weighed in run.weighed.items():
        replica, _, tp = slot.split(".")
        cut[f"replica {replica[1:]}"].append((weighed.cut_values, weighed.cut))
        alike[f"the replicated weights of TP slot {tp[1:]} of replica {replica[1:]}"].append(
            (weighed.alike_values, weighed.alike)
        )
        shared[weighed.shared_by].append((weighed.shared_values, weighed.shared))
    for replica_digests in (cut, alike, shared):
        yield {name: _added(parts) for name, parts in replica_digests.items() if any(many for many, _ in parts)}


def _added(parts: Sequence[tuple[int, list[float]]]) -> tuple[int, list[float]]:
    return sum(many for many, _ in parts), [math.fsum(each) for each in zip(*(sums for _, sums in parts), strict=True)]
