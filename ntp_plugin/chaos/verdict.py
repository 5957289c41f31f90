"""Decide what came of each fault, and whether the training is the reference run's. PURE.

A fault is *injected*, then *detected* when a supervisor records the slot as lost, and *recovered from* when all
surviving ranks have committed the first step without the lost one. Without a reference run only losses that are not
numbers, repeated samples and missing steps can be noticed.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping

from ntp_plugin.chaos import weights
from ntp_plugin.chaos.faults import INJECTED_BY_WORKER, LEAVES_THE_JOB, OF_HOSTS, OrderedFault, RequestedFaults
from ntp_plugin.chaos.history import History
from ntp_plugin.errors import ConfigError

_TOO_LATE, _WITH_ITS_REPLICA = "left behind", "code 5"
"""The kind, and the end of the reason, of losses that follow from another one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """What came of one fault."""

    name: str
    what: str
    slot: str
    fault_point: str
    step: int
    """The step in flight when it was injected; 0 if it never was."""
    injected_at: float
    """Seconds since training began."""
    detected_s: float | None
    recovered_s: float | None
    steps_again: int
    phases: Mapping[str, float]
    problem: str
    """What is wrong; empty if nothing is."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One property that the whole run must have, and what was found."""

    what: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """How many samples the committed steps used, and how many are wrong."""

    drawn: int
    twice: int
    missing: int
    """Samples that the reference run used in the same steps, and this run did not."""
    others: int
    """Samples that the reference run did not use in these steps."""
    steps: tuple[int, ...]
    """Steps with wrong samples."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """How many random faults were requested, drawn and injected."""

    of: int
    drawn: int
    injected: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignVerdict:
    """The verdict on one campaign."""

    outcomes: tuple[FaultOutcome, ...]
    checks: tuple[Check, ...]
    samples: SampleCounts
    drawn: Drawn | None = None
    efficiency: float
    """Part of the begun steps that counts: each recovery restarts one."""
    left_out: tuple[str, ...] = ()
    """Lines of the record that are not judged, each with the reason."""

    @property
    def holds(self) -> bool:
        """Whether every check holds and no fault has a problem."""
        return all(check.holds for check in self.checks) and not any(outcome.problem for outcome in self.outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """What is expected of a run with faults."""

    code: int = 0
    """The job's exit code."""
    returns: int = 0
    """How many slots rejoin."""
    troubles: int = 0
    """How often a rank finds a corrupt or missing copy."""
    bound: float = 0.0
    """Largest relative difference of a loss, or of the weights, from the reference run's."""
    weights_bound: float | None = None
    """The same for the weights alone, if it differs."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a run ended."""

    code: int
    hung: bool = False
    left: tuple[int, ...] = ()
    """Processes that outlived the run and were killed."""


def judge(
    asked: RequestedFaults, run: History, reference: History | None, end: End, expected: Expected
) -> CampaignVerdict:
    """Judge a run against its reference run, from both histories."""
    outcomes = _outcomes(asked, run, goes_on=not expected.code)
    drawn, samples = _drawn(asked, run), _samples(run, reference)
    checks = [_ended(end, expected), _nobody_left(end), _samples_right(samples, run, reference)]
    if not expected.code:
        checks.append(_steps(run, reference))
        if not (expected.returns or any(fault.what in LEAVES_THE_JOB for fault in asked.faults)):
            checks.append(_nobody_lost(run))
        elif not any(fault.what in OF_HOSTS for fault in asked.faults):
            checks.append(_only_victims_lost(run))
    if reference is not None:
        checks.append(_losses(run, reference, expected.bound))
        if not expected.code and reference.weighed:
            own = expected.weights_bound
            checks.append(_weights(run, reference, expected.bound if own is None else own))
    if expected.returns:
        checks.append(_returns(run, expected.returns))
    if expected.troubles:
        checks.append(_troubles(run, expected.troubles))
    if drawn is not None:
        checks.append(_some_injected(drawn))
    return CampaignVerdict(
        outcomes=outcomes, checks=tuple(checks), samples=samples, drawn=drawn, efficiency=_efficiency(run)
    )


