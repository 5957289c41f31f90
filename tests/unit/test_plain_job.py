"""How the handle of a plain loop acts after a recovery that has already applied the step."""

import types

import pytest

from ntp_plugin.plain.job import ElasticJob


class Driver:
    """One recovery comes before the first attempt, or between two."""

    def __init__(self, recovers, *, interrupts=False):
        self.target_epoch, self._recovers, self._interrupts = 0, recovers, interrupts

    def run_with_recovery(self, step):
        if self._interrupts:
            step()
        self.target_epoch += 1
        self._recovers()
        return step()


def job(**options):
    taken, compared = [], []
    trainer = types.SimpleNamespace(applied=4, loss=0.5)

    def step():
        taken.append(trainer.applied + 1)
        trainer.applied += 1
        return 0.25

    def roll_forward():
        trainer.applied += options.get("applies", 0)

    trainer.step = step
    watch = types.SimpleNamespace(look=lambda _: None, before_it_counts=compared.append)
    driver = Driver(roll_forward, interrupts=options.get("interrupts", False))
    return ElasticJob(trainer, driver, watch), taken, compared


@pytest.mark.parametrize(("applies", "loss", "taken"), [(1, 0.5, []), (0, 0.25, [5])])
def test_a_step_that_a_recovery_has_applied_is_not_followed_by_another_in_the_same_call(applies, loss, taken):
    """Others have returned from it, and may be at the end of the job."""
    elastic, took, _ = job(applies=applies)
    assert (elastic.step(), took, elastic.steps_done) == (loss, taken, 5)


@pytest.mark.parametrize(("interrupts", "times"), [(True, 1), (False, 0)])
def test_a_comparison_that_a_loss_interrupts_is_not_made_again(interrupts, times):
    """Others may have come through it; a recovery compares what all hold."""
    elastic, _, compared = job(interrupts=interrupts)
    elastic.compare()
    assert compared == [4] * times
