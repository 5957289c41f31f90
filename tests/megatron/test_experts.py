"""Live jobs with layers of experts: a replica is lost, its experts are dealt to the others of its expert group, and it
comes back. `make show-experts` has the same jobs at all fault points."""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.harness.parity.experts import (
    A2A,
    BIASED,
    CONTROLS,
    EP2,
    FEATURES,
    IN_ONE_BUCKET,
    OF_ALL,
    OF_TWO,
    differences,
    job_of,
    lose,
    spoilt,
)
from tests.harness.parity.job import STEPS, largest_differences, run
from tests.harness.parity.live import live
from tests.harness.parity.saved import HALF, joined, largest_difference, loading, replica_digests_in, saving
from tests.megatron.test_logs import values_in
from tests.megatron.test_loss_scale import FP16

FLOAT64 = BOUNDS["float64"]


def worst_of(lived, job):
    return max(differences(lived, job).values())


@pytest.mark.parametrize("fault_point", ["forward", "dispatch", "combine", "reduce", "vote", "apply", "applied"])
def test_a_replica_is_lost_at_each_fault_point_and_comes_back(fault_point):
    assert worst_of(lose(job_of(), 1, fault_point=fault_point), job_of()) <= FLOAT64


@pytest.mark.short
def test_the_experts_of_a_lost_slot_go_to_the_others_of_its_group():
    """One expert group: what the lost slot held comes from its copies, and replicas run padding."""
    one_group = job_of(OF_ALL)
    assert worst_of(lose(one_group, 1), one_group) <= FLOAT64


@pytest.mark.parametrize("feature", FEATURES)
def test_a_replica_is_lost_and_comes_back(feature):
    job, lost = FEATURES[feature]
    assert worst_of(lose(job, *lost), job) <= FLOAT64


@pytest.mark.parametrize("fault_point", ["reduced", "applied"])
def test_the_bias_of_experts_is_that_of_completed_steps(fault_point):
    """Between the counts and the vote, and after the step."""
    biased = job_of(router=f"{BIASED} --moe-router-bias-update-rate 0.1")
    assert worst_of(lose(biased, 1, fault_point=fault_point), biased) <= FLOAT64


def test_a_stage_without_experts_is_refused():
    """A rank that joins it later would make no optimizer for experts, and the others wait for it in their norm."""
    with pytest.raises(Refused, match="stage 0 of the pipeline has no layer of experts"):
        live(job_of(f"{OF_TWO} --moe-layer-freq [0,1]", pp=2, dp=2))


def test_a_joining_rank_skips_its_first_step():
    """As in `test_loss_scale.py`: it gathers no experts in its second step either, so nobody may."""
    sharded = f"{OF_TWO} {IN_ONE_BUCKET} --ntp-watch-steps 0 {FP16}"
    overflows = job_of(sharded, under="gradients_overflow")
    lived, _ = live(overflows, faults=[kill(1, during="backward", step=3)], back={1: 5})
    assert lived[1].seen.norms[0] == 0.0, "step 6 overflows"
    assert max(differences(lived, overflows).values()) <= FLOAT64


def test_a_step_without_padding_follows_one_with():
    """Three replicas share 8 micro-batches unevenly, and 12 evenly."""
    growing = job_of(OF_ALL, schedule="0:8,1280:12", samples=200)
    assert worst_of(lose(growing, 1, back=False), growing) <= FLOAT64


@pytest.mark.parametrize("control", CONTROLS)
def test_controls_are_noticed(control):
    assert max(spoilt(control).values()) > 1e3 * FLOAT64


@pytest.mark.parametrize(
    "more", [OF_TWO, f"{A2A} {EP2}", f"{OF_TWO} {IN_ONE_BUCKET}"], ids=["grouped", "one by one", "sharded"]
)
def test_a_checkpoint_of_a_reduced_group_is_that_of_all(tmp_path, more):
    """Equal to stock Megatron's, and a nominal job goes on with it. Of a sharded optimizer in several buckets stock
    Megatron itself saves other values than it has: its optimizer's copy of a weight is not the weight."""
    sharded = " --dist-ckpt-optim-fully-reshardable" if "--use-distributed" in more else ""
    one = job_of(f"{more}{sharded}")
    lose(dataclasses.replace(one, more=f"{one.more} {saving(tmp_path / 'ours')}"), 1, back=False)
    stock = dataclasses.replace(one, enabled=False)
    run(dataclasses.replace(stock, more=f"{one.more} {saving(tmp_path / 'stock')}"))
    ours, theirs = (replica_digests_in(tmp_path / name) for name in ("ours", "stock"))
    assert largest_difference(ours, theirs) <= FLOAT64
    if not sharded:
        second = run(dataclasses.replace(stock, more=f"{one.more} {loading(tmp_path / 'ours')}"))
        first = run(dataclasses.replace(stock, more=f"{one.more} {saving(tmp_path / 'stock')}"))
        assert len(second[0].norms) == STEPS - HALF
        assert max(largest_differences(joined(first, second), run(stock)).values()) <= FLOAT64


def test_the_losses_of_routers_are_logged_of_the_global_batch(tmp_path):
    """A step that was interrupted may be left out."""
    name = "load_balancing_loss"
    lived_in, stock_in = tmp_path / "lived", tmp_path / "stock"
    one = job_of()
    lose(dataclasses.replace(one, more=f"{one.more} --tensorboard-dir {lived_in}"), 1)
    run(dataclasses.replace(one, enabled=False, more=f"{one.more} --tensorboard-dir {stock_in}"))
    found, expected = (dict(values_in(folder)[name]) for folder in (lived_in, stock_in))
    assert len(found) >= STEPS - 2
    assert found == {step: pytest.approx(expected[step], rel=1e-6) for step in found}


def test_with_nobody_lost_it_is_stock_megatron():
    """The same bits and the same collectives, with the plugin on and off."""
    off, on = (run(dataclasses.replace(job_of(), enabled=enabled)) for enabled in (False, True))
    assert {rank: (seen.losses, seen.norms) for rank, seen in on.items()} == {
        rank: (seen.losses, seen.norms) for rank, seen in off.items()
    }
    assert {rank: seen.collectives for rank, seen in on.items()} == {
        rank: seen.collectives for rank, seen in off.items()
    }
