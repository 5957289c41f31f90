"""Prints a plan as tables."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from ntp_plugin.config.sections import ActionsPolicy
from ntp_plugin.planning import spans as sp
from ntp_plugin.planning.copy_placement import Resettled
from ntp_plugin.planning.decision import decide, in_lines
from ntp_plugin.planning.expert_changes import ExpertDeal, ExpertGroupChange
from ntp_plugin.planning.pace import HEALTHY_NS
from ntp_plugin.planning.recovery_plan import GroupChange, RecoveryPlan, fullest_memory
from ntp_plugin.planning.routes import FRAMEWORK, SegmentRoute
from ntp_plugin.planning.shard_layout import lay_out
from ntp_plugin.planning.topology import WHOLE, Pattern, Slot
from ntp_plugin.planning.transfers import Transfer

MAX_ROWS = 16
"""Most rows of a table; `--json` has them all."""


def print_plan(plan: RecoveryPlan, console: Console) -> None:
    """Print the summary of a plan, its tables, notes on it, and the action that a job would take."""
    _print_summary(plan, console)
    if plan.groups:
        console.print(_groups_table(plan))
        console.print(_orphans_table(plan))
    if plan.expert_groups:
        console.print(_expert_groups_table(plan))
        console.print(_expert_deals_table(plan.expert_groups))
    if any(route.route != FRAMEWORK for route in plan.routes):
        console.print(_lanes_table(plan.routes))
    console.print(_batch_table(plan))
    if plan.transfers and not plan.nominal.topology.expert_slots:  # with experts all state comes from copies
        console.print(_transfers_table(plan.transfers))
    _print_notes(plan, console)
    _print_choice(plan, console)


# ---------------------------------------------------------------- the summary


def _print_summary(plan: RecoveryPlan, console: Console) -> None:
    topology = plan.nominal.topology
    units = plan.nominal.units
    parameters = f"{units.elements / 1e9:.3g} B parameters"
    if topology.expert_slots:
        parameters += f", of which a token uses {units.elements_of_token / 1e9:.3g} B"
    whole = topology.dp - len(plan.dropped) - len(plan.degraded)
    layout = f"{topology.degrees} = {topology.size:,} GPUs"
    lines = [
        ("job", f"{layout}, {parameters}"),
        *_summary_of_experts(plan),
        ("lost", _name_slots(plan.lost) if plan.lost else "nothing"),
    ]
    back = sorted(set(plan.lost_before) - set(plan.lost))
    if back:
        lines.append(("back", _name_slots(back)))
    lines.append(("replicas", f"{whole} whole, {len(plan.degraded)} degraded, {len(plan.dropped)} dropped"))
    if plan.dropped:
        lines.append(
            ("dropped", f"{_first(f'r{replica}' for replica in plan.dropped)}; {len(plan.idle)} living slots idle")
        )
    lines.append(("digest", plan.digest))
    for word, line in lines:
        console.print(Text.assemble((f"{word:<9}", "bold"), line))
    console.print()


def _summary_of_experts(plan: RecoveryPlan) -> list[tuple[str, str]]:
    topology, each = plan.nominal.topology, plan.nominal.units.experts_of_slot
    if not topology.expert_slots:
        return []
    groups = topology.dp * topology.tp // topology.expert_slots
    use = fullest_memory(plan.nominal)
    what = (
        f"{_count(each, 'expert')} on a slot, {_count(groups, 'expert group')} of {topology.expert_slots} in each stage"
    )
    return [("experts", f"{what}; {_bytes(use.total)} on the fullest GPU without activations, nothing lost")]


def _name_slots(slots: Sequence[Slot]) -> str:
    return f"{_count(len(slots), 'slot')}: {_first(str(slot) for slot in slots)}"


# ---------------------------------------------------------------- tables


def _groups_table(plan: RecoveryPlan) -> Table:
    table = _table(
        "Degraded groups", "group", "lost", "width", ">widest slot / best possible", ">memory before", ">after"
    )
    tp = plan.nominal.topology.tp

    def row(group: GroupChange) -> list[str]:
        width = f"{tp - len(group.before)} -> {tp - len(group.after)}"
        balance = []
        for family in plan.nominal.units.stages[group.stage].families:
            layout = lay_out(family, tp, group.after)
            balance.append(f"{family.name} {layout.widest}/{layout.ideal}")
        lost = _first((f"t{slot}" for slot in group.after), 4) or "none"
        memory = [_bytes(group.memory_before.total), _bytes(group.memory_after.total)]
        return [f"r{group.replica}.s{group.stage}", lost, width, ", ".join(balance), *memory]

    return _filled(table, [row(group) for group in plan.groups])


def _orphans_table(plan: RecoveryPlan) -> Table:
    table = _table("Orphans, and where each goes", "lost slot", "family", ">units", "dealt to")
    tp = plan.nominal.topology.tp
    rows = []
    for group in plan.groups:
        for slot in group.after:
            for family in plan.nominal.units.stages[group.stage].families:
                orphaned = lay_out(family, tp, WHOLE).holdings[slot]
                where = _takers(lay_out(family, tp, group.after).segments, orphaned)
                cut = "cut anew: " if family.contiguous else ""
                rows.append(
                    [f"r{group.replica}.s{group.stage}.t{slot}", family.name, f"{sp.size(orphaned):,}", cut + where]
                )
    return _filled(table, rows)


def _expert_groups_table(plan: RecoveryPlan) -> Table:
    table = _table(
        "Expert groups",
        *("replicas", "stages", "width", ">experts on the fullest slot / best possible", ">memory before", ">after"),
    )
    places = plan.nominal.topology.expert_slots
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for group in plan.expert_groups:
        replicas = _name_replicas(sorted({slot.replica for slot in group.members}))
        cells = (
            f"{places - len(group.before)} -> {places - len(group.after)}",
            f"{group.fullest[0]} -> {group.fullest[1]}/{group.ideal}",
            _bytes(group.memory_before.total),
            _bytes(group.memory_after.total),
        )
        alike[replicas, *cells].append(group.stage)
    return _filled(table, [[replicas, _runs("s", stages), *cells] for (replicas, *cells), stages in alike.items()])


def _expert_deals_table(groups: Sequence[ExpertGroupChange]) -> Table:
    table = _table(
        "Experts of each layer that change slots", "of slot", "stages", ">experts", "dealt to", ">bytes in a stage"
    )
    by_holder: defaultdict[Slot, list[ExpertDeal]] = defaultdict(list)
    for deal in (deal for group in groups for deal in group.deals):
        by_holder[deal.holder].append(deal)
    alike: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for holder, deals in sorted(by_holder.items()):
        targets = _first((f"r{deal.target.replica}.t{deal.target.tp} ({deal.experts})" for deal in deals), 4)
        size = _bytes(sum(deal.size for deal in deals))
        key = (f"r{holder.replica}.t{holder.tp}", f"{sum(deal.experts for deal in deals):,}", targets, size)
        alike[key].append(holder.stage)
    table.caption = f"all: {_bytes(sum(deal.size for group in groups for deal in group.deals))}"
    return _filled(table, [[holder, _runs("s", stages), *cells] for (holder, *cells), stages in alike.items()])


def _takers(segments: Iterable[tuple[int, int, int]], orphaned: sp.Spans) -> str:
    taken = Counter[int]()
    for start, stop, slot in segments:
        taken[slot] += sp.size(sp.intersection(((start, stop),), orphaned))
    return _first((f"t{slot} ({count:,})" for slot, count in sorted(taken.items()) if count), 8)


def _lanes_table(routes: Sequence[SegmentRoute]) -> Table:
    table = _table(
        "Lanes: bytes that the busiest rank sends for one reduction",
        *("stage", "route", ">lanes", ">direct: NIC", ">cost", ">cores", ">via core: NIC", ">domain", ">cost"),
    )
    rows = []
    for route in routes:
        if route.core_cost is None:
            continue
        direct, core = route.direct_cost, route.core_cost
        rows.append(
            [
                *(
                    f"s{route.segment}",
                    route.route,
                    str(direct.communicators),
                    _bytes(direct.nic_bytes),
                    _ms(direct.cost_ns),
                ),
                *(str(core.communicators), _bytes(core.nic_bytes), _bytes(core.domain_bytes), _ms(core.cost_ns)),
            ]
        )
    return _filled(table, rows)


def _batch_table(plan: RecoveryPlan) -> Table:
    batch, surviving = plan.batch, plan.nominal.surviving(frozenset(plan.lost))
    table = _table(
        f"Batch ({batch.mode})", "replicas", ">micro-batches", ">of samples", ">kept", ">dealt to it", ">time each"
    )
    alike: defaultdict[tuple[int, int, int, int, int], list[int]] = defaultdict(list)
    for share in batch.shares:
        key = (share.count, share.size, sp.size(share.kept), sp.size(share.dealt), share.ns)
        alike[key] += surviving.sharing(share.replica)  # with context parallelism they compute each sample together
    rows = [
        [_name_replicas(replicas), str(count), str(size), str(kept), str(dealt), f"{ns / HEALTHY_NS:.3f}"]
        for (count, size, kept, dealt, ns), replicas in alike.items()
    ]
    slower = batch.step_ns / batch.nominal_ns
    table.caption = (
        f"step {batch.step_ns / HEALTHY_NS:.2f} healthy micro-batches long: {slower:.3f} x the nominal layout, "
        f"{batch.step_ns / batch.ideal_ns:.3f} x the ideal; {batch.computed:,} of {batch.total:,} micro-batches"
    )
    return _filled(table, rows)


def _transfers_table(transfers: Sequence[Transfer]) -> Table:
    table = _table("Transfers", "to", "from", "by", "what", "family", ">units", ">bytes")
    rows = []
    for move in transfers:
        source = f"{move.source}, copy of {move.of}" if move.of else str(move.source)
        units = f"{sp.size(move.units):,}" if move.units else ""
        rows.append([str(move.target), source, move.origin, move.what, move.family, units, _bytes(move.size)])
    by_origin: defaultdict[str, int] = defaultdict(int)
    for move in transfers:
        by_origin[move.origin] += move.size
    table.caption = "; ".join(f"{origin}: {_bytes(size)}" for origin, size in by_origin.items())
    return _filled(table, rows)


# ---------------------------------------------------------------- notes


def _print_notes(plan: RecoveryPlan, console: Console) -> None:
    batch = plan.batch
    notes = [*_balance_notes(plan), *_notes_of_experts(plan)]
    if plan.block_deals:
        moved = sum(blocks.size for blocks in plan.block_deals)
        replicas = {blocks.slot.replica for blocks in plan.block_deals}
        notes.append(f"optimizer blocks change hands for {_count(len(replicas), 'replica')}: {_bytes(moved)}")
    if plan.resettled_copies:
        nodes = {copy.node for copy in plan.resettled_copies if isinstance(copy, Resettled)}
        what = (
            f"the far copies of {_count(len(nodes), 'host')}" if nodes else f"{len(plan.resettled_copies):,} parities"
        )
        notes.append(f"{what} move to other hosts, because their holders are lost")
    if batch.left_out:
        left = f"{sp.size(batch.left_out):,} of {batch.total:,} micro-batches"
        if batch.mode == "shrink":
            factor = batch.computed / batch.total
            notes.append(
                f"the global batch shrinks by {left}; learning rate x {factor**0.5:.4f} (square root, usual for Adam) "
                f"or x {factor:.4f} (linear, usual for SGD)"
            )
        else:
            notes.append(
                f"{left} are left out of this step"
                + (f", {batch.owed} owed" if batch.mode == "carry" else " and queued again")
            )
    for note in notes:
        console.print(f"[bold]note[/bold] {note}")


def _notes_of_experts(plan: RecoveryPlan) -> list[str]:
    if not plan.nominal.topology.expert_slots or set(plan.lost) == set(plan.lost_before):
        return []
    padding = sum(plan.runs(share.replica) - share.count for share in plan.batch.shares)
    notes = ["state comes from copies in memory: all ranks go back to the step of the copies"]
    if padding:
        notes.append(
            f"replicas of an expert group run alike many micro-batches: {padding:,} in all are padding of weight zero"
        )
    return notes


def _print_choice(plan: RecoveryPlan, console: Console) -> None:
    """Print the action that a running job would take, where the user has limited the actions."""
    if not plan.lost or plan.nominal.policy.actions == ActionsPolicy():
        return
    choice = decide(plan)
    console.print(Text.assemble(("a job would", "bold"), f" {choice.action}, of these:"))
    for line in in_lines(choice):
        console.print(f"  {line}")


def _balance_notes(plan: RecoveryPlan) -> list[str]:
    tp, notes = plan.nominal.topology.tp, []
    seen: set[tuple[str, Pattern]] = set()
    for group in plan.groups:
        for family in plan.nominal.units.stages[group.stage].families:
            layout = lay_out(family, tp, group.after)
            fair = family.units / (tp - len(group.after))
            if group.after and layout.widest > 1.1 * fair and (family.name, group.after) not in seen:
                seen.add((family.name, group.after))
                where = f"{family.name} in r{group.replica}.s{group.stage}"
                notes.append(
                    f"{where}: {family.units} units over {tp - len(group.after)} slots leave the widest with "
                    f"{layout.widest}, {layout.widest / fair:.2f} x its even part; the others wait for it"
                )
    return notes[:4]


# ---------------------------------------------------------------- small things


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", caption_justify="left")
    for column in columns:
        table.add_column(column.removeprefix(">"), justify="right" if column.startswith(">") else "left")
    return table


def _filled(table: Table, rows: Sequence[Sequence[str]]) -> Table:
    for row in rows[:MAX_ROWS]:
        table.add_row(*row)
    if len(rows) > MAX_ROWS:
        table.add_row(f"... {len(rows) - MAX_ROWS:,} more, see --json")
    return table


def _first(words: Iterable[str], most: int = 6) -> str:
    listed = list(words)
    return " ".join(listed[:most]) + (f" ... {len(listed) - most:,} more" if len(listed) > most else "")


def _name_replicas(replicas: Sequence[int]) -> str:
    return f"{_runs('r', replicas)} ({len(replicas)})"


def _runs(letter: str, numbers: Sequence[int]) -> str:
    """Name ascending numbers, runs of them by their first and last."""
    runs = sp.joined((number, number + 1) for number in numbers)
    return _first(
        f"{letter}{start}" if stop - start == 1 else f"{letter}{start}-{letter}{stop - 1}" for start, stop in runs
    )


def _count(number: int, thing: str) -> str:
    return f"{number:,} {thing}{'s' * (number != 1)}"


def _bytes(count: int) -> str:
    for unit, size in (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.1f} ms"
