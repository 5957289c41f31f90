"""Megatron's own TensorBoard shows a recovery, and its numbers of a degraded layout; the tests read its event file."""

import dataclasses

import pytest

from ntp_plugin.telemetry import Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, run
from tests.harness.parity.layouts import BASE, MODELS, degraded, uniform
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


LOGGED = "--log-params-norm --log-num-zeros-in-grad --log-interval 1"
SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
ROUNDING = 1e-6
"""Megatron writes scalars in float32, and sums their squares in float32 as well."""


def logged_by(job, folder, play=run, **options):
    """What Megatron logs of all gradients and parameters: step -> number, of each."""
    more = f"{job.more} {LOGGED} --tensorboard-dir {folder}"
    play(dataclasses.replace(job, more=more), **options)
    logged = values_in(folder)
    return dict(logged["num-zeros"]), dict(logged["params-norm"])


def assert_same_numbers(found, expected, *, left_out=frozenset(), norms_of=range(1, STEPS + 1)):
    """Zeros are counted exactly. A norm may be left out of steps that a loss followed."""
    (zeros, norms), (expected_zeros, expected_norms) = found, expected
    assert len(set(expected_zeros.values())) > 1, "a constant would show nothing"
    assert zeros == expected_zeros
    assert set(norms_of) - norms.keys() <= left_out
    compared = set(norms_of) & norms.keys()
    assert [norms[step] for step in compared] == pytest.approx(
        [expected_norms[step] for step in compared], rel=ROUNDING
    )


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    return logged_by(uniform(BASE), tmp_path_factory.mktemp("uniform"))


@pytest.mark.parametrize(
    "layout", [{"tp": 4, "dp": 2, "lost": ("r1.s0.t2",)}, {"tp": 2, "dp": 2, "pp": 2, "lost": ("r0.s1.t0",)}]
)
@pytest.mark.parametrize(
    "option",
    [
        pytest.param("", id="plain"),
        pytest.param(SHARDED, id="sharded"),
        pytest.param(OVERLAP, id="overlap"),
    ],
)
def test_a_degraded_layout_logs_the_reference_runs_zeros_and_parameter_norms(tmp_path, expected, layout, option):
    if "pp" in layout:  # each stage draws its weights by itself
        expected = logged_by(uniform(BASE, tp=2, pp=2), tmp_path / "uniform")
    assert_same_numbers(logged_by(degraded(BASE, layout, more=option), tmp_path / "degraded"), expected)


@pytest.mark.parametrize(
    ("option", "fault_point"),
    [
        pytest.param(option, fault_point, marks=[pytest.mark.short] * (option == SHARDED and fault_point == "apply"))
        for option in ("", SHARDED, OVERLAP)
        for fault_point in ("backward", "apply", "applied", "between")
    ],
)
def test_a_live_job_logs_them_through_a_loss_and_a_return(tmp_path, expected, option, fault_point):
    """Where parameters arrive late, Megatron itself logs norms of some old ones while nobody is lost."""
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more=option)
    found = logged_by(job, tmp_path, live, faults=[kill(1, during=fault_point, step=5)], back={1: 12})
    norms_of = range(6, 12) if option == OVERLAP else range(1, STEPS + 1)
    assert_same_numbers(found, expected, left_out={4, 5}, norms_of=norms_of)


def test_a_norm_may_be_a_tensor_as_transformer_engines_kernels_give_it():
    """A rank that a loss keeps from the rest of its step logs the norm that it remembers."""
    job = Job(model=MODELS[BASE], tp=1, dp=2, pp=2, enabled=True, under="norms_are_tensors")
    lived, _ = live(job, faults=[kill(1, during="applied", step=5)])
    assert len(lived) == 3


def test_a_rank_that_is_idle_and_writes_the_log_has_the_number_of_zeros(tmp_path, expected):
    job = Job(model=MODELS[BASE], tp=2, dp=2, enabled=True, more="--ntp-min-tp-width 2")
    found = logged_by(job, tmp_path, live, faults=[kill(2, during="backward", step=5)])
    assert_same_numbers(found, expected, left_out=set(range(5, STEPS + 1)))
