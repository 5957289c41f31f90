"""Simulated machines: they reach each other, unless a link is cut, slow, or lossy."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.testing import machines
from ntp_plugin.testing.machines import Machines, why_not
from tests.patience import PATIENCE_S

pytestmark = pytest.mark.skipif(bool(why_not()), reason=why_not() or "there are machines")

SAYS_BACK = """
import socket
answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
answering.bind(("", 5000))
print("ready", flush=True)
while True:
    packet, who = answering.recvfrom(100)
    answering.sendto(packet, who)
"""
ASKS = """
import socket, sys, time
asking = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
asking.settimeout(float(sys.argv[3]))
heard, began = set(), time.monotonic()
for number in range(int(sys.argv[2])):
    asking.sendto(str(number).encode(), (sys.argv[1], 5000))
    try:
        while number not in heard:  # answers to earlier ones may be late
            heard.add(int(asking.recvfrom(100)[0]))
    except TimeoutError:
        pass
print(len(heard), time.monotonic() - began)
"""


@pytest.fixture
def two():
    with Machines(2) as made:
        answering = subprocess.Popen(
            [*made.prefix(2), sys.executable, "-c", SAYS_BACK], stdout=subprocess.PIPE, text=True
        )
        assert answering.stdout.readline() == "ready\n"
        yield made
    assert answering.wait() == -9
    answering.stdout.close()


LOST_AFTER_S = 0.3


def ask(two, times, wait_s=PATIENCE_S):
    """(how many answers, seconds); an answer that does not come is waited for so long."""
    words = [*two.prefix(1), sys.executable, "-c", ASKS, two.address(2), str(times), str(wait_s)]
    output = subprocess.run(words, capture_output=True, text=True, check=True, timeout=2 * PATIENCE_S).stdout.split()
    return int(output[0]), float(output[1])


def test_machines_reach_each_other_and_know_their_names(two):
    assert ask(two, 20)[0] == 20
    known = subprocess.run([*two.prefix(1), "cat", "/etc/hosts"], capture_output=True, text=True, check=True).stdout
    assert f"{two.address(2)} machine2" in known


def test_a_cut_lets_nothing_through_until_it_is_healed(two):
    two.cut(1, 2)
    assert ask(two, 2, LOST_AFTER_S)[0] == 0
    two.heal(1, 2)
    assert ask(two, 5)[0] == 5
    two.cut_off(2)
    assert ask(two, 1, LOST_AFTER_S)[0] == 0
    two.bring_back(2)
    assert ask(two, 1)[0] == 1


def test_a_slow_wire_delays_each_packet(two):
    two.delay(2, 0.05)
    heard, seconds = ask(two, 10)
    assert heard == 10
    assert seconds >= 10 * 0.05


def test_a_wire_that_loses_packets_loses_about_so_many(two):
    two.lose(2, 0.5)
    heard, _ = ask(two, 24, LOST_AFTER_S)
    assert 3 <= heard <= 21, "by the seed it is always the same number, but for packets of others"


def test_stopped_machines_leave_nothing():
    with Machines(2) as made:
        sleeping = subprocess.Popen([*made.prefix(1), "sleep", "100"])
        names = mine()
        assert len(names) == 2
    assert sleeping.wait() == -9
    assert not mine()
    assert not any((Path("/etc/netns") / name).exists() for name in names)
    assert not [thread for thread in threading.enumerate() if thread.name == "ntp-wires"]


def mine():
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [name for line in listed.splitlines() if (name := line.split()[0]).startswith(f"ntp{os.getpid()}x")]


def test_a_missing_permission_is_explained(monkeypatch):
    monkeypatch.setattr(machines, "why_not", lambda: "there is no `ip` (iproute2)")
    with pytest.raises(Refused, match=r"several machines cannot be had: there is no `ip`"):
        Machines(2)
