"""Assigns far copies to hosts.

Copies are placed host to host; a rank's copy lies with the peer at the same place on the other host. Copy k of host n
is nominally on host n + k x (hosts in a failure domain), round the ring of hosts: always in another node, rack or power
row, and each host holds equally many. When a host is lost, each copy that it held is dealt to the host that then holds
the fewest, in another domain than the copy's source; of equals to the next one round the ring.

Only the differences from the nominal placement are stored, so the work grows with the losses alone.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning.topology import Slot, Topology


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Resettled:
    """Copy number `copy` (from 1) of `node` is on `holder` instead of its nominal holder, which is lost."""

    node: int
    copy: int
    nominal: int
    holder: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """The holders of copies after losses: the nominal rule and its exceptions."""

    nodes: int
    reach: int
    count: int
    lost: frozenset[int]
    resettled: Mapping[tuple[int, int], Resettled]

    def holders(self, node: int) -> list[int]:
        """The living hosts that hold a far copy of `node`'s shards, first copy first."""
        result = []
        for copy in range(1, self.count + 1):
            holder = (node + copy * self.reach) % self.nodes
            if holder in self.lost:
                exception = self.resettled.get((node, copy))
                if exception is None:
                    continue
                holder = exception.holder
            result.append(holder)
        return result


def domain_size(topology: Topology, far: str) -> int:
    """Hosts per failure domain."""
    racks = topology.racks_per_power_row if far == "power" else 1
    return 1 if far == "node" else topology.nodes_per_rack * racks


def place_copies(topology: Topology, policy: CopyPolicy, lost_nodes: tuple[int, ...]) -> Placement:
    """Place the copies after these hosts were lost; refuses a cluster with too few failure domains."""
    nodes, reach = topology.nodes, domain_size(topology, policy.far)
    domains = nodes // reach
    if policy.count and domains <= policy.count:
        raise Refused(
            f"{policy.count} far copies need {policy.count + 1} whole {policy.far} domains, and {nodes} hosts of "
            f"{topology.gpus_per_node} GPUs make {domains}",
            fix="lower copies.count (0: none), or set copies.far to something smaller",
        )
    lost = frozenset(lost_nodes)
    resettled: dict[tuple[int, int], Resettled] = {}  # filled below; `placement` sees each entry as it is made
    placement = Placement(nodes=nodes, reach=reach, count=policy.count, lost=lost, resettled=resettled)
    surplus = _freed_places(placement)
    for node, copy, nominal in _orphaned_copies(placement):
        holder = _lightest_host(node, nominal, placement, surplus)
        if holder is not None:
            surplus[holder] += 1
            resettled[node, copy] = Resettled(node=node, copy=copy, nominal=nominal, holder=holder)
    return placement


def parity_hosts(topology: Topology, hosts: Iterable[int], slot: Slot, present: Collection[Slot]) -> list[Slot]:
    """The slots that hold what these hosts have of a slot's shards: on each host the one at the slot's place, if it is
    present, else the next one there."""
    found = []
    for node in hosts:
        there = topology.slots_on(node)
        first = topology.rank_of(slot) % topology.gpus_per_node % len(there)
        found += [other for other in (*there[first:], *there[:first]) if other in present][:1]
    return found


def _freed_places(placement: Placement) -> Counter[int]:
    """Host -> copies held above nominal: minus one for each copy whose source is lost, and so is not needed."""
    freed = Counter[int]()
    for node in placement.lost:
        for copy in range(1, placement.count + 1):
            freed[(node + copy * placement.reach) % placement.nodes] -= 1
    return freed


def _orphaned_copies(placement: Placement) -> Iterator[tuple[int, int, int]]:
    """(node, copy, lost holder) of living nodes, in the order of the holders."""
    for holder in sorted(placement.lost):
        for copy in range(1, placement.count + 1):
            node = (holder - copy * placement.reach) % placement.nodes
            if node not in placement.lost:
                yield node, copy, holder


def _lightest_host(node: int, nominal: int, placement: Placement, surplus: Mapping[int, int]) -> int | None:
    """The living host in another domain that holds the fewest copies, next round the ring from `nominal`."""
    taken = {*placement.lost, *placement.holders(node)}

    def may_hold(holder: int) -> bool:
        return holder not in taken and holder // placement.reach != node // placement.reach

    return lightest_host(nominal, placement.nodes, surplus, may_hold)


def lightest_host(nominal: int, nodes: int, surplus: Mapping[int, int], may_hold: Callable[[int], bool]) -> int | None:
    """The eligible host with the least surplus, next round the ring from `nominal`."""
    ring = ((nominal + step) % nodes for step in range(1, nodes))
    candidates = [holder for holder in surplus if may_hold(holder)]
    candidates += itertools.islice((holder for holder in ring if holder not in surplus and may_hold(holder)), 1)
    return min(candidates, key=lambda holder: (surplus.get(holder, 0), (holder - nominal) % nodes), default=None)
