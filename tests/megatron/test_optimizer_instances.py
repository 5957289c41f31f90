"""`--num-distributed-optimizer-instances`: several groups of replicas, each of which shards the whole optimizer.

While slots are lost, its state is sharded once over all replicas; when all are back, by instances again.
"""

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS, degraded, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import largest_difference, replica_digests_in

INSTANCES = "--use-distributed-optimizer --num-distributed-optimizer-instances 2"
OVERLAP = f"{INSTANCES} --overlap-grad-reduce --overlap-param-gather"
BATCH = 8


def job(more, **options):
    return Job(**{"model": MODELS[BASE], "tp": 1, "dp": 4, "batch": BATCH, "enabled": True, "more": more, **options})


def assert_same_training(seen):
    worst = largest_differences(seen, run(uniform(BASE, batch=BATCH)))
    assert max(worst.values()) <= BOUNDS["float64"], worst


@pytest.mark.parametrize("more", [INSTANCES, OVERLAP], ids=["plain", "overlap"])
def test_a_job_begins_degraded(more):
    assert_same_training(run(degraded(BASE, {"tp": 2, "dp": 4, "lost": ("r1.s0.t0",)}, more=more, batch=BATCH)))


@pytest.mark.parametrize(
    ("more", "fault_point"),
    [
        (INSTANCES, "backward"),
        pytest.param(INSTANCES, "apply", marks=pytest.mark.short),
        (OVERLAP, "backward"),
        (OVERLAP, "vote"),
    ],
)
def test_a_rank_dies_and_comes_back(more, fault_point):
    lived, _ = live(job(more), faults=[kill(3, during=fault_point, step=5)], back={3: 12})
    assert len(lived) == 4
    assert_same_training(as_if_always_there(lived))


def test_both_holders_of_a_shard_are_lost():
    """Slots 1 and 3 have the same shard in two instances: it comes from their copies."""
    faults = [kill(1, during="backward", step=5), kill(3, during="backward", step=5)]
    lived, _ = live(job(INSTANCES), faults=faults, back={1: 12, 3: 12})
    assert_same_training(as_if_always_there(lived))


def test_a_checkpoint_is_the_same_before_and_while_a_slot_is_lost(tmp_path):
    """Saved after 4, 8, 12 and more steps, with a slot lost from step 6 on."""
    more = "--save {} --save-interval 4 --dist-ckpt-optim-fully-reshardable"
    live(job(f"{INSTANCES} {more.format(tmp_path / 'mine')}"), faults=[kill(3, during="backward", step=6)])
    one_instance = f"--use-distributed-optimizer {more.format(tmp_path / 'theirs')}"
    run(Job(model=MODELS[BASE], tp=2, dp=2, batch=BATCH, more=one_instance))
    for step in (4, 8):
        mine, theirs = (replica_digests_in(tmp_path / name, step) for name in ("mine", "theirs"))
        assert any("exp_avg_sq" in name for name in theirs)
        assert largest_difference(mine, theirs) <= BOUNDS["float64"]
