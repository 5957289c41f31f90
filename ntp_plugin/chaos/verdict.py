"""What came of each strike, and whether the training is the reference run's. PURE.

A strike has *struck*, was *detected* when a supervisor said that the slot is lost, and is *recovered from* when all who
are left have committed the first step that nobody took with the lost one. Without a reference run only losses that are
not numbers, samples twice, and steps that are missing can be noticed.
"""

import dataclasses
import math
from collections.abc import Mapping

from ntp_plugin.chaos import weights
from ntp_plugin.chaos.faults import BY_ITS_OWN_HAND, LEAVES_THE_JOB, OrderedFault, RequestedFaults
from ntp_plugin.chaos.history import History
from ntp_plugin.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """Of one strike."""

    name: str
    what: str
    slot: str
    fault_point: str
    step: int
    """In flight when it struck; 0 where it never did."""
    injected_at: float
    """Seconds since training began."""
    detected_s: float | None
    recovered_s: float | None
    steps_again: int
    phases: Mapping[str, float]
    problem: str
    """Empty where all is well."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One thing that must hold of the whole run, and what was found."""

    what: str
    found: str
    holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SampleCounts:
    """How many, of the steps that were committed."""

    drawn: int
    twice: int
    missing: int
    """Of those that the reference run drew for the same steps."""
    others: int
    """That the reference run did not draw for them."""
    steps: tuple[int, ...]
    """In which they are not right."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Drawn:
    """Of the faults that were to be drawn."""

    of: int
    drawn: int
    injected: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CampaignVerdict:
    """On one campaign."""

    outcomes: tuple[FaultOutcome, ...]
    checks: tuple[Check, ...]
    samples: SampleCounts
    drawn: Drawn | None = None
    efficiency: float
    """Of the steps that were begun, the part that counts: each recovery has one begun anew."""
    left_out: tuple[str, ...] = ()
    """Lines of the record that are not judged, each with the reason."""

    @property
    def holds(self) -> bool:
        """Whether everything is as promised."""
        return all(check.holds for check in self.checks) and not any(outcome.problem for outcome in self.outcomes)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Expected:
    """Of a run that was broken on purpose."""

    code: int = 0
    """That the job ends with."""
    returns: int = 0
    """So many slots come back."""
    troubles: int = 0
    """So often somebody finds a copy that is not what was written."""
    bound: float = 0.0
    """Largest relative difference of a loss, or of the weights, from the reference run's."""
    weights_bound: float | None = None
    """Of the weights, where that is another one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How a run ended."""

    code: int
    hung: bool = False
    left: tuple[int, ...] = ()
    """Processes that were still there, and had to be ended."""


def judge(
    asked: RequestedFaults, run: History, reference: History | None, end: End, expected: Expected
) -> CampaignVerdict:
    """By the records of a run and of its reference run."""
    outcomes = _outcomes(asked, run, goes_on=not expected.code)
    drawn, samples = _drawn(asked, run), _samples(run, reference)
    checks = [_ended(end, expected), _nobody_left(end), _samples_right(samples, run, reference)]
    if not expected.code:
        checks.append(_steps(run, reference))
        if not (expected.returns or any(fault.what in LEAVES_THE_JOB for fault in asked.faults)):
            checks.append(_nobody_lost(run))
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
    """On strikes at a job that was there before, and may go on: of its end nothing is known, and it has no reference
    run."""
    drawn, samples = _drawn(asked, run), _samples(run, None)
    checks = [_samples_right(samples, run, None), _steps(run, None, first=min(run.commits, default=1))]
    if drawn is not None:
        checks.append(_some_injected(drawn))
    outcomes = _outcomes(asked, run, goes_on=True)
    return CampaignVerdict(
        outcomes=outcomes, checks=tuple(checks), samples=samples, drawn=drawn, efficiency=_efficiency(run)
    )


def look_over(run: History, reference: History | None, *, bound: float) -> CampaignVerdict:
    """A run of which nobody has said what was to happen: whatever struck is told by the record itself."""
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
    """Return the strikes that a record tells of, and why lines are left out that can be none."""
    injected, left_out = list[OrderedFault](), list[str]()
    for said in run.injected:
        event = said.event
        try:
            injected.append(OrderedFault(name=event.fault, what=event.what, slot=event.whom, during=event.fault_point))
        except ConfigError as error:
            left_out.append(f"a FaultInjected line that {said.slot} told: {error.what}")
    return injected, left_out


