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


def wait_until(look, why_not, timeout_s=90.0):
    """What it finds, once it finds something."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {why_not()}"
        time.sleep(0.02)
    return found


class Command:
    """A running `ntp ...`; what it says goes to a file."""

    def __init__(self, words, log, **environment):
        self.log, self._may_go_on = log, log.with_name(f"{log.name}.go-on")
        environment |= {"OMP_NUM_THREADS": "1", "GO_ON": str(self._may_go_on)}
        with log.open("wb") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment)

    @property
    def said(self):
        return self.log.read_text(errors="replace")

    def go_on(self):
        """Have a job of `paused.py` come to its end without pauses."""
        self._may_go_on.touch()

    def wait_for(self, pattern, timeout_s=90.0):
        def look():
            is_over = self.process.poll() is not None  # before it is read: its last word counts
            found = re.search(pattern, self.said)
            assert found or not is_over, self.said
            return found

        return wait_until(look, lambda: f"{pattern} in {self.said}", timeout_s)

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
