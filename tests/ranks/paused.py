"""A recipe that pauses between steps until a file exists: the event that a test waits for has happened by then.

The pauses become longer, so that a busy machine has ten minutes for that, and an idle one is not slow to react. RECIPE
and GO_ON, the file, are in the environment; `Command` sets the latter.
"""

import os
import runpy
import sys
import time
from pathlib import Path

LONGEST_S, GROWTH, LOOK_S = 5.0, 1.03, 0.1
go_on, sleep, pauses = Path(os.environ["GO_ON"]), time.sleep, 0


def pause(seconds):
    global pauses
    if sys._getframe(1).f_globals["__name__"] != "__main__":  # it is none of the recipe's
        sleep(seconds)
        return
    until, pauses = time.monotonic() + max(seconds, min(LONGEST_S, seconds * GROWTH**pauses)), pauses + 1
    while not go_on.exists() and (left := until - time.monotonic()) > 0:
        sleep(min(left, LOOK_S))


time.sleep = pause
runpy.run_path(os.environ["RECIPE"], run_name="__main__")
