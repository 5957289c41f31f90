"""A global batch that grows during training: each step has the samples of its size, in any layout.

The reference is stock Megatron with the same schedule: one full-width replica that computes every batch. Sizes change
before step 5 and before step 11. The thresholds are tokens, and no multiples of the sizes before them.
"""

import itertools

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.errors import Refused
from ntp_plugin.telemetry import Began, Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, DROPOUT, LAST_DEGRADED, LAYOUTS, MODELS, PIPELINES, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, largest_difference, replica_digests_in

SIZES = [2] * 4 + [4] * 6 + [6] * 10
SCHEDULE = {"schedule": "0:2,112:4,480:6", "samples": sum(SIZES)}
DOUBLE = {"schedule": "0:4,224:8,960:12", "samples": 2 * sum(SIZES)}
"""For replicas that take micro-batches in groups of two."""
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --ddp-bucket-size 9000 --overlap-param-gather"
KINDS = pytest.mark.parametrize("kind", ["", SHARDED], ids=["plain", "sharded"])


def assert_same_training(seen, expected, *, behind=()):
    """`behind`: steps whose log may have an older learning rate, because their state comes from older copies."""
    worst = largest_differences(seen, expected)
    assert max(worst.values()) <= BOUNDS["float64"], worst
    for one in seen.values():
        assert one.consumed == expected[0].consumed
        first = STEPS - len(one.rates) + 1  # a rank that came back has the last ones
        rates = zip(one.rates, expected[0].rates[first - 1 :], strict=True)
        assert {step for step, (mine, theirs) in enumerate(rates, start=first) if mine != theirs} <= set(behind)


def assert_every_sample_once(rows, sizes=SIZES):
    """The last attempt of each step drew the samples of the step, each once."""
    starts = [0, *itertools.accumulate(sizes)]
    for step, (start, end) in enumerate(itertools.pairwise(starts), start=1):
        drawn = [row[2:] for row in rows if row[:2] == ["drawn", step]]
        newest = max(epoch for epoch, _ in drawn)
        assert sorted(sample for epoch, sample in drawn if epoch == newest) == list(range(start, end)), step


def reference(model=BASE, **options):
    return run(uniform(model, **{**SCHEDULE, **options}))


# ---------------------------------------------------------------- planned


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ("TP2+TP1", ""),
        ("TP4+TP3", ""),
        ("TP4+TP3", OVERLAP),
        ("TP3+TP3", SHARDED),
    ],
)
def test_a_degraded_layout_has_the_batches_of_the_schedule(layout, more):
    outcomes = run(Job(model=MODELS[BASE], **LAYOUTS[layout], **SCHEDULE, more=more))
    assert_same_training(outcomes, reference())


@pytest.mark.parametrize("model", [DROPOUT, "per-token loss"])
def test_masks_and_tokens_follow_the_samples(model):
    outcomes = run(Job(model=MODELS[model], **LAYOUTS["TP2+TP1"], **SCHEDULE))
    assert_same_training(outcomes, reference(model))


@pytest.mark.parametrize(("chunks", "schedule"), [(1, SCHEDULE), (2, DOUBLE)])
def test_a_pipeline_with_a_degraded_stage(chunks, schedule):
    layout = {**PIPELINES[LAST_DEGRADED], "chunks": chunks, **schedule}
    expected = reference(tp=2, pp=2, chunks=chunks, **schedule)
    assert_same_training(run(Job(model=MODELS[BASE], **layout)), expected)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"schedule": "0:2,112:3", "samples": 20}, r"a global batch of 3 does not divide over 2 replicas"),
        ({"schedule": "0:4,112:6", "samples": 20, "pp": 2, "chunks": 2}, "takes them in groups of 2"),
    ],
)
def test_sizes_that_replicas_cannot_share_are_refused_at_the_start(options, why):
    with pytest.raises(Refused, match=why):
        run(Job(model=MODELS[BASE], tp=2, dp=2, lost=("r1.s0.t0",), **options))


# ---------------------------------------------------------------- live


def job(more="", **options):
    return Job(**{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, "more": more, **SCHEDULE, **options})


@pytest.mark.parametrize("step", [4, 5, 6])
@pytest.mark.parametrize("fault_point", ["step", "backward", "vote", "apply", "between"])
@KINDS
def test_a_rank_dies_around_the_change(kind, fault_point, step):
    """It comes back in step 9, and goes through the second change with the others."""
    lived, rows = live(job(kind), faults=[kill(3, during=fault_point, step=step)], back={3: 9})
    assert len(lived) == 4
    assert_same_training(as_if_always_there(lived), reference(), behind=[step] if kind else [])
    assert_every_sample_once(rows)


