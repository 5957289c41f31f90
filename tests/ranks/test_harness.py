"""The harness itself: a planned fault is injected or refused, and nothing is left behind undetected."""

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from tests.ranks.plain_job import FAULT_POINTS


def play_nothing(rank):
    rank.reached("between", 1)


def play_and_forget_a_process(rank):
    subprocess.Popen(["sleep", "3600"])


def play_for_ever(rank):
    rank.write([["process", os.getpid()]])
    signal.pause()


def have_ranks_play():
    """In a process of its own, which a test kills."""
    with Ranks(2, play_for_ever) as ranks:
        ranks.wait_for_rows(2, "process")
        print(*(running.process.pid for running in ranks._running.values()), flush=True)  # noqa: T201  (to the test)
        ranks.wait()


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            kill(1, during="reduec", step=5),
            r"slot 1 during 'reduec' of step 5: there is no such moment\. Fix: one of",
        ),
        (kill(2, during="reduce", step=5), r"slot 2 during 'reduce' of step 5: there are 2 slots"),
    ],
    ids=str,
)
def test_a_fault_that_cannot_be_injected_is_refused(fault, message):
    with pytest.raises(ConfigError, match=message):
        Ranks(2, play_nothing, faults=[fault], fault_points=FAULT_POINTS)


def test_a_fault_that_was_never_injected_is_reported():
    fault = kill(1, during="between", step=2)
    with pytest.raises(AssertionError, match="planned, and never injected: slot 1 during 'between' of step 2"):  # noqa: SIM117
        with Ranks(2, play_nothing, faults=[fault]) as ranks:
            ranks.wait()


def test_a_fault_that_may_miss_may_miss():
    with Ranks(2, play_nothing, faults=[kill(1, during="between", step=2, may_miss=True)]) as ranks:
        ranks.wait()


def test_a_process_that_a_rank_leaves_behind_is_reported_and_killed():
    with pytest.raises(AssertionError, match="left behind: a process that rank process"):  # noqa: SIM117
        with Ranks(1, play_and_forget_a_process) as ranks:
            ranks.wait()


@contextlib.contextmanager
def a_thread():
    stop = threading.Event()
    thread = threading.Thread(target=stop.wait, name="ntp-forgotten")
    thread.start()
    yield
    stop.set()
    thread.join()


@contextlib.contextmanager
def a_socket():
    with socket.socket():
        yield


@contextlib.contextmanager
def a_folder():
    kept = []
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(shutil, "rmtree", kept.append)
        yield
    shutil.rmtree(kept[0])


@pytest.mark.parametrize(
    ("planted", "message"),
    [
        (a_thread, "thread ntp-forgotten"),
        (a_socket, r"socket:\[\d+\] as descriptor"),
        (a_folder, "folder .*ntp-ranks-"),
    ],
)
def test_processes_left_behind_by_this_one_are_reported(planted, message):
    kept = contextlib.ExitStack()
    with kept, pytest.raises(AssertionError, match=f"left behind: {message}"), Ranks(1, play_nothing) as ranks:
        kept.enter_context(planted())
        ranks.wait()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM], ids=lambda how: how.name)
def test_ranks_end_with_their_parent(how, tmp_path):
    words = (sys.executable, "-c", f"from {__name__} import {have_ranks_play.__name__} as play; play()")
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=os.environ | {"TMPDIR": str(tmp_path)}) as test:
        ranks = [os.pidfd_open(int(process)) for process in test.stdout.readline().split()]
        test.send_signal(how)
    try:
        assert len(ranks) == 2
        for rank in ranks:
            assert select.select([rank], [], [], 30)[0], "a rank runs on"
    finally:
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(rank, signal.SIGKILL)
            os.close(rank)
