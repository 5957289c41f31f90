"""A script that enables the plugin in one line of its own, under the real `ntp run`."""

import os
import signal
import sys

import pytest

from ntp_plugin.telemetry import Began, Follower
from tests.harness.parity.job import RECIPES
from tests.ranks.command import NTP, Command

SCRIPT = f"""
from ntp_plugin.megatron import enable
enable()
import runpy
runpy.run_path({str(RECIPES / "pretrain_gpt.py")!r}, run_name="__main__")
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def run(script, tmp_path, *more):
    """The flags are in a file, where `ntp run` does not see them."""
    words = tmp_path / "words"
    words.write_text(f"{(RECIPES / 'tiny.args').read_text()} --ntp-enable {' '.join(more)}")
    command = [*NTP, "run", "--standalone", "--nproc-per-node=2", str(script), f"@{words}"]
    return Command(command, tmp_path / "log", NTP_CPU="1", PYTHONWARNINGS="ignore")


@pytest.mark.short
def test_a_rank_dies_and_the_job_comes_to_its_end(script, tmp_path):
    events = tmp_path / "events"
    job = run(script, tmp_path, f"--ntp-events={events}", "--train-iters=40")
    job.wait_for(r"iteration +3/")
    pids = {one.slot: one.event.pid for one in Follower(events).news() if isinstance(one.event, Began)}
    os.kill(pids["r1.s0.t0"], signal.SIGKILL)
    code, output = job.end()
    assert code == 0, output
    assert "slot 1 is lost: its process ended with code -9" in output
    assert "iteration       40/" in output


def test_a_refusal_is_one_line(script, tmp_path):
    code, output = run(script, tmp_path, "--hidden-dropout=0.1").end()
    assert code == 2, output
    assert "ntp: with --ntp-enable under `ntp run`" in output
    assert "Traceback" not in output, output[-2000:]


def test_an_error_of_the_script_keeps_its_own_traceback(tmp_path):
    path = tmp_path / "script.py"
    path.write_text("from ntp_plugin.megatron import enable\nenable()\n1 / 0\n")
    job = Command([sys.executable, str(path)], tmp_path / "log", NTP_CPU="1", PYTHONWARNINGS="ignore")
    code, output = job.end()
    assert code == 1
    assert "ZeroDivisionError" in output
