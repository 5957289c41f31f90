"""Which faults led to a wrong result, a hang, or something left behind. PURE.

A result is wrong where a loss that any rank reports is not the reference run's, where a step is missing, where the last
checkpoint differs, where a rank was taken for lost that no fault was to take, where one that was lost was not noticed,
or where the job has ended with a code that the faults do not explain. It is laid to the last fault that came before it;
what comes before every fault is laid to none.
"""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from ntp_plugin.chaos.outside.injector import Injected
from ntp_plugin.chaos.outside.job_run import JobRun, steps_of
from ntp_plugin.chaos.outside.job_view import CompletedStep, Noticed
from ntp_plugin.chaos.outside.kinds import STATE_IS_LOST

NO_FAULT = "(before any fault)"
STEPS_WITHOUT = 5
"""Nobody completes so many without a rank that was lost, unless it was noticed: of a step that it had its part in, and
of the next, others may come to the end."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Judged:
    """One fault, and what came of it."""

    kind: str
    words: str = ""
    wrong: str = ""
    """Why; empty if it is not."""
    hung: str = ""
    left: tuple[str, ...] = ()
    noticed_s: float | None = None
    """From the signal until a supervisor said so; of a fault that ends the job, until all processes had ended."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What may differ."""

    bound: float
    """Relative, of a loss."""
    weights_bound: float
    loses_state: bool = False
    """Two ranks that are lost together may be all that held some state, so that the job says that it cannot go on."""


def judge(
    ran: JobRun, reference: Mapping[int, float], *, weights_apart: float | None, allowed: Allowed
) -> list[Judged]:
    """One for each fault of a run, in order; and one more if something went wrong before the first."""
    judged = [
        Judged(
            kind=fault.kind.name,
            words=fault.words,
            noticed_s=ran.leavings.ended_at - fault.at if fault.kind.ends_job else noticed_s(fault, ran.noticed),
        )
        for fault in ran.injected
    ]
    wrong, at = _wrong(ran, reference, weights_apart, allowed)
    left = (*ran.leavings.processes, *ran.leavings.files)
    if wrong:
        judged = _laid_to(judged, [fault.at for fault in ran.injected], at, wrong=wrong)
    for at, wrong in (*_lost_too(ran), *_unnoticed(ran)):
        judged = _laid_to(judged, [fault.at for fault in ran.injected], at, wrong=wrong)
    if ran.hung:
        judged = _laid_to(judged, [fault.at for fault in ran.injected], math.inf, hung=ran.hung)
    if left:
        judged = _laid_to(judged, [fault.at for fault in ran.injected], math.inf, left=left)
    return judged


def losses_of(reports: Iterable[CompletedStep]) -> dict[int, float]:
    """Step -> the loss that was reported of it."""
    return {report.step: report.loss for report in reports if report.loss is not None}


def noticed_s(fault: Injected, noticed: Sequence[Noticed]) -> float | None:
    """Until the last of those that it takes was noticed; None if one never was, or if it takes nobody."""
    found = [
        min((one.at - at for one in noticed if one.rank == rank and one.at >= at), default=math.inf)
        for rank, at in fault.lost_at
    ]
    return max(found) if found and math.isfinite(max(found)) else None


def rows(job: str, judged: Iterable[Judged]) -> list[dict[str, object]]:
    """By kind, as the evidence has them."""
    by_kind = defaultdict[str, list[Judged]](list)
    for one in judged:
        by_kind[one.kind].append(one)
    found = list[dict[str, object]]()
    for kind, some in sorted(by_kind.items()):
        seconds = [one.noticed_s for one in some if one.noticed_s is not None]
        found.append(
            {
                "job": job,
                "kind": kind,
                "faults": len(some) if kind != NO_FAULT else 0,
                "wrong": sum(bool(one.wrong) for one in some),
                "hung": sum(bool(one.hung) for one in some),
                "noticed_p50_s": round(statistics.median(seconds), 3) if seconds else None,
            }
        )
    return found


def _wrong(
    ran: JobRun, reference: Mapping[int, float], weights_apart: float | None, allowed: Allowed
) -> tuple[str, float]:
    """What is, and when it came to light."""
    for report in sorted(ran.reports, key=lambda report: report.at):
        if (what := _differs(report, reference, allowed.bound)) is not None:
            return what, report.at
    what = "" if ran.hung else _ended_badly(ran, allowed)
    if not what and ran.code == 0:
        what = _not_whole(ran, reference, weights_apart, allowed)
    return what, math.inf


