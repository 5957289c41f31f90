"""Latent attention (`--multi-latent-attention`) in replicas of different width, planned and live.

The reference is stock Megatron at TP 1, since at TP > 1 without `--sequence-parallel` its gradients are partial. The
layers are TransformerEngine's own, in the CPU emulation: Megatron builds no others for it.
"""

import dataclasses
import json
import os
import subprocess
import sys

import pytest

from benchmarks.numerics import BOUNDS
from ntp_plugin.config.sections import Model
from ntp_plugin.planning.units import transformer_units
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import RECIPES, Job, largest_differences, run
from tests.harness.parity.layouts import (
    LAST_DEGRADED,
    LATENT,
    LATENT_HYBRID,
    LATENT_OF_KEYS,
    WITH_TE,
    degraded,
    reference,
    uniform,
)
from tests.harness.parity.live import as_if_always_there, live
from tests.harness.parity.saved import joined, loading, saving
from tests.ranks.command import NTP, Command

FLOAT64 = BOUNDS["float64"]
SP = "--sequence-parallel"
SHARDED = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather --ddp-bucket-size 9000"
RECOMPUTED = "--recompute-granularity selective --recompute-modules core_attn mla_up_proj"


def worst_of(outcomes, model=LATENT, layout="", **options):
    return max(largest_differences(outcomes, run(reference(model, layout, tp=1, **options))).values())


@pytest.mark.parametrize(
    ("model", "layout", "more"),
    [
        (LATENT, "TP4+TP3", SP),
        (LATENT, "TP4+TP3", ""),
        (LATENT, "TP2+TP1", ""),
        (LATENT, "TP3+TP3", f"{SP} {SHARDED}"),
        (LATENT, "TP2+TP1", f"{SP} {RECOMPUTED}"),
        (LATENT, "TP4+TP2", f"{SP} --ntp-route via_core"),
        (LATENT_OF_KEYS, "TP4+TP2", SP),
        (LATENT_HYBRID, "TP2+TP1", SP),
    ],
)
def test_a_degraded_layout_trains_as_the_reference(model, layout, more):
    assert worst_of(run(degraded(model, layout, more=more)), model) <= FLOAT64


@pytest.mark.parametrize("more", [SP, f"{SP} {SHARDED}", ""])
def test_a_pipeline_with_a_degraded_stage(more):
    outcomes = run(degraded(LATENT, LAST_DEGRADED, more=more))
    expected = Job(model=WITH_TE[LATENT], tp=1, pp=2)  # each stage draws its weights by itself
    assert max(largest_differences(outcomes, run(expected)).values()) <= FLOAT64


def test_with_sequence_parallelism_a_nominal_layout_runs_stock_megatron():
    """The same bits and the same collectives, with the plugin on and off."""
    off, on = (run(Job(model=WITH_TE[LATENT], tp=2, more=SP, enabled=enabled)) for enabled in (False, True))
    assert max(largest_differences(on, off).values()) == 0
    assert [seen.collectives for seen in on.values()] == [seen.collectives for seen in off.values()]
    assert worst_of(off) <= FLOAT64


def test_without_it_the_plugin_completes_the_gradients_from_the_first_step():
    stock, completed = (run(Job(model=WITH_TE[LATENT], tp=2, enabled=enabled)) for enabled in (False, True))
    assert worst_of(stock) > 1e-3, "Megatron adds the slots up by itself: the plugin need not"
    assert worst_of(completed) <= FLOAT64


def test_control_gradients_of_one_slots_heads_are_noticed():
    assert worst_of(run(degraded(LATENT, "TP2+TP1", spoil="shared_keys_of_one_slot"))) > 1e-3


@pytest.mark.parametrize(
    ("more", "fault_point"),
    [
        pytest.param(f"{SP} {SHARDED}", "backward", marks=pytest.mark.short),
        (f"{SP} {SHARDED}", "vote"),
        ("", "backward"),
        ("", "vote"),
    ],
)
def test_a_rank_dies_and_rejoins(more, fault_point):
    job = Job(model=WITH_TE[LATENT], tp=2, dp=2, enabled=True, more=more)
    lived, _ = live(job, faults=[kill(3, during=fault_point, step=5)], back={3: 10})
    assert {slot: one.width for slot, one in lived.items()} == dict.fromkeys(range(4), 2)
    assert worst_of(as_if_always_there(lived)) <= FLOAT64


