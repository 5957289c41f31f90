"""Measure what a killed worker costs a Megatron job without the plugin: torchrun restarts all, which load a checkpoint.

    python -m benchmarks.megatron_restart       seconds from SIGKILL to the first iteration that the log did not have

The recipe, the model and the layout are those of `make show-recovery`, on stock Megatron in CPU emulation. It saves a
`torch_dist` checkpoint after every second iteration, so that no more than two are computed again.

Megatron saves in this format only if psutil is installed, which it asks for the size of a process, for the log. Without
psutil a substitute answers 0.
"""

import importlib.util
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.harness.parity.job import Job
from tests.harness.parity.layouts import BASE, MODELS

_MOST_LIVES = 1
_ITERATION = re.compile(r" \[[^]]*\] iteration +(\d+)/")
"""Matches anywhere in a line: unbuffered, a process writes a line and its end separately, and other output comes in
between."""
_BEFORE = 5
"""So many iterations are logged before a worker is killed; two checkpoints are complete then."""
_PATIENCE_S = 180.0
_LAST_WORDS_S = 0.3
"""After the kill: the others end the iteration that they are in, if they can."""
_STAND_IN = """
class Process:
    rss = 0
    def __init__(self, pid): pass
    def memory_info(self): return self
"""


def restart_seconds(ranks: int, *, trials: int, seed: int) -> float:
    """The median over some trials."""
    chance = random.Random(seed)
    return statistics.median(_one_restart(ranks, chance) for _ in range(trials))


def _one_restart(ranks: int, chance: random.Random) -> float:
    with tempfile.TemporaryDirectory(prefix="ntp-restart-") as name:
        job = subprocess.Popen(
            _command(ranks, Path(name)),
            env=_environment(Path(name)),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        log = _Log(job)
        try:
            log.wait_for(_BEFORE)
            time.sleep(chance.uniform(0, 1))
            injected = time.monotonic()
            os.kill(_a_worker(job.pid), signal.SIGKILL)
            time.sleep(_LAST_WORDS_S)
            known = log.iterations[-1]
            back = log.wait_for(known + 1)
            resumed = log.iterations[log.iterations.index(known) + 1]
            assert 1 < resumed <= known + 1, f"it went on with iteration {resumed} after {known}"
            return back - injected
        finally:
            job.terminate()  # torchrun ends its workers
            job.wait(60)


def _command(ranks: int, folder: Path) -> list[str]:
    saved = str(folder / "checkpoints")
    more = f"--train-iters 1000 --save {saved} --load {saved} --save-interval 2 --data-cache-path {folder}/samples"
    job = Job(model=MODELS[BASE], tp=ranks // 2, dp=2, batch=2, more=more)
    torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", "--monitor-interval=0.1"]
    recipe = ["-m", "ntp_plugin.megatron", str(job.recipe), *job.words]
    return [sys.executable, "-m", *torchrun, f"--max-restarts={_MOST_LIVES}", *recipe]


def _environment(folder: Path) -> dict[str, str]:
    stand_ins = folder / "stand-ins"
    stand_ins.mkdir()
    if importlib.util.find_spec("psutil") is None:
        (stand_ins / "psutil.py").write_text(_STAND_IN)
    return os.environ | {
        "NTP_CPU": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(stand_ins), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "PYTHONUNBUFFERED": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",  # as in torchrun_restart.py
    }


class _Log:
    """The output of a job: the iterations that all of its incarnations logged, and when."""

    def __init__(self, job: "subprocess.Popen[str]") -> None:
        self._job = job
        self._output: list[str] = []
        self._times: list[float] = []
        self.iterations: list[int] = []
        threading.Thread(target=self._read, daemon=True).start()

    def wait_for(self, iteration: int) -> float:
        """When it, or a later one, was logged first."""
        deadline = time.monotonic() + _PATIENCE_S
        while time.monotonic() < deadline and self._job.poll() is None:
            for number, at in zip(self.iterations.copy(), self._times, strict=False):
                if number >= iteration:
                    return at
            time.sleep(0.02)
        raise TimeoutError(f"iteration {iteration} was not logged; the last that was said:\n{self._last_words()}")

    def _read(self) -> None:
        assert self._job.stdout is not None, "it is a pipe"
        for line in self._job.stdout:
            self._output.append(line)
            found = _ITERATION.search(line)
            if found:
                self._times.append(time.monotonic())
                self.iterations.append(int(found[1]))

    def _last_words(self) -> str:
        return "".join(self._output[-40:])


def _a_worker(agent: int) -> int:
    """The agent's first child that is a rank."""
    children: Sequence[str] = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if b"\0RANK=" in Path(f"/proc/{pid}/environ").read_bytes())


if __name__ == "__main__":
    print(f"{restart_seconds(4, trials=1, seed=1):.2f}")
