"""A data-parallel PyTorch loop that survives the loss of a rank.

ntp run --standalone --nproc-per-node=2 docs/examples/plain_loop.py
"""

import os
from collections.abc import Sequence

import torch

from ntp_plugin import elastic_job

STEPS = int(os.environ.get("STEPS", "100"))

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
data = torch.randn(4096, 8)


def loss_of(step: int, samples: Sequence[int]) -> torch.Tensor:
    """The sum of the losses of some samples of a step's global batch, which has 2 ranks x 4 samples."""
    x = data[[(8 * step + sample) % len(data) for sample in samples]]
    loss: torch.Tensor = (model(x).squeeze(1) - x.sin().sum(1)).square().sum()
    return loss


with elastic_job(model, optimizer, loss_of, per_rank=4) as job:
    while job.steps_done < STEPS:
        loss = job.step()
    if job.members[0] == int(os.environ["RANK"]):
        print(f"step {job.steps_done}: loss {loss:.4f}, members {job.members}")
