"""Inject faults from outside, by pids and signals alone, into six jobs: what `make show-outside` measures.

    python -m benchmarks.outside              three campaigns of 21 faults in each of six jobs: two hours or more
    SCALE=ci python -m benchmarks.outside     12 faults in two jobs: three minutes on two idle cores
    ROWS=plain,autotp ...                     some of the jobs

Each finished campaign is a line in build/show/outside.jsonl, and the next call continues after it. Remove the file to
get all rows from one tree.

A campaign has every kind once, in an order and at instants drawn from its seed. All campaigns of a job are compared
with one run of it without a fault. `left_behind` counts processes and files of all runs together.
"""

import dataclasses
import itertools
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import evidence
from ntp_plugin.chaos.ending import Wait, ending_in_waits
from ntp_plugin.chaos.outside import checkpoints
from ntp_plugin.chaos.outside.campaign import CampaignRequest, Reference, run_campaign, run_reference
from ntp_plugin.chaos.outside.job_run import Command, InjectionPace
from ntp_plugin.chaos.outside.kinds import kinds
from ntp_plugin.chaos.outside.verdict import Allowed, Judged, rows
from ntp_plugin.membership.failure_detector import Thresholds

PARTS = Path("build/show/outside.jsonl")
SEED, CAMPAIGNS = 20261129, 3
THRESHOLDS = Thresholds(frozen_s=1.0, silent_s=6.0, hung_s=8.0)
"""Short, and long enough for a processor that eight ranks and their new processes share."""
_HANDLERS = ("-m", "ntp_plugin.testing.signal_handlers")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Job:
    """One of the six."""

    name: str
    ranks: int
    script: tuple[str, ...]
    environment: dict[str, str]
    blocks_of: int
    """Consecutive ranks, any two of which may be lost at once."""
    bound: float
    weights_bound: float
    fork: bool = True

    def command(self, *, in_ci: bool) -> Command:
        """As a user types it."""
        flags = (f"{name}={getattr(THRESHOLDS, name):g}" for name in ("frozen_s", "silent_s", "hung_s"))
        ours = ("--ntp-respawn=1000", f"--ntp-thresholds={','.join(flags)}", *["--ntp-fork"] * self.fork)
        words = ("--standalone", f"--nproc-per-node={self.ranks}", *ours, *_HANDLERS, *self.script)
        common = {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return Command(words=words, environment=common | self.environment | (SHORTER if in_ci else {}))


def _megatron(name: str, *flags: str, ranks: int = 8, arguments: str = "tiny.args", blocks_of: int = 2) -> Job:
    words = ("recipes/megatron/pretrain_gpt.py", f"@recipes/megatron/{arguments}", "--ntp-enable", "--train-iters=120")
    saved = ("--save={run}/checkpoints", "--save-interval=1000", "--ckpt-format=torch_dist")
    return Job(
        name=name,
        ranks=ranks,
        script=(*words, *saved, *flags),
        environment={"NTP_CPU": "float64", "NTP_PRELOAD": "megatron.training.training"},
        blocks_of=blocks_of,
        bound=1e-12,
        weights_bound=1e-11,
    )


def _deepspeed(name: str, config: str, *, blocks_of: int, epochs: int) -> Job:
    words = ("recipes/deepspeed/train.py", f"--deepspeed_config=recipes/deepspeed/{config}", f"--epochs={epochs}")
    return Job(
        name=name,
        ranks=4,
        script=(*words, "--save={run}/checkpoints"),
        environment={"DS_ACCELERATOR": "cpu", "NTP_PRELOAD": "deepspeed,transformers", "PAUSE_S": "0.1"},
        blocks_of=blocks_of,
        bound=1e-6,
        weights_bound=7.4e-6,
    )


JOBS = (
    Job(
        name="plain",
        ranks=4,
        script=("recipes/plain/train.py",),
        environment={"STEPS": "300", "PAUSE_S": "0.1", "EVERY_STEP": "1", "SAVE": "{run}/last.pt"},
        blocks_of=4,
        bound=1e-12,
        weights_bound=1e-12,
        fork=False,
    ),
    _deepspeed("deepspeed-zero2-dp4", "ds_config_zero2.json", blocks_of=4, epochs=5),
    _deepspeed("autotp-tp2-dp2", "ds_config_tp.json", blocks_of=2, epochs=2),
    _megatron("megatron-dp2-tp4", "--tensor-model-parallel-size=4", blocks_of=4),
    _megatron(
        "megatron-dp2-tp2-pp2-sharded",
        "--tensor-model-parallel-size=2",
        "--pipeline-model-parallel-size=2",
        "--use-distributed-optimizer",
    ),
    _megatron(
        "megatron-dp4-ep4",
        *("--num-experts=8", "--expert-model-parallel-size=4", "--moe-ffn-hidden-size=32", "--moe-router-topk=2"),
        *("--moe-router-load-balancing-type=aux_loss", "--moe-aux-loss-coeff=1e-2"),
        *("--moe-grouped-gemm", "--moe-token-dispatcher-type=alltoall"),
        ranks=4,
        arguments="tiny-te.args",
        blocks_of=4,
    ),
)
IN_CI = {
    "plain": (
        *("kill", "segv", "stop", "stop-short", "two-kills", "handler-hangs", "kill-joiner"),
        *("supervisor-kill", "supervisor-term"),
    ),
    "autotp-tp2-dp2": ("hang-in-wait", "kill-then-hang", "stop-joiner"),
}
SHORTER = {"STEPS": "150"}
"""In CI, for a script whose length comes from the environment."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CampaignPart:
    """The stored result of a campaign."""

    job: str
    seed: int
    commit: str
    seconds: float
    not_injected: tuple[str, ...]
    kept: int
    judged: tuple[Judged, ...]


def asked(job: Job, kinds_of_it: Sequence[str] | None, seed: int) -> CampaignRequest:
    """One campaign."""
    known = kinds(THRESHOLDS)
    names = tuple(known) if kinds_of_it is None else tuple(kinds_of_it)
    return CampaignRequest(
        command=job.command(in_ci=kinds_of_it is not None),
        kinds=[known[name] for name in names],
        faults=len(names),
        seed=seed,
        pace=InjectionPace(thresholds=THRESHOLDS, every_s=1.0, blocks_of=job.blocks_of),
        allowed=Allowed(bound=job.bound, weights_bound=job.weights_bound),
    )


def campaigns(
    job: Job, kinds_of_it: Sequence[str] | None, count: int, folder: Path, *, kept: evidence.Sittings, wait: Wait
) -> list[CampaignPart]:
    """So many, with those that are kept."""
    found, reference = [_read(part) for part in kept.all(job=job.name)], None
    while len(found) < count:
        seed = next(seed for seed in itertools.count(SEED) if seed not in {part.seed for part in found})
        one = asked(job, kinds_of_it, seed)
        if reference is None:
            reference = _reference(one, folder / job.name, wait=wait)
        began = time.monotonic()
        came = run_campaign(
            one, folder / job.name / str(seed), reference, wait=wait, say=lambda what: print(what, flush=True)
        )
        part = CampaignPart(
            job=job.name,
            seed=seed,
            commit=evidence.commit(),
            seconds=round(time.monotonic() - began, 1),
            not_injected=came.not_injected,
            kept=came.kept,
            judged=came.judged,
        )
        kept.add(dataclasses.asdict(part))
        found.append(part)
    return found


def _reference(one: CampaignRequest, folder: Path, *, wait: Wait) -> Reference:
    """Its checkpoint must be there: without one, nothing of the weights would be compared."""
    print(f"{folder.name}: without a fault", flush=True)
    reference = run_reference(one, folder / "reference", wait=wait)
    tensors = checkpoints.read(reference.folder)
    if not tensors:
        raise SystemExit(f"{folder.name}: the run without a fault has written no checkpoint under {reference.folder}")
    print(f"{folder.name}: {len(tensors)} tensors of its last checkpoint are what others are compared with", flush=True)
    return reference


def _read(read: dict[str, Any]) -> CampaignPart:
    judged = tuple(Judged(**{**one, "left": tuple(one["left"])}) for one in read["judged"])
    return CampaignPart(**{**read, "judged": judged, "not_injected": tuple(read["not_injected"])})


def _bad_ends(every: Sequence[CampaignPart]) -> list[str]:
    return [
        f"{part.job}, seed {part.seed}, {one.kind} ({one.words}): {one.wrong} {one.hung} {' '.join(one.left)}"
        for part in every
        for one in part.judged
        if one.wrong or one.hung or one.left
    ]


def main(scale: str, chosen: str) -> int:
    """No fault may be wrong or hung, and none may leave anything behind."""
    names = [name for name in chosen.split(",") if name] or [job.name for job in JOBS]
    in_ci = scale == "ci"
    kept = evidence.Sittings(None if in_ci else PARTS)
    folder = Path(tempfile.mkdtemp(prefix="ntp-outside-"))
    every = list[CampaignPart]()
    with ending_in_waits() as wait:
        for job in JOBS:
            if job.name in names and (not in_ci or job.name in IN_CI):
                of_it, count = (IN_CI[job.name], 1) if in_ci else (None, CAMPAIGNS)
                every += campaigns(job, of_it, count, folder, kept=kept, wait=wait)
    by_job = dict[str, list[Judged]]()
    for part in every:
        by_job.setdefault(part.job, []).extend(part.judged)
    found = [row for job, judged in by_job.items() for row in rows(job, judged)]
    totals = {name: sum(int(str(row[name])) for row in found) for name in ("faults", "wrong", "hung")}
    left = sum(len(one.left) for part in every for one in part.judged)
    not_injected = sum(len(part.not_injected) for part in every)
    holds = bool(every) and not (totals["wrong"] or totals["hung"] or left or not_injected)
    if holds:
        shutil.rmtree(folder)
    else:
        print("\n".join(_bad_ends(every)))
        print(f"not injected: {not_injected}; the runs are in {folder}")
    return evidence.show("outside", holds=holds, seed=SEED, rows=found, **totals, left_behind=left)


if __name__ == "__main__":
    sys.exit(main(os.environ.get("SCALE", ""), os.environ.get("ROWS", "")))
