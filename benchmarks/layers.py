"""Lose whole pipeline stages of Megatron's replicas, at the start and in live jobs: what `make show-layers` shows.

    python -m benchmarks.layers               some twenty minutes on two cores
    SCALE=ci python -m benchmarks.layers      two jobs that begin so, a live one, and one planted fault

The other stages of such a replica have the layers of the lost one. A row is the largest relative difference over 20
steps, all ranks and replicas, from stock Megatron: one replica with all stages. `moment` is "start" in a job that
begins without the stage, and else the fault point at which a live one loses it, in step 5; in the rows that are `back`
it returns in step 12. `recovered_s` is the longest recovery of a rank. `step_planned` is the planned time of a step
over that of the nominal layout, and `dropped_planned` the same if the replica that has lost a stage were dropped; both
count micro-batches by the work of their slowest stage, the filling of the pipeline included. Each negative control has
one planted fault, and must be detected.
"""

import dataclasses
import itertools
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import evidence
from benchmarks.numerics import BOUNDS, SEED, compared
from ntp_plugin.config.sections import Batch, CopyPolicy, Hardware, Model, Parallel, Policy, State
from ntp_plugin.errors import NtpError
from ntp_plugin.planning.layer_cuts import Layers
from ntp_plugin.planning.recovery_plan import Nominal, plan_recovery, split_among
from ntp_plugin.planning.topology import Topology, parse_slots
from ntp_plugin.planning.units import transformer_units
from ntp_plugin.telemetry import Follower, Recovered
from ntp_plugin.testing.faults import kill
from tests.harness.parity.job import Job, largest_differences, run
from tests.harness.parity.layouts import (
    BASE,
    BOTH_LOST_STAGES,
    DEEP,
    DROPOUT,
    FIRST_STAGE_LOST,
    LAST_STAGE_LOST,
    LOST_STAGES,
    MODELS,
    OLD,
    ONE_STAGE_LEFT,
    ONE_STAGE_LOST,
    SEQUENCE,
    STAGE_AND_SLOT_LOST,
    TWO_STAGES_LOST,
)
from tests.harness.parity.live import as_if_always_there, live

_SHARDED = "distributed optimizer, overlap"
CASES = (
    *((BASE, layout, "float64") for layout in LOST_STAGES),
    *((BASE, layout, "float32") for layout in (ONE_STAGE_LOST, STAGE_AND_SLOT_LOST)),
    *((_SHARDED, layout, "float64") for layout in (ONE_STAGE_LOST, FIRST_STAGE_LOST, STAGE_AND_SLOT_LOST)),
    ("parameter gather overlap", LAST_STAGE_LOST, "float64"),
    *((SEQUENCE, layout, "float64") for layout in (DEEP, STAGE_AND_SLOT_LOST)),
    *(("tied embeddings", layout, "float64") for layout in (FIRST_STAGE_LOST, LAST_STAGE_LOST, STAGE_AND_SLOT_LOST)),
    *(("recompute", layout, "float64") for layout in (TWO_STAGES_LOST, ONE_STAGE_LEFT)),
    *((DROPOUT, layout, "float64") for layout in (ONE_STAGE_LOST, STAGE_AND_SLOT_LOST)),
    ("per-token loss", BOTH_LOST_STAGES, "float64"),
    (OLD, ONE_STAGE_LOST, "float64"),
)
_IN_CI = ((BASE, ONE_STAGE_LOST, "float64"), (_SHARDED, STAGE_AND_SLOT_LOST, "float64"))
STEP, BACK = 5, 12


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LiveCase:
    """A live job of two replicas that loses a stage."""

    fault_point: str
    ranks: tuple[int, ...] = (3,)
    more: str = ""
    model: str = BASE
    tp: int = 1
    back: bool = False


LIVE_CASES = (
    *(LiveCase(fault_point=fault_point) for fault_point in ("forward", "backward", "vote", "apply", "gather")),
    LiveCase(fault_point="exchange", ranks=(1,)),
    LiveCase(fault_point="reduce", ranks=(7,), back=True),
    LiveCase(fault_point="backward", ranks=(0,), back=True),
    LiveCase(fault_point="backward", ranks=(3, 5), back=True),
    LiveCase(fault_point="backward", ranks=(2, 5)),
    LiveCase(fault_point="backward", model="tied embeddings", ranks=(6,), back=True),
    LiveCase(fault_point="forward", tp=2, ranks=(6, 7), more="--sequence-parallel"),
    LiveCase(fault_point="forward", tp=2, ranks=(6,), more="--ntp-min-tp-width 2", back=True),
    LiveCase(fault_point="backward", more="--overlap-grad-reduce --overlap-param-gather"),
)
"""Ranks are numbered by stages: with TP 1, ranks 1, 3, 5 and 7 are the stages of the second replica."""
CONTROLS = ("neighbours_exchanged", "moved_layers_draw_their_own")
"""Planted faults (`parity/spoilt_layers.py`)."""
BATCH = 6


