"""A job of any layout resumes a checkpoint of a degraded job as if no rank had been lost, and the other way round.

The reference is stock Megatron that trains all steps in one go.
"""

import dataclasses
import functools

import numpy as np
import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of
from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    FIRST_DEGRADED,
    FIRST_STAGE_LOST,
    HYBRID,
    LAST_DEGRADED,
    MODELS,
    OLD,
    ONE_STAGE_LOST,
    degraded,
    reference,
    uniform,
)
from tests.harness.parity.live import live
from tests.harness.parity.saved import HALF, joined, largest_difference, loading, replica_digests_in, saving

FLOAT64 = BOUNDS["float64"]
TIED = "tied embeddings"


def with_arguments(job, more):
    return dataclasses.replace(job, more=f"{job.more} {more}")


@pytest.fixture(scope="module")
def first_half(tmp_path_factory):
    """Runs a job up to its middle, once: what its ranks saw, and where it saved."""

    @functools.cache
    def half(job):
        folder = tmp_path_factory.mktemp("saved")
        return run(with_arguments(job, saving(folder))), folder

    return half


def whole_run(first_half, first, second, more=""):
    seen, folder = first_half(first)
    return joined(seen, run(with_arguments(second, f"{loading(folder)} {more}")))


def assert_same_training(outcomes, expected, bound=FLOAT64):
    worst = largest_differences(outcomes, run(expected))
    assert max(worst.values()) <= bound, worst


def nominal(model, layout, **options):
    """The nominal layout, without the plugin."""
    return dataclasses.replace(degraded(model, layout, **options), lost=())


@pytest.mark.short
def test_a_nominal_job_resumes_a_checkpoint_of_a_degraded_one(first_half):
    """Adam counts its steps in a number that all parameters share: one that began again would be far off."""
    outcomes = whole_run(first_half, degraded(BASE, "TP2+TP1"), nominal(BASE, "TP2+TP1"))
    assert_same_training(outcomes, uniform(BASE))


def test_a_degraded_job_resumes_a_checkpoint_of_a_nominal_one(first_half):
    outcomes = whole_run(first_half, nominal(BASE, "TP2+TP1"), degraded(BASE, "TP2+TP1"))
    assert_same_training(outcomes, uniform(BASE))


def test_a_degraded_job_resumes_a_checkpoint_of_another_degraded_one(first_half):
    """Four slots that hold several ranges of one tensor each; other replicas, other slots, other widths."""
    outcomes = whole_run(first_half, degraded(BASE, "TP4+TP3"), degraded(BASE, "TP3+TP3"))
    assert_same_training(outcomes, uniform(BASE))


@pytest.mark.parametrize("shared_out", [True, False])
def test_a_checkpoint_of_a_degraded_job_equals_a_nominal_one(first_half, shared_out):
    """Tensor for tensor, of the optimizer as well, whether the replicas share the writing out or one does it all."""
    job = degraded(BASE, "TP4+TP3", more="" if shared_out else "--no-ckpt-fully-parallel-save")
    _, mine = first_half(job)
    _, theirs = first_half(uniform(BASE, tp=2))
    assert any("exp_avg_sq" in name for name in replica_digests_in(theirs))
    assert largest_difference(replica_digests_in(mine), replica_digests_in(theirs)) <= FLOAT64


@pytest.mark.parametrize("model", [OLD, HYBRID, "qk-layernorm"])
def test_models(first_half, model):
    outcomes = whole_run(first_half, degraded(model, "TP2+TP1"), nominal(model, "TP2+TP1"))
    assert_same_training(outcomes, uniform(model))


def test_a_tied_embedding_in_two_stages_of_different_width(first_half):
    outcomes = whole_run(first_half, degraded(TIED, FIRST_DEGRADED), nominal(TIED, FIRST_DEGRADED))
    assert_same_training(outcomes, reference(TIED, FIRST_DEGRADED))
    back = whole_run(first_half, nominal(TIED, FIRST_DEGRADED), degraded(TIED, FIRST_DEGRADED))
    assert_same_training(back, reference(TIED, FIRST_DEGRADED))


def test_bf16_with_its_float32_copies(first_half):
    outcomes = whole_run(first_half, degraded(BASE, "TP2+TP1", **BF16), nominal(BASE, "TP2+TP1", **BF16))
    worst, bounds = largest_differences(outcomes, run(uniform(BASE, **BF16))), bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


