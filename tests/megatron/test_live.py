"""Ranks of a Megatron job die, and the job continues as if nothing had happened.

The reference is stock Megatron: one full-width replica that computes the whole batch.
"""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks.numerics import BF16, BOUNDS, bounds_of
from ntp_plugin.errors import BelowMinimum, Refused, RestartIsBetter, StateLost
from ntp_plugin.telemetry import Began, Chosen, Committed, Ended, Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import RECIPES, STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, DROPOUT, HYBRID, MODELS, SEQUENCE, degraded, uniform
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import largest_difference, replica_digests_in

SHARDED = "--use-distributed-optimizer"
OVERLAP = f"{SHARDED} --overlap-grad-reduce --overlap-param-gather"
KINDS = pytest.mark.parametrize("kind", ["", OVERLAP], ids=["plain", "sharded"])
"""The state of a lost rank comes from live state of others, or from copies: `test_copies.py` tests the latter."""
IN_A_STEP = ["step", "forward", "backward", "reduce", "reduced", "vote", "apply", "applied", "between"]
PIPELINE = {"tp": 2, "pp": 2, "dp": 2}
IN_A_RECOVERY = ["report", "plan", "regroup", "resume", "moved", "built", "made", "resumed"]


def job(**options):
    return Job(**{"model": MODELS[BASE], "tp": 2, "dp": 2, "enabled": True, **options})


def assert_same_training(lived, reference=None):
    worst = largest_differences(as_if_always_there(lived), reference or run(uniform(BASE)))
    assert max(worst.values()) <= BOUNDS["float64"], worst


def assert_every_sample_once(rows, batch=6):
    """The last attempt of each step drew the samples of the step, each once."""
    for step in range(1, STEPS + 1):
        drawn = [row[2:] for row in rows if row[:2] == ["drawn", step]]
        newest = max(epoch for epoch, _ in drawn)
        samples = [sample for epoch, sample in drawn if epoch == newest]
        assert sorted(samples) == list(range((step - 1) * batch, step * batch)), step


def widths(lived):
    return {slot: one.width for slot, one in lived.items()}


def test_a_job_without_losses_trains_as_the_reference():
    lived, rows = live(job())
    assert len(lived) == 4
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize(
    "fault_point",
    [pytest.param(fault_point, marks=[pytest.mark.short] * (fault_point == "backward")) for fault_point in IN_A_STEP],
)
def test_a_rank_dies(fault_point):
    lived, rows = live(job(), faults=[kill(3, during=fault_point, step=5)])
    assert widths(lived) == {0: 2, 1: 2, 2: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_a_rank_ahead_keeps_its_learning_rate():
    """After the vote slot 0 waits for its lost neighbour, before the schedule; the other replica has come past that."""
    lived, _ = live(job(), faults=[kill(1, during="apply", step=5)])
    assert_same_training(lived)


@pytest.mark.parametrize("fault_point", IN_A_STEP)
@pytest.mark.parametrize("slot", [0, 1, 2])
def test_any_slot_may_be_the_one(slot, fault_point):
    """The first of a TP group reads samples; rank 0 prints, and the last rank reports the loss."""
    lived, rows = live(job(), faults=[kill(slot, during=fault_point, step=5)])
    assert sorted(lived) == [other for other in range(4) if other != slot]
    assert_same_training(lived)
    assert_every_sample_once(rows)


@KINDS
def test_before_the_first_step(kind):
    lived, rows = live(job(more=kind), faults=[kill(3, during="step", step=1)])
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize("fault_point", IN_A_RECOVERY)
def test_another_dies_in_the_recovery(fault_point):
    """TP4 + TP4: one of the first replica dies while the others recover from a loss in the second."""
    lived, rows = live(job(tp=4), faults=[kill(7, during="backward", step=5), kill(1, during=fault_point, epoch=1)])
    assert widths(lived) == dict.fromkeys((0, 2, 3, 4, 5, 6), 3)
    assert_same_training(lived)
    assert_every_sample_once(rows)


@KINDS
def test_a_replica_shrinks_until_it_is_lost(kind):
    faults = [kill(3, during="backward", step=4), kill(2, during="forward", step=8)]
    lived, rows = live(job(more=kind), faults=faults)
    assert widths(lived) == {0: 2, 1: 2}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_a_replica_that_is_too_narrow_is_idle_until_a_rank_rejoins():
    """Its survivor is a member that trains nothing, here the first of all; then the replica has full width again."""
    lived, rows = live(job(more="--ntp-min-tp-width 2"), faults=[kill(1, during="backward", step=5)], back={1: 10})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_an_idle_rank_is_compared_without_parameters_that_arrive_late():
    """Before a comparison ranks wait for the parameters of the last step, and an idle rank gets none."""
    more = f"{OVERLAP} --ntp-min-tp-width 2 --ntp-watch-steps 1"
    lived, rows = live(job(more=more), faults=[kill(3, during="backward", step=5)])
    assert widths(lived) == {0: 2, 1: 2, 2: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)


@KINDS
@pytest.mark.parametrize("second", [8, 12])
def test_a_joining_rank_is_idle_until_its_replica_is_wide_enough(second, kind):
    """All slots of a replica are lost, and rejoin one after the other, at once or steps apart."""
    faults = [kill(slot, during="backward", step=5) for slot in (0, 1)]
    lived, rows = live(job(more=f"{kind} --ntp-min-tp-width 2"), faults=faults, back={0: 8, 1: second})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)


