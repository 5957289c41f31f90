"""A replica that shrinks to half never holds its state twice."""

import ctypes
import functools
from pathlib import Path

import pytest
import torch
from torch.nn import functional

from ntp_plugin.plain import tensor_parallel
from ntp_plugin.plain.parallel_layers import ColumnParallel, RowParallel, TensorParallelGroup
from ntp_plugin.recovery.elastic_rank import ElasticRank
from ntp_plugin.resharding import reshard_plan
from ntp_plugin.resharding.reshard import relayout
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Ranks

WIDTH, HIDDEN, LAYERS = 512, 2048, 16
TENSOR = 3 * 4 * WIDTH * HIDDEN
"""Bytes of the largest one with Adam's two entries."""
STATE = 2 * LAYERS * TENSOR
_MMAP_THRESHOLD = -3


def play(rank, least):
    """Take a step, lose a slot, take another; how far the memory rose in the move above where it ended, in bytes."""
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, 1 << 16)  # what is freed goes back to the system, and can be seen
    reshard_plan.LEAST = least
    seen = []
    tensor_parallel.relayout = functools.partial(watch, seen)
    within = TensorParallelGroup(rank.slot % 2, 2)
    layers = [
        layer
        for number in range(LAYERS)
        for layer in (
            ColumnParallel(WIDTH, HIDDEN, within, family=f"hidden {number}"),
            RowParallel(HIDDEN, WIDTH, within, family=f"hidden {number}"),
        )
    ]
    model = torch.nn.Sequential(*layers)
    optimizer = torch.optim.Adam(model.parameters(), foreach=False)

    def loss(_, samples):
        return sum(functional.mse_loss(model(torch.full((1, WIDTH), sample / 10)), torch.ones(1)) for sample in samples)

    elastic = ElasticRank(rank.place)
    job = tensor_parallel.TensorParallel(
        model, optimizer, loss, groups=elastic.groups, within=within, ranks=4, per_replica=1
    )
    driver = elastic.drive(job)
    elastic.start()
    while job.applied < 4:
        rank.reached("step", job.applied)
        driver.run_with_recovery(job.step)
    driver.finish()
    elastic.leave()
    return seen[-1]


def watch(seen, plans, state, *rest, **options):
    """Free the gradients, and read the peak of the resident memory."""
    for parameter in state.parameters.values():
        parameter.grad = None
    Path("/proc/self/clear_refs").write_text("5")
    relayout(plans, state, *rest, **options)
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    highest, now = (int(status[key].split()[0]) << 10 for key in ("VmHWM", "VmRSS"))
    seen.append(highest - now)


@pytest.mark.parametrize(("least", "bounded"), [(0, True), (1 << 40, False)])
@pytest.mark.filterwarnings("ignore:Using a target size")
def test_memory_of_a_move_is_that_of_its_largest_tensor(least, bounded):
    """Its new part, what arrives, and both once more as one message; where all is one batch, it is seen to be more."""
    with Ranks(4, functools.partial(play, least=least), faults=[kill(3, during="step", step=2)]) as ranks:
        rose = ranks.wait()[2]
    assert (rose <= 4 * TENSOR) == bounded, f"{rose >> 20} MiB; the state is {STATE >> 20} MiB"
