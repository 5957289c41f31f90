"""Assigns slots to parities, and parities to hosts.

Instead of a copy of each slot's shards there is one parity, the XOR of the shards of g slots, and so a g-th of the
memory. The hosts of these g slots are in g failure domains and the parity's host in yet another one. When one domain is
lost, a group has lost either one member, which the others and the parity restore, or the parity and no member.

Nominally, the slots at the same place on hosts at the same place in their domain form a ring over the domains. The ring
of place q is cut into groups of g from domain q on, and the host after a group holds its parity; for the last group,
which may be smaller, that is the first host of the ring. So the parity hosts rotate from place to place, and each host
holds as many parities as any other, give or take one per rotation.

After losses, members stay together; one whose host is lost leaves its group. A parity whose parity host is lost is
dealt to the host outside of its members' domains that has been dealt the fewest, of equals to the next round the ring.
If all remaining hosts are in the members' domains, the last members form a group of their own, whose parity is on a
host in a domain of the first members.

Only the differences from the nominal rule are stored, so the work grows with the losses alone.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning.copy_placement import domain_size, lightest_host
from ntp_plugin.planning.topology import Slot, Topology


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ParityGroup:
    """Slots that share a parity, and the host that holds it."""

    members: tuple[Slot, ...]
    parity_host: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, order=True)
class ParityTurn:
    """A nominal group: the `number`th of the ring of this place on a host and this host's place in its domain."""

    place: int
    host: int
    number: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class ParityGroups:
    """The parity groups after losses: the nominal rule and its exceptions."""

    topology: Topology
    reach: int
    sharers: int
    lost: frozenset[int]
    resettled: Mapping[ParityTurn, tuple[ParityGroup, ...]]

    @property
    def domains(self) -> int:
        return -(-self.topology.nodes // self.reach)

    def group_of(self, slot: Slot) -> ParityGroup | None:
        """The group of a slot on a living host; None if all other remaining hosts are in its domain."""
        node = self.topology.node_of(slot)
        place = self.topology.rank_of(slot) % self.topology.gpus_per_node
        number = (node // self.reach - place) % self.domains // self.sharers
        turn = ParityTurn(place=place, host=node % self.reach, number=number)
        if turn in self.resettled:
            return next((group for group in self.resettled[turn] if slot in group.members), None)
        return ParityGroup(members=tuple(self.members(turn)), parity_host=self.parity_host(turn))

    def members(self, turn: ParityTurn) -> Iterator[Slot]:
        """The members of a nominal group whose hosts survive."""
        for step in range(turn.number * self.sharers, min((turn.number + 1) * self.sharers, self.domains)):
            node = (turn.place + step) % self.domains * self.reach + turn.host
            rank = node * self.topology.gpus_per_node + turn.place
            if node < self.topology.nodes and rank < self.topology.size and node not in self.lost:
                yield self.topology.slot_of(rank)

    def parity_host(self, turn: ParityTurn) -> int:
        """The nominal parity host of a group."""
        step = min((turn.number + 1) * self.sharers, self.domains)
        hosts = self.hosts_of((turn.place + step) % self.domains)
        return hosts[turn.host % len(hosts)]

    def hosts_of(self, domain: int) -> range:
        return range(domain * self.reach, min((domain + 1) * self.reach, self.topology.nodes))


def share_parities(topology: Topology, policy: CopyPolicy, lost_nodes: tuple[int, ...]) -> ParityGroups:
    """Form the groups after these hosts were lost; refuses a cluster with too few failure domains."""
    resettled: dict[ParityTurn, tuple[ParityGroup, ...]] = {}
    parities = ParityGroups(
        topology=topology,
        reach=domain_size(topology, policy.far),
        sharers=policy.sharers,
        lost=frozenset(lost_nodes),
        resettled=resettled,
    )
    if parities.domains <= policy.sharers:
        fewer = parities.domains - 1
        fixes = [f"at most xor:{fewer} here"] if fewer > 1 else []
        fixes += ["copies.mode = copy"] + (["copies.far set to something smaller"] if policy.far != "node" else [])
        raise Refused(
            f"copies.mode = {policy.mode} needs {policy.sharers} {policy.far} domains for the members of a parity and "
            f"one more for itself, and {topology.nodes} hosts of {topology.gpus_per_node} GPUs make {parities.domains}",
            fix=", or ".join(fixes),
        )
    dealt = Counter[int]()
    for turn in _turns_without_parity_host(parities):
        groups = tuple(_settled(tuple(parities.members(turn)), parities, parities.parity_host(turn), dealt))
        dealt.update(group.parity_host for group in groups)
        resettled[turn] = groups
    return parities


def _turns_without_parity_host(parities: ParityGroups) -> Iterator[ParityTurn]:
    """The nominal groups whose parity host is lost, in the order of the lost hosts."""
    for lost in sorted(parities.lost):
        domain = lost // parities.reach
        hosts = parities.hosts_of(domain)
        for place in range(parities.topology.gpus_per_node):
            step = (domain - place) % parities.domains or parities.domains
            if step % parities.sharers and step != parities.domains:
                continue
            for host in range(hosts.index(lost), parities.reach, len(hosts)):
                turn = ParityTurn(place=place, host=host, number=-(-step // parities.sharers) - 1)
                if any(parities.members(turn)):
                    yield turn


def _settled(
    members: tuple[Slot, ...], parities: ParityGroups, nominal: int, dealt: Mapping[int, int]
) -> Iterator[ParityGroup]:
    """Group these members, together as far as some host survives outside of their domains."""
    nodes, reach, node_of = parities.topology.nodes, parities.reach, parities.topology.node_of
    for size in range(len(members), 0, -1):
        domains = {node_of(slot) // reach for slot in members[:size]}
        parity_host = lightest_host(
            nominal,
            nodes,
            dealt,
            lambda host, domains=domains: host not in parities.lost and host // reach not in domains,  # type: ignore[misc]
        )
        if parity_host is not None:
            yield ParityGroup(members=members[:size], parity_host=parity_host)
            yield from _settled(members[size:], parities, nominal, dealt)
            return
