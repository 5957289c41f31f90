"""Measure what a killed worker costs under torchrun's own elastic restart, on the same machine: all workers start anew.

python -m benchmarks.torchrun_restart          seconds from SIGKILL to the first collective of all new workers
"""

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

MOST_LIVES = 3
"""torchrun's own default. With torch 2.15 and gloo a restart succeeds only if the rendezvous does not share its store
with the workers (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1): otherwise they find addresses of earlier incarnations, and
fail."""

WORKER = """
import os, sys, time, torch, torch.distributed as dist
from pathlib import Path
folder = Path(sys.argv[1])
dist.init_process_group("gloo")
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
dist.all_reduce(torch.ones(1024))
(folder / f"life{life}.rank{dist.get_rank()}").write_text(f"{time.monotonic()} {os.getpid()}")
while folder.exists() and not (folder / "stop").exists():  # it ends with the measuring process
    dist.all_reduce(torch.ones(1024))
    time.sleep(0.01)
os._exit(0)
"""


def restart_seconds(ranks: int, *, trials: int) -> float:
    """The median over some trials."""
    return statistics.median(_one_restart(ranks) for _ in range(trials))


def _one_restart(ranks: int) -> float:
    with tempfile.TemporaryDirectory(prefix="ntp-torchrun-") as name:
        folder = Path(name)
        (folder / "worker.py").write_text(WORKER)
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        command += [f"--max-restarts={MOST_LIVES}", "--monitor-interval=0.1", str(folder / "worker.py"), name]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        job = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            pid = int(_wait_for(folder, [0], ranks)[1].split()[1])
            injected = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            back = max(float(text.split()[0]) for text in _wait_for(folder, range(1, MOST_LIVES + 1), ranks))
            return back - injected
        finally:
            (folder / "stop").touch()
            job.terminate()
            job.wait(60)


def _wait_for(folder: Path, lives: Sequence[int], ranks: int, timeout_s: float = 120.0) -> list[str]:
    """Wait until all workers of one of these incarnations have written after their first collective."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        for life in lives:
            texts = [_text(folder / f"life{life}.rank{rank}") for rank in range(ranks)]
            if all(texts):
                return texts
        time.sleep(0.01)
    raise TimeoutError(f"{ranks} workers under torchrun did not come to life within {timeout_s} s")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


if __name__ == "__main__":
    print(f"{restart_seconds(8, trials=3):.2f}")