@KINDS
def test_a_replica_that_lost_a_stage_is_idle(kind):
    reference = run(uniform(BASE, tp=2, pp=2))
    lived, _ = live(job(**PIPELINE, more=kind), faults=[kill(slot, during="forward", step=5) for slot in (0, 1)])
    trained = {slot: one for slot, one in lived.items() if slot not in (4, 5)}
    assert_same_training(trained, reference)


@KINDS
def test_all_slots_of_a_replica_die_at_once(kind):
    lived, rows = live(job(more=kind), faults=[kill(slot, during="backward", step=5) for slot in (0, 1)])
    assert widths(lived) == {2: 2, 3: 2}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_losing_the_only_holder_of_state_ends_the_job():
    """Both holders of the same units are lost: the error names the units, and a fix."""
    with pytest.raises(StateLost, match="restart from"):
        live(job(), faults=[kill(slot, during="backward", step=5) for slot in (1, 3)])


def test_a_restart_ends_the_job_when_the_users_costs_favor_it(tmp_path):
    """Half of a replica is half of its speed for days, and a restart takes a minute."""
    more = f"--ntp-actions-restart-s 60 --ntp-events={tmp_path}/events"
    with pytest.raises(RestartIsBetter, match=r"a restart is better .*reduce tp: 0\.\d+.*restart: 0\.99.*restart from"):
        live(job(more=more), faults=[kill(3, during="backward", step=5)])
    (chosen,) = [one.event for one in Follower(tmp_path / "events").news() if isinstance(one.event, Chosen)]
    assert (chosen.action, chosen.lost) == ("restart", ["r1.s0.t1"])


def test_a_replica_that_may_not_shrink_is_idle():
    lived, rows = live(job(more="--ntp-actions-forbid reduce-tp"), faults=[kill(3, during="backward", step=5)])
    assert widths(lived) == {0: 2, 1: 2, 2: 1}
    assert lived[2].seen.share == (0, 0)
    assert_same_training({slot: lived[slot] for slot in (0, 1)})
    assert_every_sample_once(rows)


def test_no_full_width_replica_is_left():
    faults = [kill(1, during="backward", step=5), kill(2, during="backward", step=8)]
    with pytest.raises(BelowMinimum, match="or leave --ntp-actions-forbid out"):
        live(job(more="--ntp-actions-forbid reduce-tp"), faults=faults)


def test_no_replica_is_left_that_may_train(tmp_path):
    faults = [kill(1, during="backward", step=5), kill(2, during="backward", step=8)]
    more = f"--ntp-min-tp-width 2 --save {tmp_path} --save-interval 100"
    with pytest.raises(BelowMinimum, match=f"Fix: restart from the last checkpoint in {tmp_path}"):
        live(job(more=more), faults=faults)


def test_a_rank_rejoins():
    lived, rows = live(job(), faults=[kill(3, during="backward", step=5)], back={3: 10})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert lived[3].seen.losses == lived[2].seen.losses[-len(lived[3].seen.losses) :]
    assert_every_sample_once(rows)


