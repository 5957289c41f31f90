"""Live jobs with context parallelism: a replica is lost, the others of its context group share the sequences, and it
comes back.

The reference is stock Megatron on one rank of each stage. Without `--calculate-per-token-loss` samples have tokens that
all count, as in `test_context_parallel.py`.
"""

import dataclasses
import json

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import RECIPES, STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS
from tests.harness.parity.live import as_if_always_there, live
from tests.ranks.command import NTP, Command

FLOAT64 = BOUNDS["float64"]
MODEL = f"{MODELS[BASE]} --transformer-impl transformer_engine"
PER_TOKEN, SP = "--calculate-per-token-loss", "--sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
LEVELS = "--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"
DP_LAST = "--use-tp-pp-dp-mapping --expert-tensor-parallel-size 2"
"""Megatron wants the same number of replicas for experts, of which there are none."""


def job(more="", **options):
    """Two context groups of two replicas."""
    options = {"tp": 1, "cp": 2, "dp": 2, "masked": PER_TOKEN in more, "enabled": True} | options
    return Job(model=MODEL, more=more, **options)


def worst_of(lived, more="", **options):
    expected = run(Job(model=MODEL, **{"tp": 1, "masked": PER_TOKEN in more} | options, more=more))
    return max(largest_differences(seen_of(lived), expected).values())


def seen_of(lived):
    """What ranks saw of the whole training. An idle rank of a first stage takes itself for the last one meanwhile."""
    seen = as_if_always_there(lived)
    return {
        slot: one if len(one.losses) == STEPS else dataclasses.replace(one, losses=[], steps_with_loss=[])
        for slot, one in seen.items()
    }


@pytest.mark.parametrize("fault_point", ["forward", "backward", "reduce", "vote", "apply"])
@pytest.mark.parametrize("more", ["", PER_TOKEN], ids=["mean", "per token"])
def test_a_replica_is_lost_at_each_fault_point_and_comes_back(fault_point, more):
    lived, _ = live(job(more), faults=[kill(1, during=fault_point, step=4)], back={1: 12})
    assert len(lived) == 4
    assert worst_of(lived, more) <= FLOAT64


@pytest.mark.short
def test_the_rest_of_a_replica_with_a_lost_slot_is_idle():
    """With tensor and sequence parallelism slots 2 and 3 are the second replica; slot 2 is lost."""
    lived, _ = live(job(f"{SP} {PER_TOKEN}", tp=2, dp=1), faults=[kill(2, during="backward", step=4)], back={2: 12})
    assert len(lived) == 4
    assert worst_of(lived, PER_TOKEN) <= FLOAT64


@pytest.mark.parametrize(
    ("more", "layout", "lost"),
    [
        pytest.param(PER_TOKEN, {"cp": 4, "dp": 1}, [3], id="of four replicas two share"),
        pytest.param(PER_TOKEN, {"cp": 4, "dp": 1}, [0, 2], id="of four two are lost"),
        pytest.param("", {}, [2, 3], id="a whole context group is lost"),
        pytest.param("", {"tp": 2, "pp": 2, "dp": 1}, [5], id="in a pipeline"),
        pytest.param(f"{PER_TOKEN} {DP_LAST}", {"pp": 2}, [3], id="stages before replicas"),
        pytest.param(SHARDED, {}, [0], id="with the distributed optimizer"),
        pytest.param(f"{PER_TOKEN} --cp-comm-type a2a", {}, [1], id="a2a"),
        pytest.param(f"{PER_TOKEN} --cp-comm-type all_gather", {"cp": 4, "dp": 1}, [1], id="all_gather"),
        pytest.param(f"{PER_TOKEN} {LEVELS}", {"cp": 4, "dp": 1}, [1], id="a2a in p2p"),
    ],
)
def test_context_groups_go_on_with_fewer_replicas(more, layout, lost):
    lived, _ = live(
        job(more, **layout),
        faults=[kill(slot, during="backward", step=4) for slot in lost],
        back=dict.fromkeys(lost, 12),
    )
    assert len(lived) == job(**layout).processes
    assert worst_of(lived, PER_TOKEN if PER_TOKEN in more else "", pp=layout.get("pp", 1)) <= FLOAT64


@pytest.mark.parametrize(("layout", "lost"), [({}, [1]), ({"cp": 4, "dp": 1}, [0])])
def test_parts_whose_tokens_do_not_all_count_weigh_as_in_megatron(layout, lost):
    """Without a loss per token each part of a sequence has the mean over its own tokens, and the parts weigh alike: so
    the reference has as many parts. Replicas that share fewer take the means of theirs one by one."""
    masked = job(masked=True, **layout)
    lived, _ = live(masked, faults=[kill(slot, during="backward", step=4) for slot in lost])
    expected = run(dataclasses.replace(masked, enabled=False, dp=1))
    assert max(largest_differences(seen_of(lived), expected).values()) <= FLOAT64
    whole = run(dataclasses.replace(masked, enabled=False, dp=1, cp=1))
    assert max(largest_differences(expected, whole).values()) > 1e3 * FLOAT64, "the parts differ in their tokens"


def test_a_reported_mean_is_one_over_all_parts_where_it_comes_from_the_vote():
    """The step is over when the rank is lost, and keeps slot 0 from its result: it returns what all voted with."""
    lived, _ = live(job(under="losses_are_means", tp=2, dp=1), faults=[kill(1, during="applied", step=4)])
    expected = run(Job(model=MODEL, tp=1, masked=False))
    assert lived[0].seen.losses[3:] == pytest.approx(expected[0].losses[3:], rel=FLOAT64)


def test_masks_are_those_of_whole_sequences():
    """A dropout between the layers, whose rows a replica finds in the sequence."""
    masks = "--hidden-dropout 0.1 --ntp-enable --ntp-dropout exact"
    lived, _ = live(job(masks, masked=False), faults=[kill(1, during="backward", step=4)], back={1: 12})
    assert worst_of(lived, masks, masked=False) <= FLOAT64


@pytest.mark.parametrize("spoil", ["replicas_of_a_context_weigh_as_before", "rows_are_in_order"])
def test_controls_are_noticed(spoil):
    masks = "--hidden-dropout 0.1 --ntp-enable --ntp-dropout exact" if spoil == "rows_are_in_order" else ""
    lived, _ = live(job(masks, masked=False, spoil=spoil), faults=[kill(1, during="backward", step=4)])
    assert worst_of(lived, masks, masked=False) > 1e3 * FLOAT64


def test_each_sample_is_recorded_once(tmp_path):
    """One replica of a context group records the samples that all of them draw."""
    recipe, out = RECIPES.parent / "chaos" / "megatron-context-parallel.toml", tmp_path / "out"
    command = Command([*NTP, "chaos", "--out", str(out), str(recipe)], tmp_path / "log")
    code, output = command.end()
    assert code == 0, output
    checks = json.loads((out / "verdict.json").read_text())["checks"]
    assert all(check["holds"] for check in checks)
    assert any("each once" in check["what"] for check in checks)


def test_with_nobody_lost_it_is_stock_megatron():
    """The same bits and the same collectives, with the plugin on and off."""
    off, on = (run(dataclasses.replace(job(PER_TOKEN), enabled=enabled)) for enabled in (False, True))
    assert {rank: (seen.losses, seen.norms) for rank, seen in on.items()} == {
        rank: (seen.losses, seen.norms) for rank, seen in off.items()
    }