def _lost_too(ran: JobRun) -> Iterator[tuple[float, str]]:
    """Ranks that were taken for lost and that no fault was to take; when, and in words.

    After the last fault this means something only where the job has come to its own end: another one takes all along.
    """
    times = [fault.at for fault in ran.injected]
    ended_well = ran.code == 0 and not any(fault.kind.ends_job for fault in ran.injected)
    until = math.inf if ended_well else max(times, default=-math.inf)
    for one in ran.noticed:
        if one.at < until and not one.left_out and not _is_explained(one, ran, times):
            yield one.at, f"rank {one.rank} was lost too"


def _is_explained(one: Noticed, ran: JobRun, times: Sequence[float]) -> bool:
    """By a signal to that rank since the last fault, or by an earlier one that was not noticed until now."""
    meant = (*ran.may_be_lost_at, *(lost for fault in ran.injected for lost in (*fault.lost_at, *fault.may_be_lost_at)))
    return any(
        not any(at < time <= one.at for time in times)
        or not any(other.rank == rank and at <= other.at < one.at for other in ran.noticed)
        for rank, at in meant
        if rank == one.rank and at <= one.at
    )


def _unnoticed(ran: JobRun) -> Iterator[tuple[float, str]]:
    """Ranks that were not, although others went on without them; when the fault was, and in words."""
    for fault in ran.injected if ran.is_recorded else ():
        for rank, at in dict(reversed(fault.lost_at)).items():  # a joiner may be lost before the others knew of it
            noticed = any(one.rank == rank and one.at >= at for one in ran.noticed)
            if not noticed and (steps := _steps_without(rank, at, ran.reports)) >= STEPS_WITHOUT:
                yield fault.at, f"rank {rank} was lost, nobody noticed, and the others completed {steps} further steps"


def _steps_without(rank: int, since: float, reports: Sequence[CompletedStep]) -> int:
    """How many further steps others have completed and that rank has not: one that goes on has survived its signal."""
    last = max((report.step for report in reports if report.at <= since), default=0)
    its_own = {report.step for report in reports if report.rank == rank}
    further = {report.step for report in reports if report.at > since and report.step > last}
    return len(further - its_own) if its_own else 0


def _not_whole(ran: JobRun, reference: Mapping[int, float], weights_apart: float | None, allowed: Allowed) -> str:
    """What a job that says it is done has not done."""
    if missing := sorted(reference.keys() - steps_of(ran.reports)):
        return f"the job ended with code 0 and without steps {missing[:5]}, {len(missing)} in all"
    if weights_apart is not None and not weights_apart <= allowed.weights_bound:
        return f"the last checkpoint is {weights_apart:.1e} apart ({allowed.weights_bound:.0e} is allowed)"
    return ""


def _differs(report: CompletedStep, reference: Mapping[int, float], bound: float) -> str | None:
    if report.loss is None:
        return None
    if report.step not in reference:
        return f"step {report.step} is none of the reference run's"
    calm = reference[report.step]
    gap = abs(report.loss - calm) / max(abs(calm), 1e-300)
    if gap <= bound:
        return None
    who = "" if report.rank is None else f" on rank {report.rank}"
    return f"loss {report.loss!r} of step {report.step}{who} is {gap:.1e} from {calm!r} ({bound:.0e} is allowed)"


def _ended_badly(ran: JobRun, allowed: Allowed) -> str:
    """A code that the last fault does not explain."""
    last = ran.injected[-1].kind if ran.injected else None
    if ran.code == 0:  # also where a fault ends the job: it was over just before
        return ""
    if last is not None and (last.ends_job or last.may_end_job):
        if ran.code == last.end_code:
            return ""
        return f"the job ended with code {ran.code}, and {last.name} ends it with {last.end_code}"
    if last is not None and last.takes_two and allowed.loses_state and ran.code in STATE_IS_LOST:
        return ""
    return f"the job ended with code {ran.code}"


def _laid_to(
    judged: Sequence[Judged],
    times: Sequence[float],
    at: float,
    *,
    wrong: str = "",
    hung: str = "",
    left: tuple[str, ...] = (),
) -> list[Judged]:
    """The last fault before that instant has it."""
    before = sum(time <= at for time in times)
    if not before:
        return [*judged, Judged(kind=NO_FAULT, wrong=wrong, hung=hung, left=left)]
    one = judged[before - 1]
    changed = dataclasses.replace(one, wrong=one.wrong or wrong, hung=one.hung or hung, left=(*one.left, *left))
    return [*judged[: before - 1], changed, *judged[before:]]
