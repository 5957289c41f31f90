"""How often a host asks the job's store: at each look, and less often where many do."""

import threading
import time

import pytest

from ntp_plugin.launch.supervisor import ASK_S_PER_HOST, Supervisor
from ntp_plugin.recovery.detector import Thresholds
from ntp_plugin.recovery.heartbeat import HeartbeatFile
from ntp_plugin.recovery.place import first_view

SELDOM_S = 0.2


class CountingStore:
    """Of a job in which nothing happens."""

    def __init__(self, questions):
        self.left, self.all_asked = questions, threading.Event()

    def read(self, _):
        self.left -= 1
        if not self.left:
            self.all_asked.set()


@pytest.fixture
def seconds_of(tmp_path):
    """How long a supervisor takes to ask so often."""
    heartbeats = HeartbeatFile(tmp_path / "heartbeats", 1)

    def measure(questions, ask_s):
        store, silent = CountingStore(questions), {"told": lambda *_: None, "told_stuck": lambda _: None}
        supervisor = Supervisor(store, first_view(1), heartbeats, thresholds=Thresholds(), ask_s=ask_s, **silent)
        since = time.monotonic()
        supervisor.start()
        assert store.all_asked.wait(60)
        seconds = time.monotonic() - since
        supervisor.stop()
        return seconds

    yield measure
    heartbeats.close()


def test_many_hosts_ask_less_often(seconds_of):
    assert seconds_of(4, ask_s=SELDOM_S) >= 3 * SELDOM_S


def test_few_ask_at_each_look(seconds_of):
    """Which takes 0.15 s; as seldom as above it would take 6 s."""
    assert seconds_of(31, ask_s=2 * ASK_S_PER_HOST) < 30 * SELDOM_S
