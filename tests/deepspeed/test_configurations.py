"""Live jobs with options that people have in their configurations: each loses a rank, which rejoins."""

import dataclasses

import pytest

from ntp_plugin.errors import Refused
from ntp_plugin.testing.faults import kill
from tests.deepspeed.halves import NEEDS_FLOAT16
from tests.harness.zero.compare import BOUNDS, assert_same_training, differences, of_weights
from tests.harness.zero.job import Block, Job, Play, run

STAGES = [0, 1, 2]
FAULTS, BACK = [kill(1, during="reduce", step=6)], {1: 12}
SUM = (("gradient_allreduce_op", "sum"),)
NOWHERE = Block(device="none")


def trains_alike(job, *, play=None):
    outcomes, rows = run(job, faults=FAULTS, back=BACK, play=play)
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, job)
    return rows


def optimizer(kind, **params):
    return (("optimizer", Block(type=kind, params=Block(params))), ("zero_allow_untested_optimizer", True))


# ---------------------------------------------------------------- how gradients are reduced


@pytest.mark.parametrize(
    ("stage", "tp"), [pytest.param(0, 1, marks=pytest.mark.short), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2)]
)
def test_gradients_are_summed(stage, tp):
    """A sum over the micro-batches of all ranks is the same, whoever computes them."""
    trains_alike(Job(stage=stage, tp=tp, more=SUM))


class WeighsLosses(Play):
    """Losses weighed as for a mean."""

    def _play(self, rank):
        from ntp_plugin.deepspeed.full_width_replicas import FullWidthReplicas  # noqa: PLC0415  (only ranks have DeepSpeed with hooks in it)

        FullWidthReplicas.weight = property(lambda replicas: len(replicas._left) / replicas._topology.dp)
        return super()._play(rank)


def test_losses_weighed_as_for_a_mean_are_detected():
    job = Job(more=SUM)
    outcomes, rows = run(job, faults=FAULTS, back=BACK, play=WeighsLosses)
    assert differences(outcomes, rows, job)["weights"] > 1e3 * BOUNDS["float64"]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("option", [("prescale_gradients", True), ("gradient_predivide_factor", 3.0)])
def test_gradients_are_divided_in_another_place(stage, option):
    trains_alike(Job(stage=stage, more=(option,)))


@pytest.mark.parametrize("stage", [1, 2])
def test_offloading_to_nowhere(stage):
    zero = Block(
        stage=stage, reduce_bucket_size=500, reduce_scatter=False, offload_optimizer=NOWHERE, offload_param=NOWHERE
    )
    trains_alike(Job(stage=stage, more=(("zero_optimization", zero),)))


# ---------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("more", "dtype"),
    [
        pytest.param(optimizer("Lamb", weight_decay=0.01), "float64", marks=pytest.mark.short),
        (optimizer("Muon", torch_adam=True), "float64"),
        (optimizer("Adagrad"), "float64"),
        (optimizer("Lion", weight_decay=0.01), "float32"),
    ],
    ids=["lamb", "muon", "adagrad", "lion"],
)
def test_optimizers_without_zero(more, dtype):
    trains_alike(Job(more=more, dtype=dtype))


@pytest.mark.parametrize(("stage", "tp"), [(1, 1), (2, 1), (0, 2)])
@pytest.mark.parametrize(
    ("more", "dtype"),
    [(optimizer("Lion", weight_decay=0.01), "float32"), (optimizer("RMSprop", momentum=0.9, eps=1e-4), "float64")],
    ids=["lion", "rmsprop"],
)
def test_element_wise_optimizers_are_sharded_and_cut(more, dtype, stage, tp):
    trains_alike(Job(more=more, dtype=dtype, stage=stage, tp=tp))


@pytest.mark.parametrize(
    ("kind", "job", "message"),
    [
        ("Lamb", {"stage": 1}, "FusedLamb steps whole matrices"),
        ("Muon", {"ranks": 4, "tp": 2}, "MuonWithAuxAdam steps whole matrices"),
        ("Adagrad", {"stage": 1}, "Adagrad is made anew within ZeRO"),
        ("Adamax", {}, r"torch\.optim\.adamax\.Adamax is not known"),
    ],
)
def test_other_optimizers_are_refused(kind, job, message):
    with pytest.raises(Refused, match=message):
        run(Job(**{"ranks": 2, **job}, steps=2, epochs=1, more=optimizer(kind)))


