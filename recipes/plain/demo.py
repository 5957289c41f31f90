"""Kill a rank of a tensor-parallel job in plain PyTorch and watch. About a minute on 2 cores.

Runs train_tp.py twice: undisturbed, and with a worker killed by SIGKILL, whose place a warm spare takes. Prints
the second run's log, and both last losses, which agree except for the last digits.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SCRIPT = Path(__file__).with_name("train_tp.py")
STEPS, PAUSE_S = 40, 0.25


def start(log: Path, *flags: str, pause_s: float) -> subprocess.Popen[bytes]:
    """Start `ntp run` on the recipe, as you would type it."""
    ntp = [sys.executable, "-m", "ntp_plugin.cli.main"]
    words = [*ntp, "run", "--standalone", "--nproc-per-node=4", *flags, str(SCRIPT)]
    environment = os.environ | {"STEPS": str(STEPS), "PAUSE_S": str(pause_s), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def wait_for(log: Path, pattern: str, job: subprocess.Popen[bytes]) -> re.Match[str]:
    """Wait until the log of the job has the pattern."""
    while not (found := re.search(pattern, log.read_text())):
        if job.poll() is not None:
            sys.exit(f"the job ended with {job.returncode}:\n{log.read_text()}")
        time.sleep(0.05)
    return found


def last_loss(log: Path) -> float:
    """Read the loss in the last line."""
    found = re.search(rf"step {STEPS}: loss (\S+), members \(0, 1, 2, 3\)", log.read_text())
    if found is None:
        sys.exit(f"the job did not come to its end with all members:\n{log.read_text()}")
    return float(found[1])


def main() -> None:
    """Run both, and compare the losses."""
    folder = Path(tempfile.mkdtemp(prefix="ntp-demo-"))
    calm, degraded = folder / "calm", folder / "degraded"
    print(f"1. {STEPS} steps undisturbed: 2 replicas of 2 slots ({calm})", flush=True)
    start(calm, pause_s=0.0).wait()
    print(f"2. the same, and slot 1 is killed by SIGKILL ({degraded})", flush=True)
    job = start(degraded, "--ntp-spares=1", pause_s=PAUSE_S)
    victim = int(wait_for(degraded, r"slot 1 is pid (\d+)", job)[1])
    wait_for(degraded, r"slot 0: step 1,", job)
    os.kill(victim, signal.SIGKILL)
    job.wait()
    for line in degraded.read_text().splitlines():
        if line.startswith(("ntp run:", "slot 0:")):
            print(f"   {line}")
    undisturbed, survived = last_loss(calm), last_loss(degraded)
    print(f"loss after {STEPS} steps: {undisturbed:.12f} undisturbed, {survived:.12f} with the kill")
    sys.exit(0 if abs(undisturbed - survived) <= 1e-10 * undisturbed else "they differ by more than rounding")


main()
