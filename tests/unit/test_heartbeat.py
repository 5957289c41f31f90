"""What a rank tells of itself: that it moved, that it waits, and that it was kept from running."""

import os
import subprocess
import sys
import threading
import time

import pytest

from ntp_plugin.recovery.heartbeat import Heart, HeartbeatFile, WaitForCpu

SPIN = """
import os, sys, time
os.sched_setaffinity(0, {int(sys.argv[1])})
until = time.monotonic() + 5
while time.monotonic() < until:
    pass
"""


WRITE = """
import sys
from pathlib import Path
from ntp_plugin.recovery.heartbeat import Beat, HeartbeatFile
file, step = HeartbeatFile(Path(sys.argv[1]), 1), 0
while True:
    step += 1
    file.write(0, Beat(count=step, moved_at=float(step), waiting=bool(step % 2)))
"""


@pytest.fixture
def file(tmp_path):
    file = HeartbeatFile(tmp_path / "beats", 1)
    yield file
    file.close()


def beats(file, told, starved):
    """What the heart writes for each (moved, waiting) with the seconds for which it has starved by then."""
    moments = iter(zip(told, starved, strict=True))
    now = [((0.0, False), 0.0)]
    heart = Heart(file, 0, every_s=0.001, moved=lambda: now[0][0], starved=lambda: now[0][1])
    for now[0] in moments:
        yield heart._moved_or_starved()
    heart.stop()


def test_time_without_a_cpu_is_no_standstill(file):
    told = [(10.0, False), (10.0, False), (10.0, False), (12.0, False), (12.0, False)]
    seen = list(beats(file, told, [1.0, 1.0, 1.7, 2.0, 2.1]))
    assert [(round(at, 9), waits) for at, waits in seen] == [
        (11.0, False),
        (11.0, False),
        (11.7, False),
        (12.3, False),
        (12.4, False),
    ]


def test_who_waits_for_others_tells_since_when_whatever_its_cpu_does(file):
    told = [(10.0, True), (10.0, True), (10.5, False), (10.5, False)]
    assert list(beats(file, told, [1.0, 2.0, 2.5, 2.75])) == [(10.0, True), (10.0, True), (11.0, False), (11.25, False)]


def test_the_system_tells_how_long_a_thread_waited_for_a_cpu():
    """Two that always want to run share one CPU: each is kept waiting about half of the time."""
    allowed, me = os.sched_getaffinity(0), threading.get_native_id()
    cpu = min(allowed)
    other = subprocess.Popen([sys.executable, "-c", SPIN, str(cpu)])
    os.sched_setaffinity(0, {cpu})
    waited = WaitForCpu(me)
    try:
        before, until = waited(), time.monotonic() + 1.0
        while time.monotonic() < until:
            pass
        assert waited() - before > 0.1
    finally:
        os.sched_setaffinity(0, allowed)
        other.kill()
        other.wait()
    waited.close()
    assert waited() == WaitForCpu(0)() == 0.0, "closed, and no such thread"


def test_what_is_told_together_is_read_together(file):
    """The other process moves as fast as it can, and waits after every odd move."""
    writer = subprocess.Popen([sys.executable, "-c", WRITE, str(file.path)])
    try:
        while not file.read(0).count:
            assert writer.poll() is None
        last, until = 0.0, time.monotonic() + 2.0
        while time.monotonic() < until:
            beat = file.read(0)
            assert beat.moved_at.is_integer()
            assert beat.waiting == beat.moved_at % 2
            assert beat.moved_at >= last
            last = beat.moved_at
    finally:
        writer.kill()
        writer.wait()


def test_the_last_beat_says_so(file):
    asked = threading.Semaphore(0)
    heart = Heart(file, 0, every_s=0.001, moved=lambda: asked.release() or (3.0, False), starved=lambda: 0.0)
    heart.start()
    assert all(asked.acquire(timeout=10) for _ in range(2)), "it beats"  # the first beat is written when it asks again
    assert not file.read(0).leaving
    before = file.read(0).count
    heart.stop()
    assert file.read(0).leaving
    assert file.read(0).count > before