# ---------------------------------------------------------------- state beside the optimizer's


AUTOCAST = [
    (0, "bfloat16"),
    (1, "bfloat16"),
    (2, "bfloat16"),
    (3, "bfloat16"),
    *(pytest.param(stage, "float16", marks=NEEDS_FLOAT16) for stage in STAGES),
]


def trains_alike_in_a_small_type(job):
    """Layouts differ by rounding in the small type, so another number of ranks of DeepSpeed's own does too."""
    alone = dataclasses.replace(job, enabled=False)
    reference = run(alone)[0][0]
    two = run(dataclasses.replace(alone, ranks=2, each=2 * job.each))[0][0]
    outcomes, _ = run(job, faults=[kill(1, during="vote", step=6)], back=BACK)
    assert sorted(outcomes) == [0, 1, 2, 3]
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
        assert of_weights(seen, reference.weights) <= 4 * of_weights(two, reference.weights)


@pytest.mark.parametrize(("stage", "dtype"), AUTOCAST)
def test_autocast(stage, dtype):
    """In fp16 torch's scaler goes with the counters."""
    autocast = Block(enabled=True, dtype=dtype)
    trains_alike_in_a_small_type(Job(stage=stage, dtype="float32", more=(("torch_autocast", autocast),)))


@pytest.mark.parametrize("stage", [*STAGES, 3])
def test_gradients_are_reduced_in_another_type(stage):
    trains_alike_in_a_small_type(Job(stage=stage, dtype="float32", more=(("communication_data_type", "bf16"),)))


RANDOM_LTD = Block(
    enabled=True,
    data_routing=Block(
        enabled=True,
        random_ltd=Block(
            enabled=True,
            total_layer_num=4,
            random_ltd_layer_num=2,
            random_ltd_layer_id=[1, 2],
            model_mask_name=None,
            model_type="decoder",
            hidden_state_order="batch_seq_dim",
            random_ltd_schedule=Block(
                min_value=8,
                max_value=64,
                schedule_type="fixed_linear",
                schedule_config=Block(require_steps=18, seq_per_step=4),
            ),
        ),
    ),
)


class NotesTokens(Play):
    """Each rank writes down, at its end, how many tokens random LTD keeps, and has kept."""

    def _play(self, rank):
        from tests.harness.zero import job as harness  # noqa: PLC0415

        seen = harness._Loop._seen

        def noted(loop):
            rank.write([["kept", rank.slot, loop.engine.random_ltd_scheduler.state_dict()]])
            return seen(loop)

        harness._Loop._seen = noted
        return super()._play(rank)


@pytest.mark.parametrize("stage", [0, 1])
def test_random_ltd_keeps_as_many_tokens(stage):
    job = Job(stage=stage, more=(("data_efficiency", RANDOM_LTD),))
    rows = trains_alike(job, play=NotesTokens)
    _, of_reference = run(dataclasses.replace(job, enabled=False), play=NotesTokens)
    kept = {row[1]: row[2] for row in rows if row[0] == "kept"}
    assert sorted(kept) == [0, 1, 2, 3]
    assert list(kept.values()) == [row[2] for row in of_reference if row[0] == "kept"]


# ---------------------------------------------------------------- what is refused


def test_several_are_refused_at_once():
    more = (("gradient_allreduce_op", "sum"), ("managed_gradient_accumulation", False))
    writer = (("checkpoint", Block(writer=Block(type="python", data_parallel="replica"))),)
    with pytest.raises(Refused, match=r"2 options are not supported: managed_grad.*; checkpoint\.writer"):
        run(Job(ranks=2, steps=2, epochs=1, more=(*more, *writer)))


def test_adapters_train_without_autotp():
    trains_alike(Job(transformer="adapted llama", stage=1, dtype="float32"))


def test_adapters_that_deepspeed_cannot_build_are_refused():
    with pytest.raises(Refused, match=r"DeepSpeed cannot build ZeRO .* \(KeyError, also without ntp\).*adapters"):
        run(Job(transformer="adapted llama", tp=2, stage=1, dtype="float32", steps=2, epochs=1))