def _efficiency(run: History) -> float:
    done, not_counted = len(run.commits), len(run.taken_again) + len(run.recoveries)
    return done / max(1, done + not_counted)


# ---------------------------------------------------------------- one strike


def _outcomes(asked: RequestedFaults, run: History, *, goes_on: bool) -> tuple[FaultOutcome, ...]:
    ordered = (_outcome(fault, run, goes_on=goes_on) for fault in asked.faults)
    return (*ordered, *(_never_injected(left.fault, left.why) for left in asked.unordered))


def _outcome(fault: OrderedFault, run: History, *, goes_on: bool) -> FaultOutcome:
    said = next((said for said in run.injected if said.event.fault == fault.name), None)
    if said is None:
        return _never_injected(fault, _why_never_injected(fault, run))
    leaves = fault.what in LEAVES_THE_JOB
    epoch = _epoch_without(run, fault.slot, said.at) if leaves else None
    recovered = _next_step(run, said.at, epoch) if (epoch is not None or not leaves) else None
    phases = next(iter(run.recoveries[epoch].values())).event.phases if epoch is not None else {}
    problem = (
        "the others did not go on" if goes_on and recovered is None and not _is_last(run, fault.slot, said.at) else ""
    )
    return FaultOutcome(
        name=fault.name,
        what=fault.what,
        slot=fault.slot,
        fault_point=said.event.fault_point,
        step=said.event.step,
        injected_at=said.at - run.began_at,
        detected_s=_detected(run, fault.slot, said.at),
        recovered_s=None if recovered is None else recovered - said.at,
        steps_again=_steps_again(run, said.at, epoch),
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
        problem="" if fault.may_miss else f"it never struck: {why}",
    )


def _why_never_injected(fault: OrderedFault, run: History) -> str:
    if fault.slot in run.slots or not run.slots:
        inside = fault.what in BY_ITS_OWN_HAND
        return "the slot did not come to that moment" if inside else "nobody had the slot then"
    return f"this job has no such slot, but {', '.join(run.slots[:8])}{', ...' * (len(run.slots) > 8)}"


def _detected(run: History, slot: str, at: float) -> float | None:
    number = run.numbers.get(slot)
    return min((said.at - at for said in run.gone if said.event.number == number and said.at >= at), default=None)


def _epoch_without(run: History, slot: str, at: float) -> int | None:
    """The first that was come to after a time, and in which a slot is lost."""
    found = [
        epoch
        for epoch, slots in run.recoveries.items()
        if any(said.at >= at and slot in said.event.lost for said in slots.values())
    ]
    return min(found, default=None)


def _steps_again(run: History, at: float, epoch: int | None) -> int:
    """In the recovery that leads to the epoch, and in none behind it: those are for later losses."""
    if epoch is None:
        return 0
    until = max(said.at for said in run.recoveries[epoch].values())
    return max((said.event.again for said in run.restored if at <= said.at <= until), default=0)


def _next_step(run: History, at: float, epoch: int | None) -> float | None:
    """When all had committed the first step that was begun after it, or in a later membership."""
    for step in sorted(run.commits):
        told = run.commits[step].values()
        if (epoch is None and _begun_at(run, step) >= at) or (
            epoch is not None and min(said.event.epoch for said in told) >= epoch
        ):
            return run.committed_at(step)
    return None


def _begun_at(run: History, step: int) -> float:
    return min(said.at - said.event.seconds for said in run.commits[step].values())


def _is_last(run: History, slot: str, at: float) -> bool:
    """Whether the step in flight when it struck was the last, if there was one, and all others came to their end."""
    others = run.commits[max(run.commits)].keys() - {slot} if run.commits else set()
    ended = bool(run.ended) and others <= set(run.ended)
    return ended and all(_begun_at(run, step) <= at for step in run.commits)


# ---------------------------------------------------------------- the training


def _steps(run: History, reference: History | None, *, first: int = 1) -> Check:
    """`first`: of a job that may have begun from a checkpoint."""
    last = first - 1 + len(reference.commits) if reference is not None else max(run.commits, default=0)
    wanted = range(first, last + 1)
    missing = sorted(set(wanted) - run.commits.keys())
    found = f"{len(run.commits)} of {len(wanted)}" + (f"; missing are {missing[:5]}" if missing else "")
    return Check(what="every step was committed", found=found, holds=not missing and bool(wanted))


