"""Computes which rows of a sequence each slot of a TP group holds under sequence parallelism.

All slots store equally many rows, because collectives need equal parts: the length over the width, rounded up, with FP8
to a multiple of a granule. Rows are in order from the first slot on, so that the pads (rows that no sequence fills) are
the last rows of the last slots. With a short sequence a slot may hold nothing but pads.
"""

import dataclasses

from ntp_plugin.planning.spans import Span


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SequenceRows:
    """A sequence of `length` rows over a group of `width` slots."""

    length: int
    width: int
    granule: int = 1
    """Every slot stores a multiple of this many rows: FP8's matrices need it."""

    @property
    def stored(self) -> int:
        """The rows that every slot stores, pads included."""
        return -(-self.length // (self.width * self.granule)) * self.granule

    @property
    def padded(self) -> int:
        """The length with pads."""
        return self.stored * self.width

    @property
    def pads(self) -> int:
        return self.padded - self.length

    def held(self, place: int) -> Span:
        """The rows of the sequence that the slot at this place of its group holds; it stores them first."""
        start, stop = place * self.stored, (place + 1) * self.stored
        return min(start, self.length), min(stop, self.length)
