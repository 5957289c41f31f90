"""An ordinary PyTorch loop that survives its ranks: data parallel on CPU, 200 steps of a small regression.

  ntp run --standalone --nproc-per-node=4 --ntp-respawn=1 recipes/plain/train.py

While it runs, kill one of the four workers (their pids are printed): the others go on at once with its samples, and a
new process takes its place a few seconds later. The last line is that of an undisturbed run, but for the members and
the last digits. Takes a minute; PAUSE_S, the pause after each step, gives you and the new process time.
With EVERY_STEP=1 each worker prints each step, and with SAVE=FILE the last weights are written: by those `ntp chaos
outside` judges the job.
"""

import os
import sys
import time

import torch

from ntp_plugin.plain.job import elastic_job

torch.manual_seed(0)
torch.set_num_threads(1)
STEPS, PAUSE_S = int(os.environ.get("STEPS", "200")), float(os.environ.get("PAUSE_S", "0.2"))
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, eps=1e-4)


def loss_of(step: int, samples: list[int]) -> torch.Tensor:
    """The sum of the losses of some samples of a step; a sample is drawn from its number, whoever computes it."""
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        x = torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(1000 * step + sample))
        total = total + (model(x) - x.sin().sum()).square().sum()
    return total


with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
    print(f"slot {os.environ['RANK']} is pid {os.getpid()}", flush=True)
    while job.steps_done < STEPS:
        loss = job.step()
        if os.environ.get("EVERY_STEP"):
            sys.stdout.write(f"rank {os.environ['RANK']}: step {job.steps_done}: loss {loss!r}\n")
        time.sleep(PAUSE_S)
    if job.members[0] == int(os.environ["RANK"]):
        weights = sum(parameter.detach().abs().sum() for parameter in model.parameters())
        print(f"step {job.steps_done}: loss {loss:.12f}, weights {weights:.12f}, members {job.members}", flush=True)
        if os.environ.get("SAVE"):
            torch.save(model.state_dict(), os.environ["SAVE"])
