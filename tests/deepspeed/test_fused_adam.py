"""DeepSpeed's own Adam, its default: it counts the steps of a group in one parameter."""

import dataclasses

import pytest
import torch

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from ntp_plugin.training.optimizers import Numbers, element_wise, refuse_unknown_state
from tests.deepspeed.halves import HALVES
from tests.deepspeed.test_tensor_parallel_zero import SCALED
from tests.harness.zero import fused_adam
from tests.harness.zero.compare import assert_same_training, differences
from tests.harness.zero.job import Job, have_deepspeed_imported, run


def job(**options):
    return Job(**{"ranks": 4, "dtype": "float32", "fused_adam": "known", **options})


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_a_killed_rank_rejoins(stage):
    outcomes, rows = run(job(stage=stage), faults=[kill(1, during="backward", step=6)], back={1: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, job(stage=stage))


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.short), 2])
def test_a_killed_slot_rejoins(stage):
    """While it is lost its replica has several shards in a group, one of which is counted."""
    spec = job(stage=stage, tp=2)
    outcomes, rows = run(spec, faults=[kill(1, during="backward", step=6)], back={1: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, spec)


def assert_no_further_than_torchs(spec, faults, back):
    """At other widths the order of sums is another one, for any Adam."""
    found, of_torchs = (
        differences(*run(one, faults=faults, back=back), one)
        for one in (spec, dataclasses.replace(spec, fused_adam=""))
    )
    assert all(found[key] <= 4 * of_torchs[key] for key in found), (found, of_torchs)


def test_one_after_the_other_from_copies():
    faults = [kill(2, during="backward", step=4), kill(0, during="applied", step=7)]
    assert_no_further_than_torchs(job(stage=1, tp=4), faults, {2: 12})


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("stage", "tp"), [(0, 1), (1, 2)])
def test_in_half_precision(stage, tp, dtype):
    """Without ZeRO DeepSpeed wraps it in another optimizer than torch's, which makes all parameters one."""
    spec = job(stage=stage, tp=tp, dtype=dtype, more=SCALED if dtype == "float16" else ())
    assert_no_further_than_torchs(spec, [kill(1, during="backward", step=6)], {1: 12})


def test_on_a_cpu_it_is_refused_where_replicas_of_different_width_would_differ():
    with pytest.raises(Refused, match=r"DeepSpeed's FusedAdam on a CPU rounds an element by its place.*torch_adam"):
        run(job(fused_adam="refused", tp=2))


@pytest.mark.parametrize("stage", [0, 1])
def test_the_cpus_own_kernel(stage):
    """Replicas of one width are alike, and with ZeRO one rank steps each element."""
    spec = job(stage=stage, fused_adam="own")
    outcomes, rows = run(spec, faults=[kill(1, during="backward", step=6)], back={1: 12})
    assert_same_training(outcomes, rows, spec)


def test_state_of_fused_adam_is_in_the_table(monkeypatch):
    """The step of the last parameter of a group counts for all three."""
    have_deepspeed_imported()
    from deepspeed.ops.adam import fused_adam as deepspeeds  # noqa: PLC0415

    monkeypatch.setattr(deepspeeds, "FusedAdamBuilder", fused_adam.Builder)
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(3)]
    optimizer = deepspeeds.FusedAdam(parameters)
    for _ in range(2):
        for parameter in parameters:
            parameter.grad = torch.ones(3)
        optimizer.step()
    assert [optimizer.state[parameter]["step"] for parameter in parameters] == [0, 0, 2], "which is DeepSpeed's own way"
    assert [Numbers(optimizer).of(parameter) for parameter in parameters] == [{"step": 2}] * 3
    for parameter in parameters:
        refuse_unknown_state(element_wise(optimizer), "w", parameter, optimizer.state[parameter])
