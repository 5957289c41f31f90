"""List the ways to carry out an action, domain by domain.

What is best for one degraded domain depends on the others: the first narrower replica slows the reduction of all, the
second hardly more, and with a batch that is kept a second degraded replica often costs nothing. So an action is offered
with the others as they are, and with all alike; whoever asks takes the better one.
"""

from collections.abc import Mapping, Sequence

from ntp_plugin.planning.actions import DROP_REPLICA, REDUCE_TP, RESTART, SWAP_SPARE, WAIT_FOR_SPARE

type Handling = Mapping[int, str]
"""Domain -> REDUCE_TP, DROP_REPLICA or SWAP_SPARE."""


def options(action: str, number: int, others: Sequence[int], ready: int) -> list[Handling]:
    """For the domain of that number; `others` are degraded too, the worst first, and `ready` spares are there."""
    rest = [other for other in others if other != number]
    return _once(_all(action, number, rest, ready))


def _all(action: str, number: int, rest: Sequence[int], ready: int) -> list[Handling]:
    if action in (REDUCE_TP, DROP_REPLICA):
        return [{number: action}, dict.fromkeys([number, *rest], action)]
    if action == RESTART:
        return [{number: DROP_REPLICA}, dict.fromkeys([number, *rest], DROP_REPLICA)]
    if action == WAIT_FOR_SPARE:
        return [{number: SWAP_SPARE}]
    swapped = dict.fromkeys([number, *rest][: max(1, ready)], SWAP_SPARE)
    left = rest[len(swapped) - 1 :]
    alike = [swapped | dict.fromkeys(left, what) for what in (REDUCE_TP, DROP_REPLICA)]
    return [{number: SWAP_SPARE}, swapped, *alike]


def _once(handlings: Sequence[Handling]) -> list[Handling]:
    return [one for place, one in enumerate(handlings) if one not in handlings[:place]]
