"""A process knows from its environment alone whether it is a founder."""

import pytest

from ntp_plugin.recovery.rank_context import RankContext

VARIABLES = {
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
    "TORCHELASTIC_RUN_ID": "job",
    "NTP_TOKEN": "words",
    "NTP_HEARTBEATS": "/nowhere/heartbeats",
    "NTP_HEARTBEAT_S": "0.25",
    "NTP_HUNG_S": "60",
    "WORLD_SIZE": "12",
}


def place_of(slot, **more):
    return RankContext.read(VARIABLES | {"RANK": str(slot)} | more)


@pytest.mark.parametrize(
    ("more", "joins"),
    [
        ({}, False),
        ({"NTP_INCARNATION": "11/0"}, False),
        ({"NTP_INCARNATION": "11/1"}, True),
        ({"NTP_INCARNATION": "1/0"}, True),
        ({"NTP_HOST_INCARNATION": "1"}, True),
        ({"NTP_HOST_INCARNATION": "0"}, False),
    ],
)
def test_a_process_outside_the_first_view_joins(more, joins):
    place = place_of(11, **more)
    assert place.joining is joins
    assert (place.member_id not in place.first_view.member_ids) is joins


def test_a_founder_check_creates_no_view(monkeypatch):
    """The question is asked several times in each step, for any number of slots."""
    monkeypatch.setattr("ntp_plugin.recovery.rank_context.first_view", None)
    assert not place_of(11).joining
