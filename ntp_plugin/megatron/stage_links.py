"""Which slots of two pipeline stages send to each other, and which rows. PURE.

Both sides compute it alone, from the layout: what one expects to receive is what the other sends.
"""

import dataclasses
from collections.abc import Callable

from ntp_plugin.megatron.layout import Layout
from ntp_plugin.planning.sequence_rows import SequenceRows

type RowsOfWidth = Callable[[int], SequenceRows]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Link:
    """A rank of another stage, and the rows of this slot's tensor that it shares."""

    peer: int
    rows: slice = slice(None)


class Links:
    """The links of a slot to other stages: its senders and receivers."""

    def __init__(self, layout: Layout, *, rows: RowsOfWidth | None) -> None:
        """`rows` returns how the sequence is cut over this many slots, if it is."""
        stages = layout.stages
        place = stages.index(layout.slot.stage)
        self.before, self.after = stages[place - 1], stages[(place + 1) % len(stages)]
        self._layout, self._rows = layout, rows

    def senders(self, stage: int) -> list[Link]:
        """Return the slots of another stage that send to this one."""
        if self._rows is not None:
            return self._by_rows(stage, self._rows)
        slot, layout = self._layout.slot, self._layout
        return [Link(peer=layout.ranks[layout.in_column(dataclasses.replace(slot, stage=stage))])]

    def receivers(self, stage: int) -> list[Link]:
        """Return the slots of another stage that this one sends to."""
        if self._rows is not None:
            return self._by_rows(stage, self._rows)
        return [Link(peer=self._layout.ranks[slot]) for slot in self._layout.receivers(stage)]

    def _by_rows(self, stage: int, rows: RowsOfWidth) -> list[Link]:
        layout = self._layout
        others = [slot for slot in layout.topology.group(layout.slot.replica, stage) if slot in layout.ranks]
        theirs = rows(len(others))
        start, stop = rows(layout.width).held(layout.survivors.index(layout.slot.tp))
        links = []
        for place, slot in enumerate(others):
            first, last = theirs.held(place)
            first, last = max(first, start), min(last, stop)
            if first < last:
                links.append(Link(peer=layout.ranks[slot], rows=slice(first - start, last - start)))
        return links
