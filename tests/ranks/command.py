"""`ntp ...` as a user types it."""

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import ClassVar

from tests.patience import PATIENCE_S

RECIPES = Path(__file__).parents[2] / "recipes" / "plain"
PAUSED = Path(__file__).with_name("paused.py")
NTP = (sys.executable, "-m", "ntp_plugin.cli.main")


def wait_until(look, why_not, timeout_s=PATIENCE_S):
    """Return the first result of `look` that is not empty."""
    deadline = time.monotonic() + timeout_s
    while not (found := look()):
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {why_not()}"
        time.sleep(0.02)
    return found


def descendants(pid):
    """This process and all that it has started, as far as they have not ended."""
    with contextlib.suppress(OSError):  # it ends meanwhile
        children = [int(word) for task in Path(f"/proc/{pid}/task").iterdir() for word in children_of(task)]
        return [pid, *(found for child in children for found in descendants(child))]
    return [pid]


def children_of(task):
    return (task / "children").read_text().split()


def descendants_of(pid):
    """A pidfd for each process that descends from one; by pid."""
    return {child: os.pidfd_open(child) for child in descendants(pid)[1:]}


def assert_all_end(pidfds, timeout_s=300.0):
    """Assert that these processes, by pid, end."""
    for pid, pidfd in pidfds.items():
        assert select.select([pidfd], [], [], timeout_s)[0], f"runs on: {Path(f'/proc/{pid}/cmdline').read_bytes()}"
        os.close(pidfd)


class Command:
    """A running `ntp ...`; what it says goes to a file."""

    started: ClassVar = []
    """All that a test has started; `tests/conftest.py` stops them after it."""

    def __init__(self, words, log, **environment):
        self.log, self._may_go_on = log, log.with_name(f"{log.name}.go-on")
        environment |= {"OMP_NUM_THREADS": "1", "GO_ON": str(self._may_go_on)}
        with log.open("wb") as file:
            self.process = subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=os.environ | environment)
        self.started.append(self)

    @property
    def output(self):
        return self.log.read_text(errors="replace")

    def go_on(self):
        """Have a job of `paused.py` come to its end without pauses."""
        self._may_go_on.touch()

    def wait_for(self, pattern):
        def look():
            is_over = self.process.poll() is not None  # before it is read: its last word counts
            found = re.search(pattern, self.output)
            assert found or not is_over, self.output
            return found

        return wait_until(look, lambda: f"{pattern} in {self.output}")

    def end(self):
        """(exit code, output)"""
        try:
            code = self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {PATIENCE_S} s: {self.output}") from None
        return code, self.output

    def stop(self):
        """Kill it with all that it has started. A test that fails leaves it running, and whatever is left running
        takes the processor from the tests after it, or has Python complain in the middle of one of them."""
        if self.process.poll() is None:
            for pid in descendants(self.process.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait()


def last_line(output):
    """(loss, weights, members) of the last line of a plain recipe."""
    found = re.search(r"loss (\S+), weights (\S+), members (\(.*\))", output)
    assert found, output
    return float(found[1]), float(found[2]), found[3]
