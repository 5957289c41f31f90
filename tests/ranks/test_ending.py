"""How `ntp run` ends if its workers are slow to end, as on a busy machine."""

import os
import signal

from tests.ranks.command import NTP, RECIPES, Command

SLOW_S = 20
"""Longer than a rank may be silent."""
ENDS_SLOWLY = f"""
import atexit, runpy, time
atexit.register(time.sleep, {SLOW_S})
runpy.run_path({str(RECIPES / "train_tp.py")!r}, run_name="__main__")
"""


def test_survivors_that_lost_state_and_are_slow_to_exit_give_the_job_their_code(tmp_path):
    """Slots 1 and 3 hold the same features of their replicas; without them 0 and 2 cannot continue."""
    script = tmp_path / "slow.py"
    script.write_text(ENDS_SLOWLY)
    flags = ["--standalone", "--nproc-per-node=4", "--ntp-thresholds", "silent_s=5,hung_s=5"]
    running = Command([*NTP, "run", *flags, str(script)], tmp_path / "log", STEPS="1000000", PAUSE_S="0.05")
    pids = [int(running.wait_for(rf"slot {slot} is pid (\d+)")[1]) for slot in (1, 3)]
    running.wait_for("slot 0: step 1,")
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    code, output = running.end()
    assert output.count("held by no living slot") == 2, output
    assert code == 4, output
