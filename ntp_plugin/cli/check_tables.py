"""Prints what `ntp check` has found as tables."""

from collections.abc import Iterable

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ntp_plugin.planning.job_check import JobCheck, JobMemory
from ntp_plugin.planning.memory_fit import MemoryUse
from ntp_plugin.planning.survival import CopyMemory, Survival
from ntp_plugin.telemetry.printable import printable


def print_check(check: JobCheck, console: Console) -> None:
    """Print whether the job is accepted, and then the reasons against it, or what a loss does to it."""
    _print_verdict(check, console)
    if check.unsupported:
        console.print(_rows("", "option", "why", "fix", rows=((o.flag, o.why, o.fix) for o in check.unsupported)))
    if check.survivals:
        console.print(_survivals(check.survivals))
        _print_ends(check.survivals, console)
    if check.memory is not None:
        console.print(_memory(check.memory))
    if check.changes:
        changed = ((option.flag, option.change) for option in check.changes)
        console.print(_rows("While ranks are lost", "option", "what changes", rows=changed))
    for note in check.notes:
        console.print(Text.assemble(("note ", "bold"), printable(note)))


def _print_verdict(check: JobCheck, console: Console) -> None:
    topology = check.topology
    verdict = Text("accepted", style="bold green")
    if not check.accepted:
        many = len(check.unsupported)
        verdict = Text(f"not accepted: {many} option{'s are' if many > 1 else ' is'} not supported", style="bold red")
    hosts = f"{topology.nodes:,} host{'s' * (topology.nodes != 1)} of {topology.gpus_per_node}"
    layout = f"{topology.degrees} = {topology.size:,} ranks on {hosts}"
    console.print(Text.assemble(verdict, f"  {check.framework}, {layout}"))
    console.print()


def _survivals(survivals: Iterable[Survival]) -> Table:
    rows = (
        (
            found.kind,
            _verdict(found),
            f"{found.survived} of {found.planned}" + f" ({found.losses:,} in all)" * (found.losses > found.planned),
            ", ".join(found.state_from) or "-",
            "-" if found.step_time is None else f"{found.step_time:.2f} x",
        )
        for found in survivals
    )
    return _rows("Losses", "lost", "the job", "goes on", "state comes from", ">a step takes", rows=rows)


def _verdict(found: Survival) -> str:
    if not found.exit_code:
        return "goes on"
    return "may end" if found.survived else f"ends, code {found.exit_code}"


def _print_ends(survivals: Iterable[Survival], console: Console) -> None:
    """Print why the job ends, for each kind of loss that may end it."""
    for found in survivals:
        if found.exit_code:
            fix = f" Fix: {found.fix}." if found.fix else ""
            line = f"{found.kind}: {found.example} lost: {found.why}.{fix}"
            console.print(Padding(Text(printable(line)), (0, 0, 0, 2)))
    console.print()


def _memory(memory: JobMemory) -> Table:
    rows = []
    for what, use in (
        ("GPU of the fullest rank, without activations", memory.nominal),
        ("the same, a slot of its group lost", memory.degraded),
    ):
        if use is not None:
            rows.append((what, _bytes(use.total), _parts(use)))
    if memory.copies is not None:
        rows.append(("copies of a rank, in host memory", *_of_copies(memory.copies)))
        rows.append(("copies on one host", _bytes(memory.copies.host), "/dev/shm must have room"))
    else:
        rows.append(("copies", "none", "the job makes none"))
    title = f"Memory, by {memory.parameters:,} parameters"
    return _rows(title, "what", ">bytes", "made of", rows=rows)


def _parts(use: MemoryUse) -> str:
    parts = {
        "weights": use.weights,
        "gradients": use.gradients,
        "optimizer": use.optimizer,
        "buffers of lanes": use.packing,
    }
    return ", ".join(f"{name} {_bytes(size)}" for name, size in parts.items() if size)


def _of_copies(copies: CopyMemory) -> tuple[str, str]:
    kept = f", kept for other hosts {_bytes(copies.far)}" if copies.far else ", none on another host"
    return _bytes(copies.near + copies.far), f"on its own host {_bytes(copies.near)}{kept}"


def _rows(title: str, *columns: str, rows: Iterable[Iterable[str]]) -> Table:
    table = Table(title=title or None, title_justify="left", title_style="bold")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    for row in rows:
        table.add_row(*(Text(printable(cell)) for cell in row))  # a path may have what rich takes for markup
    return table


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