def test_each_rank_reads_for_itself_where_replicas_would_share_the_reading(first_half):
    outcomes = whole_run(first_half, degraded(BASE, "TP2+TP1"), degraded(BASE, "TP2+TP1"), "--ckpt-fully-parallel-load")
    assert_same_training(outcomes, uniform(BASE))


SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --dist-ckpt-optim-fully-reshardable"


@pytest.mark.parametrize("route", ["direct", "via_core"])
def test_a_sharded_optimizer(first_half, route):
    """Nominal -> degraded, and degraded -> degraded in another way. Megatron itself cannot load a sharded optimizer
    with torch's Adam, so the checkpoint of a degraded job is compared with that of a nominal one, tensor for tensor."""
    here, there = (degraded(BASE, layout, more=SHARDED, route=route) for layout in ("TP4+TP3", "TP3+TP3"))
    whole = nominal(BASE, "TP4+TP3", more=SHARDED)
    for first, second in ((whole, here), (here, there)):
        assert_same_training(whole_run(first_half, first, second), uniform(BASE))
    mine, theirs = (replica_digests_in(first_half(job)[1]) for job in (here, whole))
    assert any("exp_avg_sq" in name for name in theirs)
    assert largest_difference(mine, theirs) <= FLOAT64


def test_a_sharded_optimizer_of_an_embedding_in_two_stages(first_half):
    """Its rows are held once for both stages."""
    first, second = (degraded(TIED, layout, more=SHARDED) for layout in (FIRST_DEGRADED, LAST_DEGRADED))
    assert_same_training(whole_run(first_half, first, second), reference(TIED, FIRST_DEGRADED))


def test_a_sharded_optimizer_in_buckets_of_another_layout_is_refused(first_half):
    buckets = SHARDED.replace("--dist-ckpt-optim-fully-reshardable", "")
    with pytest.raises(Refused, match="--dist-ckpt-optim-fully-reshardable"):
        whole_run(first_half, nominal(BASE, "TP2+TP1", more=buckets), degraded(BASE, "TP2+TP1", more=buckets))


def test_two_swapped_units_in_a_checkpoint_are_detected(first_half):
    spoilt = degraded(BASE, "TP2+TP1", spoil="units_swapped_in_a_checkpoint")
    _, mine = first_half(spoilt)
    _, theirs = first_half(uniform(BASE, tp=2))
    assert largest_difference(replica_digests_in(mine), replica_digests_in(theirs)) > 1e-3
    outcomes = whole_run(first_half, spoilt, nominal(BASE, "TP2+TP1"))
    assert max(largest_differences(outcomes, run(uniform(BASE))).values()) > 1e-3


@pytest.mark.parametrize("more", ["", SHARDED])
@pytest.mark.parametrize("layout", [ONE_STAGE_LOST, FIRST_STAGE_LOST])
def test_layers_that_have_moved(first_half, layout, more):
    """Saved by stages that have layers of a lost one, and loaded by those that have their own; and the reverse. No
    replica has all stages in the last run, so its weights come from the checkpoint."""
    moved, whole = degraded(BASE, layout, more=more), nominal(BASE, layout, more=more)
    assert_same_training(whole_run(first_half, whole, moved), reference(BASE, layout))
    if not more:  # stock Megatron cannot load a sharded optimizer on a CPU
        assert_same_training(whole_run(first_half, moved, whole), reference(BASE, layout))
    nobody = dataclasses.replace(moved, lost=("r0.s1,r1.s2",))
    assert_same_training(whole_run(first_half, moved, nobody), reference(BASE, layout))


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"])
def test_a_live_job_saves_after_a_loss(tmp_path, more):
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=f"{saving(tmp_path)} {more}")
    lived, _ = live(job, faults=[kill(3, during="backward", step=5)])
    assert {slot: one.width for slot, one in lived.items()} == {0: 2, 1: 2, 2: 1}
    first = {slot: one.seen for slot, one in lived.items()}
    assert all(len(seen.norms) == HALF for seen in first.values())
    goes_on = degraded if more else nominal  # Megatron itself cannot load a sharded optimizer with torch's Adam
    second = run(with_arguments(goes_on(BASE, "TP2+TP1", more=more), loading(tmp_path)))
    assert_same_training(joined(first, second), uniform(BASE))


