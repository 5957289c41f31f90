"""A joining rank that asks is admitted, and one that died meanwhile delays nobody twice."""

import itertools
import threading

import pytest

from ntp_plugin.errors import Excluded
from ntp_plugin.membership import admission
from ntp_plugin.membership.admission import AdmissionControl, wait_for_admission
from ntp_plugin.membership.protocol import MemberId, View, newest_view, the_end, view_key, with_joiners, without
from tests.patience import PATIENCE_S
from tests.unit.key_store import Keys

FIRST = View(epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=f"{slot}/0") for slot in range(3)))


@pytest.fixture(autouse=True)
def _no_long_waits(monkeypatch):
    monkeypatch.setattr(admission, "_WAIT_S", 0.05)
    monkeypatch.setattr(admission, "_POLL_S", 0.001)


def asking(store):
    joiner = threading.Thread(target=wait_for_admission, args=(store, FIRST), kwargs={"slot": 1}, daemon=True)
    joiner.start()
    return joiner


def control_of(store, epoch, newer_view_exists):
    """Admission of a member that polls whenever it is asked."""
    return AdmissionControl(store, epoch, newer_view_exists, now=itertools.count().__next__)


def wait_until_asked(admission_control):
    while not admission_control.is_requested():
        pass


def let_in(joiner):
    joiner.join(PATIENCE_S)
    return not joiner.is_alive()


def test_a_joining_rank_is_admitted_when_members_open_admission():
    store = Keys()
    admission_control = control_of(store, lambda: 0, lambda: True)
    assert not admission_control.is_requested()
    joiner = asking(store)
    wait_until_asked(admission_control)
    assert joiner.is_alive(), "it waits for admission"
    assert admission_control.open(mine=True)
    assert let_in(joiner)


def test_members_open_once_for_a_rank_that_died():
    store = Keys()
    store.create("asked/0/0", "")
    admission_control, other = control_of(store, lambda: 0, lambda: False), control_of(store, lambda: 0, lambda: False)
    assert admission_control.is_requested()
    assert not admission_control.open(mine=True), "no rank asked"
    assert not other.open(mine=False)
    assert not admission_control.is_requested()
    joiner = asking(store)
    wait_until_asked(other)
    assert joiner.is_alive(), "admission that was opened for the other is closed"
    other.open(mine=True)
    assert let_in(joiner)


def test_members_with_short_steps_do_not_poll_in_each():
    store, now = Keys(), 0.0
    admission_control = AdmissionControl(store, lambda: 0, lambda: True, now=lambda: now)
    assert not admission_control.is_requested()
    store.create("asked/0/0", "")
    now = 0.2
    assert not admission_control.is_requested(), "it has just looked"
    now = 0.3
    assert admission_control.is_requested()


def test_a_waiting_rank_asks_again_in_the_next_epoch():
    store, epoch = Keys(), 0
    admission_control = control_of(store, lambda: epoch, lambda: True)
    joiner = asking(store)
    wait_until_asked(admission_control)
    following = without(FIRST, [1])
    store.create(view_key(1), following.encode())
    epoch = 1
    wait_until_asked(admission_control)
    assert joiner.is_alive()
    admission_control.open(mine=True)
    assert let_in(joiner)


def test_a_late_joining_rank_does_not_wait():
    store = Keys()
    store.create(view_key(1), the_end(FIRST).encode())
    assert let_in(asking(store)), "joining says that the job is over"


def test_a_joining_rank_ends_when_the_job_is_over():
    """The view is empty, which is not the end of a finished job: admission will never open."""
    store, view = Keys(), FIRST
    for slot in range(3):
        view = without(view, [slot])
        store.create(view_key(view.epoch), view.encode())
    with pytest.raises(Excluded, match="all members have left"):
        wait_for_admission(store, FIRST, slot=1)


# ------------------------------------------------ who can only train with others

FOUR = View(epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=f"{slot}/0") for slot in range(4)))


def asking_together(store, slot, other):
    def come():
        wait_for_admission(store, FOUR, slot=slot, together=[other])
        wanted = None
        while wanted is None or store.create(view_key(wanted.epoch), wanted.encode()) != wanted.encode():
            wanted = with_joiners(newest_view(store.read, FOUR), [MemberId(slot=slot, incarnation=f"{slot}/1")])

    joiner = threading.Thread(target=come, daemon=True)
    joiner.start()
    return joiner


def put(store, view):
    store.create(view_key(view.epoch), view.encode())
    return view


def test_a_joining_rank_asks_only_when_its_replica_is_complete():
    store = Keys()
    view = put(store, without(FOUR, [2, 3]))
    admission_control = control_of(store, lambda: view.epoch, lambda: True)
    first = asking_together(store, 2, 3)
    while "come/1/2" not in store:
        pass
    first.join(0.05)
    assert first.is_alive() and not admission_control.is_requested()
    second = asking_together(store, 3, 2)
    wait_until_asked(admission_control)
    admission_control.open(mine=True)
    assert let_in(first) and let_in(second)
    assert newest_view(store.read, FOUR).slots == (0, 1, 2, 3)


def test_a_joining_rank_does_not_ask_beside_one_about_to_leave():
    """The others have lost this slot, and have not yet continued without its replica."""
    store = Keys()
    degraded = put(store, without(FOUR, [3]))
    store.create("come/1/2", "")
    joiner = asking_together(store, 3, 2)
    joiner.join(0.05)
    assert joiner.is_alive() and "asked/1/0" not in store
    put(store, without(degraded, [2]))
    other = asking_together(store, 2, 3)
    admission_control = control_of(store, lambda: 2, lambda: True)
    wait_until_asked(admission_control)
    admission_control.open(mine=True)
    assert let_in(joiner) and let_in(other)


def test_a_second_joining_rank_does_not_ask_again():
    """The members are in the recovery with the first one, and none would open admission."""
    store = Keys()
    view = put(store, with_joiners(put(store, without(FOUR, [2, 3])), [MemberId(slot=2, incarnation="2/1")]))
    assert view.joiners == (2,)
    assert let_in(asking_together(store, 3, 2))
    assert "asked/2/0" not in store


def test_a_rank_with_other_settings_is_never_admitted():
    """It asks under the digest of its own settings, and members poll for theirs."""
    store = Keys()
    admission_control = control_of(store, lambda: 0, lambda: True)
    admission_control.settings = "ours"
    for settings in ("", "others"):
        args = {"slot": 1, "settings": settings}
        threading.Thread(target=wait_for_admission, args=(store, FIRST), kwargs=args, daemon=True).start()
    while sum(key.startswith("asked/") for key in store) < 2:
        pass
    assert not any(admission_control.is_requested() for _ in range(10))
    joiner = threading.Thread(
        target=wait_for_admission, args=(store, FIRST), kwargs={"slot": 2, "settings": "ours"}, daemon=True
    )
    joiner.start()
    wait_until_asked(admission_control)
    assert admission_control.open(mine=True)
    assert let_in(joiner)
    store.create(view_key(1), the_end(FIRST).encode())  # for ranks that still ask
