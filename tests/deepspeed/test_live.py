"""Ranks of a real DeepSpeed job are killed: the training equals that of an undisturbed run."""

import dataclasses
import functools
import shutil
from pathlib import Path

import pytest

from ntp_plugin.errors import ConfigError, Excluded, Refused, StateLost
from ntp_plugin.testing.faults import freeze, kill
from ntp_plugin.testing.ranks import Ranks
from tests.deepspeed.halves import HALVES
from tests.harness.zero.compare import BOUNDS, assert_same_training, of_weights, used_once
from tests.harness.zero.fault_points import SHARDED_FAULT_POINTS
from tests.harness.zero.job import Job, Play, have_deepspeed_imported, run, undisturbed

STAGES = [0, 1, 2, 3]
FAULT_POINTS = ["forward", "backward", "accumulated", "reduce", "vote", "apply", "applied", "between"]


@pytest.mark.parametrize("stage", [0, 1, 2, pytest.param(3, marks=pytest.mark.short)])
def test_a_job_without_losses_trains_as_the_reference(stage):
    """Bit for bit as without us."""
    job = Job(stage=stage)
    outcomes, rows = run(job)
    reference = undisturbed(job)
    for slot, seen in outcomes.items():
        weights, others = seen.weights, reference[slot].weights
        assert all(weights[name].tobytes() == others[name].tobytes() for name in others)
        assert (seen.losses, seen.norms) == (reference[slot].losses, reference[slot].norms)
    assert used_once(rows, job)


IN_FLOAT32 = Job(stage=1, dtype="bfloat16", more=(("data_types", {"grad_accum_dtype": "fp32"}),))
"""Gradients of bf16 are added up in float32: another optimizer of DeepSpeed's (`BF16_Optimizer`)."""


def test_a_job_without_losses_with_float32_accumulation():
    outcomes, rows = run(IN_FLOAT32)
    reference = run(dataclasses.replace(IN_FLOAT32, enabled=False))[0]
    for slot, seen in outcomes.items():
        weights, others = seen.weights, reference[slot].weights
        assert all(weights[name].tobytes() == others[name].tobytes() for name in others)
        assert (seen.losses, seen.norms) == (reference[slot].losses, reference[slot].norms)
    assert used_once(rows, IN_FLOAT32)


LOSSES = [
    (stage, slot, fault_point)
    for stage in STAGES
    for slot in (0, 1, 3)
    for fault_point in (
        *FAULT_POINTS,
        *(["gather"] if stage else []),  # without ZeRO nothing is gathered
        *(SHARDED_FAULT_POINTS if stage > 2 else []),
    )
]
SHORT = [(0, 1, "reduce"), (1, 0, "vote"), (2, 3, "gather"), (3, 0, "gather-forward"), (3, 1, "applied")]


@pytest.mark.parametrize(
    ("stage", "slot", "fault_point"),
    [pytest.param(*loss, marks=[pytest.mark.short] * (loss in SHORT)) for loss in LOSSES],
)
def test_a_rank_is_killed(stage, slot, fault_point):
    job = Job(stage=stage)
    outcomes, rows = run(job, faults=[kill(slot, during=fault_point, step=6)])
    assert sorted(outcomes) == [other for other in range(4) if other != slot]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("step", [1, 7])
