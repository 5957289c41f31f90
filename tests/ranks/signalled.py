"""A recipe that hangs in a signal handler, as a script's own may: how a test disturbs a job from outside.

    SIGUSR1   the main thread hangs as soon as it waits for others, and polls until then
    SIGUSR2   it hangs where it is

The slots in QUICK do not pause between steps, so that they nearly always wait for the others. If HUNG is set, a joining
process never reaches its script. RECIPE and GO_ON are those of `paused.py`.
"""

import os
import runpy
import signal
import time
from pathlib import Path

SLOT, sleep = os.environ["RANK"], time.sleep


def hang(*_):
    print(f"slot {SLOT} hangs", flush=True)
    while True:
        sleep(3600)


def hang_in_a_wait(number, frame):
    while frame is not None and frame.f_code.co_name != "_wait_sliced":
        frame = frame.f_back
    if frame is None:
        signal.setitimer(signal.ITIMER_REAL, 0.003)
    else:
        hang()


signal.signal(signal.SIGUSR1, hang_in_a_wait)
signal.signal(signal.SIGALRM, hang_in_a_wait)
signal.signal(signal.SIGUSR2, hang)
if os.environ.get("HUNG") and os.environ.get("NTP_INCARNATION"):
    hang()
if SLOT in os.environ.get("QUICK", "").split(","):
    Path(os.environ["GO_ON"] + SLOT).touch()
    os.environ["GO_ON"] += SLOT
runpy.run_path(str(Path(__file__).with_name("paused.py")), run_name="__main__")
