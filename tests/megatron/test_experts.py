"""Live jobs with layers of experts: a replica is lost, its experts are dealt to the others of its expert group, and it
comes back.

The reference is stock Megatron in the same layout, with nobody lost: which weights experts begin with depends on it.
"""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import HALF, joined, largest_difference, loading, replica_digests_in, saving
from tests.megatron.test_logs import values_in

FLOAT64 = BOUNDS["float64"]
MODEL = f"{MODELS[BASE]} --transformer-impl transformer_engine"
ROUTER = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-dtype fp64"
AUX = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
SINKHORN = "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1"
BIASED = "--moe-router-load-balancing-type none --moe-router-score-function sigmoid --moe-router-enable-expert-bias"
GROUPED, A2A = "--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall"
EP2, EP4, SP = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4", "--sequence-parallel"
PER_TOKEN = "--calculate-per-token-loss"
IN_ONE_BUCKET = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHARDED = f"{IN_ONE_BUCKET} --ddp-bucket-size 9000"
OF_TWO = f"{GROUPED} {A2A} {EP2}"


def job(more=OF_TWO, *, router=f"{ROUTER} {AUX}", **options):
    """Four replicas; by default two expert groups of two."""
    return Job(model=MODEL, more=f"{router} {more}", **{"tp": 1, "dp": 4, "batch": 8, "enabled": True} | options)


def worst_of(lived, job):
    """The largest difference; an idle rank of a first stage takes itself for the last one meanwhile."""
    seen = {
        slot: one if len(one.losses) == STEPS else dataclasses.replace(one, losses=[])
        for slot, one in as_if_always_there(lived).items()
    }
    return max(largest_differences(seen, run(reference(job))).values())


def reference(job):
    """Exact masks are in it as well: they make the runs equal."""
    return dataclasses.replace(job, enabled=False, spoil="")


def lose(job, *slots, fault_point="backward", back=True):
    faults = [kill(slot, during=fault_point, step=4) for slot in slots]
    lived, _ = live(job, faults=faults, back=dict.fromkeys(slots, 12) if back else {})
    assert len(lived) == job.processes - (0 if back else len(slots))
    return lived


@pytest.mark.parametrize("fault_point", ["forward", "reduce", "vote", "apply", "applied"])
def test_a_replica_is_lost_at_each_fault_point_and_comes_back(fault_point):
    assert worst_of(lose(job(), 1, fault_point=fault_point), job()) <= FLOAT64


@pytest.mark.short
def test_the_experts_of_a_lost_slot_go_to_the_others_of_its_group():
    """One expert group: what the lost slot held comes from its copies, and replicas run padding."""
    one_group = job(f"{GROUPED} {A2A} {EP4}")
    assert worst_of(lose(one_group, 1), one_group) <= FLOAT64