@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_rejoins(stage, step):
    job = Job(stage=stage)
    outcomes, rows = run(job, faults=[kill(2, during="vote", step=step)], back={2: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert {seen.members for seen in outcomes.values()} == {4}
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_in_float32_with_clipping(stage):
    """DeepSpeed's default: it reduces, and takes norms, in float32."""
    job = Job(stage=stage, dtype="float32")
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)])
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_ranks_are_lost_one_by_one_until_one_is_left(stage):
    job = Job(stage=stage)
    faults = [kill(0, during="vote", step=4), kill(3, during="backward", step=9), kill(1, during="applied", step=14)]
    outcomes, rows = run(job, faults=faults)
    assert {slot: seen.members for slot, seen in outcomes.items()} == {2: 1}
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("fault_point", ["report", "plan", "regroup", "resume", "resumed"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_second_one_in_the_recovery(stage, fault_point):
    job = Job(stage=stage)
    outcomes, rows = run(job, faults=[kill(0, during="reduce", step=5), kill(2, during=fault_point, epoch=1)])
    assert sorted(outcomes) == [1, 3]
    assert_same_training(outcomes, rows, job)


HEARD = [("forward", 0), ("forward", 1), ("backward", 0), ("backward", 1), ("accumulated", 1), ("accumulated", 2)]


@pytest.mark.parametrize(
    ("stage", "fault_point", "micro_batch"),
    [
        pytest.param(stage, *where, marks=[pytest.mark.short] * (stage == 1 and where == ("backward", 1)))
        for stage in STAGES
        for where in HEARD
    ],
)
def test_the_others_learn_of_a_loss_in_their_own_code(stage, fault_point, micro_batch):
    """They learn of the loss at their next call of the engine, and not in a collective."""
    job = Job(stage=stage, hear_at=(fault_point, 6, micro_batch))
    outcomes, rows = run(job, faults=[kill(2, during="forward", step=6)])
    assert sorted(outcomes) == [0, 1, 3]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_the_others_learn_of_a_loss_right_before_the_vote(stage):
    job = Job(stage=stage, hear_at=("words", 6, 0))
    outcomes, rows = run(job, faults=[kill(2, during="vote", step=6)])
    assert sorted(outcomes) == [0, 1, 3]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_waiting_in_a_vote_that_others_left_applies_the_step(stage):
    """It does not apply the step twice if the next loss comes before it has continued."""
    job = Job(stage=stage, slow_to_leave=6)
    faults = [kill(3, during="applied", step=6), kill(2, during="rolled", epoch=1)]
    outcomes, rows = run(job, faults=faults)
    assert sorted(outcomes) == [0, 1]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_waits_in_the_vote_of_a_checkpoint_that_others_left(stage):
    job = Job(stage=stage, saves=8, slow_to_leave=9)
    outcomes, rows = run(job, faults=[kill(3, during="applied", step=9)])
    assert sorted(outcomes) == [0, 1, 2]
    assert_same_training(outcomes, rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_two_at_once(stage):
    job = Job(stage=stage)
    outcomes, rows = run(job, faults=[kill(1, during="vote", step=5), kill(2, during="vote", step=5)])
    assert sorted(outcomes) == [0, 3]
    assert_same_training(outcomes, rows, job)


def test_a_hung_rank_is_evicted_and_training_continues():
    job = Job(stage=1)
    have_deepspeed_imported()
    with Ranks(4, Play(job), faults=[freeze(2, during="backward", step=5)]) as ranks:
        outcomes = ranks.wait(but=[2])
        assert ranks.verdicts[2].kind == "frozen"
        ranks.thaw(2)
        with pytest.raises(Excluded, match=r"slot 2 .* the others went on without it"):
            ranks.wait(but=[0, 1, 3])
    assert_same_training(outcomes, ranks.rows, job)


@pytest.mark.parametrize("stage", STAGES)
def test_a_loader_of_the_script_that_shuffles(stage):
    """Steps do not end where turns do."""
    job = Job(stage=stage, own_loader=True, epochs=3)
    assert job.samples % (job.ranks * job.each * job.micro)
    outcomes, rows = run(job, faults=[kill(3, during="accumulated", step=7)], back={3: 15})
    assert_same_training(outcomes, rows, job, once=False)  # the sampler adds some, so that all ranks have as many


def test_a_loader_that_cannot_be_rewound_is_refused():
    """It is refused even if an earlier loader could be rewound."""
    with pytest.raises(Refused, match="no followed loader has yielded"):
        run(Job(ranks=2, unfollowed=True, steps=2, epochs=1))


@pytest.mark.parametrize("calls", [("set_train_batch_size", 8), ("set_train_micro_batch_size", 1), ("no_sync",)])
def test_calls_that_a_loop_may_not_make_are_refused(calls):
    with pytest.raises(Refused, match=rf"engine\.{calls[0]}\(\)"):
        run(Job(ranks=2, steps=2, epochs=1, calls=calls))


@pytest.mark.parametrize(("stage", "epochs"), [*((stage, 5) for stage in STAGES), (0, 3)])
def test_masks_do_not_depend_on_the_rank(stage, epochs):
    """With three data epochs some steps span two of them: their micro-batches are drawn in another order."""
    exact = Job(stage=stage, dropout=0.2, ntp=(("dropout", "exact"),), own_loader=epochs == 3, epochs=epochs)
    outcomes, _ = run(exact, faults=[kill(1, during="backward", step=6)], back={1: 12})
    reference, _ = run(exact)
    for seen in outcomes.values():
        assert of_weights(seen, reference[0].weights) <= BOUNDS["float64"]


def test_masks_of_the_framework_do():
    """A control for the last one."""
    job = Job(dropout=0.2)
    outcomes, _ = run(job, faults=[kill(1, during="backward", step=6)])
    assert of_weights(outcomes[0], run(job)[0][0].weights) > 1e-4


@pytest.mark.parametrize("stage", STAGES)
def test_a_rank_is_lost_while_a_checkpoint_is_written(stage):
    job = Job(stage=stage, saves=8)
    outcomes, rows = run(job, faults=[kill(2, during="save", step=8)])
    assert_same_training(outcomes, rows, job)
    saved = [names for kind, *names in rows if kind == "saved"]
    assert len(saved) == 3
    shards = [name for name in saved[-1][0] if "optim_states" in name]
    assert len(shards) == (3 if stage else 0)


@pytest.mark.parametrize("stage", STAGES)
def test_a_checkpoint_that_a_loss_interrupts_is_written_again(tmp_path, stage):
    """The checkpoint is of that very step and of the survivors, also if a shard is lost: the first attempt had four."""
    job = Job(stage=stage, saves=20, folder=str(tmp_path))
    outcomes, rows = run(job, faults=[kill(2 if stage else 0, during="written", step=21)])
    assert len(outcomes) == 3
    shards = list(tmp_path.glob("one/*optim_states.pt"))
    assert len(shards) == (3 if stage else 0)
    _, read = run(dataclasses.replace(job, enabled=False, ranks=3, loads=True))
    assert [row[2] for row in read if row[0] == "loaded"] == [20] * 3
    assert not [row for row in rows if row[0] == "micro" and row[1] == 20 and row[2]], "the step was not taken again"
    assert_same_training(outcomes, rows, dataclasses.replace(job, folder=""))


def test_a_loss_in_the_checkpoint_of_the_last_step_is_recovered():
    """There are no copies of it yet, and the loop has none left to take."""
    with pytest.raises(StateLost, match=r"checkpoint of step 20 was not written.* of step 19"):
        run(Job(stage=1, saves_turns=True), faults=[kill(2, during="save", step=20)])


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.short)])
def test_a_joining_rank_skips_checkpoints_already_written(stage):
    """Its script goes through turns that are over, and asks for those in between."""
    job = Job(stage=stage, saves_turns=True)
    outcomes, rows = run(job, faults=[kill(2, during="vote", step=6)], back={2: 12})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert_same_training(outcomes, rows, job)
    assert len([row for row in rows if row[0] == "writes"]) == job.epochs


