"""Lose ranks in DeepSpeed jobs, of the user's own loop and of trainers: what `make show-trainers` shows.

    CONFIGS=path[:path...] python -m benchmarks.trainers     every fault point and victim; some twenty minutes
    SCALE=ci python -m benchmarks.trainers                   a slice; no configurations are counted without CONFIGS

Each row is a job of four ranks that loses one: with ZeRO-3 or offloading, of Hugging Face's Trainer, or of a loop with
Accelerate. It has the largest relative difference of its losses and weights from stock DeepSpeed on the same samples;
what the Trainer logs, and what both count, is compared as well. The loss of a loop with Accelerate is that of its
evaluations. `recovered_s` is the time from the kill to the end of the first later step of the
others, including an ordinary step. The paths in CONFIGS are checkouts of projects with DeepSpeed configurations
(`deepspeed_configs.py`). Each negative control has one planted fault, and must be detected.
"""

import dataclasses
import itertools
import json
import math
import os
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import deepspeed_configs, evidence
from benchmarks.deepspeed_numerics import FAULT_POINTS, SEED, STEP, VICTIMS, Play, recovered_s
from ntp_plugin.errors import NtpError
from ntp_plugin.testing.faults import kill
from ntp_plugin.testing.ranks import Rank
from tests.harness.accelerate import compare as accelerate_compare
from tests.harness.accelerate import job as accelerate
from tests.harness.hf import compare as hf_compare
from tests.harness.hf import job as hf
from tests.harness.zero import job as zero
from tests.harness.zero.compare import BOUNDS, differences, used_once, within
from tests.harness.zero.fault_points import SHARDED_FAULT_POINTS
from tests.harness.zero.job import Job, Rows, run

ACCEPTED = 0.9
"""The part of the configurations that has to be accepted."""
RECOVERED_S = 1.0
_ON_CPU = {"device": "cpu"}
OFFLOADS = {
    "none": {},
    "optimizer": {"offload_optimizer": _ON_CPU},
    "optimizer, parameters": {"offload_optimizer": _ON_CPU, "offload_param": _ON_CPU},
}
CONTROLS = ("repeated_ones_count", "frozen_slices_not_restored", "padding_not_left_out")
"""Planted faults."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TrainerCase:
    """One row of Hugging Face's Trainer, or of a loop with Accelerate."""

    job: hf.Job | accelerate.Job
    victim: int
    fault_point: str
    back: int | None = None
    """The step at which the victim rejoins."""


