"""Which faults come in which order, from a seed. PURE.

All kinds come before one comes again. Kinds that end the job are spread out, each behind as many of the others as the
rest is divided into, and the last part has none: so some runs come to their own end, where their last checkpoint can
be compared.
"""

import random
from collections.abc import Sequence

from ntp_plugin.chaos.outside.kinds import FaultKind


def draw(kinds: Sequence[FaultKind], count: int, seed: int) -> list[FaultKind]:
    """So many faults, in the order in which they are injected."""
    chosen = random.Random(seed)
    drawn = list[FaultKind]()
    while len(drawn) < count:
        deck = list(kinds)
        chosen.shuffle(deck)
        drawn += deck[: count - len(drawn)]
    return _spread(drawn)


def _spread(drawn: Sequence[FaultKind]) -> list[FaultKind]:
    ends = [kind for kind in drawn if kind.ends_job]
    others = [kind for kind in drawn if not kind.ends_job]
    parts = len(ends) + 1
    bounds = [len(others) * part // parts for part in range(parts + 1)]
    spread = list[FaultKind]()
    for part in range(parts):
        spread += [*others[bounds[part] : bounds[part + 1]], *ends[part : part + 1]]
    return spread