@pytest.mark.parametrize("stage", [0, pytest.param(1, marks=pytest.mark.short)])
def test_a_loop_that_saves_by_the_number_of_steps_alone(tmp_path, stage):
    """It asks after each micro-batch, of which degraded replicas have another number, and again when a rank joins."""
    job = Job(stage=stage, saves_each=4, folder=str(tmp_path))
    outcomes, rows = run(job, faults=[kill(2, during="vote", step=6)], back={2: 13})
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert {path.name for path in tmp_path.glob("step*")} == {f"step{step}" for step in (4, 8, 12, 16, 20)}
    assert_same_training(outcomes, rows, dataclasses.replace(job, saves_each=0, folder=""))


@pytest.fixture(scope="module")
def begun(tmp_path_factory):
    """Two data epochs of five, and a copy of their checkpoints for runs that resume from them."""
    folder = tmp_path_factory.mktemp("begun")

    @functools.cache
    def turns(stage):
        job = Job(stage=stage, own_loader=True, saves_turns=True, steps=8, epochs=2, folder=str(folder / str(stage)))
        run(dataclasses.replace(job, enabled=False))
        return Path(job.folder)

    def copied(stage, to):
        shutil.copytree(turns(stage), to)
        return Job(stage=stage, own_loader=True, saves_turns=True, goes_on=True, folder=str(to))

    return copied


