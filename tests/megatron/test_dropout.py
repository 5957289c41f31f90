"""With exact masks, which are the default, a degraded run drops what the uniform one drops.

The reference is one full-width replica of TP 4 with exact masks and without a loss. tests/unit/test_dropout.py shows
that these masks are good.
"""

import dataclasses

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.errors import Refused
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, DROPOUT, MODELS, OPTIONS, SEQUENCE, degraded, uniform

FLOAT64 = BOUNDS["float64"]
PER_TOKEN = "--calculate-per-token-loss"
SELECTIVE = "--recompute-granularity selective"
DROPS = "--hidden-dropout 0.1 --attention-dropout 0.1"


def worst(outcomes, reference):
    return max(largest_differences(outcomes, reference).values())


@pytest.mark.parametrize("layout", ["TP4+TP3", "TP3+TP3", "TP2+TP1"])
def test_the_same_training(layout):
    assert worst(run(degraded(DROPOUT, layout)), run(uniform(DROPOUT))) <= FLOAT64


@pytest.mark.parametrize(
    ("option", "layout"),
    [
        (OPTIONS["recompute"], "TP4+TP3"),
        (SELECTIVE, "TP3+TP3"),
        (f"{OPTIONS['recompute']} {OPTIONS['distributed optimizer, overlap']}", "TP3+TP3"),
    ],
)
def test_options_make_no_difference(option, layout):
    assert worst(run(degraded(DROPOUT, layout, more=option)), run(uniform(DROPOUT))) <= FLOAT64


def test_micro_batches_of_two_samples_draw_the_masks_of_single_samples():
    eight = f"--global-batch-size 8 {PER_TOKEN}"
    outcomes = run(degraded(DROPOUT, "TP4+TP3", more=f"{eight} --micro-batch-size 2"))
    assert worst(outcomes, run(uniform(DROPOUT, more=eight))) <= FLOAT64


@pytest.mark.parametrize("more", ["", OPTIONS[SEQUENCE]])
def test_healthy_replicas_of_another_width_draw_the_same(more):
    assert worst(run(Job(model=MODELS[DROPOUT], tp=2, dp=2, more=more)), run(uniform(DROPOUT))) <= FLOAT64


def test_pipelined_micro_batches_keep_their_samples_while_others_are_under_way():
    """Two replicas of two stages that recompute their activations in the backward, against one that does not."""
    reference = run(Job(model=MODELS[DROPOUT], tp=2, pp=2))
    outcomes = run(Job(model=MODELS[DROPOUT], tp=1, pp=2, dp=2, more=OPTIONS["recompute"]))
    (losses,) = {tuple(seen.losses) for seen in reference.values() if seen.losses}
    assert sorted(len(seen.losses) for seen in outcomes.values()) == [0, 0, STEPS, STEPS], "two stages"
    for seen in outcomes.values():
        assert seen.norms == pytest.approx(reference[0].norms, rel=FLOAT64, abs=0)
        assert not seen.losses or seen.losses == pytest.approx(losses, rel=FLOAT64, abs=0)


def test_something_is_dropped():
    """Without dropout all of this would hold trivially."""
    assert worst(run(uniform(DROPOUT)), run(uniform(BASE))) > 1e-2


def test_masks_of_the_slots_own_generator_are_another_training():
    assert worst(run(degraded(DROPOUT, "TP4+TP3", spoil="masks_of_the_slot")), run(uniform(DROPOUT))) > 1e-2


def test_in_a_healthy_layout_the_frameworks_masks_stay():
    """The same bits with the plugin on and off."""
    off = Job(model=f"{MODELS[BASE]} {DROPS}", tp=2, dp=2)
    assert worst(run(dataclasses.replace(off, enabled=True, more="--ntp-dropout framework")), run(off)) == 0


def test_masks_are_exact_by_default():
    job = Job(model=f"{MODELS[BASE]} {DROPS}", tp=2, dp=2, enabled=True)
    assert worst(run(job), run(uniform(DROPOUT))) <= FLOAT64


@pytest.mark.short
def test_the_frameworks_masks_are_refused_in_a_degraded_one():
    with pytest.raises(Refused, match=r"--hidden-dropout 0.1 would draw other masks.*Fix: .*--ntp-dropout auto"):
        run(degraded(BASE, "TP2+TP1", more=f"{DROPS} --ntp-dropout framework"))
