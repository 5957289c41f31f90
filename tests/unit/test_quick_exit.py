"""A process that ends without Python's teardown does what is needed at its end, and nothing more."""

import signal
import subprocess
import sys

import pytest

BEGINS = """
import atexit, ctypes, os, sys, threading, time
from ntp_plugin.launch import quick_exit
class Kept:
    def __del__(self, write=os.write):
        write(1, b"torn down\\n")
kept = Kept()
quick_exit.arm()
quick_exit.arm()
atexit.register(print, "handler")
threading.Thread(target=lambda: (time.sleep(0.2), print("thread"))).start()
ctypes.CDLL(None).printf(b"printed in C\\n")
"""
OURS = "from ntp_plugin.errors import StateLost\nwith quick_exit.on_errors_of_ours(): sys.exit(StateLost.exit_code)"
ITS_OWN = "with quick_exit.on_errors_of_ours(): sys.exit(99)"
INTERRUPTED = "with quick_exit.on_errors_of_ours(): raise KeyboardInterrupt"


def end_by(script):
    """(exit code, lines of its output, what is in its errors)"""
    done = subprocess.run([sys.executable, "-c", BEGINS + script], capture_output=True, text=True, check=False)
    return done.returncode, sorted(done.stdout.splitlines()), done.stderr


@pytest.mark.parametrize(
    ("script", "code"),
    [("quick_exit.set_exit_code(0)", 0), ("quick_exit.set_exit_code(5)", 5), (OURS, 4), (INTERRUPTED, -signal.SIGINT)],
)
def test_a_quick_exit_skips_only_the_teardown(script, code):
    ended, output, errors = end_by(script)
    assert (ended, output) == (code, ["handler", "printed in C", "thread"])
    assert ("KeyboardInterrupt" in errors) == (code == -signal.SIGINT)


@pytest.mark.parametrize(("script", "code"), [("", 0), (ITS_OWN, 99), ("raise ValueError('its own')", 1)])
def test_other_exits_run_the_teardown(script, code):
    ended, output, errors = end_by(script)
    assert (ended, output) == (code, ["handler", "printed in C", "thread", "torn down"])
    assert ("its own" in errors) == (code == 1)


AS_A_COMMAND = """
import os, sys
class Kept:
    def __del__(self, write=os.write):
        write(1, b"torn down\\n")
kept = Kept()
from ntp_plugin.cli.main import console
sys.argv = ["ntp", *sys.argv[1:]]
sys.exit(console())
"""


def test_a_command_is_not_torn_down():
    words = ["run", "--ntp-respawn=-1", "train.py"]
    done = subprocess.run([sys.executable, "-c", AS_A_COMMAND, *words], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert "argument --ntp-respawn: '-1' is not a whole number from 0" in done.stderr
