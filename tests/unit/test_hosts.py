"""How a host interprets the heartbeats of others, also if the job's store answers late."""

import pytest
from torch.distributed import HashStore

from ntp_plugin.launch.hosts import Hosts
from ntp_plugin.launch.reachability import RefusingEndpoint
from ntp_plugin.membership.failure_detector import Thresholds
from ntp_plugin.membership.protocol import MemberId, View
from ntp_plugin.membership.store import TorchStore

LIMITS = Thresholds()
VIEW = View(epoch=0, member_ids=tuple(MemberId(slot=slot, incarnation=str(slot)) for slot in range(2)))
CUT_S = 4.0


class LateStore(TorchStore):
    """Host 1 loses its connection to the store for some seconds, at its `late`-th read of host 0's heartbeat."""

    def __init__(self, late):
        super().__init__(HashStore(), corner="job", token="")
        self.now, self._looks, self._late = 100.0, 0, late

    def count(self, key, more=0):
        if (key, more) == ("beat/0", 0):
            self._looks += 1
            if self._looks == self._late:
                self.others_go_on(CUT_S)
        return super().count(key, more)

    def others_go_on(self, seconds, beats=None):
        """Host 0 has beaten all the time, or so often."""
        self.now += seconds
        for _ in range(int(seconds / LIMITS.host_heartbeat_s) if beats is None else beats):
            super().count("beat/0", 1)


@pytest.fixture
def host_1():
    endpoints = []

    def make(store):
        endpoints.append(RefusingEndpoint("127.0.0.1"))
        clock = lambda: store.now  # noqa: E731
        return Hosts(
            store, host=1, host_incarnation=0, hosts=2, slots=2, endpoint=endpoints[-1], thresholds=LIMITS, clock=clock
        )

    yield make
    for endpoint in endpoints:
        endpoint.close()


def test_a_reconnected_host_does_not_report_the_others_silent(host_1):
    """It reads again at once: the other has sent no heartbeat since the store answered."""
    store = LateStore(late=2)
    host, began_at = host_1(store), store.now
    assert host.tick(VIEW, None) == []
    store.others_go_on(LIMITS.host_heartbeat_s)
    assert host.tick(VIEW, None) == []
    assert store.now >= began_at + CUT_S > began_at + LIMITS.host_s
    assert host.tick(VIEW, None) == []


@pytest.mark.parametrize(("silence", "is_lost"), [(LIMITS.host_s - 0.1, False), (LIMITS.host_s + 0.1, True)])
def test_a_host_without_heartbeats_is_lost(host_1, silence, is_lost):
    store = LateStore(late=0)
    host = host_1(store)
    store.others_go_on(0.0, beats=1)
    assert host.tick(VIEW, None) == []
    store.others_go_on(silence, beats=0)
    found = host.tick(VIEW, None)
    assert [(verdict.slot, verdict.kind) for verdict in found] == ([(0, "host")] if is_lost else [])