@pytest.mark.short
def test_a_rejoined_rank_survives_the_next_loss_and_return():
    """Its training began in the middle of the others': what Megatron sets up at the beginning, it has to have too."""
    faults = [kill(3, during="backward", step=4), kill(0, during="backward", step=10)]
    lived, rows = live(job(), faults=faults, back={3: 7, 0: 13})
    assert widths(lived) == dict.fromkeys(range(4), 2)
    assert_same_training(lived)
    assert_every_sample_once(rows)


@pytest.mark.parametrize(
    ("slot", "fault_point"),
    [
        pytest.param(
            slot,
            fault_point,
            marks=[pytest.mark.short] * (who == "who came back" and fault_point == "arriving"),
            id=f"{who}-{fault_point}",
        )
        for slot, who in {0: "0", 2: "2", 3: "who came back", 5: "of a third"}.items()
        for fault_point in ("moved", "made", "resumed", "arriving", "arrived")
    ],
)
def test_a_loss_while_optimizer_state_is_sent_to_a_rejoined_rank(slot, fault_point):
    """The rejoined rank has weights, trains, and is lost; or a sender to it, or another. The results are the same."""
    size = 2 if slot < 4 else 3
    faults = [kill(3, during="backward", step=5), kill(slot, during=fault_point, epoch=2)]
    lived, rows = live(job(dp=size), faults=faults, back={3: 10})
    assert len(lived) == 2 * size - 1
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_optimizer_state_is_sent_in_bf16_and_over_stages():
    """Masters in float32 are most of the state that arrives."""
    options = PIPELINE | BF16
    lived, _ = live(job(**options), faults=[kill(5, during="backward", step=5)], back={5: 10})
    reference = run(uniform(BASE, tp=2, pp=2, **BF16))
    worst = largest_differences(as_if_always_there(lived), reference)
    bounds = bounds_of(BASE, "bfloat16")
    assert all(worst[what] <= bound for what, bound in bounds.items()), worst


def test_wrong_optimizer_state_is_detected_by_its_digest():
    spoil = "what_an_optimizer_keeps_arrives_doubled"
    with pytest.raises(StateLost, match=r"\(exp_avg\) is not the same wherever it is held"):
        live(job(spoil=spoil), faults=[kill(3, during="backward", step=5)], back={3: 10})


@pytest.mark.parametrize(
    ("model", "fault_point"),
    [
        *((BASE, fault_point) for fault_point in (*IN_A_STEP, "exchange")),
        *(("tied embeddings", fault_point) for fault_point in ("forward", "backward", "vote", "apply")),
    ],
)
@pytest.mark.parametrize("slot", [0, 7])
def test_a_stage_is_degraded(slot, model, fault_point):
    """The first or the last; while others wait to receive from it, or to send."""
    reference = run(uniform(model, tp=2, pp=2))
    lived, _ = live(job(model=MODELS[model], **PIPELINE), faults=[kill(slot, during=fault_point, step=5)])
    assert len(lived) == 7
    assert_same_training(lived, reference)


@pytest.mark.parametrize("fault_point", [*IN_A_STEP, "exchange"])
def test_the_stage_in_the_middle_is_degraded(fault_point):
    """The rank, one of twelve, for which neighbours on both sides wait."""
    pipeline = {"tp": 2, "pp": 3, "chunks": 1}
    lived, _ = live(job(dp=2, **pipeline), faults=[kill(7, during=fault_point, step=5)])
    assert len(lived) == 11
    assert_same_training(lived, run(uniform(BASE, **pipeline)))


def test_a_stage_of_a_hybrid_model_is_degraded_and_restored():
    """Attention and MLP layers; no stage has as many of both."""
    model = {"model": MODELS[HYBRID].replace("*--*", "*-|-*"), "tp": 2, "pp": 2}
    lived, _ = live(job(dp=2, **model), faults=[kill(5, during="backward", step=5)], back={5: 10})
    assert widths(lived) == dict.fromkeys(range(8), 2)
    assert_same_training(lived, run(Job(**model)))


@KINDS
def test_a_rank_rejoins_its_stage(kind):
    lived, _ = live(job(**PIPELINE, more=kind), faults=[kill(6, during="backward", step=5)], back={6: 10})
    assert widths(lived) == dict.fromkeys(range(8), 2)
    assert_same_training(lived, run(uniform(BASE, tp=2, pp=2)))


