"""Megatron's own TensorBoard shows a recovery; the test reads its event file."""

import pytest

from ntp_plugin.telemetry import Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.parity.live import live

pytest.importorskip("tensorboard", reason="without it Megatron writes no TensorBoard")


def values_in(folder):
    """Name -> step and value of each entry, in order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: PLC0415

    read = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    read.Reload()
    return {name: [(at.step, at.value) for at in read.Scalars(name)] for name in read.Tags()["scalars"]}


@pytest.mark.short
def test_a_recovery_is_in_megatrons_own_tensorboard(tmp_path):
    more = f"--ntp-events {tmp_path / 'events'} --tensorboard-dir {tmp_path / 'board'}"
    live(Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=more), faults=[kill(1, during="backward", step=5)])
    logged = values_in(tmp_path / "board")
    ours = {name: values for name, values in logged.items() if name.startswith("ntp/")}
    writer = [one.event for one in Follower(tmp_path / "events").news() if one.slot == "r1.s0.t1"]
    (recovered,) = [event for event in writer if isinstance(event, Recovered)]
    assert ours.pop("ntp/recovery_s") == [(5, pytest.approx(recovered.seconds, rel=1e-6))]
    assert ours == {
        "ntp/epoch": [(5, 1.0)],
        "ntp/lost": [(5, 1.0)],
        "ntp/width/r0": [(5, 1.0)],
        "ntp/width/r1": [(5, 2.0)],
    }
    steps = [step for step, _ in logged["lm loss"]]
    assert steps == sorted(set(steps)), "Megatron's own are told once for each step, the one that was taken again too"
