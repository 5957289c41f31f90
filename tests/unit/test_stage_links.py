"""Between two stages of any widths a slot gets every row that it needs once, from a slot that has it."""

import dataclasses
import functools

from hypothesis import given
from hypothesis import strategies as st

from ntp_plugin.config.sections import Parallel
from ntp_plugin.megatron.layout import Layout
from ntp_plugin.megatron.stage_links import Links
from ntp_plugin.planning.sequence_rows import SequenceRows
from ntp_plugin.planning.topology import Slot, Topology


@st.composite
def layouts(draw):
    """Two stages of a replica; each keeps a slot."""
    tp = draw(st.integers(1, 6))
    lost = [
        Slot(replica=0, stage=stage, tp=slot)
        for stage in range(2)
        for slot in draw(st.sets(st.integers(0, tp - 1), max_size=tp - 1))
    ]
    return Layout(topology=Topology.of(Parallel(tp=tp, pp=2, dp=1)), lost=frozenset(lost), rank=0)


def rows_of(length):
    return functools.partial(_rows, length)


def _rows(length, width):
    return SequenceRows(length=length, width=width)


def each_rank(layout):
    return [dataclasses.replace(layout, rank=rank) for rank in range(len(layout.slots))]


@given(layouts(), st.integers(1, 40))
def test_rows_are_sent_once_by_a_slot_that_has_them(layout, length):
    sent = {}
    for me in each_rank(layout):
        links = Links(me, rows=rows_of(length))
        first, _ = SequenceRows(length=length, width=me.width).held(me.survivors.index(me.slot.tp))
        for link in links.receivers(1 - me.slot.stage):
            sent[me.rank, link.peer] = range(first + link.rows.start, first + link.rows.stop)
    for me in each_rank(layout):
        first, last = SequenceRows(length=length, width=me.width).held(me.survivors.index(me.slot.tp))
        got = []
        for link in Links(me, rows=rows_of(length)).senders(1 - me.slot.stage):
            rows = range(first + link.rows.start, first + link.rows.stop)
            assert sent.pop((link.peer, me.rank)) == rows
            got += rows
        assert got == list(range(first, last))
    assert not sent, "no slot sends what none expects"


@given(layouts())
def test_whole_tensors_come_from_one_slot(layout):
    sent = {
        (me.rank, link.peer) for me in each_rank(layout) for link in Links(me, rows=None).receivers(1 - me.slot.stage)
    }
    for me in each_rank(layout):
        (link,) = Links(me, rows=None).senders(1 - me.slot.stage)
        sent.remove((link.peer, me.rank))
    assert not sent