def judge_attached(asked: RequestedFaults, run: History) -> CampaignVerdict:
    """Judge faults in a job that existed before and may go on: its end is unknown, and it has no reference run."""
    drawn, samples = _drawn(asked, run), _samples(run, None)
    checks = [_samples_right(samples, run, None), _steps(run, None, first=min(run.commits, default=1))]
    if drawn is not None:
        checks.append(_some_injected(drawn))
    outcomes = _outcomes(asked, run, goes_on=True)
    return CampaignVerdict(
        outcomes=outcomes, checks=tuple(checks), samples=samples, drawn=drawn, efficiency=_efficiency(run)
    )


def look_over(run: History, reference: History | None, *, bound: float) -> CampaignVerdict:
    """Judge a run without a recipe: its faults are those that the record itself has."""
    injected, left_out = _injected(run)
    outcomes = tuple(_outcome(fault, run, goes_on=False) for fault in injected)
    beside = [] if reference is None else [_losses(run, reference, bound)]
    if reference is not None and reference.weighed and run.weighed:
        beside.append(_weights(run, reference, bound))
    samples = _samples(run, reference)
    checks = (
        _samples_right(samples, run, reference),
        _steps(run, reference, first=min(run.commits, default=1)),
        *beside,
    )
    return CampaignVerdict(
        outcomes=outcomes, checks=checks, samples=samples, efficiency=_efficiency(run), left_out=tuple(left_out)
    )


def _injected(run: History) -> tuple[list[OrderedFault], list[str]]:
    """Return the faults in a record, and the reason for each line that cannot be one."""
    injected, left_out = list[OrderedFault](), list[str]()
    for recorded in run.injected:
        event = recorded.event
        try:
            injected.append(OrderedFault(name=event.fault, what=event.what, slot=event.whom, during=event.fault_point))
        except ConfigError as error:
            left_out.append(f"a FaultInjected line of {recorded.slot}: {error.what}")
    return injected, left_out


def _efficiency(run: History) -> float:
    done, not_counted = len(run.commits), len(run.taken_again) + len(run.recoveries)
    return done / max(1, done + not_counted)


# ---------------------------------------------------------------- one fault


def _outcomes(asked: RequestedFaults, run: History, *, goes_on: bool) -> tuple[FaultOutcome, ...]:
    ordered = (_outcome(fault, run, goes_on=goes_on) for fault in asked.faults)
    return (*ordered, *(_never_injected(left.fault, left.why) for left in asked.unordered))


def _outcome(fault: OrderedFault, run: History, *, goes_on: bool) -> FaultOutcome:
    recorded = next((recorded for recorded in run.injected if recorded.event.fault == fault.name), None)
    if recorded is None:
        return _never_injected(fault, _why_never_injected(fault, run))
    leaves = fault.what in LEAVES_THE_JOB
    epoch = _epoch_without(run, fault.slot, recorded.at) if leaves else None
    recovered = _next_step(run, recorded.at, epoch) if (epoch is not None or not leaves) else None
    phases = next(iter(run.recoveries[epoch].values())).event.phases if epoch is not None else {}
    problem = (
        "the others did not go on"
        if goes_on and recovered is None and not _is_last(run, fault.slot, recorded.at)
        else ""
    )
    return FaultOutcome(
        name=fault.name,
        what=fault.what,
        slot=fault.slot,
        fault_point=recorded.event.fault_point,
        step=recorded.event.step,
        injected_at=recorded.at - run.began_at,
        detected_s=_detected(run, fault.slot, recorded.at),
        recovered_s=None if recovered is None else recovered - recorded.at,
        steps_again=_steps_again(run, recorded.at, epoch),
        phases=phases,
        problem=problem,
    )


def _never_injected(fault: OrderedFault, why: str) -> FaultOutcome:
    return FaultOutcome(
        name=fault.name,
        what=fault.what,
        slot=fault.slot,
        fault_point=fault.during,
        step=0,
        injected_at=0.0,
        detected_s=None,
        recovered_s=None,
        steps_again=0,
        phases={},
        problem="" if fault.may_miss else f"never injected: {why}",
    )


def _why_never_injected(fault: OrderedFault, run: History) -> str:
    if fault.slot in run.slots or not run.slots:
        inside = fault.what in INJECTED_BY_WORKER
        return "the slot did not reach that fault point" if inside else "the slot had no process then"
    return f"this job has no such slot, but {', '.join(run.slots[:8])}{', ...' * (len(run.slots) > 8)}"


def _detected(run: History, slot: str, at: float) -> float | None:
    number = run.numbers.get(slot)
    return min(
        (recorded.at - at for recorded in run.ranks_lost if recorded.event.number == number and recorded.at >= at),
        default=None,
    )


