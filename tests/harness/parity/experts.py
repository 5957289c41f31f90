"""Jobs with layers of experts, by feature, and how they live through a loss.

The reference is stock Megatron in the same layout, with nobody lost: which weights experts begin with depends on it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import STEPS, Job, largest_differences, run
from tests.harness.parity.layouts import BASE, LATENT, MODELS, WITH_TE
from tests.harness.parity.live import Lived, as_if_always_there, live

MODEL = f"{MODELS[BASE]} --transformer-impl transformer_engine"
ROUTER = "--num-experts 4 --moe-ffn-hidden-size 32 --moe-router-topk 2 --moe-router-dtype fp64"
AUX = "--moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 1e-2"
SINKHORN = "--moe-router-load-balancing-type sinkhorn --moe-router-topk 1"
BIASED = (
    f"{ROUTER} --moe-router-load-balancing-type none --moe-router-score-function sigmoid"
    " --moe-router-enable-expert-bias"
)
BY_SEQUENCE = (
    f"{ROUTER} --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 1e-2 --moe-z-loss-coeff 1e-3"
    " --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2 --moe-router-num-groups 2"
    " --moe-router-group-topk 1"
)
GROUPED, A2A = "--moe-grouped-gemm", "--moe-token-dispatcher-type alltoall"
EP2, EP4, SP = "--expert-model-parallel-size 2", "--expert-model-parallel-size 4", "--sequence-parallel"
ETP1, PER_TOKEN = "--expert-tensor-parallel-size 1", "--calculate-per-token-loss"
IN_ONE_BUCKET = "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather"
SHARDED = f"{IN_ONE_BUCKET} --ddp-bucket-size 9000"
MUON = "--optimizer muon --muon-momentum 0.9 --muon-extra-scale-factor 0.2 --muon-scale-mode spectral"
DELTA_NET = (
    "--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-conv-kernel-dim 4"
    " --linear-key-head-dim 8 --linear-value-head-dim 4 --linear-num-key-heads 4 --linear-num-value-heads 8"
)
OVERLAPPED = "--overlap-moe-expert-parallel-comm --fp16 --initial-loss-scale 65536"
"""Megatron overlaps exchanges in half precision alone; `NTP_CPU=float64` has doubles in its place."""
SHARED = "--moe-shared-expert-intermediate-size 48"
RECOMPUTED = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
_MASKED = "--hidden-dropout 0.1 --ntp-enable --ntp-dropout exact"
OF_TWO, OF_ALL = f"{GROUPED} {A2A} {EP2}", f"{GROUPED} {A2A} {EP4}"


def job_of(more: str = OF_TWO, *, router: str = f"{ROUTER} {AUX}", **options: Any) -> Job:
    """Four replicas; by default two expert groups of two."""
    four: dict[str, Any] = {"model": MODEL, "tp": 1, "dp": 4, "batch": 8, "enabled": True}
    return Job(more=f"{router} {more}", **four | options)


FEATURES: Mapping[str, tuple[Job, tuple[int, ...]]] = {
    "ep+grouped": (job_of(), (1,)),
    "ep+one group": (job_of(OF_ALL), (1,)),
    "ep+one by one": (job_of(f"{A2A} {EP2}"), (1,)),
    "ep+all-gather+sinkhorn": (job_of(EP2, router=f"{ROUTER} {SINKHORN}"), (1,)),
    "ep+tp+sp+etp of 1": (job_of(f"{OF_ALL} {ETP1} {SP}", tp=2, dp=2), (1,)),
    "ep+tp+sp+etp": (job_of(f"{GROUPED} {EP2} {SP}", tp=2, dp=2), (2,)),
    "ep+distopt": (job_of(f"{OF_TWO} {SHARDED}"), (1,)),
    "ep+per token": (job_of(f"{OF_TWO} {PER_TOKEN}"), (2,)),
    "ep+pp": (job_of(pp=2, dp=2), (1,)),
    "ep+pp+interleaved": (job_of(chunks=2, pp=2, dp=2), (1,)),
    "ep+two of a group lost": (job_of(OF_ALL), (0, 3)),
    "ep+a whole group lost": (job_of(), (2, 3)),
    "tp+sp": (job_of(f"{GROUPED} {A2A} {SP}", tp=2, dp=2), (3,)),
    "tp+sp+etp of 1": (job_of(f"{GROUPED} {A2A} {SP} {ETP1}", tp=2, dp=2), (3,)),
    "ep+recomputed": (job_of(f"{OF_TWO} {RECOMPUTED}"), (1,)),
    "ep+shared": (job_of(f"{OF_TWO} {SHARED} --moe-shared-expert-gate"), (1,)),
    "ep+shared, overlapped": (job_of(f"{OF_TWO} {SHARED} --moe-shared-expert-overlap"), (1,)),
    "ep+by sequence+z-loss+groups of experts": (job_of(router=BY_SEQUENCE), (1,)),
    "ep+bias": (job_of(router=BIASED), (1,)),
    "ep+bias+pp": (job_of(router=BIASED, pp=2, dp=2), (1,)),
    "ep+capacity": (job_of(f"{OF_TWO} --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity"), (1,)),
    "ep+exact masks": (job_of(f"{OF_TWO} {_MASKED}"), (1,)),
    "ep+cp": (job_of(f"{OF_TWO} {PER_TOKEN}", cp=2, dp=2), (1,)),
    "ep+mtp": (job_of(f"{OF_ALL} --mtp-num-layers 1"), (1,)),
    "ep+mla": (job_of(model=WITH_TE[LATENT]), (1,)),
    "ep+mla+mtp+shared+bias": (
        job_of(
            f"{OF_TWO} {SHARED} --mtp-num-layers 1",
            router=BIASED,
            model=WITH_TE[LATENT],
        ),
        (1,),
    ),
    "tp+sp+gated delta nets": (job_of(f"{GROUPED} {A2A} {SP} {DELTA_NET}", tp=2, dp=2), (3,)),
    "ep+muon": (job_of(f"{OF_ALL} {MUON}"), (1,)),
    "cp": (job_of(PER_TOKEN, router="", cp=2, dp=2), (1,)),
    "cp+tp+sp": (job_of(f"{PER_TOKEN} {SP}", router="", tp=2, cp=2, dp=1), (2,)),
    "ep+pp+fp16": (job_of(f"{OF_TWO} --fp16 --initial-loss-scale 65536", pp=2, dp=2), (1,)),
    "ep+exchanges overlapped": (job_of(f"{OF_TWO} {OVERLAPPED}"), (1,)),
    "ep+exchanges overlapped+exact masks": (job_of(f"{OF_TWO} {OVERLAPPED} {_MASKED}"), (1,)),
    "ep+pp+interleaved+exchanges overlapped": (job_of(f"{OF_TWO} {OVERLAPPED}", chunks=2, pp=2, dp=2), (1,)),
}
"""Feature -> a job that has it, and the slots that it loses. The words of a feature are joined by +."""

CONTROLS: Mapping[str, tuple[Job, bool]] = {
    "experts_swapped": (job_of(OF_ALL), False),
    "padding_adds_to_the_loss": (job_of(OF_ALL), False),
    "padding_weighs_as_others": (job_of(OF_ALL), False),
    "experts_weigh_by_groups": (job_of(OF_ALL), False),
    "router_losses_are_means_of_replicas": (job_of(OF_ALL), False),
    "experts_are_one_matrix": (job_of(f"{OF_ALL} {MUON}"), False),
    "bias_stays_after_a_recovery": (job_of(router=f"{BIASED} --moe-router-bias-update-rate 0.1"), True),
    "replicas_of_a_context_weigh_as_before": (job_of("", router="", cp=2, dp=2, masked=False), False),
    "chunks_are_in_order": (job_of("", router="", cp=4, dp=1, masked=False), False),
    "rows_are_in_order": (job_of(_MASKED, router="", cp=2, dp=2, masked=False), False),
    "delta_net_in_one_section": (job_of(f"{SP} {DELTA_NET}", router="", tp=2, dp=2), False),
}
"""Planted fault (`spoilt.py`, `spoilt_experts.py`) -> the job that must detect it, and whether a rank comes back: some
faults are of what a rank does that has just begun."""


def fault_points_of(job: Job) -> tuple[str, ...]:
    """The fault points of a step that a job reaches."""
    exchanges = ("dispatch", "combine") if "--num-experts" in job.more else ()
    backward = () if "--overlap-moe" in job.more else ("backward",)  # it is within the forward of another micro-batch
    return ("forward", *exchanges, *backward, "reduce", "reduced", "vote", "apply", "applied")


def reference(job: Job) -> Job:
    """The same job of stock Megatron. Exact masks are in it as well: they make the runs equal."""
    return dataclasses.replace(job, enabled=False, spoil="")


def spoilt(control: str) -> dict[str, float]:
    """The largest differences of a job with a planted fault."""
    job, back = CONTROLS[control]
    return differences(lose(dataclasses.replace(job, spoil=control), 1, back=back), job)


def lose(job: Job, *slots: int, fault_point: str = "", back: bool = True) -> dict[int, Lived]:
    """Run a job that loses slots in its step 4, and takes them back before step 12; return what its ranks saw."""
    fault_point = fault_point or ("backward" if "backward" in fault_points_of(job) else "combine")
    faults = [kill(slot, during=fault_point, step=4) for slot in slots]
    lived, _ = live(job, faults=faults, back=dict.fromkeys(slots, 12) if back else {})
    assert len(lived) == job.processes - (0 if back else len(slots))
    return lived


def differences(lived: Mapping[int, Lived], job: Job) -> dict[str, float]:
    """The largest differences from the reference. An idle rank of a first stage takes itself for the last one, so its
    losses do not count."""
    seen = {
        slot: one if len(one.losses) == STEPS else dataclasses.replace(one, losses=[], steps_with_loss=[])
        for slot, one in as_if_always_there(lived).items()
    }
    return largest_differences(seen, run(reference(job)))
