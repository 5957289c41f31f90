"""A rank that gets a wake-up event looks at once, and one that gets none polls by itself."""

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from ntp_plugin.membership import wakeup
from ntp_plugin.membership.heartbeat import HeartbeatFile
from ntp_plugin.membership.wakeup import WakeUp, ring
from tests.patience import PATIENCE_S


@pytest.fixture(name="patient")
def _patient(monkeypatch):
    """A client that does not poll by itself within a test."""
    monkeypatch.setattr(wakeup, "_LOOK_S", 2 * PATIENCE_S)


def waiting(mine):
    thread = threading.Thread(target=mine.wait, daemon=True)
    thread.start()
    return thread


def ended(thread, within_s=PATIENCE_S):
    thread.join(within_s)
    return not thread.is_alive()


@pytest.mark.usefixtures("patient")
def test_a_newer_epoch_wakes_waiting_ranks(tmp_path):
    path = tmp_path / "heartbeats"
    file, mine = HeartbeatFile(path, 4), WakeUp(path, 2)
    thread = waiting(mine)
    assert not ended(thread, 0.1)
    file.announce_epoch(0, [2])
    assert not ended(thread, 0.1), "that is no news"
    file.announce_epoch(1, [1, 2])
    assert ended(thread) and file.newest_epoch() == 1
    mine.close(), file.close()


@pytest.mark.usefixtures("patient")
def test_a_ring_before_the_wait_is_not_lost(tmp_path):
    mine, other = WakeUp(tmp_path / "a", 0), WakeUp(tmp_path / "b", 0)
    ring(tmp_path / "a", [0, 1])
    assert ended(waiting(mine))
    thread = waiting(other)
    assert not ended(thread, 0.1), "it is of another job"
    other.wake()
    assert ended(thread)
    mine.close(), other.close()


def test_a_client_without_wake_ups_still_polls(tmp_path):
    mine, began = WakeUp(tmp_path / "a", 0), time.monotonic()
    mine.wait()
    assert time.monotonic() - began > 0.9, "and not often"
    mine.close()


@pytest.mark.usefixtures("patient")
def test_a_client_that_comes_before_the_old_one_left_polls_often(tmp_path):
    old, new = WakeUp(tmp_path / "a", 0), WakeUp(tmp_path / "a", 0)
    assert ended(waiting(new))
    old.close()
    third = WakeUp(tmp_path / "a", 0)
    thread = waiting(third)
    assert not ended(thread, 0.1), "the name is free"
    third.wake()
    assert ended(thread)
    new.close(), third.close()


def test_too_many_wake_ups_block_no_sender(tmp_path):
    mine = WakeUp(tmp_path / "a", 0)
    for _ in range(10_000):
        ring(tmp_path / "a", [0])
    mine.wait()
    mine.close()


@pytest.mark.usefixtures("patient")
def test_a_full_socket_hides_no_epoch(tmp_path):
    """Names in the abstract namespace have no permissions, and all users of the host can list them."""
    path = tmp_path / "heartbeats"
    file, mine = HeartbeatFile(path, 4), WakeUp(path, 2)
    assert mine._name[1:] in Path("/proc/net/unix").read_text()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        stranger.setblocking(False)
        with contextlib.suppress(BlockingIOError):  # it is full
            while True:
                stranger.sendto(b"garbage" * 1000, mine._name)
    file.announce_epoch(1, [2])  # whose ring is refused
    mine.wait()
    assert file.newest_epoch() == 1, "it polls because of the foreign one"
    mine.close()
    file.close()