@pytest.mark.parametrize(
    "kind",
    ["", pytest.param(OVERLAP, marks=pytest.mark.short)],
    ids=["plain", "sharded"],
)
def test_a_rank_comes_back_in_the_step_that_changes(kind, tmp_path):
    lived, rows = live(
        job(f"{kind} --ntp-events={tmp_path}/events"), faults=[kill(1, during="apply", step=5)], back={1: 11}
    )
    assert len(lived) == 4
    assert_same_training(as_if_always_there(lived), reference(), behind=[5] if kind else [])
    assert_every_sample_once(rows)
    events = [one.event for one in Follower(tmp_path / "events").news()]
    began = [event.micro_batches for event in events if isinstance(event, Began)]
    assert began == [[1, 1]] * 4 + [[3, 3]]
    recovered = [event.micro_batches for event in events if isinstance(event, Recovered)]
    assert recovered == [[1, 3]] * 3 + [[3, 3]] * 4


@KINDS
def test_an_idle_rank_goes_through_a_change(kind):
    lived, rows = live(job(f"{kind} --ntp-min-tp-width 2"), faults=[kill(2, during="backward", step=3)], back={2: 13})
    assert len(lived) == 4
    assert_same_training(as_if_always_there(lived), reference())
    assert_every_sample_once(rows)


@KINDS
def test_a_pipeline_loses_a_rank_in_the_step_that_changes(kind):
    lived, _ = live(job(kind, pp=2), faults=[kill(5, during="backward", step=5)], back={5: 12})
    assert_same_training(as_if_always_there(lived), reference(tp=2, pp=2))


@pytest.mark.parametrize("step", [5, 6])
def test_masks_follow_the_samples_of_repeated_steps(step):
    lived, _ = live(job(SHARDED, model=MODELS[DROPOUT]), faults=[kill(0, during="applied", step=step)])
    assert_same_training(as_if_always_there(lived), reference(DROPOUT), behind=[step])


def test_fp16_overflows_as_in_the_reference_run():
    fp16 = "--fp16 --loss-scale-window 5 --initial-loss-scale 65536 --hysteresis 1"
    lived, rows = live(job(fp16), faults=[kill(3, during="vote", step=5)], back={3: 12})
    assert_same_training(as_if_always_there(lived), reference(more=fp16))
    assert_every_sample_once(rows)


def test_an_evaluation_before_the_change_keeps_its_own_batch():
    more = "--eval-interval 4 --eval-iters 2 --eval-global-batch-size 4"
    expected = reference(more=more)
    lived, _ = live(job(f"{SHARDED} {more}"), faults=[kill(3, during="forward", step=5)], back={3: 9})
    assert_same_training(as_if_always_there(lived), expected)
    for one in lived.values():
        evaluated = expected[0].evaluated[-len(one.seen.evaluated) :]
        assert one.seen.evaluated == pytest.approx(evaluated, rel=1e-12)


def test_all_ranks_save_where_the_size_changes(tmp_path):
    """Megatron saves a checkpoint there by itself. A rank that came back must not save where the others do not."""
    saving = job(f"--save {tmp_path} --save-interval 100")  # the fifth section is a save
    lived, _ = live(saving, faults=[kill(3, during="backward", step=6)], back={3: 9})
    assert len(lived) == 4
    assert_same_training(as_if_always_there(lived), reference())
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == ["iter_0000004", "iter_0000010", "iter_0000020"]
    theirs = tmp_path / "theirs"
    run(uniform(BASE, tp=2, more=f"--save {theirs} --save-interval 100 --exit-interval 10", **SCHEDULE))
    difference = largest_difference(replica_digests_in(tmp_path, 10), replica_digests_in(theirs, 10))
    assert difference <= BOUNDS["float64"]


def test_a_degraded_job_goes_on_from_the_checkpoint_of_a_change(tmp_path):
    first = run(uniform(BASE, tp=2, more=f"--save {tmp_path} --save-interval 100 --exit-interval 10", **SCHEDULE))
    second = run(Job(model=MODELS[BASE], **LAYOUTS["TP2+TP1"], **SCHEDULE, more=f"--load {tmp_path}"))
    assert len(first[0].norms) == 10 == STEPS - len(second[0].norms)
    assert_same_training(joined(first, second), reference())


# ---------------------------------------------------------------- negative controls


@pytest.mark.parametrize("spoil", ["sampler_keeps_the_first_batch", "scale_keeps_the_first_batch"])
def test_control_a_replica_that_keeps_the_first_size_is_noticed(spoil):
    outcomes = run(Job(model=MODELS[BASE], **LAYOUTS["TP2+TP1"], **SCHEDULE, spoil=spoil))
    worst = largest_differences(outcomes, reference())
    assert worst["loss" if spoil.startswith("sampler") else "grad_norm"] > 1e-6, worst


def test_control_repeated_steps_with_the_newest_size_are_noticed():
    spoilt = job(SHARDED, spoil="repeated_steps_have_the_newest_batch")
    with pytest.raises(RuntimeError, match="repeated steps consume the same samples"):
        live(spoilt, faults=[kill(1, during="applied", step=4), kill(3, during="step", step=5)])
