"""A tensor-parallel PyTorch loop: a replica that loses a rank goes on narrower.

ntp run --standalone --nproc-per-node=4 docs/examples/tensor_parallel_loop.py
"""

import os
from collections.abc import Sequence

import torch

from ntp_plugin import ColumnParallel, RowParallel, TensorParallelGroup, tensor_parallel_job

STEPS = int(os.environ.get("STEPS", "100"))


class MLP(torch.nn.Module):
    """Two layers whose 32 hidden features are cut over the ranks of a replica."""

    def __init__(self, group: TensorParallelGroup) -> None:
        super().__init__()
        self.column = ColumnParallel(8, 32, group, family="hidden")
        self.row = RowParallel(32, 1, group, family="hidden")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The prediction for each row."""
        prediction: torch.Tensor = self.row(torch.tanh(self.column(x)))
        return prediction


def build(group: TensorParallelGroup) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """The part of the model that this rank holds, and its optimizer."""
    torch.manual_seed(0)
    model = MLP(group)
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def loss_of(model: torch.nn.Module, step: int, samples: Sequence[int]) -> torch.Tensor:
    """The sum of the losses of some samples of a step's global batch, which has 2 replicas x 4 samples."""
    drawn = [torch.randn(8, generator=torch.Generator().manual_seed(1000 * step + sample)) for sample in samples]
    x = torch.stack(drawn)
    loss: torch.Tensor = (model(x).squeeze(1) - x.sin().sum(1)).square().sum()
    return loss


with tensor_parallel_job(build, loss_of, tp=2, per_replica=4) as job:
    while job.steps_done < STEPS:
        loss = job.step()
    if job.members[0] == int(os.environ["RANK"]):
        print(f"step {job.steps_done}: loss {loss:.4f}, members {job.members}")
