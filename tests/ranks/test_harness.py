"""The harness itself: what is planned strikes or is refused, and nothing is left behind unnoticed."""

import contextlib
import shutil
import socket
import subprocess
import threading

import pytest

from ntp_plugin.errors import ConfigError
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks
from tests.ranks.plain_job import MOMENTS


def play_nothing(rank):
    rank.reached("between", 1)


def play_and_forget_a_process(rank):
    subprocess.Popen(["sleep", "30"])


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            kill(1, during="reduec", step=5),
            r"slot 1 during 'reduec' of step 5: there is no such moment\. Way out: one of",
        ),
        (kill(2, during="reduce", step=5), r"slot 2 during 'reduce' of step 5: there are 2 slots"),
    ],
    ids=str,
)
def test_a_fault_that_cannot_strike_is_refused(fault, message):
    with pytest.raises(ConfigError, match=message):
        Ranks(2, play_nothing, faults=[fault], moments=MOMENTS)


def test_a_fault_that_never_struck_is_told():
    fault = kill(1, during="between", step=2)
    with pytest.raises(AssertionError, match="planned, and never struck: slot 1 during 'between' of step 2"):  # noqa: SIM117
        with Ranks(2, play_nothing, faults=[fault]) as ranks:
            ranks.wait(30)


def test_a_fault_that_may_miss_may_miss():
    with Ranks(2, play_nothing, faults=[kill(1, during="between", step=2, may_miss=True)]) as ranks:
        ranks.wait(30)


def test_a_process_that_a_rank_leaves_behind_is_told_and_ended():
    with pytest.raises(AssertionError, match="left behind: a process that rank process"):  # noqa: SIM117
        with Ranks(1, play_and_forget_a_process) as ranks:
            ranks.wait(30)


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
def test_what_is_left_behind_here_is_told(planted, message):
    kept = contextlib.ExitStack()
    with kept, pytest.raises(AssertionError, match=f"left behind: {message}"), Ranks(1, play_nothing) as ranks:
        kept.enter_context(planted())
        ranks.wait(30)