def test_a_rank_of_a_wide_replica_dies():
    """The sequence of 16 is cut over the three that are left."""
    job = Job(model=WITH_TE[LATENT], tp=4, dp=2, enabled=True, more=SP)
    lived, _ = live(job, faults=[kill(6, during="forward", step=5)])
    assert worst_of(as_if_always_there(lived)) <= FLOAT64


def resumed(tmp_path, first, second, more=""):
    seen = run(dataclasses.replace(first, more=f"{first.more} {saving(tmp_path)}"))
    return joined(seen, run(dataclasses.replace(second, more=f"{second.more} {loading(tmp_path)}")))


def test_a_nominal_job_resumes_a_checkpoint_of_a_degraded_one(tmp_path):
    saved = degraded(LATENT, "TP4+TP3", more=SP)
    assert worst_of(resumed(tmp_path, saved, uniform(LATENT, tp=2, more=SP))) <= FLOAT64


def test_a_degraded_job_resumes_a_checkpoint_of_a_nominal_one_with_a_sharded_optimizer(tmp_path):
    sharded = f"{SP} --use-distributed-optimizer --dist-ckpt-optim-fully-reshardable"
    saved = Job(model=WITH_TE[LATENT], tp=2, dp=2, more=sharded)
    assert worst_of(resumed(tmp_path, saved, degraded(LATENT, "TP4+TP3", more=sharded))) <= FLOAT64


def test_control_two_swapped_heads_in_a_checkpoint_are_noticed(tmp_path):
    saved = degraded(LATENT, "TP4+TP3", more=SP, spoil="units_swapped_in_a_checkpoint")
    assert worst_of(resumed(tmp_path, saved, uniform(LATENT, tp=2, more=SP))) > 1e-3


def test_a_campaign_of_ntp_chaos(tmp_path):
    """A rank is killed in the backward of a job under `ntp run`, and comes back: TP4, of which three are left."""
    recipe, out = RECIPES.parent / "chaos" / "megatron-transformer-engine.toml", tmp_path / "out"
    words = ["--standalone", "--nproc-per-node=8", str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-mla.args'}"]
    more = ["--train-iters=80", "--tensor-model-parallel-size=4", SP, "--ntp-enable"]
    command = Command([*NTP, "chaos", "--out", str(out), str(recipe), "--", *words, *more], tmp_path / "log")
    code, output = command.end()
    assert code == 0, output
    assert json.loads((out / "verdict.json").read_text())["holds"]


# ---------------------------------------------------------------- planning and refusals

REFUSED = {
    "": [],
    "--tensor-model-parallel-size 2 --sequence-parallel": [],
    "--transformer-impl local": ["--multi-latent-attention with --transformer-impl local"],
    "--mla-down-proj-fusion": ["--mla-down-proj-fusion"],
    "--cache-mla-latents": ["--cache-mla-latents"],
    "--experimental-attention-variant dsa": ["--experimental-attention-variant"],
    "--tensor-model-parallel-size 3": ["--num-query-groups"],
}
PROBE = """
import json, sys
from ntp_plugin.megatron import check
flags = ["--ntp-enable", "--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "8",
         "--attention-dropout", "0", "--hidden-dropout", "0", "--multi-latent-attention"]
print(json.dumps({more: [option.flag for option in check([*flags, *more.split()])] for more in sys.argv[1:]}))
"""


def test_what_is_refused():
    """In a process of its own: the parser's emulation changes torch."""
    command = [sys.executable, "-W", "ignore", "-c", PROBE, *REFUSED]
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == REFUSED


@pytest.mark.parametrize("model", [LATENT_OF_KEYS, LATENT])
def test_planning_counts_the_parameters_that_megatron_builds(model):
    """From the shape alone, as `ntp plan` and `ntp check` do; it has no norms of latents."""
    sizes = {"kv_lora_rank": 16, "qk_head_dim": 4, "qk_pos_emb_head_dim": 4, "v_head_dim": 6}
    shape = Model(layers=2, hidden=64, heads=16, ffn=160, vocab=250, vocab_multiple=32, seq=16, **sizes)
    if model == LATENT:
        shape = dataclasses.replace(shape, q_lora_rank=24)
    norms = 2 * (16 + 24) if model == LATENT else 0
    (stage,) = transformer_units(shape, tp=1, pp=1).stages
    assert (stage.elements + norms) * 8 == run(uniform(model, tp=1))[0].counted["weights"]