@pytest.mark.parametrize("stage", [0, 1])
def test_a_rank_rejoins_a_job_that_began_from_a_checkpoint(begun, tmp_path, stage):
    """There is a newer one by then, and its script must not begin its turns from that."""
    outcomes, _ = run(begun(stage, tmp_path / "mine"), faults=[kill(2, during="backward", step=10)], back={2: 7})
    reference = run(dataclasses.replace(begun(stage, tmp_path / "reference"), enabled=False))[0][0]
    assert sorted(outcomes) == [0, 1, 2, 3]
    assert reference.steps == 20
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
        assert of_weights(seen, reference.weights) <= BOUNDS["float64"]


def test_a_job_that_is_resumed_reads_no_checkpoint(begun, tmp_path):
    """It resumes from copies of a run that began from a checkpoint and has written newer ones since, which are not
    read."""
    (tmp_path / "dead").mkdir(mode=0o700)  # as the folder of a run is
    job = dataclasses.replace(begun(1, tmp_path / "mine"), copies=str(tmp_path / "dead"))
    run(job, faults=[kill(slot, during="backward", step=18) for slot in range(4)], leaving=range(4))
    reference = run(dataclasses.replace(begun(1, tmp_path / "reference"), enabled=False))[0][0]
    outcomes, rows = run(dataclasses.replace(job, copies="", resumes=str(tmp_path / "dead")))
    assert min(row[1] for row in rows if row[0] == "micro") in (17, 18)
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
        assert of_weights(seen, reference.weights) <= BOUNDS["float64"]


def test_a_job_that_died_in_its_last_checkpoint_writes_it_when_it_is_resumed(tmp_path):
    """No step is left to take. Those of the turns before are not written again."""
    (tmp_path / "dead").mkdir(mode=0o700)  # as the folder of a run is
    job = Job(stage=1, saves_turns=True, folder=str(tmp_path / "saved"), copies=str(tmp_path / "dead"))
    last = job.steps + job.epochs
    run(job, faults=[kill(slot, during="written", step=last) for slot in range(4)], leaving=range(4))
    for turn in range(job.epochs):
        shutil.rmtree(tmp_path / f"saved/turn{turn}")
    outcomes, _ = run(dataclasses.replace(job, copies="", resumes=str(tmp_path / "dead")))
    assert {seen.steps for seen in outcomes.values()} == {20}
    assert [path.name for path in (tmp_path / "saved").glob("turn*")] == ["turn4"]


@pytest.mark.parametrize(("stage", "back", "saves"), [(0, {}, 8), (1, {}, 8), (1, {0: 12}, 15)])
def test_a_checkpoint_has_the_model_after_the_first_rank_was_lost(stage, back, saves):
    """Which was to write it; who comes into its place writes it again, alone. It says of how many shards it is."""
    _, rows = run(Job(stage=stage, saves=saves), faults=[kill(0, during="vote", step=5)], back=back)
    names = [row[1] for row in rows if row[0] == "saved"]
    assert names and all("mp_rank_00_model_states.pt" in saved for saved in names)
    assert [row[1:] for row in rows if row[0] == "writes"] == [[0, 4] if back else [1, 3]]


@pytest.mark.parametrize("stage", STAGES)
def test_stock_deepspeed_loads_a_checkpoint_saved_after_a_loss(tmp_path, stage):
    """With as many ranks as had saved it: weights, and what the optimizer keeps."""
    job = Job(stage=stage, saves=20, folder=str(tmp_path))
    run(job, faults=[kill(0, during="vote", step=6)])
    outcomes, rows = run(dataclasses.replace(job, enabled=False, ranks=3, loads=True))
    for seen in outcomes.values():
        assert seen.steps == 20
        assert of_weights(seen, undisturbed(job)[0].weights) <= BOUNDS["float64"]
    assert [row[2] for row in rows if row[0] == "loaded"] == [20] * 3


@pytest.mark.short
def test_without_copies_a_shard_is_lost_with_its_rank():
    job = Job(stage=1, ntp=(("copies", {"mode": "off"}),))
    with pytest.raises(StateLost, match=r"3 of 4 ranks .*ntp\.copies\.mode"):
        run(job, faults=[kill(2, during="vote", step=5)])