def _epoch_without(run: History, slot: str, at: float) -> int | None:
    """Return the first epoch that was entered after a time and without the slot."""
    found = [
        epoch
        for epoch, slots in run.recoveries.items()
        if any(recorded.at >= at and slot in recorded.event.lost for recorded in slots.values())
    ]
    return min(found, default=None)


def _steps_again(run: History, at: float, epoch: int | None) -> int:
    """Return the repeated steps of the recovery into this epoch; later ones are for later losses."""
    if epoch is None:
        return 0
    until = max(recorded.at for recorded in run.recoveries[epoch].values())
    return max((recorded.event.again for recorded in run.restored if at <= recorded.at <= until), default=0)


def _next_step(run: History, at: float, epoch: int | None) -> float | None:
    """Return when all had committed the first step that began after the fault, or in the epoch that followed it."""
    for step in sorted(run.commits):
        commits = run.commits[step].values()
        if (epoch is None and _begun_at(run, step) >= at) or (
            epoch is not None and min(recorded.event.epoch for recorded in commits) >= epoch
        ):
            return run.committed_at(step)
    return None


def _begun_at(run: History, step: int) -> float:
    return min(recorded.at - recorded.event.seconds for recorded in run.commits[step].values())


def _is_last(run: History, slot: str, at: float) -> bool:
    """Return whether the fault came in the last step, or after it, and all other slots ended well."""
    others = run.commits[max(run.commits)].keys() - {slot} if run.commits else set()
    ended = bool(run.ended) and others <= set(run.ended)
    return ended and all(_begun_at(run, step) <= at for step in run.commits)


# ---------------------------------------------------------------- the training


def _steps(run: History, reference: History | None, *, first: int = 1) -> Check:
    """`first`: the first step, which is not 1 if the job began from a checkpoint."""
    last = first - 1 + len(reference.commits) if reference is not None else max(run.commits, default=0)
    wanted = range(first, last + 1)
    missing = sorted(set(wanted) - run.commits.keys())
    found = f"{len(run.commits)} of {len(wanted)}" + (f"; missing are {missing[:5]}" if missing else "")
    return Check(what="every step was committed", found=found, holds=not missing and bool(wanted))


def _samples(run: History, reference: History | None) -> SampleCounts:
    """Count wrong samples. A slot that was lost before it recorded a step may have used the missing ones."""
    drawn = twice = missing = others = 0
    wrong = []
    for step in sorted(run.commits):
        samples = run.samples(step)
        mine, theirs = (
            {*samples},
            {*samples} if reference is None or step not in reference.commits else {*reference.samples(step)},
        )
        unrecorded = len(theirs - mine)
        counts = (
            len(samples) - len(mine),
            unrecorded if unrecorded and unrecorded > _may_be_unrecorded(run, step, len(theirs)) else 0,
            len(mine - theirs),
        )
        drawn, twice, missing, others = drawn + len(samples), twice + counts[0], missing + counts[1], others + counts[2]
        if any(counts):
            wrong.append(step)
    return SampleCounts(drawn=drawn, twice=twice, missing=missing, others=others, steps=tuple(wrong))


def _samples_right(samples: SampleCounts, run: History, reference: History | None) -> Check:
    found = f"{samples.drawn} in {len(run.commits)} steps"
    if samples.steps:
        where = f"{list(samples.steps[:5])}{' and others' * (len(samples.steps) > 5)}"
        found += f"; {samples.twice} twice, {samples.missing} missing, {samples.others} other ones, in steps {where}"
    what = (
        "the samples are the reference run's, each once"
        if reference is not None
        else "no sample was used twice in a step"
    )
    return Check(what=what, found=found, holds=not samples.steps and bool(run.commits))


def _may_be_unrecorded(run: History, step: int, of: int) -> float:
    """Return how many of a step's samples may be unrecorded: at most the shares of replicas with members that were lost
    before they recorded the step."""
    commits = run.commits[step]
    epoch = min(recorded.event.epoch for recorded in commits.values())
    members = set(run.slots) - _lost_in(run, epoch)
    lost_later = {slot for later in run.recoveries if later > epoch for slot in _lost_in(run, later)}
    replicas = {int(slot[1:].split(".")[0]) for slot in (members - commits.keys()) & lost_later}
    _, shares = run.layout_of(step)
    return of * sum(shares[replica] for replica in replicas) / sum(shares)


