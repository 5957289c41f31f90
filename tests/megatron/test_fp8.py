"""FP8 (`--fp8-format`) in replicas of different width, planned and live.

FP8 rounds differently at each width, in stock Megatron too: maxima of other tensors decide its scales. So the bound is
a multiple of what stock Megatron shows between uniform widths on the same samples, measured here.
TransformerEngine's own layers run in the CPU emulation: casts are a GPU's, products are torch's.
"""

import functools
import itertools

import pytest

from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import FP8_CURRENT, FP8_DELAYED, FP8_HISTORY, WITH_TE, degraded
from tests.harness.parity.live import as_if_always_there, live

NOISE = 4
"""How many times the difference between two uniform widths a degraded run may be from its reference."""
SP = "--sequence-parallel"
FLOAT32 = {"dtype": "float32"}


def uniform(model, tp, more=""):
    return run(Job(model=WITH_TE[model], tp=tp, more=more, **FLOAT32))


@functools.cache
def floor(model, more=""):
    """The largest relative difference of a loss between stock Megatron at two of TP1, TP2 and TP4."""
    pairs = itertools.combinations((1, 2, 4), 2)
    found = max(
        largest_differences(uniform(model, one, more), uniform(model, other, more))["loss"] for one, other in pairs
    )
    assert 1e-6 < found < 1e-3, "FP8 rounds, and the model trains"
    return found


def apart(outcomes, model=FP8_DELAYED):
    """The same between this run and stock Megatron at TP2, in multiples of that."""
    return largest_differences(outcomes, uniform(model, 2))["loss"] / floor(model)


def same_scales(outcomes):
    """Whether all ranks have the same scales; all are of one stage."""
    found = {seen.fp8_scales for seen in outcomes.values()}
    return len(found) == 1 and "" not in found


@pytest.mark.parametrize(
    ("model", "layout", "more"),
    [
        (FP8_DELAYED, "TP2+TP1", ""),
        (FP8_DELAYED, "TP4+TP3", SP),
        (FP8_HISTORY, "TP3+TP3", SP),
        (FP8_CURRENT, "TP2+TP1", ""),
        (FP8_CURRENT, "TP4+TP3", SP),
    ],
)
def test_a_degraded_layout_trains_as_the_reference_but_for_fp8s_noise(model, layout, more):
    """With sequence parallelism and three slots, each stores 16 rows of 32: the last has pads alone."""
    outcomes = run(degraded(model, layout, more=more, **FLOAT32))
    assert apart(outcomes, model) <= NOISE
    assert same_scales(outcomes) == (model != FP8_CURRENT)


@pytest.mark.parametrize("model", [FP8_DELAYED, FP8_CURRENT])
def test_a_nominal_layout_runs_stock_megatron(model):
    """The same bits and the same collectives, with the plugin on and off."""
    off, on = (run(Job(model=WITH_TE[model], tp=2, dp=2, enabled=enabled, **FLOAT32)) for enabled in (False, True))
    assert max(largest_differences(on, off).values()) == 0
    assert [seen.collectives for seen in on.values()] == [seen.collectives for seen in off.values()]


def test_control_a_replica_that_weighs_too_much_is_noticed():
    assert apart(run(degraded(FP8_DELAYED, "TP2+TP1", spoil="scale_by_replicas", **FLOAT32))) > NOISE


def test_control_scales_that_a_replica_does_not_update_are_noticed():
    assert apart(run(degraded(FP8_DELAYED, "TP2+TP1", spoil="scales_of_a_replica_stay", **FLOAT32))) > NOISE


def test_a_replica_may_split_its_micro_batches():
    """Slots then store a multiple of 8 rows of each piece, and of 16 all together: pieces have two sequences."""
    whole = "--calculate-per-token-loss --micro-batch-size 4 --global-batch-size 24"
    outcomes = run(degraded(FP8_CURRENT, "TP4+TP3", more=f"{SP} {whole} --ntp-gpu-memory-gb 0.003", **FLOAT32))
    assert {seen.share for seen in outcomes.values() if seen.replica == 1} == {(4, 2)}
    difference = largest_differences(outcomes, uniform(FP8_CURRENT, 2, whole))["loss"]
    assert difference <= NOISE * floor(FP8_CURRENT, whole)


def test_two_replicas_that_each_begin_without_scales():
    """Each replica quantizes its first micro-batch with scales of 1, which are coarse for gradients in E4M3: one of six
    micro-batches in one replica, two in two, in stock Megatron too. So the reference is the job with nobody lost."""
    nominal = run(Job(model=WITH_TE[FP8_HISTORY], tp=4, dp=2, **FLOAT32))
    outcomes = run(degraded(FP8_HISTORY, "TP4+TP2", **FLOAT32))
    assert largest_differences(outcomes, nominal)["loss"] / floor(FP8_HISTORY) <= NOISE
    assert same_scales(outcomes)


@pytest.mark.parametrize(
    ("model", "fault_point", "more"),
    [
        pytest.param(FP8_DELAYED, "backward", "", marks=pytest.mark.short),
        (FP8_HISTORY, "vote", SP),
        (FP8_DELAYED, "forward", "--use-distributed-optimizer"),
        (FP8_CURRENT, "backward", SP),
    ],
)
def test_a_rank_dies_and_rejoins(model, fault_point, more):
    """The step begins again with the scales that it had, and the joining rank gets them from the others."""
    job = Job(model=WITH_TE[model], tp=2, dp=2, enabled=True, more=more, **FLOAT32)
    lived, _ = live(job, faults=[kill(3, during=fault_point, step=3)], back={3: 5})
    outcomes = as_if_always_there(lived)
    assert {slot: one.width for slot, one in lived.items()} == dict.fromkeys(range(4), 2)
    assert apart(outcomes, model) <= NOISE
    assert same_scales(outcomes) == (model != FP8_CURRENT)


def test_an_idle_rank_gets_the_scales_of_those_who_trained():
    job = Job(model=WITH_TE[FP8_DELAYED], tp=2, dp=2, enabled=True, more="--ntp-min-tp-width 2", **FLOAT32)
    lived, _ = live(job, faults=[kill(3, during="backward", step=3)], back={3: 5})
    outcomes = as_if_always_there(lived)
    assert apart(outcomes) <= NOISE
    assert same_scales(outcomes)