@pytest.mark.parametrize(
    ("more", "ntp", "kind", "message"),
    [
        ((("managed_gradient_accumulation", False),), (), Refused, "managed_gradient_accumulation"),
        pytest.param(
            *((("hybrid_engine", {"enabled": True}),), ()),
            *(Refused, "hybrid_engine|DeepSpeedHybridEngine"),
            marks=pytest.mark.short,
        ),
        ((("datastates_ckpt", {}),), (), Refused, "datastates_ckpt"),
        pytest.param(
            *((), (("copys", {}),), ConfigError, r"ntp\.copys is not a known key.*copies"), marks=pytest.mark.short
        ),
        ((), (("copies", {"count": "two"}),), ConfigError, r"ntp\.copies\.count"),
        ((), (("lost", ["r1"]),), ConfigError, r"ntp\.lost"),
        ((), (("batch", {"mode": "trim"}),), Refused, r"ntp\.batch\.mode"),
        ((), (("route", "via_core"),), Refused, r"ntp\.route"),
    ],
)
def test_unsupported_settings_are_refused_at_the_start(more, ntp, kind, message):
    with pytest.raises(kind, match=message):
        run(Job(ranks=2, steps=2, epochs=1, more=more, ntp=ntp))


SCALED = (("fp16", {"enabled": True, "initial_scale_power": 10}),)
"""So that DeepSpeed's two widths do not begin with another number of steps that overflow."""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("stage", STAGES)
def test_in_half_precision(stage, dtype):
    """With masters in float32. No further from four ranks of DeepSpeed alone than four times what two of its are."""
    comes_back_in_half_precision(Job(stage=stage, dtype=dtype, more=SCALED if dtype == "float16" else ()))


def comes_back_in_half_precision(job):
    alone = dataclasses.replace(job, enabled=False)
    reference = run(alone)[0][0]
    two = run(dataclasses.replace(alone, ranks=2, each=2 * job.each))[0][0]
    outcomes, rows = run(job, faults=[kill(1, during="reduce", step=6)], back={1: 14})
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
        assert of_weights(seen, reference.weights) <= 4 * of_weights(two, reference.weights)
    assert used_once(rows, job)


def test_a_rank_rejoins_with_float32_accumulation():
    comes_back_in_half_precision(IN_FLOAT32)


def test_a_second_loss_in_the_recovery_with_float32_accumulation():
    """Both ranks rejoin later."""
    faults = [kill(0, during="reduce", step=5), kill(2, during="resume", epoch=1)]
    outcomes, rows = run(IN_FLOAT32, faults=faults, back={0: 10, 2: 14})
    reference = run(dataclasses.replace(IN_FLOAT32, enabled=False))[0][0]
    assert {seen.members for seen in outcomes.values()} == {4}
    for seen in outcomes.values():
        assert (seen.steps, seen.samples, seen.rates) == (reference.steps, reference.samples, reference.rates)
        assert seen.weights.keys() == reference.weights.keys()
    first, *others = outcomes.values()
    for seen in others:
        assert all(seen.weights[name].tobytes() == first.weights[name].tobytes() for name in first.weights)
    assert used_once(rows, IN_FLOAT32)


def test_stock_deepspeed_loads_a_checkpoint_saved_with_float32_accumulation(tmp_path):
    job = dataclasses.replace(IN_FLOAT32, saves=20, folder=str(tmp_path))
    saved, _ = run(job, faults=[kill(0, during="vote", step=6)])
    outcomes, rows = run(dataclasses.replace(job, enabled=False, ranks=3, loads=True))
    for seen in outcomes.values():
        assert seen.steps == 20
        assert all(seen.weights[name].tobytes() == saved[1].weights[name].tobytes() for name in seen.weights)
    assert [row[2] for row in rows if row[0] == "loaded"] == [20] * 3


def test_the_monitor_continues_when_the_first_rank_is_lost(tmp_path):
    """It also logs the recovery."""
    block = {"enabled": True, "output_path": str(tmp_path), "job_name": "run"}
    job = Job(more=(("csv_monitor", block),))
    run(job, faults=[kill(0, during="vote", step=6)])
    lines_of = {path.name: path.read_text().splitlines() for path in (tmp_path / "run").iterdir()}
    samples = [line.split(",")[0] for line in lines_of["Train_Samples_lr.csv"] if not line.startswith("step")]
    assert samples == [str(16 * step) for step in range(1, 21)]
    assert lines_of["NTP_ranks.csv"][1:] == ["80,3"]
