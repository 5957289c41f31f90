"""Kill ranks of a Megatron job and watch it go on: `make demo`. Two to three minutes on 2 cores, most of it start-up.

    python recipes/megatron/demo.py

Eight CPU ranks, two replicas of TP 4, train pretrain_gpt.py through `ntp run`. One rank is killed by SIGKILL, and later
one of the other replica; each replica goes on at width 3. The first one that was killed comes back, in a warm spare
process. Then the same training runs once more and is left alone. You see the grid of slots while they train, and in the
end build/demo/demo.png and demo.html: both loss curves, how long the training stood after each kill, and whether every
sample was used once. It computes in double precision, where rounding is far from everything that could be wrong; if the
last losses differ by more than that, the exit code is 1.
"""

import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from demo_report import Kill, Report
from demo_view import Picture, Screen

from ntp_plugin.telemetry import Follower

HERE = Path(__file__).parent
FOLDER = Path("build/demo")
REPLICAS, TP, BATCH, STEPS = 2, 4, 4, 100
VICTIMS = {20: "r0.s0.t1", 60: "r1.s0.t3"}
"""After which step which slot is killed. The first comes back: it builds its model for as long as a few steps take."""
PATIENCE_S = 600.0
"""For one run, on a machine that is busy with other things besides."""
LOOK_S = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """One training, its log, and what it tells."""

    name: str
    steps: int
    flags: tuple[str, ...] = ()

    @property
    def log(self) -> Path:
        return FOLDER / f"{self.name}.log"

    @property
    def events(self) -> Path:
        return FOLDER / f"{self.name}.jsonl"

    @property
    def words(self) -> list[str]:
        """The command, as you would type it."""
        ntp = ["-m", "ntp_plugin.cli.main", "run", "--standalone", f"--nproc-per-node={REPLICAS * TP}", *self.flags]
        recipe = [str(HERE / "pretrain_gpt.py"), f"@{HERE / 'tiny.args'}"]
        ours = [f"--tensor-model-parallel-size={TP}", f"--global-batch-size={BATCH}", f"--train-iters={self.steps}"]
        return [sys.executable, *ntp, *recipe, *ours, "--ntp-enable", f"--ntp-events={self.events}"]

    def start(self) -> subprocess.Popen[bytes]:
        """In double precision on the CPU."""
        self.events.unlink(missing_ok=True)
        environment = os.environ | {
            "NTP_CPU": "float64",
            "NTP_PRELOAD": "megatron.training.training",  # what a spare imports
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        with self.log.open("wb") as file:
            return subprocess.Popen(self.words, stdout=file, stderr=subprocess.STDOUT, env=environment)


def watch(run: Run, screen: Screen) -> Iterator[Picture]:
    """Start it, and have its picture again and again until it is over."""
    picture, follower, job = Picture(steps=run.steps, replicas=REPLICAS, tp=TP), Follower(run.events), run.start()
    try:
        deadline, over = time.monotonic() + PATIENCE_S, False
        while not over:
            over = job.poll() is not None
            for told in follower.news():
                picture.hear(told)
            screen.show(picture)
            yield picture
            if time.monotonic() > deadline:
                sys.exit(f"{run.name}: not over after {PATIENCE_S:.0f} s; its log is {run.log}")
            time.sleep(LOOK_S)
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait()
    if job.returncode:
        tail = "\n".join(run.log.read_text(errors="replace").splitlines()[-30:])
        sys.exit(f"{run.name}: the job ended with code {job.returncode}; the end of {run.log}:\n{tail}")


def run_and_kill(run: Run, screen: Screen) -> tuple[Picture, list[Kill]]:
    """Strike when the job says that it has come to a step."""
    kills: list[Kill] = []
    waiting = dict(VICTIMS)
    for picture in watch(run, screen):
        for step in [step for step in waiting if picture.step >= step]:
            slot = waiting.pop(step)
            os.kill(picture.pids[slot], signal.SIGKILL)
            kills.append(Kill(slot=slot, pid=picture.pids[slot], step=picture.step + 1, at=time.time()))
            picture.killed(slot)
    return picture, kills


def run_undisturbed(run: Run, screen: Screen) -> Picture:
    """To compare with."""
    *_, picture = watch(run, screen)
    return picture


def main() -> None:
    """Both runs, and what came of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    hurt = Run(name="killed", steps=STEPS, flags=("--ntp-spares=1",))
    calm = Run(name="undisturbed", steps=STEPS)
    with Screen("1 of 2: two ranks are going to be killed") as screen:
        disturbed, kills = run_and_kill(hurt, screen)
    with Screen("2 of 2: the same training, left alone") as screen:
        undisturbed = run_undisturbed(calm, screen)
    report = Report(disturbed=disturbed, undisturbed=undisturbed, kills=kills)
    report.write(FOLDER, command="make demo")
    report.print()
    sys.exit(0 if report.holds else 1)


if __name__ == "__main__":
    main()
