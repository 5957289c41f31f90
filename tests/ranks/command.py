"""`ntp ...` as somebody types it."""

import os
import re
import subprocess
import sys
import time
from pathlib import Path

RECIPES = Path(__file__).parents[2] / "recipes" / "plain"
PAUSED = Path(__file__).with_name("paused.py")
NTP = (sys.executable, "-m", "ntp_plugin.cli.main")


class Command:
    """A running `ntp ...`; what it says goes to a file."""

    def __init__(self, words, log, **environment):
        self.log = log
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment | {"OMP_NUM_THREADS": "1"}
            )

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, pattern, timeout_s=90.0):
        deadline = time.monotonic() + timeout_s
        while not (found := re.search(pattern, self.said)):
            assert self.process.poll() is None, self.said
            assert time.monotonic() < deadline, f"{pattern} was not said within {timeout_s} s: {self.said}"
            time.sleep(0.02)
        return found

    def end(self, timeout_s=90.0):
        """(exit code, what it said)"""
        try:
            code = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {timeout_s} s: {self.said}") from None
        return code, self.said


def last_line(said):
    """(loss, weights, members) of the last line of a plain recipe."""
    found = re.search(r"loss (\S+), weights (\S+), members (\(.*\))", said)
    assert found, said
    return float(found[1]), float(found[2]), found[3]
