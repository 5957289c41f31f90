"""`ntp run` is killed by SIGKILL: none of its processes outlives it."""

import os
import signal
import subprocess
import sys

import pytest

from ntp_plugin.launch import bound, reaper
from tests.ranks.command import NTP, RECIPES, Command, assert_all_end, descendants_of, wait_until

BOUND = [sys.executable, "-I", "-S", bound.__file__]
WITHIN_S = 300.0
"""Far above the usual time: it only finds a process that does not end."""


@pytest.fixture
def run(tmp_path):
    """Start `ntp run`; whatever becomes of the test, it is killed in the end."""
    started = []

    def start(*words, **environment):
        started.append(Command([*NTP, "run", "--standalone", *words], tmp_path / "log", **environment))
        return started[-1]

    yield start
    for running in started:
        running.process.kill()
        running.process.wait()


def kill_with_all(running):
    """SIGKILL the supervisor; all its descendants must end."""
    pidfds = descendants_of(running.process.pid)
    running.process.kill()
    assert_all_end(pidfds)


WITH_CHILDREN = """
import multiprocessing, os, subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], start_new_session=True)
multiprocessing.get_context("fork").Process(target=time.sleep, args=(3600,)).start()
print("is ready", flush=True)
time.sleep(3600)
"""


@pytest.mark.parametrize("flags", [(), ("--ntp-fork",), ("--ntp-spares=1",)], ids=["started", "forked", "spares"])
def test_workers_end_with_their_supervisor(run, flags):
    words = ["--nproc-per-node=2", *flags, str(RECIPES / "train_tp.py")]
    running = run(*words, STEPS="1000000", PAUSE_S="0.05")
    running.wait_for("slot 0: step 1,")
    kill_with_all(running)


@pytest.mark.parametrize("how", ["started", "forked", "by a shell"])
def test_processes_started_by_workers_end_as_well(run, tmp_path, how):
    """In sessions of their own, too."""
    (tmp_path / "train.py").write_text(WITH_CHILDREN)
    words, flags = [str(tmp_path / "train.py")], ["--ntp-fork"] if how == "forked" else []
    if how == "by a shell":
        (tmp_path / "train.sh").write_text(f"#!/bin/sh\n{sys.executable} {words[0]}\nexit\n")
        flags, words = ["--no-python"], ["sh", str(tmp_path / "train.sh")]
    running = run("--nproc-per-node=2", *flags, *words)
    wait_until(lambda: running.output.count("is ready") == 2, lambda: running.output, WITHIN_S)
    kill_with_all(running)


def test_a_stopped_worker_ends_with_its_supervisor(run):
    running = run("--nproc-per-node=2", str(RECIPES / "train_tp.py"), STEPS="1000000", PAUSE_S="0.05")
    pid = int(running.wait_for(r"slot 1 is pid (\d+)")[1])
    running.wait_for("slot 0: step 1,")
    os.kill(pid, signal.SIGSTOP)
    kill_with_all(running)


def test_a_supervisor_that_died_before_prctl_is_detected(tmp_path):
    """A parent that dies right after it starts a process leaves one with another parent."""
    done = subprocess.run(
        [*BOUND, str(os.getppid()), "touch", str(tmp_path / "started")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert f"touch is not started: its supervisor (pid {os.getppid()}) is dead" in done.stderr
    assert not (tmp_path / "started").exists()


def test_a_bound_program_starts_with_default_signals(tmp_path):
    """With the signals that Python ignores; and one that is not there is named."""
    output = subprocess.check_output(bound.bound(["grep", "SigIgn", "/proc/self/status"]), text=True)
    assert int(output.split()[1], 16) >> (signal.SIGPIPE - 1) & 1 == 0
    assert int(output.split()[1], 16) >> (signal.SIGXFSZ - 1) & 1 == 0
    done = subprocess.run(bound.bound([tmp_path / "no"]), capture_output=True, text=True, check=False)
    assert done.returncode == 127
    assert done.stderr == f"ntp run: {tmp_path / 'no'} cannot be started: No such file or directory\n"


def test_only_a_killed_supervisor_is_cleaned_up_after(tmp_path, monkeypatch):
    monkeypatch.setenv("NTP_HEARTBEATS", str(tmp_path))
    sleeps = [sys.executable, "-c", "import time; time.sleep(3600)"]
    left = subprocess.Popen(sleeps, start_new_session=True)
    other = subprocess.Popen(sleeps, env=os.environ | {"NTP_HEARTBEATS": f"{tmp_path}/other"})
    try:
        reaper.Reaper("NTP_HEARTBEATS").close()
        assert left.poll() is None
        killed = reaper.Reaper("NTP_HEARTBEATS")
        killed._process.stdin.close()
        assert left.wait(WITHIN_S) == -signal.SIGKILL
        assert killed._process.wait(WITHIN_S) == 0
        assert other.poll() is None
    finally:
        left.kill()
        other.kill()
        left.wait()
        other.wait()
