"""Prints a simulation as tables."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp_plugin.simulator.report import SimulationReport
from ntp_plugin.simulator.scenario import Scenario


def print_report(scenario: Scenario, report: SimulationReport, console: Console) -> None:
    """Print the scenario, each part of the report that was asked for, and the assumptions."""
    topology = scenario.topology
    experts = f", expert groups of {topology.expert_slots}" if topology.expert_slots else ""
    lines = [
        ("job", f"{topology.degrees} = {report.gpus:,} GPUs in {report.domains:,} domains{experts}"),
        ("machine", f"{scenario.asked.machine}, {scenario.machine.domain_gpus} GPUs to a domain"),
        ("step", f"{report.nominal_step_s:.2f} s, nothing lost; batch mode {scenario.asked.mode}"),
        ("seed", str(report.seed)),
    ]
    for word, line in lines:
        console.print(Text.assemble((f"{word:<9}", "bold"), line))
    console.print()
    if report.losses:
        console.print(_losses_table(report))
    if report.spares:
        console.print(_spares_table(report))
    if report.courses:
        console.print(_courses_table(scenario, report))
    for assumption in report.assumptions:
        console.print(f"[bold]assumed[/bold] {assumption}")


def _losses_table(report: SimulationReport) -> Table:
    table = Table(title="Throughput lost, mean (worst) of all draws", title_justify="left", title_style="bold")
    table.add_column("failed GPUs", justify="right")
    table.add_column("GPUs in whole groups", justify="right")
    names = list(dict.fromkeys(loss.policy for loss in report.losses))
    for name in names:
        table.add_column(name, justify="right")
    for whole in report.availability:
        cells = {loss.policy: loss for loss in report.losses if loss.failed == whole.failed}
        table.add_row(
            f"{whole.failed:.4%}",
            f"{whole.mean:.2%}",
            *(f"{cells[name].mean:.2%} ({cells[name].worst:.2%})" for name in names),
        )
    return table


def _spares_table(report: SimulationReport) -> Table:
    table = Table(title="Spare domains that keep the batch whole", title_justify="left", title_style="bold")
    table.add_column("policy")
    table.add_column("spares", justify="right")
    for name, needed in report.spares:
        table.add_row(name, str(needed))
    return table


def _courses_table(scenario: Scenario, report: SimulationReport) -> Table:
    days, faults = scenario.asked.days, report.faults
    table = Table(title=f"{days:g} days, {faults:,} faults", title_justify="left", title_style="bold")
    table.add_column("policy")
    for name in ("goodput", "lowest throughput", "paused", "spares used", "events"):
        table.add_column(name, justify="right")
    table.add_column("actions taken")
    for course in report.courses:
        done = ", ".join(f"{action} {count:,}" for action, count in sorted(course.actions.items()))
        table.add_row(
            course.policy,
            f"{course.goodput:.3%}",
            f"{course.least:.2%}",
            f"{course.paused_s / 3600:.1f} h",
            str(course.spares_used),
            f"{course.events:,}",
            done,
        )
    return table
