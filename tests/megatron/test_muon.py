"""Muon (`--optimizer muon`), which steps whole matrices: live jobs in which a loss drops replicas and narrows none.

The reference is stock Megatron in the same layout, with nobody lost.
"""

import dataclasses
import os
import subprocess
import sys

import pytest

from benchmarks.numerics import BOUNDS
from tests.harness.parity.experts import MUON, OF_ALL, OF_TWO, PER_TOKEN, SP, differences, job_of, lose, spoilt
from tests.harness.parity.job import run
from tests.harness.parity.saved import largest_difference, replica_digests_in, saving

FLOAT64 = BOUNDS["float64"]


@pytest.mark.short
def test_each_expert_of_a_reduced_group_is_a_matrix_of_its_own():
    job = job_of(f"{OF_ALL} {MUON}")
    assert max(differences(lose(job, 1), job).values()) <= FLOAT64


@pytest.mark.parametrize(
    ("job", "lost"),
    [
        (job_of(f"{OF_TWO} {MUON}"), (1,)),
        (job_of(f"{OF_TWO} {MUON} {SP} --expert-tensor-parallel-size 1", tp=2, dp=2), (3,)),
        (job_of(f"{MUON} {SP} --ntp-min-tp-width 2", router="", tp=2, dp=2), (3,)),
        (job_of(MUON, router="", pp=2, dp=2), (1,)),
        (job_of(f"{MUON} {PER_TOKEN}", router="", cp=2, dp=2), (1,)),
    ],
    ids=["two groups", "tensor", "never narrower", "pipeline", "context"],
)
def test_a_replica_is_lost_and_comes_back(job, lost):
    assert max(differences(lose(job, *lost), job).values()) <= FLOAT64


def test_a_checkpoint_of_a_reduced_group_is_that_of_all(tmp_path):
    one = job_of(f"{OF_TWO} {MUON}")
    lose(dataclasses.replace(one, more=f"{one.more} {saving(tmp_path / 'ours')}"), 1, back=False)
    run(dataclasses.replace(one, enabled=False, more=f"{one.more} {saving(tmp_path / 'stock')}"))
    ours, theirs = (replica_digests_in(tmp_path / name) for name in ("ours", "stock"))
    assert any("momentum_buffer" in name for name in ours)
    assert largest_difference(ours, theirs) <= FLOAT64


def test_the_bound_notices_experts_that_are_stepped_as_one_matrix():
    assert max(spoilt("experts_are_one_matrix").values()) > 1e3 * FLOAT64


PROBE = """
import types
from ntp_plugin.megatron import cpu_emulation
cpu_emulation.install(cpu_emulation.wanted())
import torch
from ntp_plugin.megatron.layers.uneven_layers import set_cut
from ntp_plugin.megatron.muon import each_by_itself
from ntp_plugin.planning.units import Family, Run, Tensor

weight = torch.nn.Parameter(torch.zeros(6, 4, dtype=torch.bfloat16))
weight.main_param = torch.nn.Parameter(torch.zeros(6, 4))
family = Family(name="experts 0 of 2", units=4, number=0, each=2)
set_cut(weight, Tensor(name="", shape=(12, 4), family=family.name, runs=(Run(start=0, unit_size=3),)), family)
shapes = []

def original(_, parameter, part):
    shapes.append(tuple(part.shape))
    return part

orthogonalize = each_by_itself(types.SimpleNamespace(parameters={"layer.experts.weight0": weight}), original)
gradient = torch.arange(24.0).reshape(6, 4)
assert torch.equal(orthogonalize(None, weight.main_param, gradient), gradient)
orthogonalize(None, torch.nn.Parameter(torch.zeros(6, 4)), gradient)
assert shapes == [(3, 4), (3, 4), (6, 4)], shapes
"""


def test_experts_in_half_precision_are_known_by_what_is_stepped():
    """With `--bf16` the optimizer steps a float32 copy of each parameter, which does not say what it is made of."""
    done = subprocess.run(
        [sys.executable, "-c", PROBE], env=os.environ | {"NTP_CPU": "1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
