"""State that is no tensor is where it would be without a loss: random numbers, and the position in the data."""

import pytest

from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS
from tests.harness.parity.layouts import DROPOUT, MODELS
from tests.harness.parity.live import live
from tests.megatron.test_live import SHARDED, assert_every_sample_once, assert_same_training, job


@pytest.mark.parametrize("kind", ["", SHARDED], ids=["plain", "sharded"])
@pytest.mark.parametrize("model", [None, DROPOUT], ids=["no dropout", "exact dropout"])
def test_generators_and_the_cursor_of_the_data_after_a_recovery_and_a_return(model, kind):
    """Each slot, surviving or rejoined, has the generators of an undisturbed run, and all have consumed the same
    samples."""
    trained = job(more=kind, **({} if model is None else {"model": MODELS[model]}))
    calm, _ = live(trained)
    lived, rows = live(trained, faults=[kill(3, during="backward", step=5)], back={3: 10})
    assert {slot: one.seen.consumed for slot, one in lived.items()} == dict.fromkeys(range(4), STEPS * trained.batch)
    assert {slot: one.seen.drawn_from for slot, one in lived.items()} == {
        slot: one.seen.drawn_from for slot, one in calm.items()
    }
    assert_every_sample_once(rows)
    if model is None:
        assert_same_training(lived)


@pytest.mark.parametrize("kind", ["", SHARDED], ids=["plain", "sharded"])
def test_generators_and_the_cursor_of_the_data_in_a_degraded_layout(kind):
    trained = job(more=kind)
    calm, _ = live(trained)
    lived, _ = live(trained, faults=[kill(3, during="vote", step=5)])
    for slot, one in lived.items():
        assert one.seen.consumed == STEPS * trained.batch
        assert one.seen.drawn_from == calm[slot].seen.drawn_from
