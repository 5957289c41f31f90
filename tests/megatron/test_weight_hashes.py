"""Megatron's own comparison of weights (`--check-weight-hash-...-interval`), through losses and returns."""

import pytest

from ntp_plugin.errors import SilentCorruption
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import run
from tests.harness.parity.layouts import BASE, degraded, uniform
from tests.harness.parity.live import live
from tests.megatron.test_live import KINDS, assert_same_training, job

HASHES = "--check-weight-hash-across-dp-replicas-interval 2 --ntp-watch-steps 0"


@KINDS
@pytest.mark.parametrize("slot", [1, 3])
def test_a_job_compares_before_and_after_a_loss_and_a_return(kind, slot):
    lived, _ = live(job(more=f"{HASHES} {kind}"), faults=[kill(slot, during="backward", step=5)], back={slot: 14})
    assert len(lived) == 4
    assert_same_training(lived)


@KINDS
def test_a_rank_dies_in_the_comparison(kind):
    """The section after step 2 is the comparison; with parameters on their way, one before it waits for them."""
    lived, _ = live(job(more=f"{HASHES} {kind}"), faults=[kill(1, during="vote", step=4)])
    assert len(lived) == 3
    assert_same_training(lived)


def test_an_idle_rank_takes_part():
    more = f"{HASHES} --ntp-min-tp-width 2"
    lived, _ = live(job(more=more), faults=[kill(2, during="backward", step=5)], back={2: 14})
    assert_same_training(lived)


def test_a_planned_job_compares():
    layout = {"tp": 4, "dp": 2, "lost": ("r1.s0.t2",)}
    assert run(degraded(BASE, layout, more=HASHES))[0].losses == pytest.approx(run(uniform(BASE))[0].losses, rel=1e-12)


@pytest.mark.parametrize(
    "faults",
    [
        pytest.param((), id="nobody is lost"),
        pytest.param((kill(1, during="backward", step=4),), id="degraded", marks=pytest.mark.short),
    ],
)
def test_control_a_flipped_bit_is_found(faults):
    """By Megatron while nobody is lost, and by the plugin's comparison in a degraded layout."""
    found = "differs between 2 replicas after step" if faults else "Parameter hashes not matching"
    with pytest.raises((SilentCorruption, RuntimeError), match=found):
        live(job(spoil="a_bit_flips", more=HASHES), faults=faults)