def _lost_in(run: History, epoch: int) -> set[str]:
    return {slot for recorded in run.recoveries.get(epoch, {}).values() for slot in recorded.event.lost}


def _ended(end: End, expected: Expected) -> Check:
    holds = not end.hung and end.code == expected.code
    found = "it was not over in time" if end.hung else f"code {end.code}"
    return Check(what=f"the job ended with code {expected.code}", found=found, holds=holds)


def _nobody_left(end: End) -> Check:
    found = f"pids {', '.join(map(str, end.left))}" if end.left else "none"
    return Check(what="no worker was left behind", found=found, holds=not end.left)


def _nobody_lost(run: History) -> Check:
    lost = {slot for epoch in run.recoveries for slot in _lost_in(run, epoch)}
    return Check(what="no rank was lost", found=", ".join(sorted(lost)) or "none", holds=not run.recoveries)


def _only_victims_lost(run: History) -> Check:
    """A process that ends without a fault of its own is a defect, also where another one takes its place. Those that
    leave with the rest of a replica, or are too late to join, are none."""
    slots = {number: slot for slot, number in run.numbers.items()}
    ended = {
        (slots.get(lost.number, f"slot {lost.number}"), lost.pid)
        for lost in (recorded.event for recorded in run.ranks_lost)
        if lost.kind != _TOO_LATE and not lost.reason.endswith(_WITH_ITS_REPLICA)
    }
    faults = Counter(recorded.event.whom for recorded in run.injected)
    beyond = sorted(slot for slot, count in Counter(slot for slot, _ in ended).items() if count > faults[slot])
    return Check(what="nobody was lost but by a fault", found=", ".join(beyond) or "nobody", holds=not beyond)


def _returns(run: History, wanted: int) -> Check:
    epochs = (next(iter(slots.values())) for _, slots in sorted(run.recoveries.items()))
    back = [slot for recorded in epochs for slot in recorded.event.back]
    return Check(what=f"{wanted} lost slots rejoined", found=", ".join(back) or "none", holds=len(back) >= wanted)


def _drawn(asked: RequestedFaults, run: History) -> Drawn | None:
    if not asked.to_be_drawn:
        return None
    injected = {recorded.event.fault for recorded in run.injected}
    return Drawn(of=asked.to_be_drawn, drawn=len(asked.drawn), injected=len(injected & {*asked.drawn}))


def _some_injected(drawn: Drawn) -> Check:
    """A job may end, or have no slot to spare, before all are drawn."""
    found = f"{drawn.drawn} of {drawn.of} were drawn, and {drawn.injected} of these were injected"
    return Check(what="faults were drawn", found=found, holds=drawn.injected > 0)


def _troubles(run: History, wanted: int) -> Check:
    found = [trouble.event.what for trouble in run.troubles]
    return Check(what="the corrupt copy was found", found="; ".join(found) or "never", holds=len(found) >= wanted)


def _losses(run: History, reference: History, bound: float) -> Check:
    apart = differences(run, reference)
    worst = max(apart, key=lambda step: apart[step], default=None)
    broken = [step for step, value in run.losses.items() if not math.isfinite(value)]
    if worst is None:
        return Check(what="losses agree with the reference run's", found="none were recorded", holds=False)
    found = f"{apart[worst]:.1e} apart at most, in step {worst} of {len(apart)}; {bound:.0e} is allowed"
    return Check(what="losses agree with the reference run's", found=found, holds=apart[worst] <= bound and not broken)


def _weights(run: History, reference: History, bound: float) -> Check:
    """Compare the weights that both runs end with."""
    what, distances = "weights agree with the reference run's", weights.apart(run, reference)
    if not distances:
        return Check(what=what, found="none were recorded", holds=False)
    worst = max(distances, key=lambda whole: distances[whole])
    found = f"{distances[worst]:.1e} apart at most, in {worst}, of {len(distances)}; {bound:.0e} is allowed"
    return Check(what=what, found=found, holds=distances[worst] <= bound)


def differences(run: History, reference: History) -> dict[int, float]:
    """Return step -> difference of the losses, relative to the reference run's."""
    mine, calm = run.losses, reference.losses
    return {step: abs(mine[step] - calm[step]) / max(abs(calm[step]), 1e-300) for step in sorted(mine.keys() & calm)}
