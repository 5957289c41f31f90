"""Faults from outside: signals to the processes of `ntp run` at any instant, without fault points."""

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.ranks.command import NTP, RECIPES, Command, last_line

SIGNALLED = Path(__file__).with_name("signalled.py")


def job(folder, *flags, hung_s=3, **environment):
    """Three slots that train slowly until they may continue."""
    words = [*NTP, "run", "--standalone", "--nproc-per-node=3", f"--ntp-thresholds=hung_s={hung_s}", *flags]
    variables = {"RECIPE": str(RECIPES / "train.py"), "STEPS": "60", "PAUSE_S": "1"} | environment
    return Command([*words, str(SIGNALLED)], folder / "log", **variables)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    running = job(tmp_path_factory.mktemp("undisturbed"))
    running.go_on()
    code, output = running.end()
    assert code == 0, output
    return last_line(output)


def pids_of(running):
    return [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in range(3)]


def holds(running, undisturbed, members):
    code, output = running.end()
    assert code == 0, output
    loss, weights, _ = undisturbed
    assert last_line(output) == (pytest.approx(loss, rel=1e-10), pytest.approx(weights, rel=1e-10), members)
    return output


def test_a_rank_that_hangs_within_a_wait_is_found(tmp_path, undisturbed):
    running = job(tmp_path, QUICK="1")
    os.kill(pids_of(running)[1], signal.SIGUSR1)
    running.wait_for("slot 1 hangs")
    reason = running.wait_for(r"slot 1 is lost: it has neither moved nor polled for (\S+) s while 2 others wait")
    assert float(reason[1]) >= 3, "more than that, rounded to a tenth"
    running.go_on()
    holds(running, undisturbed, "(0, 2)")


def test_a_rank_that_hangs_just_after_another_was_killed_is_found(tmp_path, undisturbed):
    running = job(tmp_path)
    pids = pids_of(running)
    os.kill(pids[1], signal.SIGKILL)
    os.kill(pids[2], signal.SIGUSR2)
    running.wait_for("slot 1 is lost(.|\n)*slot 2 is lost: it has neither moved nor polled")
    running.go_on()
    holds(running, undisturbed, "(0,)")


def test_a_joining_process_that_is_stopped_is_lost_like_a_member(tmp_path, undisturbed):
    running = job(tmp_path, "--ntp-respawn=2")
    os.kill(pids_of(running)[1], signal.SIGKILL)
    joining = int(running.wait_for(r"slot 1 starts anew \(pid (\d+)\)")[1])
    os.kill(joining, signal.SIGSTOP)
    running.wait_for("slot 1 is lost: its process is stopped(.|\n)*slot 1 starts anew(.|\n)*slot 1 is pid")
    running.go_on()
    holds(running, undisturbed, "(0, 1, 2)")
    assert not Path(f"/proc/{joining}").exists()


def test_a_job_that_is_over_does_not_wait_for_a_process_that_never_joined(tmp_path, undisturbed):
    running = job(tmp_path, "--ntp-respawn=1", HUNG="1")
    os.kill(pids_of(running)[1], signal.SIGKILL)
    joining = int(running.wait_for(r"slot 1 starts anew \(pid (\d+)\)")[1])
    running.wait_for("slot 1 hangs")
    running.go_on()
    output = holds(running, undisturbed, "(0, 2)")
    assert f"slot 1 (pid {joining}) is ended: the job is over, and it had not joined" in output
    assert not Path(f"/proc/{joining}").exists()


STOPPED_S = 5.0
"""Longer than the others wait for a loss to be published, which takes a supervisor that runs."""


def test_a_loss_is_no_error_while_the_supervisor_is_stopped(tmp_path, undisturbed):
    running = job(tmp_path)
    pids = pids_of(running)
    running.process.send_signal(signal.SIGSTOP)
    os.kill(pids[1], signal.SIGKILL)
    time.sleep(STOPPED_S)  # this is the fault
    running.process.send_signal(signal.SIGCONT)
    running.wait_for("slot 1 is lost")
    running.go_on()
    output = holds(running, undisturbed, "(0, 2)")
    assert re.findall(r"slot (\d) is lost", output) == ["1"]


def test_a_supervisor_that_was_stopped_for_long_does_not_take_its_store_for_lost(tmp_path, undisturbed):
    running = job(tmp_path, "--ntp-thresholds=host_heartbeat_s=0.1,host_s=0.5,store_s=1", hung_s=30)
    pids_of(running)
    for _ in range(3):
        running.process.send_signal(signal.SIGSTOP)
        time.sleep(2.0)  # twice store_s
        running.process.send_signal(signal.SIGCONT)
        time.sleep(0.2)  # in which it looks
    running.go_on()
    holds(running, undisturbed, "(0, 1, 2)")
