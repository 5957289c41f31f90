"""What a rank reports of itself: that it makes progress, that it waits, and that it got no CPU."""

import os
import subprocess
import sys
import threading
import time

import pytest

from ntp_plugin.membership.heartbeat import HeartbeatFile, HeartbeatThread, WaitForCpu
from ntp_plugin.membership.wait_progress import Movement
from tests.patience import PATIENCE_S

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
from ntp_plugin.membership.heartbeat import Heartbeat, HeartbeatFile
file, step = HeartbeatFile(Path(sys.argv[1]), 1), 0
while True:
    step += 1
    file.write(0, Heartbeat(count=step, moved_at=float(step), polled_at=step + 0.5 if step % 2 else None))
"""


@pytest.fixture
def file(tmp_path):
    file = HeartbeatFile(tmp_path / "beats", 1)
    yield file
    file.close()


def beats(file, movements, starved):
    """The heartbeats for each (moved, polled) and the seconds without a CPU by then."""
    readings = iter(zip(movements, starved, strict=True))
    now = [(Movement(0.0), 0.0)]
    heartbeat = HeartbeatThread(file, 0, every_s=0.001, moved=lambda: now[0][0], starved=lambda: now[0][1])
    for movement, starved_now in readings:
        now[0] = Movement(*movement), starved_now
        moved_at, polled_at, _ = heartbeat._moved_or_starved()
        yield moved_at, polled_at
    heartbeat.stop()


def test_time_without_a_cpu_is_no_hang(file):
    movements = [(10.0, None), (10.0, None), (10.0, None), (12.0, None), (12.0, None)]
    seen = list(beats(file, movements, [1.0, 1.0, 1.7, 2.0, 2.1]))
    assert [(round(at, 9), polled) for at, polled in seen] == [
        (11.0, None),
        (11.0, None),
        (11.7, None),
        (12.3, None),
        (12.4, None),
    ]


def test_a_waiting_rank_reports_since_when_regardless_of_its_cpu(file):
    movements = [(10.0, 10.0), (10.0, 10.25), (10.5, None), (10.5, None)]
    moved = [at for at, _ in beats(file, movements, [1.0, 2.0, 2.5, 2.75])]
    assert moved[:2] == [10.0, 10.0]
    assert moved[3] == moved[2] + 0.25


def test_a_wait_that_gets_no_cpu_cannot_poll(file):
    movements = [(10.0, 10.0), (10.0, 10.25), (10.0, 10.25), (10.0, 10.25)]
    polled = [at for _, at in beats(file, movements, [0.0, 0.0, 0.5, 3.0])]
    assert polled == [10.0, 10.25, 10.75, 13.25]


def test_the_kernel_reports_how_long_a_thread_waited_for_a_cpu():
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


def test_values_written_together_are_read_together(file):
    """The other process makes progress as fast as it can, and waits after every odd step."""
    writer = subprocess.Popen([sys.executable, "-c", WRITE, str(file.path)])
    try:
        while not file.read(0).count:
            assert writer.poll() is None
        last, until = 0.0, time.monotonic() + 2.0
        while time.monotonic() < until:
            beat = file.read(0)
            assert beat.moved_at.is_integer()
            assert (beat.polled_at is not None) == beat.moved_at % 2
            assert beat.moved_at >= last
            last = beat.moved_at
    finally:
        writer.kill()
        writer.wait()


ENDS = """
import sys
from pathlib import Path
from ntp_plugin.membership.wait_progress import Movement
from ntp_plugin.membership.heartbeat import HeartbeatThread, HeartbeatFile
HeartbeatThread(HeartbeatFile(Path(sys.argv[1]), 1), 0, every_s=0.01, moved=lambda: Movement(1.0)).start()
{ends}
"""


@pytest.mark.parametrize(
    "ends", ["raise ValueError", "sys.exit(4)", "import os; os.fork() or sys.exit(0); raise OSError"]
)
def test_a_process_that_ends_with_an_error_announces_its_end(file, ends):
    ended = subprocess.run(
        [sys.executable, "-c", ENDS.format(ends=ends), str(file.path)], check=False, capture_output=True
    )
    assert ended.returncode
    assert file.read(0).leaving


def test_a_forked_process_announces_nothing(file):
    forks = "import os, time\nif os.fork() == 0: sys.exit(0)\nos.wait(); os._exit(9)"
    assert subprocess.run([sys.executable, "-c", ENDS.format(ends=forks), str(file.path)], check=False).returncode == 9
    assert not file.read(0).leaving


def test_how_often_the_supervisor_has_looked(file):
    before = file.looks()
    file.count_look()
    assert file.looks() == before + 1


def test_the_last_heartbeat_is_marked(file):
    asked = threading.Semaphore(0)
    heartbeat = HeartbeatThread(
        file, 0, every_s=0.001, moved=lambda: asked.release() or Movement(3.0), starved=lambda: 0.0
    )
    heartbeat.start()
    for _ in range(2):  # the first heartbeat is written at the second poll
        assert asked.acquire(timeout=PATIENCE_S), "it beats"
    assert not file.read(0).leaving
    before = file.read(0).count
    heartbeat.stop()
    assert file.read(0).leaving
    assert file.read(0).count > before