@pytest.mark.parametrize("more", ["", "--no-align-param-gather"], ids=["aligned gathers", "gathers as needed"])
def test_a_rank_rejoins_an_interleaved_pipeline_that_gathers_parameters(more):
    """Megatron lets it gather no parameters in its first step, and the schedule of the others would gather all."""
    interleaved = {"tp": 1, "pp": 2, "chunks": 2, "batch": 8}
    lived, _ = live(job(**interleaved, more=f"{OVERLAP} {more}"), faults=[kill(1, during="vote", step=5)], back={1: 10})
    assert widths(lived) == dict.fromkeys(range(4), 1)
    assert_same_training(lived, run(uniform(BASE, **interleaved)))


@KINDS
def test_two_stages_of_a_replica_are_degraded_one_after_the_other_in_an_interleaved_pipeline(kind):
    interleaved = {**PIPELINE, "chunks": 2, "batch": 8}
    reference = run(uniform(BASE, tp=2, pp=2, chunks=2, batch=8))
    faults = [kill(0, during="backward", step=4), kill(5, during="forward", step=9)]
    lived, _ = live(job(**interleaved, more=kind), faults=faults)
    assert_same_training(lived, reference)


@KINDS
@pytest.mark.parametrize(
    "more",
    [
        "--sequence-parallel",
        "--overlap-grad-reduce --ddp-bucket-size 9000",
        "--calculate-per-token-loss",
        "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        "--clip-grad 0",
    ],
)
def test_with(more, kind):
    options = {"more": f"{more} {kind}", "tp": 4}
    whole = run(uniform(BASE, more=more))
    lived, rows = live(job(**options), faults=[kill(5, during="backward", step=5)])
    assert_same_training(lived, whole)
    assert_every_sample_once(rows)


@pytest.mark.parametrize("fault_point", ["forward", "vote", "applied"])
def test_in_an_evaluation(fault_point):
    """Each fifth section is an evaluation; it is repeated completely, and its samples are read again."""
    more = "--eval-interval 4 --eval-iters 2"
    whole = run(uniform(BASE, more=more))
    lived, _ = live(job(more=more), faults=[kill(3, during=fault_point, step=5)])
    assert_same_training(lived, whole)
    last = [one.seen.evaluated[-1] for one in lived.values()]
    assert last == pytest.approx([whole[0].evaluated[-1]] * 3, rel=1e-12)


@KINDS
@pytest.mark.parametrize(
    ("fault_point", "section"),
    [pytest.param("save", 6, marks=pytest.mark.short), ("written", 6), ("vote", 6), ("applied", 6), ("forward", 7)],
)
def test_in_a_checkpoint(fault_point, section, kind, tmp_path):
    """After five steps the sixth section saves, and the last too; both checkpoints equal those of a nominal job. Their
    sharded optimizer state is cut as the ranks are, and is read in `test_checkpoints.py`."""
    more = f"{kind} --save {{}} --save-interval 5 --dist-ckpt-format torch_dist"
    whole = uniform(BASE, tp=2, more=more.format(tmp_path / "whole"))
    lived, _ = live(job(more=more.format(tmp_path / "mine")), faults=[kill(3, during=fault_point, step=section)])
    assert_same_training(lived, run(whole))
    for step in (5, 10, STEPS):
        mine, theirs = (weights_in(tmp_path / name, step, kind) for name in ("mine", "whole"))
        assert largest_difference(mine, theirs) <= BOUNDS["float64"]


def weights_in(folder, step, kind):
    found = replica_digests_in(folder, step)
    return {name: whole for name, whole in found.items() if not (kind and name.startswith("optimizer"))}


@pytest.mark.short
def test_a_job_saves_with_some_ranks_and_later_with_all(tmp_path):
    """Megatron keeps by which groups it shares the writing out; of two whose groups differ each waits for the other."""
    more = "--save {} --save-interval 2 --dist-ckpt-format torch_dist"
    whole = uniform(BASE, more=more.format(tmp_path / "whole"))
    faults = [kill(0, during="backward", step=4), kill(1, during="backward", step=8)]
    lived, _ = live(job(tp=1, dp=3, more=more.format(tmp_path / "mine")), faults=faults, back={0: 7, 1: 11})
    assert widths(lived) == {0: 1, 1: 1, 2: 1}
    assert_same_training(lived, run(whole))
    for step in (4, 6, STEPS):
        mine, theirs = (replica_digests_in(tmp_path / name, step) for name in ("mine", "whole"))
        assert largest_difference(mine, theirs) <= BOUNDS["float64"]


