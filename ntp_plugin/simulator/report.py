"""Run a simulation and build its report: plain numbers, for tables, plots and JSON."""

import dataclasses
from collections.abc import Iterator

from ntp_plugin.simulator.failures import DomainFailure
from ntp_plugin.simulator.scenario import Scenario
from ntp_plugin.simulator.setting import Course
from ntp_plugin.simulator.snapshot import Availability, Loss, losses, spares_needed
from ntp_plugin.simulator.timeline import follow

FRACTIONS = 8
"""Failed parts that are looked at, up to the largest."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SimulationReport:
    """Everything that a simulation says. What was not asked for is empty."""

    seed: int
    gpus: int
    domains: int
    nominal_step_s: float
    assumptions: tuple[str, ...]
    faults: int
    losses: tuple[Loss, ...]
    availability: tuple[Availability, ...]
    spares: tuple[tuple[str, int], ...]
    """(policy, spare domains with which it never has to pause)."""
    courses: tuple[Course, ...]


def work_of(scenario: Scenario) -> int:
    """How many parts `simulate` goes through, for a progress bar."""
    asked = scenario.asked
    parts = FRACTIONS if asked.failed_up_to else 0
    parts += len(asked.policies) if asked.days else 0
    return parts + (len(asked.policies) if asked.spares_needed else 0)


def simulate(scenario: Scenario) -> Iterator[SimulationReport]:
    """The report as it grows, once after each part of the work; the last one is whole."""
    asked, fleet = scenario.asked, scenario.fleet
    faults = scenario.faults() if asked.days else ()
    report = SimulationReport(
        seed=asked.seed,
        gpus=scenario.topology.size,
        domains=scenario.domains,
        nominal_step_s=fleet.nominal_step_s,
        assumptions=tuple(_assumptions(scenario, faults)),
        faults=len(faults),
        losses=(),
        availability=(),
        spares=(),
        courses=(),
    )
    yield report
    for part in range(FRACTIONS if asked.failed_up_to else 0):
        rows, whole = losses(
            fleet,
            [policy for policy in scenario.policies if not (policy.chooses or policy.hot or policy.cold)],
            mode=asked.mode,
            failed=[asked.failed_up_to * (part + 1) / FRACTIONS],
            draws=asked.draws,
            seed=asked.seed,
            blast=asked.failures.blast_gpus,
        )
        report = dataclasses.replace(report, losses=report.losses + rows, availability=report.availability + whole)
        yield report
    for policy in scenario.policies if asked.spares_needed else ():
        if not (policy.chooses or policy.hot or policy.cold):
            needed = spares_needed(fleet, policy, faults, horizon_s=scenario.horizon_s)
            report = dataclasses.replace(report, spares=(*report.spares, (policy.name, needed)))
        yield report
    setting = scenario.setting(faults) if asked.days else None
    for policy in scenario.policies if setting is not None else ():
        assert setting is not None, "there is a run"
        report = dataclasses.replace(report, courses=(*report.courses, follow(setting, policy, faults)))
        yield report


def _assumptions(scenario: Scenario, faults: tuple[DomainFailure, ...]) -> Iterator[str]:
    asked, failures = scenario.asked, scenario.asked.failures
    if asked.packed:
        yield "degraded domains are packed into as few replicas as possible at every change"
    if not scenario.topology.narrows:
        yield "a replica that has lost a slot is dropped, whatever the policy: with experts or cp none goes on narrower"
    if scenario.topology.expert_slots:
        yield "tokens are spread evenly over the experts"
    if asked.even:
        yield "work divides evenly over any width, as if attention heads could be cut"
    if failures.trace is not None:
        yield (
            f"each outage of {failures.trace} takes {failures.trace_gpus} GPUs of a domain "
            f"({len(faults)} outages within the run)"
        )
    idle = scenario.machine.domain_gpus - scenario.groups_per_domain * asked.parallel.tp
    if idle:
        domain = scenario.machine.domain_gpus
        yield f"{idle} of {domain} GPUs of each domain are not used, and their failures not counted"
    yield "a spare that is not in use does not fail"
