"""Stock Megatron with context parallelism in the CPU emulation trains as it does without, by TransformerEngine's own
ring, gather and exchanges of heads.

The reference has one rank of context, and its attention is unfused. Without `--calculate-per-token-loss` Megatron
weighs the parts of a sample alike, so these jobs have samples whose tokens all count.
"""

import collections
import os
import re
import subprocess
import sys

import pytest

from benchmarks.numerics import BOUNDS
from tests.harness.parity.job import RECIPES, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, MODELS

FLOAT64 = BOUNDS["float64"]
PER_TOKEN, SP = "--calculate-per-token-loss", "--sequence-parallel"
FEW = "--train-iters 4"


def job(more="", **options):
    model = f"{MODELS[BASE]} --transformer-impl transformer_engine"
    masked = PER_TOKEN in more
    return Job(model=model, more=f"{FEW} {more}", batch=4, **{"tp": 1, "cp": 2, "masked": masked} | options)


def reference(more="", **options):
    """The same samples on one rank of each stage, with no fused attention to be called."""
    return job(more, under="no_fused_attention", cp=1, **options)


def worst_of(outcomes, reference):
    """The largest difference, once the ranks of a context have the same bits."""
    held = collections.defaultdict(set)
    for seen in outcomes.values():
        for name, part in seen.parts.items():
            held[name, part.index.tobytes()].add(part.values.tobytes())
    assert {len(values) for values in held.values()} == {1}
    return max(largest_differences(outcomes, run(reference)).values())


@pytest.mark.short
def test_a_ring_with_tensor_and_sequence_parallelism_trains_as_one_rank():
    assert worst_of(run(job(f"{SP} {PER_TOKEN}", tp=2)), reference(PER_TOKEN)) <= FLOAT64


@pytest.mark.parametrize(
    ("more", "layout"),
    [
        ("", {}),
        (PER_TOKEN, {"cp": 4}),
        (PER_TOKEN, {"dp": 2}),
        ("--cp-comm-type a2a", {"tp": 2}),
        (f"--cp-comm-type a2a {PER_TOKEN}", {"cp": 4}),
        (f"--cp-comm-type all_gather {PER_TOKEN}", {"tp": 2}),
        ("--cp-comm-type all_gather", {"cp": 4}),
        (f"--cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2 {PER_TOKEN}", {"cp": 4}),
    ],
)
def test_each_kind_of_communication_trains_as_one_rank(more, layout):
    assert worst_of(run(job(more, **layout)), reference(PER_TOKEN if PER_TOKEN in more else "")) <= FLOAT64


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_pipelines_with_tensor_and_sequence_parallelism(kind):
    found = run(job(f"{SP} {PER_TOKEN} --cp-comm-type {kind}", tp=2, pp=2))
    assert worst_of(found, reference(PER_TOKEN, pp=2)) <= FLOAT64


@pytest.mark.parametrize("kind", ["a2a", "all_gather"])
def test_a_sliding_window(kind):
    window = f"{PER_TOKEN} --window-size 6,0"
    assert worst_of(run(job(f"{window} --cp-comm-type {kind}")), reference(window)) <= FLOAT64


def test_one_rank_of_context_may_call_fused_attention():
    """As a rank does that stays alone in its context."""
    assert worst_of(run(job(PER_TOKEN, cp=1, under="attention_is_fused")), reference(PER_TOKEN)) <= FLOAT64


def losses(processes, *more):
    """What Megatron prints under `NTP_CPU=1`."""
    script = [str(RECIPES / "pretrain_gpt.py"), f"@{RECIPES / 'tiny-te.args'}", "--train-iters=4"]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"]
    command = [*launch, "-m", "ntp_plugin.megatron", *script, "--use-cpu-initialization", *more]
    environment = {**os.environ, "NTP_CPU": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return [float(loss) for loss in re.findall(r"lm loss: (\S+)", done.stdout)]


def test_a_job_in_float32_prints_the_losses_of_one_rank():
    expected = losses(1)
    assert len(expected) == 4
    assert losses(2, "--context-parallel-size=2") == pytest.approx(expected, rel=1e-6)


def test_megatron_weighs_the_parts_of_a_sample_alike_without_a_loss_per_token():
    """Its own rule, and so a control: where a part has fewer tokens that count, each weighs more."""
    assert worst_of(run(job(masked=True)), reference(masked=True)) > 1e-6


def test_control_statistics_in_single_precision_are_noticed():
    assert worst_of(run(job(PER_TOKEN, spoil="statistics_are_rounded")), reference(PER_TOKEN)) > 1e3 * FLOAT64
