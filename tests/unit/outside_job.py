"""A job for tests of faults from outside: a supervisor that restarts ranks, and ranks that print steps.

python outside_job.py --ntp-run-dir=FOLDER PLANT     PLANT is what goes wrong in the folder run-1, or nothing
"""

import os
import subprocess
import sys
import time
from pathlib import Path

RANKS, STEPS, PAUSE_S = 2, 60, 0.05
PLANTED_FROM = 20


def supervise(folder, plant):
    def start(rank):
        return subprocess.Popen([sys.executable, __file__, "rank", folder, plant], env=os.environ | {"RANK": str(rank)})

    ranks = {rank: start(rank) for rank in range(RANKS)}
    while any(process.poll() is None for process in ranks.values()):
        for rank, process in ranks.items():
            if process.poll():
                ranks[rank] = start(rank)
        time.sleep(0.02)
    return 7 if plant == "code" else 0


def train(folder, plant):
    counted = Path(folder, "step")
    step = int(counted.read_text()) if counted.exists() else 0  # a restarted rank continues at the step of the others
    while step < STEPS:
        step += 1
        loss = 1 / step
        if step >= PLANTED_FROM:
            if plant == "hang":
                time.sleep(3600)
            loss *= 1 + 1e-3 * (plant == "wrong")
        sys.stdout.write(f"rank {os.environ['RANK']}: step {step}: loss {loss!r}\n")
        sys.stdout.flush()
        new = counted.with_name(f"step.{os.environ['RANK']}")
        new.write_text(str(step))
        new.rename(counted)
        time.sleep(PAUSE_S)
    if plant == "process":
        subprocess.Popen(["sleep", "3600"], start_new_session=True)
    if plant == "file":
        Path(os.environ["TMPDIR"], f"ntp-planted-{os.environ['RANK']}").touch()


if __name__ == "__main__":
    if sys.argv[1] == "rank":
        train(*sys.argv[2:])
    else:
        where = sys.argv[1].partition("=")[2]
        sys.exit(supervise(where, sys.argv[2] if Path(where).name == "run-1" else "nothing"))