@KINDS
@pytest.mark.parametrize("slot", [1, 2])
def test_a_checkpoint_is_saved_while_a_replica_is_idle(slot, kind, tmp_path):
    """The idle slot is the first of all ranks, or the last; it does not write, and stops when the others do."""
    more = f"{kind} --save {{}} --save-interval 5 --exit-interval 10 --exit-duration-in-mins 60"
    whole = uniform(BASE, more=more.format(tmp_path / "whole"))
    mine = job(more=f"{more.format(tmp_path / 'mine')} --ntp-min-tp-width 2")
    lived, _ = live(mine, faults=[kill(slot, during="backward", step=5)])
    assert len(lived) == 3
    trained = {number: one for number, one in lived.items() if one.width == 2}
    assert_same_training(trained, run(whole))
    for step in (5, 10):
        replica_digests = [weights_in(tmp_path / name, step, kind) for name in ("mine", "whole")]
        assert largest_difference(*replica_digests) <= BOUNDS["float64"]


@KINDS
def test_two_ranks_of_eight_are_left(kind):
    """TP4 + TP4 shrinks six times, in every replica, to TP1 + TP1."""
    victims = {2: 7, 4: 0, 6: 5, 8: 2, 10: 6, 12: 3}
    faults = [kill(slot, during="backward", step=step) for step, slot in victims.items()]
    lived, rows = live(job(tp=4, more=kind), faults=faults)
    assert widths(lived) == {1: 1, 4: 1}
    assert_same_training(lived)
    assert_every_sample_once(rows)


def test_replicas_with_different_initial_state_are_refused():
    with pytest.raises(Refused, match=r"do not begin alike: .*weight.* slots 0, 1 \w+.*Fix: have all of them"):
        live(job(spoil="replicas_begin_apart"))


@pytest.mark.short
def test_misplaced_units_are_detected_by_their_digest():
    with pytest.raises(StateLost, match=r"is not the same wherever it is held"):
        live(job(spoil="dealt_units_swapped"), faults=[kill(3, during="backward", step=5)])


def events_of(path, kind):
    return [one.event for one in Follower(path).news() if isinstance(one.event, kind)]


@pytest.mark.parametrize(
    ("spoil", "back"),
    [
        ("samples_not_rewound", {}),
        ("dealt_units_swapped_and_not_compared", {}),
        ("what_an_optimizer_keeps_arrives_doubled_and_is_not_compared", {3: 10}),
    ],
)
def test_the_comparison_detects_planted_faults(spoil, back):
    lived, _ = live(job(spoil=spoil), faults=[kill(3, during="backward", step=5)], back=back)
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE)))
    assert worst["weights"] > 1e-6, worst


@pytest.mark.parametrize(("by", "right"), [("", True), ("_by_megatron", False)], ids=["ours", "Megatron's"])
def test_remains_of_an_interrupted_step_are_collected_in_another(by, right):
    spoil = f"what_is_left_of_a_step_is_collected_in_another{by}"
    lived, _ = live(job(**PIPELINE, more=OVERLAP, spoil=spoil), faults=[kill(6, during="backward", step=5)])
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE, tp=2, pp=2)))
    assert (max(worst.values()) <= BOUNDS["float64"]) == right, worst


def test_a_degraded_run_equals_a_planned_one_bit_for_bit():
    """A loss before anything is applied: then every step is one of the degraded layout."""
    planned = run(degraded(BASE, {"tp": 2, "dp": 2, "lost": ("r1.s0.t1",)}))
    lived, _ = live(job(), faults=[kill(3, during="step", step=1)])
    for slot, one in lived.items():
        assert (one.seen.losses, one.seen.norms) == (planned[slot].losses, planned[slot].norms)
        for name, part in planned[slot].parts.items():
            assert np.array_equal(one.seen.parts[name].values, part.values), name


def test_tokens_of_a_file(tmp_path):
    """They are shuffled, and an index of that is kept in a file."""
    text = tmp_path / "text"
    text.write_text("".join(f"{number} {number**2} {number**3}\n" for number in range(1, 200)))
    command = [sys.executable, RECIPES / "tokenize_text.py", text, tmp_path / "tokens"]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert f"{text.stat().st_size:,} tokens" in output
    more = f"--data-path {tmp_path / 'tokens'} --split 90,5,5"
    whole = run(uniform(BASE, more=more))
    lived, _ = live(job(more=more), faults=[kill(3, during="backward", step=5)], back={3: 10})
    assert_same_training(lived, whole)
    assert whole[0].losses != run(uniform(BASE))[0].losses


