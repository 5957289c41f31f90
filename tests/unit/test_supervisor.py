"""How often a host asks the job's store: at each look, and less often where many do."""

import time

import pytest

from ntp_plugin.launch.supervisor import ASK_S_PER_HOST, LOOK_S, Supervisor
from ntp_plugin.recovery.detector import Thresholds
from ntp_plugin.recovery.heartbeat import HeartbeatFile
from ntp_plugin.recovery.place import first_view


class CountingStore:
    """Of a job in which nothing happens."""

    def __init__(self):
        self.asked = 0

    def read(self, _):
        self.asked += 1


@pytest.fixture
def questions(tmp_path):
    """How many a supervisor asks for each interval that goes by."""
    heartbeats = HeartbeatFile(tmp_path / "heartbeats", 1)

    def count(interval_s, **more):
        store = CountingStore()
        silent = {"told": lambda *_: None, "told_stuck": lambda _: None}
        supervisor = Supervisor(store, first_view(1), heartbeats, thresholds=Thresholds(), **silent, **more)
        since = time.monotonic()
        supervisor.start()
        while time.monotonic() - since < 10 * interval_s:
            time.sleep(LOOK_S)
        supervisor.stop()
        return store.asked / ((time.monotonic() - since) / interval_s)

    yield count
    heartbeats.close()


def test_many_hosts_ask_less_often(questions):
    assert questions(0.05, ask_s=0.05) <= 1.1


def test_few_ask_at_each_look(questions):
    """On a loaded machine looks are late, but none leaves the store out."""
    assert questions(0.05, ask_s=2 * ASK_S_PER_HOST) > 2
