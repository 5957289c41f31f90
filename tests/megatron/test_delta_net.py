"""Gated delta nets (`--experimental-attention-variant gated_delta_net`): on the CPU, and live through a loss.

The reference is stock Megatron in the same layout, with nobody lost: a slot draws its own decays and convolutions.
"""

import dataclasses

import pytest
import torch
from torch.nn import functional

from benchmarks.numerics import BOUNDS
from ntp_plugin.megatron.delta_net_emulation import causal_convolution, of_unit_length
from tests.harness.parity.experts import DELTA_NET, MODEL, PER_TOKEN, SP, differences, lose
from tests.harness.parity.job import Job, run
from tests.harness.parity.saved import largest_difference, replica_digests_in, saving

FLOAT64 = BOUNDS["float64"]
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"


def job(more=SP, **options):
    return Job(model=MODEL, more=f"{DELTA_NET} {more}", **{"tp": 2, "dp": 2, "batch": 8, "enabled": True} | options)


def worst_of(lived, of):
    return max(differences(lived, of).values())


# ---------------------------------------------------------------- the functions that stand for kernels


def test_a_length_is_divided_by():
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0]], dtype=torch.float64)
    assert torch.allclose(of_unit_length(x), torch.tensor([[0.6, 0.8], [0.0, 0.0]], dtype=torch.float64))


def test_a_channel_is_weighted_over_earlier_positions():
    x = torch.arange(10.0, dtype=torch.float64).reshape(1, 5, 2)
    weight = torch.tensor([[1.0, 10.0, 100.0], [0.0, 0.0, 1.0]], dtype=torch.float64)
    found, state = causal_convolution(x=x, weight=weight, bias=None, activation="silu", cu_seqlens=None)
    assert state is None
    first = torch.tensor([0.0, 200.0, 420.0, 642.0, 864.0], dtype=torch.float64)  # x = 0, 2, 4, 6, 8
    assert torch.allclose(found[0, :, 0], functional.silu(first))
    assert torch.allclose(found[0, :, 1], functional.silu(x[0, :, 1]))


# ---------------------------------------------------------------- live


@pytest.mark.short
def test_slots_are_lost_and_come_back():
    """One slot of each of two replicas: three slots share four key heads, and a sequence of 16 with pads."""
    of_four = job(f"{SP} {SHARDED}", tp=4)
    assert worst_of(lose(of_four, 1, 6), of_four) <= FLOAT64


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        (job(), (1,)),
        (job(pp=2), (1,)),
        (job(PER_TOKEN, tp=1, cp=2), (1,)),
    ],
    ids=["tensor", "pipeline", "context"],
)
def test_a_slot_is_lost_and_comes_back(one, lost):
    """With experts: `test_experts.py`, which has the negative control as well."""
    assert worst_of(lose(one, *lost), one) <= FLOAT64


def test_a_checkpoint_of_a_degraded_layout_is_that_of_stock(tmp_path):
    """Megatron saves queries, keys, values, gates and decays as tensors of their own."""
    one = job()
    lose(dataclasses.replace(one, more=f"{one.more} {saving(tmp_path / 'ours')}"), 1, back=False)
    run(dataclasses.replace(one, enabled=False, more=f"{one.more} {saving(tmp_path / 'stock')}"))
    ours, theirs = (replica_digests_in(tmp_path / name) for name in ("ours", "stock"))
    assert any(name.endswith("in_proj.weight.alpha") for name in ours)
    assert largest_difference(ours, theirs) <= FLOAT64
