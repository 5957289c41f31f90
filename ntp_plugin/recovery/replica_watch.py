"""Replicas compared while they train: what they hold alike is to be the same bits.

A flipped bit in one replica's weights is no error to anybody: it trains on, and its gradients are summed with the
others'. So every `watch_steps` steps, where the next one begins, each rank digests its weights and whatever else the
others have alike, and all compare. Who is wrong is told where it can be (`copies/watch.py`). Then the job stops, or the
wrong ranks leave it as if they had died, and what they held comes from the others (`on_sdc`).

No copy is made of a state that is about to be compared: that of a wrong rank would be what the others go on from.
"""

import logging
from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist

from ntp_plugin.config.sections import TrainingPolicy
from ntp_plugin.copies import digest
from ntp_plugin.copies.pieces import Piece
from ntp_plugin.copies.watch import Odd, Sums, Told, are_alike, odd_ones, sums_of
from ntp_plugin.errors import SilentCorruption
from ntp_plugin.planning.topology import Topology
from ntp_plugin.recovery.rank import ElasticRank
from ntp_plugin.telemetry import Compared, Corrupted, Teller

_LOG = logging.getLogger(__name__)


type HeldAlike = Iterable[tuple[str, str, Piece, Mapping[str, torch.Tensor]]]
"""What every replica has: its name, among which wholes it is (`copies/watch.py`), the piece that this rank has of it,
and the values of these elements by name."""


class ReplicaWatch:
    """Looks every so many steps."""

    def __init__(
        self,
        policy: TrainingPolicy,
        topology: Topology,
        *,
        rank: ElasticRank,
        held_alike: Callable[[], HeldAlike],
        distrust: Callable[[int], None],
        teller: Teller,
    ) -> None:
        """`distrust` the copies that were made since a step: nobody may begin from them where the job stops."""
        self._topology, self._held_alike, self._distrust = topology, held_alike, distrust
        self._teller, self._alike = teller, 0
        self._groups, self._slot = rank.groups, rank.place.slot
        self._every, self._heals = policy.watch_steps, policy.on_sdc == "heal"
        self._looked = 0, 0
        """The steps and the epoch that it last looked after."""

    def look(self, step: int) -> None:
        """If it is time, after so many steps; all ranks come together, wherever there may be something to do before the
        next one, for the first time or again."""
        now = step, self._groups.epoch
        if not self._every or not step or step % self._every or now == self._looked:
            return
        mine = self._digests(step)
        said: list[tuple[int, Sums]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(said, (self._alike, sums_of(mine)))
        odd = [] if are_alike(sums for _, sums in said) else self._odd_of_all(mine)
        self._looked, self._alike = now, max(alike for alike, _ in said)  # who came in has not looked before
        self._teller.tell(Compared(step=step, values=len(mine), odd=len(odd)))
        if odd:
            self._act(odd[0], step)
        else:
            self._alike = step

    def _odd_of_all(self, mine: Told) -> list[Odd]:
        told: list[tuple[int, Told]] = [(0, {})] * dist.get_world_size()
        dist.all_gather_object(told, (self._slot, mine))
        return odd_ones(dict(told))

    def _digests(self, step: int) -> Told:
        found = {}
        for title, among, piece, entries in self._held_alike():
            salts = [f"{piece.tensor} {name} {step}" for name in entries]
            numbers = digest.digests(list(entries.values()), piece.runs, salts=salts)
            for name, number in zip(entries, numbers, strict=True):
                found[f"{title} ({name})"] = among, piece.whole, str(piece.ranges), number
        return found

    def _act(self, odd: Odd, step: int) -> None:
        slots = ", ".join(str(self._topology.slot_of(slot)) for slot in odd.slots)
        if odd.certain:
            what = f"{odd.values} in {slots} is not what the other replicas have after step {step}"
        else:
            what = f"{odd.values} differs between {odd.wholes} replicas after step {step}, in one of {slots}"
        heals = self._heals and odd.certain
        self._teller.tell(Corrupted(step=step, what=what, slots=slots.split(", "), certain=odd.certain, healed=heals))
        _LOG.error("silent corruption: %s", what)
        if heals and self._slot not in odd.slots:
            return  # they leave, and are missed in this step
        if not heals:
            self._distrust(self._alike)
        raise SilentCorruption(
            f"{what}; at step {self._alike} all were alike" if self._alike else what,
            way_out="test the hardware of these slots"
            + ("; the others go on" if heals else f", and {self._restart()}"),
        )

    def _restart(self) -> str:
        if not self._alike:
            return "restart from a checkpoint of before this run"
        return f"restart from a checkpoint of step {self._alike} or before"
