"""The reference run, and runs with faults until all have been injected.

Everything is in one folder: `reference/` and `run-1/`, `run-2/`, ... hold the record and the output of each run.
"""

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from ntp_plugin.chaos.ending import Wait
from ntp_plugin.chaos.outside import leavings
from ntp_plugin.chaos.outside.drawing import draw
from ntp_plugin.chaos.outside.job_run import Command, InjectionPace, JobRun, run_job
from ntp_plugin.chaos.outside.kinds import FaultKind
from ntp_plugin.chaos.outside.verdict import NO_FAULT, Allowed, Judged, judge, losses_of
from ntp_plugin.errors import Refused


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRequest:
    """What a campaign is to do."""

    command: Command
    kinds: Sequence[FaultKind]
    faults: int
    seed: int
    pace: InjectionPace
    allowed: Allowed


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """A run of the job without a fault."""

    folder: Path
    losses: dict[int, float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignResult:
    """What came of a campaign."""

    judged: tuple[Judged, ...]
    not_injected: tuple[str, ...]
    """Kinds that no run had room for."""
    missed: tuple[str, ...]
    kept: int
    """Folders in shared memory that runs left as they may; they are removed."""

    @property
    def holds(self) -> bool:
        """Whether all faults were injected, and none had a bad end."""
        return not self.not_injected and not any(one.wrong or one.hung or one.left for one in self.judged)


type Say = Callable[[str], None]


def run_reference(asked: CampaignRequest, folder: Path, *, wait: Wait) -> Reference:
    """Without a fault. Raises `Refused` where it does not end well, or reports no losses."""
    ran = run_job(asked.command, folder, [], pace=asked.pace, chosen=random.Random(asked.seed), wait=wait)
    log = folder / "log.txt"
    if ran.hung or ran.code:
        how = ran.hung or f"it ended with code {ran.code}"
        raise Refused(f"the reference run, which has no fault, did not end well: {how}", fix=f"see {log}")
    if left := (*ran.leavings.processes, *ran.leavings.files):
        raise Refused(f"the reference run, which has no fault, has left {left[0]} behind", fix=f"see {log}")
    losses = losses_of(ran.reports)
    if not losses:
        raise Refused(
            "the reference run reported no losses: neither its record nor its output has any",
            fix="have the script print a line for each step, and say by --line how it looks",
        )
    return Reference(folder=folder, losses=losses)


def run_campaign(
    asked: CampaignRequest, folder: Path, reference: Reference, *, wait: Wait, say: Say = lambda _: None
) -> CampaignResult:
    """Runs with faults until the queue is empty; two in a row that took nothing from it end it, too."""
    queue, chosen = draw(asked.kinds, asked.faults, asked.seed), random.Random(asked.seed)
    judged, missed, kept, idle, number = list[Judged](), list[str](), list[Path](), 0, 0
    while queue and idle < 2:
        number += 1
        before = len(queue)
        ran = run_job(
            asked.command, folder / f"run-{number}", queue, pace=asked.pace, chosen=chosen, wait=wait, say=say
        )
        idle = idle + 1 if len(queue) == before else 0
        one = judge(ran, reference.losses, weights_apart=_weights_apart(ran, reference), allowed=asked.allowed)
        one += _not_removed(kept)
        for bad in (one for one in one if one.wrong or one.hung or one.left):
            say(f"run {number}: {bad.kind}: {'; '.join(_words(bad))}")
        say(f"run {number}: {len(ran.injected)} faults, ended with code {ran.code}; {len(queue)} faults to come")
        judged, missed, kept = [*judged, *one], [*missed, *ran.missed], [*kept, *ran.leavings.kept]
    leavings.remove(kept)
    return CampaignResult(
        judged=tuple(judged),
        not_injected=tuple(kind.name for kind in queue),
        missed=tuple(missed),
        kept=len(kept),
    )


def _words(bad: Judged) -> list[str]:
    return [what for what in (bad.wrong, bad.hung, "left behind: " * bool(bad.left) + ", ".join(bad.left)) if what]


def _weights_apart(ran: JobRun, reference: Reference) -> float | None:
    """Compare the last checkpoint with the reference run's, if the run ended well."""
    if ran.code != 0:
        return None
    from ntp_plugin.chaos.outside import checkpoints  # noqa: PLC0415  (brings torch)

    return checkpoints.apart(ran.folder, reference.folder)


def _not_removed(kept: Sequence[Path]) -> list[Judged]:
    """What the run before this one left, and this one was to remove at its start."""
    still = [path for path in kept if path.name.startswith(leavings.REMOVED_BY_THE_NEXT) and path.exists()]
    leavings.remove(still)
    return [Judged(kind=NO_FAULT, left=tuple(map(str, still)))] if still else []