@KINDS
@pytest.mark.parametrize(("fault_point", "section"), [("vote", 6), ("applied", 6), ("forward", 7), ("save", 10)])
def test_ranks_agree_after_each_step_whether_to_continue(fault_point, section, kind, tmp_path):
    """Each second section asks; the tenth, after five steps, saves before it does."""
    more = f"{kind} --exit-duration-in-mins 60 --exit-signal-handler --save {tmp_path} --save-interval 5"
    lived, _ = live(job(more=more), faults=[kill(3, during=fault_point, step=section)])
    assert_same_training(lived)
    assert sorted(path.name for path in tmp_path.glob("iter_*")) == [f"iter_{step:07d}" for step in (5, 10, 15, 20)]


@KINDS
@pytest.mark.parametrize("model", [DROPOUT, f"{SEQUENCE}: {DROPOUT}"])
def test_masks_stay_the_same_over_a_loss_and_a_return(model, kind):
    lived, rows = live(job(model=MODELS[model], more=kind), faults=[kill(3, during="backward", step=5)], back={3: 10})
    assert_same_training(lived, run(uniform(model)))
    assert_every_sample_once(rows)


@pytest.mark.parametrize("back", [{}, pytest.param({3: 10}, marks=pytest.mark.short)])
def test_bf16(back):
    """Its float32 copies move with the weights; bounded by what Megatron itself differs by in bf16."""
    lived, _ = live(job(**BF16), faults=[kill(3, during="backward", step=5)], back=back)
    assert len(lived) == 3 + len(back)
    worst = largest_differences(as_if_always_there(lived), run(uniform(BASE, **BF16)))
    bounds = bounds_of(BASE, "bfloat16")
    assert all(worst[key] <= bounds[key] for key in worst), (worst, bounds)


@pytest.mark.short
def test_one_stage_of_a_replica_records_its_samples(tmp_path):
    path = tmp_path / "events"
    live(job(tp=1, pp=2, more=f"--ntp-events={path}"), faults=[kill(3, during="backward", step=5)])
    steps = [one.event for one in Follower(path).news() if isinstance(one.event, Committed)]
    for step in range(1, STEPS + 1):
        samples = sorted(sample for event in steps if event.step == step for sample in event.samples)
        assert samples == list(range((step - 1) * 6, step * 6)), step


def test_events_are_recorded(tmp_path):
    """With `--ntp-events`: steps with loss and samples, the recovery, the end."""
    path = tmp_path / "events"
    live(job(more=f"--ntp-events={path}"), faults=[kill(3, during="backward", step=5)])
    recorded = Follower(path).news()
    steps = [one.event for one in recorded if isinstance(one.event, Committed)]
    for step in range(1, STEPS + 1):
        mine = [event for event in steps if event.step == step]
        assert sorted(sample for event in mine for sample in event.samples) == list(range((step - 1) * 6, step * 6))
        assert len({event.losses["lm loss"] for event in mine}) == 1
        assert {event.epoch for event in mine} == {int(step >= 5)}
    recovered = [one for one in recorded if isinstance(one.event, Recovered)]
    assert sorted(one.slot for one in recovered) == ["r0.s0.t0", "r0.s0.t1", "r1.s0.t0"]
    assert {(*one.event.lost, *map(tuple, one.event.widths)) for one in recovered} == {("r1.s0.t1", (2,), (1,))}
    assert {sum(one.event.micro_batches) for one in recovered} == {6}
    assert [one.event.action for one in recorded if isinstance(one.event, Chosen)] == ["reduce tp"]
    assert sum(isinstance(one.event, Began) for one in recorded) == 4
    assert sum(isinstance(one.event, Ended) for one in recorded) == 3


def test_samples_are_recorded_once_where_a_model_has_several_chunks(tmp_path):
    """Each chunk has a loader, and draws the same samples."""
    events = tmp_path / "events"
    more = f"--ntp-events {events} --train-iters 4"
    live(job(tp=1, pp=2, chunks=2, batch=8, more=more), faults=[])
    committed = [one.event for one in Follower(events).news() if isinstance(one.event, Committed)]
    drawn = [(event.step, sample) for event in committed for sample in event.samples]
    assert len(drawn) == len(set(drawn)) == 4 * 8
