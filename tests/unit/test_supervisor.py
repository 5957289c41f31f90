"""How often a host polls the job's store: at each interval, and less often if many hosts do."""

import os
import threading
import time

import pytest

from ntp_plugin.launch.supervisor import ASK_S_PER_HOST, Supervisor
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.protocol import MemberId
from ntp_plugin.recovery.rank_context import first_view
from tests.patience import PATIENCE_S

SELDOM_S, ME = 0.2, os.getpid()


class CountingStore:
    """The store of a job in which nothing happens."""

    def __init__(self, questions):
        self.left, self.all_asked = questions, threading.Event()

    def read(self, _):
        self.left -= 1
        if not self.left:
            self.all_asked.set()


class CountedLooks(HeartbeatFile):
    looks = 0

    def read(self, slot):
        self.looks += 1
        return super().read(slot)


@pytest.fixture
def supervised(tmp_path):
    """How many seconds and looks it takes until a supervisor has asked so often."""
    heartbeats = CountedLooks(tmp_path / "heartbeats", 1)

    def measure(questions, ask_s):
        store, silent = CountingStore(questions), {"report": lambda *_: None, "reported_hung": lambda _: None}
        supervisor = Supervisor(store, first_view(1), heartbeats, thresholds=Thresholds(), ask_s=ask_s, **silent)
        supervisor.watch(MemberId(slot=0, incarnation="0/0"), ME, lambda: 0)
        since, heartbeats.looks = time.monotonic(), 0
        supervisor.start()
        assert store.all_asked.wait(PATIENCE_S)
        seconds, looks = time.monotonic() - since, heartbeats.looks
        supervisor.stop()
        return seconds, looks

    yield measure
    heartbeats.close()


def test_many_hosts_ask_less_often(supervised):
    seconds, _ = supervised(4, ask_s=SELDOM_S)
    assert seconds >= 3 * SELDOM_S


def test_few_ask_at_each_look(supervised):
    _, looks = supervised(31, ask_s=2 * ASK_S_PER_HOST)
    assert 31 <= looks <= 32, "it may have begun with the next one when that was counted"


def test_an_error_of_its_own_is_the_trouble_of_its_host(tmp_path):
    """Otherwise its thread would end silently, and no loss would be detected any more."""

    class Odd(CountingStore):
        def read(self, _):
            self.all_asked.set()
            raise ZeroDivisionError("odd")

    heartbeats, store = HeartbeatFile(tmp_path / "heartbeats", 1), Odd(1)
    silent = {"report": lambda *_: None, "reported_hung": lambda _: None}
    supervisor = Supervisor(store, first_view(1), heartbeats, thresholds=Thresholds(), **silent)
    supervisor.watch(MemberId(slot=0, incarnation="0/0"), ME, lambda: 0)
    supervisor.start()
    assert store.all_asked.wait(PATIENCE_S)
    supervisor.stop()
    heartbeats.close()
    assert "ZeroDivisionError: odd" in str(supervisor.trouble)
    assert supervisor.trouble.exit_code == 6