def _samples(run: History, reference: History | None) -> SampleCounts:
    """Nothing twice; nothing missing but what a slot drew that was lost before it could tell of a step it had done."""
    drawn = twice = missing = others = 0
    wrong = []
    for step in sorted(run.commits):
        samples = run.samples(step)
        mine, theirs = (
            {*samples},
            {*samples} if reference is None or step not in reference.commits else {*reference.samples(step)},
        )
        untold = len(theirs - mine)
        counts = (
            len(samples) - len(mine),
            untold if untold and untold > _may_be_untold(run, step, len(theirs)) else 0,
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


def _may_be_untold(run: History, step: int, of: int) -> float:
    """So many of a step's samples at most were drawn by members that were lost before they could tell of it: no more
    than the shares of their replicas."""
    told = run.commits[step]
    epoch = min(said.event.epoch for said in told.values())
    members = set(run.slots) - _lost_in(run, epoch)
    lost_later = {slot for later in run.recoveries if later > epoch for slot in _lost_in(run, later)}
    replicas = {int(slot[1:].split(".")[0]) for slot in (members - told.keys()) & lost_later}
    _, shares = run.layout_of(step)
    return of * sum(shares[replica] for replica in replicas) / sum(shares)


def _lost_in(run: History, epoch: int) -> set[str]:
    return {slot for said in run.recoveries.get(epoch, {}).values() for slot in said.event.lost}


def _ended(end: End, expected: Expected) -> Check:
    holds = not end.hung and end.code == expected.code
    found = "it was not over in time" if end.hung else f"code {end.code}"
    return Check(what=f"the job ended with code {expected.code}", found=found, holds=holds)


def _nobody_left(end: End) -> Check:
    found = f"pids {', '.join(map(str, end.left))}" if end.left else "none"
    return Check(what="no worker was left behind", found=found, holds=not end.left)


def _nobody_lost(run: History) -> Check:
    lost = {slot for epoch in run.recoveries for slot in _lost_in(run, epoch)}
    return Check(what="nobody was taken for lost", found=", ".join(sorted(lost)) or "nobody", holds=not run.recoveries)


def _returns(run: History, wanted: int) -> Check:
    epochs = (next(iter(slots.values())) for _, slots in sorted(run.recoveries.items()))
    back = [slot for said in epochs for slot in said.event.back]
    return Check(what=f"{wanted} came back", found=", ".join(back) or "nobody did", holds=len(back) >= wanted)


def _drawn(asked: RequestedFaults, run: History) -> Drawn | None:
    if not asked.to_be_drawn:
        return None
    injected = {said.event.fault for said in run.injected}
    return Drawn(of=asked.to_be_drawn, drawn=len(asked.drawn), injected=len(injected & {*asked.drawn}))


def _some_injected(drawn: Drawn) -> Check:
    """A job may end, or have nobody to spare, before all are drawn."""
    found = f"{drawn.drawn} of {drawn.of} were drawn, and {drawn.injected} of these struck"
    return Check(what="faults were drawn", found=found, holds=drawn.injected > 0)


def _troubles(run: History, wanted: int) -> Check:
    told = [said.event.what for said in run.troubles]
    return Check(what="the spoilt copy was found out", found="; ".join(told) or "never", holds=len(told) >= wanted)


def _losses(run: History, reference: History, bound: float) -> Check:
    apart = differences(run, reference)
    worst = max(apart, key=lambda step: apart[step], default=None)
    broken = [step for step, value in run.losses.items() if not math.isfinite(value)]
    if worst is None:
        return Check(what="losses agree with the reference run's", found="none were told", holds=False)
    found = f"{apart[worst]:.1e} apart at most, in step {worst} of {len(apart)}; {bound:.0e} is allowed"
    return Check(what="losses agree with the reference run's", found=found, holds=apart[worst] <= bound and not broken)


def _weights(run: History, reference: History, bound: float) -> Check:
    """Of those that all end with."""
    what, distances = "weights agree with the reference run's", weights.apart(run, reference)
    worst = max(distances, key=lambda whole: distances[whole])
    found = f"{distances[worst]:.1e} apart at most, in {worst}, of {len(distances)}; {bound:.0e} is allowed"
    return Check(what=what, found=found, holds=distances[worst] <= bound)


def differences(run: History, reference: History) -> dict[int, float]:
    """Step -> how far the losses are apart, relative to the reference run's."""
    mine, calm = run.losses, reference.losses
    return {step: abs(mine[step] - calm[step]) / max(abs(calm[step]), 1e-300) for step in sorted(mine.keys() & calm)}
