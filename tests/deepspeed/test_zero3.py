"""ZeRO-3: what is different where the parameters themselves are sharded. `test_live.py` has the fault points."""

import dataclasses
import json
import math

import pytest
import torch

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.harness.zero.compare import BOUNDS, assert_same_training, differences, of_weights
from tests.harness.zero.job import Job, Play, run, undisturbed

THREE = Job(stage=3)


def loses_one(job, *, slot=1, during="gather-backward", step=6, back=None):
    outcomes, rows = run(job, faults=[kill(slot, during=during, step=step)], back=back)
    assert_same_training(outcomes, rows, job)
    return outcomes, rows


@pytest.mark.parametrize("each", [pytest.param(1, marks=pytest.mark.short), 3])
def test_ranks_with_fewer_micro_batches_repeat_one(each):
    """All ranks gather in every forward: three ranks with shares of 2, 1 and 1 go forward twice each."""
    loses_one(dataclasses.replace(THREE, each=each))


@dataclasses.dataclass(frozen=True)
class CountsRepeated(Play):
    """A job in which repeated micro-batches count."""

    def _play(self, rank):
        from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415

        AccumulationWindow.repeats = False
        return super()._play(rank)


def test_repeated_micro_batches_would_change_the_training():
    """The control of the test before."""
    job = dataclasses.replace(THREE, each=1)
    outcomes, rows = run(job, faults=[kill(1, during="backward", step=6)], play=CountsRepeated)
    assert differences(outcomes, rows, job)["weights"] > 1e-4


@pytest.mark.short
def test_a_parameter_that_nobody_steps_comes_from_copies():
    """Each of its slices is held once."""
    loses_one(dataclasses.replace(THREE, frozen="3.weight"), back={1: 12})


@pytest.mark.parametrize(
    ("during", "back"),
    [("between", {1: 12}), ("vote", None), pytest.param("gather-backward", {1: 12}, marks=pytest.mark.short)],
)
def test_second_slices_of_each_node(during, back):
    """DeepSpeed gathers the weights for a backward within a node, but for the time in which a rank is lost."""
    two_to_a_node = json.dumps({"zero_hpz_partition_size": 2})
    loses_one(dataclasses.replace(THREE, zero=two_to_a_node, frozen="3.weight"), during=during, back=back)


def test_a_model_that_is_made_sharded():
    loses_one(dataclasses.replace(THREE, zero_init=True, dtype="float32"), back={1: 12})


@pytest.mark.parametrize("kind", ["llama", "tied llama"])
def test_a_transformer(kind):
    """With tied embeddings a module uses a parameter of another one."""
    loses_one(dataclasses.replace(THREE, transformer=kind, dtype="float32"), slot=0, back={0: 12})


def test_modules_whose_parameters_are_gathered_as_one():
    leaves = json.dumps({"leaf_module": {"name_suffixes": ["mlp"]}})
    loses_one(dataclasses.replace(THREE, transformer="llama", dtype="float32", zero=leaves), back={1: 12})


def test_an_evaluation_is_interrupted():
    """Every forward of it is a gather; the rest gives NaN, and training goes on."""
    outcomes, rows = loses_one(dataclasses.replace(THREE, evaluates=9), during="evaluation", step=9)
    assert sorted(outcomes) == [0, 2, 3]
    evaluated = [math.isfinite(row[2]) for row in rows if row[0] == "evaluated"]
    assert any(evaluated) and not all(evaluated)


@pytest.mark.short
def test_the_model_is_written_by_the_ranks_that_are_left(tmp_path):
    """`save_16bit_model` gathers: a rank that is lost in it costs no weight of its step."""
    job = dataclasses.replace(
        THREE,
        saves_model=20,
        folder=str(tmp_path),
        zero=json.dumps({"stage3_gather_16bit_weights_on_model_save": True}),
    )
    outcomes, _ = run(job, faults=[kill(2, during="written", step=21)])
    assert len(outcomes) == 3
    saved = torch.load(tmp_path / "pytorch_model.bin")
    whole = undisturbed(job)[0].weights
    assert saved.keys() == whole.keys()
    seen = dataclasses.replace(outcomes[0], weights={name: value.double().numpy() for name, value in saved.items()})
    assert of_weights(seen, whole) <= BOUNDS["float64"]


@pytest.mark.short
def test_a_rank_saves_while_others_are_in_the_vote_of_the_step():
    """No collective follows the vote if no parameter persists. The state goes back, and the step is taken again."""
    none_persists = json.dumps({"stage3_param_persistence_threshold": 0})
    job = dataclasses.replace(THREE, saves=8, slow_to_leave=8, zero=none_persists)
    outcomes, rows = run(job, faults=[kill(3, during="save", step=8)])
    assert sorted(outcomes) == [0, 1, 2]
    assert_same_training(outcomes, rows, job)


ON_CPU, NOWHERE = {"device": "cpu"}, {"device": "none"}
OFFLOADED = {
    "optimizer": {"offload_optimizer": ON_CPU},
    "optimizer and parameters": {"offload_optimizer": ON_CPU, "offload_param": ON_CPU},
    "nothing": {"offload_optimizer": NOWHERE, "offload_param": NOWHERE},
}


def offloads(stage, what, **options):
    return Job(stage=stage, zero=json.dumps(OFFLOADED[what]), torch_adam_offloaded=True, **options)


@pytest.mark.parametrize("what", [pytest.param("optimizer", marks=pytest.mark.short), *list(OFFLOADED)[1:]])
def test_offloaded_state(what):
    loses_one(offloads(3, what), back={1: 12})


@pytest.mark.parametrize("stage", [1, 2])
def test_offloaded_state_of_the_other_stages(stage):
    loses_one(offloads(stage, "optimizer"), during="reduce", back={1: 12})


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeeds_own_cpu_adam(stage):
    """It rounds an element by its place, so the difference is one of float32."""
    spec = Job(stage=stage, zero=json.dumps(OFFLOADED["optimizer"]), fused_adam="own", dtype="float32")
    loses_one(spec, during="reduce", back={1: 12})


@pytest.mark.short
@pytest.mark.parametrize(
    ("zero", "message"),
    [
        ({"offload_optimizer": {"device": "nvme", "nvme_path": "/tmp"}}, r"offload_optimizer\.device = nvme"),
        ({"zero_quantized_gradients": True}, "zero_quantized_gradients"),
    ],
)
def test_what_cannot_be_restored_is_refused(zero, message):
    with pytest.raises(Refused, match=message):
        run(dataclasses.replace(THREE, ranks=2, steps=2, epochs=1, zero=json.dumps(zero)))


def test_second_slices_of_ranks_with_other_parameters_are_refused():
    two_to_a_node = json.dumps({"zero_hpz_partition_size": 2})
    with pytest.raises(Refused, match="zero_hpz_partition_size > 1 with an mpu"):
        run(dataclasses.replace(THREE, mpu=True, tp=2, steps=2, epochs=1, zero=two_to_a_node))


def test_second_slices_when_two_of_two_nodes_come_back_in_turn():
    two_to_a_node = json.dumps({"zero_hpz_partition_size": 2})
    job = dataclasses.replace(THREE, zero=two_to_a_node)
    faults = [kill(1, during="vote", step=5), kill(2, during="gather-forward", step=7)]
    outcomes, rows = run(job, faults=faults, back={1: 10, 2: 14})
    assert_same_training(outcomes, rows, job)
