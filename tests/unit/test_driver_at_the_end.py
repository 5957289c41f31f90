"""Members that end a job together lose one of them between their last section and the end."""

import threading

import pytest

from ntp_plugin.membership import protocol
from ntp_plugin.membership.agreement import Agreement
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.membership.wait_progress import CollectiveWait
from ntp_plugin.recovery.driver import Driver, Patience
from ntp_plugin.testing.stateless import Stateless
from tests.patience import PATIENCE_S, until
from tests.unit.key_store import Keys

MEMBER_IDS = tuple(MemberId(slot=slot, incarnation=f"first/{slot}") for slot in range(3))
FIRST = View(epoch=0, member_ids=MEMBER_IDS)


class Late:
    """The same store for a member that looks for who has arrived only after a loss."""

    def __init__(self, keys, after):
        self._keys, self._after = keys, after
        self.create, self.present = keys.create, keys.present

    def read(self, key):
        if key.startswith("arrived/0/") or key == protocol.view_key(1):
            assert self._after.wait(PATIENCE_S)
        return self._keys.read(key)


class Groups:
    """None: what the driver asks of them."""

    def __init__(self):
        self.surviving = CollectiveWait()
        self.waiting = lambda: self.surviving
        self.check = lambda: None
        self.interrupt = lambda _: 0
        self.addresses = dict
        self.unmatched = lambda _: {}
        self.regroup = lambda *_, **__: None


class WakeUp:
    wait = wake = staticmethod(lambda: None)


def driver(keys, member_id, **patience):
    agreement = Agreement.founding(keys, FIRST, member_id)
    return Driver(
        agreement=agreement,
        newest_epoch=lambda: 0,
        looks=lambda: 0,
        wakeup=WakeUp(),
        groups=Groups(),
        trainer=Stateless(),
        patience=Patience(**patience),
    )


@pytest.fixture
def apart():
    """Run a function on a thread of its own."""
    threads = []

    def run(work):
        thread = threading.Thread(target=work, daemon=True)
        threads.append(thread)
        thread.start()

    yield run
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "a member waits for ever"


def test_one_rank_has_finished_the_last_section_and_another_has_not(apart):
    """Rank 0 has finished the section and rank 1 has not when 2 is lost: both repeat it, and end."""
    keys, lost, done = Keys(), threading.Event(), {0: [], 1: []}

    def first():
        member = driver(keys, MEMBER_IDS[0])

        def work():
            done[0].append(member.target_epoch)
            if member.target_epoch == 0:
                keys.create(protocol.view_key(1), protocol.without(FIRST, [2]).encode())
                lost.set()

        member.at_the_end(work)
        member.finish()

    def second():
        member = driver(Late(keys, lost), MEMBER_IDS[1])
        member.at_the_end(lambda: done[1].append(member.target_epoch))
        member.finish()

    keys.create("arrived/0/2", "arrived")
    keys.create("arrived/0/1", "arrived")
    apart(first)
    apart(second)
    assert lost.wait(PATIENCE_S)
    until(lambda: keys.read(protocol.view_key(2)) is not None)
    assert View.decode(keys.read(protocol.view_key(2))).over
    assert done[0] == [0, 1]
    assert done[1] == [1]


def test_an_agreement_at_the_end_shows_that_a_rank_has_finished(apart):
    """So that one that writes a model alone is given its time when another is lost."""
    keys = Keys()
    member = driver(keys, MEMBER_IDS[0], agree_s=0.0)
    keys.create(protocol.view_key(1), protocol.without(FIRST, [2]).encode())
    apart(member.finish)
    until(lambda: keys.present(["report/1/0"]) and member._groups.surviving.movement().done)
    assert keys.read(protocol.view_key(2)) is None, "the one that is at work was evicted"
    other = driver(keys, MEMBER_IDS[1])
    other.finish()
    assert View.decode(keys.read(protocol.view_key(2))).over