TRAINER_STEP = 3
TRAINER_CASES = (
    TrainerCase(job=hf.Job(stage=0), victim=1, fault_point="counting"),
    TrainerCase(job=hf.Job(stage=1), victim=3, fault_point="vote"),
    TrainerCase(job=hf.Job(stage=2), victim=0, fault_point="gather", back=7),
    TrainerCase(job=hf.Job(stage=3), victim=2, fault_point="backward", back=7),
    TrainerCase(job=hf.Job(stage=3, lora=True), victim=1, fault_point="reduce"),
    TrainerCase(job=hf.Job(stage=3, dtype="float32"), victim=0, fault_point="logging"),
)
"""The first rank writes the log."""
EVALUATES = 18
ACCELERATE_CASES = tuple(
    TrainerCase(job=accelerate.Job(evaluates=EVALUATES, **changes), victim=victim, fault_point=fault_point, back=back)
    for changes, victim, fault_point, back in (
        ({"stage": 0}, 2, "vote", 7),
        ({"stage": 1}, 3, "stepped", None),
        ({"stage": 2, "gathers": True}, 0, "gather", 7),
        ({"stage": 2, "saves": 3}, 1, "saving", None),
        ({"stage": 3, "accumulates": False, "each": 1}, 1, "forward", None),
        ({"stage": 3}, 2, "backward", 7),
        ({"stage": 3, "dtype": "float32"}, 0, "reduce", None),
    )
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One row of a loop of the user's own."""

    job: Job
    victim: int
    fault_point: str
    offload: str = "none"
    back: int | None = None
    """The step at which the victim rejoins."""


def cases(scale: str) -> Iterator[Case]:
    """Yield the jobs; in CI one of eight."""
    for number, case in enumerate(_all_cases()):
        if scale != "ci" or number % 8 == 0:
            yield case


def trainer_cases(scale: str) -> tuple[TrainerCase, ...]:
    """Return the jobs of trainers; in CI one of each."""
    some = 1 if scale == "ci" else None
    return (*TRAINER_CASES[:some], *ACCELERATE_CASES[:some])


def _all_cases() -> Iterator[Case]:
    for fault_point in (*FAULT_POINTS, *SHARDED_FAULT_POINTS):
        for victim in VICTIMS:
            yield Case(job=Job(stage=3), victim=victim, fault_point=fault_point)
    for stage, offload in ((1, "optimizer"), (2, "optimizer"), (3, "optimizer"), (3, "optimizer, parameters")):
        for victim, fault_point in zip(VICTIMS, ("reduce", "vote", "gather"), strict=True):
            yield Case(job=_offloading(stage, offload), victim=victim, fault_point=fault_point, offload=offload)
    for stage in (2, 3):
        spec = dataclasses.replace(_offloading(stage, "optimizer"), dtype="float32", torch_adam_offloaded=False)
        own = dataclasses.replace(spec, fused_adam="own")
        yield Case(job=own, victim=1, fault_point="reduce", offload="optimizer (CPUAdam)")
    for victim in VICTIMS:
        yield Case(job=Job(stage=3, frozen="3.weight"), victim=victim, fault_point="vote", back=12)
        yield Case(job=Job(stage=3, each=1), victim=victim, fault_point="gather-backward")
        yield Case(job=Job(stage=3, dtype="float32"), victim=victim, fault_point="scatter")
    for kind in ("llama", "tied llama"):
        yield Case(job=Job(stage=3, transformer=kind, dtype="float32"), victim=2, fault_point="gather-forward", back=12)
    yield Case(job=Job(stage=3, zero_init=True, dtype="float32"), victim=0, fault_point="backward", back=12)


def _offloading(stage: int, what: str) -> Job:
    return Job(stage=stage, zero=json.dumps(OFFLOADS[what]), torch_adam_offloaded=True)


@dataclasses.dataclass(frozen=True)
class Spoilt(Play):
    """A run that may have one thing of ZeRO-3 wrong."""

    def _play(self, rank: Rank) -> zero.Seen:
        if self.spoil:
            _spoil(self.spoil)
        return super()._play(rank)


def _spoil(what: str) -> None:
    from ntp_plugin.deepspeed import flat_shards, sharded_weights  # noqa: PLC0415  (only ranks have DeepSpeed)
    from ntp_plugin.deepspeed.accumulation_window import AccumulationWindow  # noqa: PLC0415

    sliced = sharded_weights.slices_stepped
    if what == "repeated_ones_count":
        setattr(AccumulationWindow, "repeats", False)  # noqa: B010
    elif what == "frozen_slices_not_restored":
        without = dataclasses.replace(
            flat_shards._STAGE_3, shards=lambda held: [one for one in sliced(held) if one.values.requires_grad]
        )
        setattr(flat_shards, "_STAGE_3", without)  # noqa: B010
    elif what == "padding_not_left_out":
        shift = sharded_weights.ParameterSlices.overlaps

        def shifted(slices: Any) -> Any:
            for parameter, start, stop, at in shift(slices):
                yield parameter, max(0, start - 1), max(0, start - 1) + stop - start, at

        setattr(sharded_weights.ParameterSlices, "overlaps", shifted)  # noqa: B010


def lived(case: Case, spoil: str = "") -> tuple[dict[int, zero.Seen], Rows]:
    """A run with times in its rows."""
    faults = [kill(case.victim, during=case.fault_point, step=STEP)]
    back = None if case.back is None else {case.victim: case.back}
    return run(case.job, faults=faults, back=back, play=lambda job, asking: Spoilt(job, asking, spoil))


def noticed(control: str) -> bool:
    """Return whether the comparison, or the plugin itself, detects it."""
    job = Job(stage=3, each=1, frozen="3.weight" if control == "frozen_slices_not_restored" else "")
    case = Case(job=job, victim=1, fault_point="vote")
    try:
        outcomes, rows = lived(case, control)
        return not (within(differences(outcomes, rows, job), job.dtype) and used_once(rows, job))
    except (NtpError, RuntimeError):
        return True


def row_of(case: Case) -> tuple[dict[str, Any], bool]:
    """Return the row of a job, and whether it holds."""
    job = case.job
    row: dict[str, Any] = {"trainer": "loop", "stage": job.stage, "offload": case.offload, "dtype": job.dtype}
    row |= {"model": _model(job), "moment": case.fault_point, "victim": case.victim, "back": case.back is not None}
    try:
        outcomes, recorded = lived(case)
        found = differences(outcomes, recorded, job)
        once, took = used_once(recorded, job), recovered_s(recorded)
    except (RuntimeError, TimeoutError, AssertionError, NtpError) as error:  # the other rows are worth knowing
        return row | {"failed": str(error)[-200:]}, False
    row |= {"loss": found["loss"], "weights": found["weights"], "bound": BOUNDS[job.dtype], "once": once}
    return row | {"recovered_s": took}, within(found, job.dtype) and once


def row_of_trainer(case: TrainerCase) -> tuple[dict[str, Any], bool]:
    """Return the row of a job of a trainer, and whether it holds: its log and counters too are compared."""
    job = case.job
    ran: Any = (hf, hf_compare) if isinstance(job, hf.Job) else (accelerate, accelerate_compare)
    running, compare = ran
    trainer = "hf-trainer" if running is hf else "accelerate"
    row: dict[str, Any] = {"trainer": trainer, "stage": job.stage, "offload": "none", "dtype": job.dtype}
    row |= {"model": _model_of(job), "moment": case.fault_point, "victim": case.victim, "back": case.back is not None}
    try:
        faults = [kill(case.victim, during=case.fault_point, step=TRAINER_STEP)]
        back = None if case.back is None else {case.victim: case.back}
        outcomes, _ = running.run(job, faults=faults, back=back)
        joined = {} if running is hf else {"joined": back or {}}  # the Trainer's log has nothing from before it joined
        row |= compare.differences(outcomes, job, **joined) | {"bound": compare.BOUNDS[job.dtype]}
        compare.assert_same_training(outcomes, job, **joined)
    except (RuntimeError, TimeoutError, AssertionError, NtpError) as error:  # the other rows are worth knowing
        return row | {"failed": str(error)[-200:]}, False
    return row, True


def _model_of(job: hf.Job | accelerate.Job) -> str:
    if isinstance(job, accelerate.Job):
        return "layers" + ", gathers" * job.gathers + ", checkpoints" * bool(job.saves)
    return "llama, adapters" if job.lora else "llama"


def _model(job: Job) -> str:
    made = "made sharded" if job.zero_init else f"{job.frozen} frozen" if job.frozen else job.transformer
    return made or f"{job.each} micro-batches of a rank"


def main(scale: str) -> int:
    """Count, lose ranks, and write the evidence."""
    folders = [Path(one) for one in os.environ.get("CONFIGS", "").split(":") if one]
    if not all(folder.is_dir() for folder in folders):
        sys.stderr.write("CONFIGS must be paths of checkouts, with : between them\n")
        return 2
    configs = deepspeed_configs.counted(folders) if folders else {}
    rows, fine = [], True
    played = (row_of(case) for case in cases(scale))
    of_trainers = (row_of_trainer(case) for case in trainer_cases(scale))
    for row, holds in itertools.chain(played, of_trainers):
        rows.append(row)
        fine &= holds
        print(row, file=sys.stderr, flush=True)
    seconds = [row["recovered_s"] for row in rows if "recovered_s" in row]
    p50 = statistics.median(seconds) if seconds else math.inf
    controls = [{"name": control, "noticed": noticed(control)} for control in CONTROLS]
    accepted = not configs or configs["configs_accepted"] >= ACCEPTED * configs["configs"]
    return evidence.show(
        "trainers",
        holds=fine and accepted and p50 <= RECOVERED_S and all(control["noticed"] for control in controls),
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        recovered_p50_s=p50,
        recovered_slowest_s=max(seconds, default=math.inf),
        negative_controls=controls,
        **configs,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
