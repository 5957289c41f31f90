"""A rank is lost before training has begun: the others wait for it in a call that nothing interrupts."""

import contextlib
import os
import signal
from pathlib import Path

from tests.ranks.command import NTP, RECIPES, Command, descendants, wait_until


def worker(running, slot):
    """The process of a slot, as soon as there is one."""
    mark = f"RANK={slot}".encode()
    for pid in descendants(running.process.pid)[1:]:
        with contextlib.suppress(OSError):  # it has ended since
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                return pid
    return None


def test_a_loss_before_the_start_ends_the_job_with_its_reason(tmp_path):
    words = [*NTP, "run", "--standalone", "--nproc-per-node=3", "--ntp-respawn=1", str(RECIPES / "train.py")]
    running = Command(words, tmp_path / "log")
    os.kill(wait_until(lambda: worker(running, 1), lambda: running.output), signal.SIGKILL)
    code, output = running.end()
    assert code == 1, output
    assert "slot 1 was lost before all others had begun to train, and these wait for it" in output
    assert "starts anew" not in output
