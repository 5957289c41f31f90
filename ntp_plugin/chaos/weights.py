"""How far the weights that two runs end with are apart, by what their slots told of them (`copies/sketch.py`). PURE.

Those of the slots of a replica make a whole of what it has cut. What it has alike makes one in each TP slot, over the
stages. A whole of which a slot is missing, since it was lost behind the last step, is not compared.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence

from ntp_plugin.chaos.history import History

_NONE = "all replicas, of which none told all"

type _ReplicaDigests = dict[str, tuple[int, list[float]]]
"""By their names, how many values each has, and their sums."""


def apart(run: History, reference: History) -> dict[str, float]:
    """Whole -> its distance from the reference run's, relative to the size of that."""
    found = dict[str, float]()
    for mine, calm in zip(_replica_digests(run), _replica_digests(reference), strict=True):
        if calm:
            wanted, sums = max(calm.values())
            whole = {name: theirs for name, (many, theirs) in mine.items() if many == wanted}
            size = math.hypot(*sums) or 1.0
            found |= {name: math.dist(theirs, sums) / size for name, theirs in whole.items()} or {_NONE: math.inf}
    return found


def _replica_digests(run: History) -> Iterator[_ReplicaDigests]:
    """What is cut, and what is alike."""
    cut, alike = defaultdict(list), defaultdict(list)
    for slot, told in run.weighed.items():
        replica, _, tp = slot.split(".")
        cut[f"replica {replica[1:]}"].append((told.cut_values, told.cut))
        alike[f"what TP slot {tp[1:]} of replica {replica[1:]} has whole"].append((told.alike_values, told.alike))
    for replica_digests in (cut, alike):
        yield {name: _added(parts) for name, parts in replica_digests.items() if any(many for many, _ in parts)}


def _added(parts: Sequence[tuple[int, list[float]]]) -> tuple[int, list[float]]:
    return sum(many for many, _ in parts), [math.fsum(each) for each in zip(*(sums for _, sums in parts), strict=True)]
