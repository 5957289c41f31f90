"""A test of your own loop: a rank is killed in step 5, and the job trains what it trains without a fault.

pytest docs/examples/test_my_loop.py
"""

import os
from collections.abc import Sequence

import torch

from ntp_plugin import elastic_job
from ntp_plugin.testing import Fault, Rank, Ranks, kill

STEPS = 10


def play(rank: Rank) -> list[float]:
    """What each rank runs, in a process of its own: the loop under test. Returns the trained weights."""
    os.environ.update(rank.environment())
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)

    def loss_of(step: int, samples: Sequence[int]) -> torch.Tensor:
        rank.reached("forward", step)  # a fault that is planned for this point happens here
        x = torch.stack([_sample(100 * step + sample) for sample in samples])
        loss: torch.Tensor = (model(x).squeeze(1) - x.sum(1)).square().sum()
        return loss

    with elastic_job(model, optimizer, loss_of, per_rank=2) as job:
        while job.steps_done < STEPS:
            job.step()
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


def _sample(number: int) -> torch.Tensor:
    return torch.randn(8, dtype=torch.float64, generator=torch.Generator().manual_seed(number))


def trained(faults: Sequence[Fault] = ()) -> dict[int, list[float]]:
    """Rank -> its weights after the last step; a rank that was killed is absent."""
    with Ranks(3, play, faults=faults) as ranks:
        return ranks.wait()


def test_a_lost_rank_changes_nothing() -> None:
    """The survivors agree bit for bit, and with the run without a fault up to rounding."""
    survivors = trained([kill(1, during="forward", step=5)])
    reference = trained()[0]
    assert sorted(survivors) == [0, 2]
    assert survivors[0] == survivors[2]
    torch.testing.assert_close(torch.tensor(survivors[0]), torch.tensor(reference), rtol=0, atol=1e-12)