def planned(layout: str) -> dict[str, float]:
    """Return the planned step times of a layout, in nominal steps: with moved layers, and without these replicas."""
    where = LOST_STAGES[layout]
    tp, pp, dp = where["tp"], where["pp"], where["dp"]
    parallel, count = Parallel(tp=tp, pp=pp, dp=dp), where.get("layers", pp)
    shape = Model(layers=count, hidden=64, heads=16, groups=8, kv_channels=4, ffn=160, vocab=256, seq=16)
    topology, depths = Topology.of(parallel), parallel.depths(count)
    nominal = Nominal(
        topology=topology,
        units=transformer_units(shape, tp=tp, pp=pp),
        batch=Batch(global_batch=BATCH),
        state=State(),
        hardware=Hardware(),
        policy=Policy(copies=CopyPolicy(count=0)),
        layers=Layers(units=transformer_units(shape, tp=tp, pp=count), depths=depths),
    )
    lost = parse_slots(where["lost"], topology)
    plan = plan_recovery(nominal, lost=lost, lost_before=lost)
    step = split_among(nominal, range(dp)).step_ns
    kept = [replica for replica in range(dp) if replica not in {slot.replica for slot in lost}]
    dropped = {"dropped_planned": split_among(nominal, kept).step_ns / step} if kept else {}
    return {"step_planned": plan.batch.step_ns / step} | dropped


def row_of(feature: str, layout: str, dtype: str) -> dict[str, Any]:
    """Run one case."""
    where = LOST_STAGES[layout]
    row: dict[str, Any] = {"framework": "megatron", "feature": feature, "layout": layout}
    row |= {"lost": ",".join(where["lost"]), "moment": "start", "dtype": dtype} | planned(layout)
    try:
        found = compared(feature, layout, dtype=dtype)
    except (NtpError, RuntimeError, AssertionError) as error:  # the other rows are worth knowing
        return row | {"failed": str(error)[-200:], "holds": False}
    return row | found | {"holds": max(found.values()) <= BOUNDS[dtype]}


def live_row_of(case: LiveCase) -> dict[str, Any]:
    """Run one live case."""
    where: dict[str, Any] = {"tp": case.tp, "pp": 3 if case.tp > 1 else 4, "layers": 6 if case.tp > 1 else 4}
    row: dict[str, Any] = {"framework": "megatron", "feature": f"{case.model}, {case.more or 'live'}"}
    row |= {"layout": f"DP2 x PP{where['pp']} x TP{case.tp}", "lost": ",".join(map(str, case.ranks))}
    row |= {"moment": case.fault_point, "back": case.back, "dtype": "float64"}
    faults = [kill(rank, during=case.fault_point, step=STEP) for rank in case.ranks]
    back, model = dict.fromkeys(case.ranks, BACK) if case.back else {}, MODELS[case.model]
    with tempfile.TemporaryDirectory() as folder:
        events = Path(folder) / "events"
        more = f"--use-distributed-optimizer {case.more} --ntp-events={events}"
        try:
            lived, _ = live(Job(model=model, dp=2, enabled=True, more=more, **where), faults=faults, back=back)
            found = largest_differences(as_if_always_there(lived), run(Job(model=model, **where)))
        except (NtpError, RuntimeError, TimeoutError, AssertionError) as error:  # the other rows are worth knowing
            return row | {"failed": str(error)[-200:], "holds": False}
        recovered = [one.event.seconds for one in Follower(events).news() if isinstance(one.event, Recovered)]
    return row | found | {"recovered_s": max(recovered), "holds": max(found.values()) <= BOUNDS["float64"]}


def noticed(control: str) -> bool:
    """Return whether the comparison, or the plugin itself, detects it."""
    try:
        return max(compared(BASE, ONE_STAGE_LOST, spoil=control).values()) > BOUNDS["float64"]
    except NtpError:
        return True


def rows_of(scale: str) -> Iterator[dict[str, Any]]:
    """Yield the rows as they are finished."""
    planned_ones = (row_of(*case) for case in (_IN_CI if scale == "ci" else CASES))
    live_ones = (live_row_of(case) for case in LIVE_CASES[: 1 if scale == "ci" else None])
    for row in itertools.chain(planned_ones, live_ones):
        sys.stderr.write(f"{row}\n")
        yield row


def main(scale: str) -> int:
    """Run everything, and write the evidence."""
    rows = list(rows_of(scale))
    planted = CONTROLS[:1] if scale == "ci" else CONTROLS
    controls = [{"name": control, "noticed": noticed(control)} for control in planted]
    return evidence.show(
        "layers",
        holds=all(row["holds"] for row in rows) and all(control["noticed"] for control in controls),
        seed=SEED,
        rows=rows,
        scale=scale or "default",
        negative_controls=controls,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", "")))