@pytest.fixture(scope="module")
def every_step(tmp_path_factory):
    """Runs a job up to its middle, once, and has it save after every step: where it did."""

    @functools.cache
    def saved(job):
        folder = tmp_path_factory.mktemp("every-step")
        run(with_arguments(job, saving(folder).replace(f"--save-interval {HALF}", "--save-interval 1")))
        return folder

    return saved


FAULT_POINTS = ["step", "forward", "backward", "reduce", "reduced", "vote", "apply", "applied", "between"]


@pytest.mark.parametrize("slot", range(4))
@pytest.mark.parametrize(
    ("more", "fault_point"),
    [
        *(("", fault_point) for fault_point in FAULT_POINTS),
        *((SHARDED, fault_point) for fault_point in (*FAULT_POINTS, "gather")),
    ],
)
def test_after_a_loss_a_run_equals_a_planned_degraded_run_bit_for_bit(every_step, more, fault_point, slot):
    """Which step is the first that the degraded job took, whether for the first time or again, is seen by who drew
    samples in the new epoch; the planned run begins from a checkpoint of the step before that one."""
    lost, two = ("r0.s0.t0", "r0.s0.t1", "r1.s0.t0", "r1.s0.t1")[slot], {"tp": 2, "dp": 2}
    folder = every_step(nominal(BASE, two, more=more))
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=more)
    lived, rows = live(job, faults=[kill(slot, during=fault_point, step=HALF)])
    first = min(step for what, step, epoch, _ in rows if what == "drawn" and epoch)
    assert first in ((HALF, HALF + 1) if not more else (HALF - 1, HALF, HALF + 1))
    asked = f"{loading(folder)} --ckpt-step {first - 1}"
    planned = run(with_arguments(degraded(BASE, {**two, "lost": (lost,)}, more=more), asked))
    alike = STEPS - HALF  # steps up to there may have been recorded before the loss
    assert len(lived) == len(planned) == 3
    for expected, (_, one) in zip(planned.values(), sorted(lived.items()), strict=True):
        assert one.seen.norms[-alike:] == expected.norms[-alike:]
        assert one.seen.losses[-alike:] == expected.losses[-alike:]
        for name, part in expected.parts.items():
            assert np.array_equal(one.seen.parts[name].values, part.values), name


TORCH = "--ckpt-format torch"


@pytest.mark.parametrize("more", ["", "--use-distributed-optimizer"], ids=["plain", "sharded"])
def test_one_file_for_each_slot_while_none_is_lost_and_whole_tensors_else(tmp_path, more):
    """`--ckpt-format torch`: saved after 4, 8, 12 ... steps, with a slot lost from step 6 to 10."""
    saves = f"{TORCH} --save {tmp_path} --save-interval 4 {more}"
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=saves)
    lived, _ = live(job, faults=[kill(3, during="backward", step=6)], back={3: 12})
    assert len(lived) == 4
    kinds = {
        int(folder.name.removeprefix("iter_")): "whole" if (folder / ".metadata").exists() else "files"
        for folder in tmp_path.glob("iter_*")
    }
    assert kinds == {4: "files", 8: "whole", 12: "files", 16: "files", 20: "files"}


@pytest.mark.parametrize("step", [pytest.param(4, id="files"), pytest.param(8, id="whole", marks=pytest.mark.short)])
def test_a_job_resumes_from_either(tmp_path, step):
    """A job ends after this many steps; a slot is lost in step 6. The next one has the same arguments."""
    more = f"{TORCH} --save {tmp_path} --save-interval 4 --exit-interval {step} --load {tmp_path}"
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=more)
    first, _ = live(job, faults=[kill(3, during="backward", step=6)] if step > 6 else ())
    second = run(dataclasses.replace(job, more=more.replace(f"--exit-interval {step}", "")))
    assert_same_training(joined({rank: one.seen for rank, one in first.items()}, second), uniform(BASE))


def test_files_of_slots_are_refused_where_slots_are_lost(tmp_path):
    whole = Job(model=MODELS[BASE], tp=2, dp=2, more=f"{TORCH} {saving(tmp_path)}")
    run(whole)
    with pytest.raises(Refused, match="one file for each slot"):
        run(degraded(BASE, "TP2+TP1", more=f"{TORCH} {loading(tmp_path)}"))
