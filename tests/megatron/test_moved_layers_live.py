"""A pipeline stage of a replica dies, and its layers go to the other stages, from copies in memory.

The reference is stock Megatron: one replica with all stages that computes the whole batch.
"""

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.telemetry import Chosen, Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, DROPOUT, MODELS, OLD
from tests.harness.parity.live import as_if_always_there, live
from tests.megatron.test_live import IN_A_RECOVERY, IN_A_STEP

FLOAT64 = BOUNDS["float64"]
SHARDED = "--use-distributed-optimizer"
OVERLAPPED = f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 9000"


def job(more=OVERLAPPED, model=BASE, **where):
    return Job(**{"model": MODELS[model], "tp": 1, "pp": 4, "dp": 2, "enabled": True, "more": more, **where})


def reference(of, **changes):
    where = {name: getattr(of, name) for name in ("tp", "pp", "layers", "dtype")}
    return run(Job(model=of.model, **where, **changes))


def assert_same_training(lived, of, **changes):
    worst = largest_differences(as_if_always_there(lived), reference(of, **changes))
    assert max(worst.values()) <= FLOAT64, worst


def assert_every_sample_is_drawn(rows, batch=6):
    """The last attempt of each step drew the samples of the step; each stage draws them."""
    for step in range(1, STEPS + 1):
        drawn = [row[2:] for row in rows if row[:2] == ["drawn", step]]
        newest = max(epoch for epoch, _ in drawn)
        samples = {sample for epoch, sample in drawn if epoch == newest}
        assert samples == {*range((step - 1) * batch, step * batch)}, step


def parameters(lived, slots):
    """How many parameters each of these ranks has at the end."""
    return [len(lived[slot].seen.parts) for slot in slots]


def event_of(path, kind):
    return [one.event for one in Follower(path).news() if isinstance(one.event, kind)][-1]


@pytest.mark.parametrize(
    ("slot", "fault_point"),
    [
        pytest.param(slot, fault_point, marks=[pytest.mark.short] * ((slot, fault_point) == (3, "backward")))
        for slot in (1, 3, 7)
        for fault_point in (*IN_A_STEP, "exchange", "gather")
    ],
)
def test_a_stage_dies(slot, fault_point):
    """Slot 1 is the first stage of the second replica, 3 its second, and 7 its last."""
    of = job()
    lived, rows = live(of, faults=[kill(slot, during=fault_point, step=5)])
    others = [other for other in (1, 3, 5, 7) if other != slot]
    assert sum(parameters(lived, others)) == sum(parameters(lived, (0, 2, 4, 6))), "its other stages have all"
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_the_plan_says_that_layers_move(tmp_path):
    events = tmp_path / "events"
    live(job(f"{SHARDED} --ntp-events={events}"), faults=[kill(3, during="backward", step=5)])
    assert event_of(events, Chosen).action == "move layers"
    recovered = event_of(events, Recovered)
    assert recovered.widths == [[1, 1, 1, 1], [1, 0, 1, 1]]
    assert recovered.micro_batches == [4, 2]


@pytest.mark.parametrize("slot", [0, 2, 6])
def test_the_nominal_layers_return(slot):
    of = job()
    lived, rows = live(of, faults=[kill(slot, during="vote", step=4)], back={slot: 11})
    assert parameters(lived, range(0, 8, 2)) == parameters(lived, range(1, 8, 2))
    assert sorted(lived) == list(range(8))
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


@pytest.mark.parametrize("fault_point", IN_A_RECOVERY)
def test_another_stage_dies_in_the_recovery(fault_point):
    of = job()
    faults = [kill(3, during="backward", step=5), kill(5, during=fault_point, epoch=1)]
    lived, rows = live(of, faults=faults)
    assert sum(parameters(lived, (1, 7))) == sum(parameters(lived, (0, 2, 4, 6))), "two stages have all"
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_stages_die_until_one_is_left_and_return():
    of = job()
    faults = [kill(slot, during="reduce", step=3 + 2 * number) for number, slot in enumerate((3, 7, 1))]
    lived, rows = live(of, faults=faults, back={3: 13, 7: 13, 1: 13})
    assert sorted(lived) == list(range(8))
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_the_same_stage_dies_in_both_replicas():
    """Its weights are in copies alone."""
    of = job()
    faults = [kill(2, during="backward", step=5), kill(3, during="apply", step=9)]
    lived, rows = live(of, faults=faults)
    assert sorted(lived) == [0, 1, 4, 5, 6, 7]
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_the_only_replica_goes_on():
    of = job(dp=1)
    lived, rows = live(of, faults=[kill(2, during="backward", step=5)])
    assert sorted(lived) == [0, 1, 3]
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_a_stage_of_two_slots_dies_and_one_of_another_stage():
    of = job(tp=2, pp=3, layers=6)
    faults = [kill(slot, during="forward", step=5) for slot in (6, 7)]  # r1.s1
    lived, rows = live(of, faults=[*faults, kill(10, during="vote", step=9)])
    assert sorted(lived) == [0, 1, 2, 3, 4, 5, 8, 9, 11]
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_a_stage_that_is_too_narrow_leaves_its_other_slot_idle():
    of = job(f"{SHARDED} --ntp-min-tp-width 2", tp=2, pp=3, layers=6)
    lived, rows = live(of, faults=[kill(6, during="forward", step=5)], back={6: 12})
    assert sorted(lived) == list(range(12))
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


@pytest.mark.parametrize("slot", [1, 7])
def test_a_tied_embedding(slot):
    of = job(model="tied embeddings")
    lived, rows = live(of, faults=[kill(slot, during="backward", step=5)], back={slot: 12})
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


def test_a_tied_embedding_stays_in_two_stages():
    """The replica is dropped that has one stage left."""
    of = job(model="tied embeddings", pp=2)
    lived, rows = live(of, faults=[kill(3, during="backward", step=5)])
    assert not lived[1].seen.parts
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


@pytest.mark.parametrize(
    ("model", "more", "of_both"),
    [
        (OLD, SHARDED, ""),
        (BASE, f"{SHARDED} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1", ""),
        (BASE, f"{OVERLAPPED} --overlap-param-gather", ""),
        (DROPOUT, SHARDED, ""),
        (BASE, SHARDED, "--eval-iters 2 --eval-interval 6"),
        ("per-token loss", SHARDED, ""),
    ],
)
def test_features(model, more, of_both):
    of = job(f"{more} {of_both}", model=model)
    lived, rows = live(of, faults=[kill(3, during="backward", step=5)], back={3: 12})
    assert_same_training(lived, of, more=of_both)
    if not of_both:  # an evaluation is a section of the rows, too
        assert_every_sample_is_drawn(rows)


def test_with_sequence_parallelism():
    of = job(f"{SHARDED} --sequence-parallel", tp=2, pp=3, layers=6)
    lived, rows = live(of, faults=[kill(slot, during="forward", step=5) for slot in (6, 7)])
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)


@pytest.mark.parametrize("more", ["--ntp-actions-forbid move-layers", "--ntp-copies-protect all"])
def test_a_replica_is_dropped_where_layers_do_not_move(more):
    """Without the distributed optimizer, or where it is forbidden."""
    of = job(f"{SHARDED} {more}" if "forbid" in more else more)
    lived, rows = live(of, faults=[kill(3, during="backward", step=5)])
    assert parameters(lived, (1, 5, 7)) == [0, 0, 0]
    assert_same_training(lived, of)
    assert_every_sample_is_drawn(rows)