@pytest.mark.parametrize(
    ("one", "lost"),
    [
        pytest.param(job(f"{A2A} {EP2}"), [1], id="expert by expert"),
        pytest.param(job(EP2, router=f"{ROUTER} {SINKHORN}"), [1], id="all-gather, sinkhorn"),
        pytest.param(
            job(f"{GROUPED} {A2A} {EP4} --expert-tensor-parallel-size 1 {SP}", tp=2, dp=2), [1], id="TP, ETP 1"
        ),
        pytest.param(job(f"{GROUPED} {EP2} {SP}", tp=2, dp=2), [2], id="TP, columns cut as well"),
        pytest.param(job(f"{OF_TWO} {SHARDED}"), [1], id="distributed optimizer"),
        pytest.param(job(f"{OF_TWO} {PER_TOKEN}"), [2], id="per token"),
        pytest.param(job(pp=2, dp=2), [1], id="pipeline"),
        pytest.param(job(f"{OF_TWO} --moe-layer-freq [0,1]", pp=2, dp=2), [1], id="a stage without experts"),
        pytest.param(job(f"{GROUPED} {A2A} {EP4}"), [0, 3], id="two of a group"),
        pytest.param(job(), [2, 3], id="a whole expert group"),
        pytest.param(job(f"{GROUPED} {A2A} {SP}", tp=2, dp=2), [3], id="EP 1"),
        pytest.param(job(f"{GROUPED} {A2A} {SP} --expert-tensor-parallel-size 1", tp=2, dp=2), [3], id="EP 1, ETP 1"),
        pytest.param(
            job(f"{OF_TWO} --recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
            [1],
            id="recomputed",
        ),
        pytest.param(
            job(f"{OF_TWO} --moe-shared-expert-intermediate-size 48 --moe-shared-expert-gate"), [1], id="shared expert"
        ),
        pytest.param(
            job(f"{OF_TWO} --moe-shared-expert-intermediate-size 48 --moe-shared-expert-overlap"),
            [1],
            id="shared expert, overlapped",
        ),
        pytest.param(
            job(
                OF_TWO,
                router=f"{ROUTER} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2"
                " --moe-z-loss-coeff 1e-3 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2"
                " --moe-router-num-groups 2 --moe-router-group-topk 1",
            ),
            [1],
            id="by sequence, z-loss, groups",
        ),
        pytest.param(job(router=f"{ROUTER} {BIASED}"), [1], id="bias"),
        pytest.param(job(router=f"{ROUTER} {BIASED}", pp=2, dp=2), [1], id="bias, in a pipeline"),
        pytest.param(
            job(f"{OF_TWO} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"), [1], id="capacity"
        ),
        pytest.param(job(f"{OF_TWO} --hidden-dropout 0.1 --ntp-dropout exact --ntp-enable"), [1], id="exact masks"),
        pytest.param(job(f"{OF_TWO} {PER_TOKEN}", cp=2, dp=2), [1], id="context groups"),
        pytest.param(job(chunks=2, pp=2, dp=2), [1], id="interleaved"),
        pytest.param(job(f"{GROUPED} {A2A} {EP4} --mtp-num-layers 1"), [1], id="multi-token prediction"),
    ],
)
def test_a_replica_is_lost_and_comes_back(one, lost):
    assert worst_of(lose(one, *lost), one) <= FLOAT64


@pytest.mark.parametrize("fault_point", ["reduced", "applied"])
def test_the_bias_of_experts_is_that_of_completed_steps(fault_point):
    """Between the counts and the vote, and after the step."""
    biased = job(router=f"{ROUTER} {BIASED} --moe-router-bias-update-rate 0.1")
    assert worst_of(lose(biased, 1, fault_point=fault_point), biased) <= FLOAT64


def test_a_step_without_padding_follows_one_with():
    """Three replicas share 8 micro-batches unevenly, and 12 evenly."""
    growing = job(f"{GROUPED} {A2A} {EP4}", schedule="0:8,1280:12", samples=200)
    assert worst_of(lose(growing, 1, back=False), growing) <= FLOAT64


def test_a_bias_that_is_not_restored_is_noticed():
    biased = job(router=f"{ROUTER} {BIASED} --moe-router-bias-update-rate 0.1", spoil="bias_stays_after_a_recovery")
    assert worst_of(lose(biased, 1), biased) > 1e3 * FLOAT64


@pytest.mark.parametrize(
    "spoil", ["experts_swapped", "padding_adds_to_the_loss", "padding_weighs_as_others", "experts_weigh_by_groups"]
)
def test_controls_are_noticed(spoil):
    spoilt = job(f"{GROUPED} {A2A} {EP4}", spoil=spoil)
    assert worst_of(lose(spoilt, 1, back=False), spoilt) > 1e3 * FLOAT64


@pytest.mark.parametrize(
    "more", [OF_TWO, f"{A2A} {EP2}", f"{OF_TWO} {IN_ONE_BUCKET}"], ids=["grouped", "one by one", "sharded"]
)
def test_a_checkpoint_of_a_reduced_group_is_that_of_all(tmp_path, more):
    """Equal to stock Megatron's, and a nominal job goes on with it. Of a sharded optimizer in several buckets stock
    Megatron itself saves other values than it has: its optimizer's copy of a weight is not the weight."""
    sharded = " --dist-ckpt-optim-fully-reshardable" if "--use-distributed" in more else ""
    one = job(f"{more}{sharded}")
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
    one = job()
    lose(dataclasses.replace(one, more=f"{one.more} --tensorboard-dir {lived_in}"), 1)
    run(dataclasses.replace(one, enabled=False, more=f"{one.more} --tensorboard-dir {stock_in}"))
    found, expected = (dict(values_in(folder)[name]) for folder in (lived_in, stock_in))
    assert len(found) >= STEPS - 2
    assert found == {step: pytest.approx(expected[step], rel=1e-6) for step in found}


def test_with_nobody_lost_it_is_stock_megatron():
    """The same bits and the same collectives, with the plugin on and off."""
    off, on = (run(dataclasses.replace(job(), enabled=enabled)) for enabled in (False, True))
    assert {rank: (seen.losses, seen.norms) for rank, seen in on.items()} == {
        rank: (seen.losses, seen.norms) for rank, seen in off.items()
    }
    assert {rank: seen.collectives for rank, seen in on.items()} == {
        rank: seen.collectives for rank, seen in off.items()
    }
