"""A tensor-parallel PyTorch loop that survives its ranks: two replicas of two slots on CPU, 200 steps of a regression.

  ntp run --standalone --nproc-per-node=4 --ntp-respawn=1 recipes/plain/train_tp.py

While it runs, kill one of the four workers (their pids are printed): its replica goes on with one slot, which now holds
all 32 hidden features, and with fewer samples; you see the members change. A few seconds later a new process takes the
place, and gets exactly its 16 features back (at once with --ntp-spares=1). The last line is that of an undisturbed run,
but for the last digits. Kill slots 1 and 3 in one go, and it ends with code 4: nobody holds their features any more.
"""

import os
import time

import torch

from ntp_plugin.plain.job import tensor_parallel_job
from ntp_plugin.plain.parallel_layers import TensorParallelGroup, TensorParallelMLP

torch.manual_seed(0)
torch.set_num_threads(1)
torch.set_default_dtype(torch.float64)
STEPS, PAUSE_S = int(os.environ.get("STEPS", "200")), float(os.environ.get("PAUSE_S", "0.2"))
MIN_WIDTH = int(os.environ.get("MIN_WIDTH", "1"))  # with 2, a replica that loses a slot stands idle until it is back


def build(group: TensorParallelGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The model of this slot, and its optimizer."""
    model = TensorParallelMLP(8, 16, 32, 1, group)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def loss_of(model: torch.nn.Module, step: int, samples: list[int]) -> torch.Tensor:
    """The sum of the losses of some samples of a step; a sample is drawn from its number, whoever computes it."""
    drawn = [torch.randn(8, generator=torch.Generator().manual_seed(1000 * step + sample)) for sample in samples]
    x = torch.stack(drawn)
    return (model(x).squeeze(1) - x.sin().sum(1)).square().sum()


with tensor_parallel_job(build, loss_of, tp=2, per_replica=8, min_width=MIN_WIDTH) as job:
    print(f"slot {os.environ['RANK']} is pid {os.getpid()}", flush=True)
    members: tuple[int, ...] = ()
    while job.steps_done < STEPS:
        loss = job.step()
        if job.members != members:
            members = job.members
            print(f"slot {os.environ['RANK']}: step {job.steps_done}, members {members}", flush=True)
        time.sleep(PAUSE_S)
    if job.members[0] == int(os.environ["RANK"]):
        print(f"step {job.steps_done}: loss {loss:.12f}, members {job.members}", flush=True)
