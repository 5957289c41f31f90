"""Plans the recovery of a described job: what `ntp plan` prints, as a function."""

from pathlib import Path

from ntp_plugin.config import schema
from ntp_plugin.config.files import read_file
from ntp_plugin.config.sections import Job
from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.decision import as_allowed
from ntp_plugin.planning.expert_changes import require_expert_state
from ntp_plugin.planning.recovery_plan import Nominal, RecoveryPlan, plan_recovery
from ntp_plugin.planning.survival import placed_copies
from ntp_plugin.planning.topology import Slot, Topology, parse_slots
from ntp_plugin.planning.transfers import Change


def plan(job: Job) -> RecoveryPlan:
    """Plan what every survivor would do if the named slots were lost. Runs nothing.

    Args:
        job: The layout, the shape of the model, the policy, and the losses: `lose` now, `already` before, and `back`
            those of `already` that return now.

    Returns:
        The plan that every rank of such a job would compute. Two plans are equal if their `digest` is.

    Raises:
        ConfigError: A value is out of its bounds, values do not fit together, or a slot is not in the layout.
        BelowMinimum: No replica is left that may train.
        StateLost: Neither a living slot nor a copy holds some state of a lost slot.

    Examples:
        >>> from ntp_plugin.planning import Job, Model, Parallel, plan
        >>> found = plan(
        ...     Job(
        ...         parallel=Parallel(tp=4, pp=2, dp=4),
        ...         model=Model(layers=4, hidden=64, heads=8, ffn=256, vocab=1000),
        ...         lose=("r1.s0.t2",),
        ...     )
        ... )
        >>> found.degraded, found.dropped
        ((1,), ())
        >>> found.batch.computed, found.batch.total
        (64, 64)
    """
    job = schema.checked(job)
    topology = Topology.of(job.parallel, experts=job.model.experts is not None)
    already, lose, back = (parse_slots(words, topology) for words in (job.already, job.lose, job.back))
    _refuse_overlap("lose", lose, "back", back, sorted(lose & back))
    _refuse_overlap("lose", lose, "already", already, sorted(lose & already))
    never_lost = sorted(back - already)
    if never_lost:
        raise ConfigError(f"back names {never_lost[0]}, which was not lost", fix="name it in already as well")
    nominal, after = as_allowed(Nominal.of(job)), (already | lose) - back
    if topology.expert_slots:
        _require_expert_state(nominal, before=already, after=after)
    return plan_recovery(nominal, lost_before=already, lost=after)


def _require_expert_state(nominal: Nominal, *, before: frozenset[Slot], after: frozenset[Slot]) -> None:
    change = nominal.surviving(before), nominal.surviving(after)
    change[1].require_a_replica()
    policy = nominal.policy.copies
    copies = None if policy.mode == "off" else placed_copies(nominal.topology, policy, change[0].lost_nodes)
    require_expert_state(
        Change(before=change[0], after=change[1], units=nominal.units, state=nominal.state, copies=copies)
    )


def read_job(path: str | Path) -> Job:
    """Read the description of a job for `plan`.

    Args:
        path: A .toml or .json file with the keys of `ntp plan --config`, as in `recipes/plan/`.

    Raises:
        ConfigError: The file cannot be read, or a key or a value in it is wrong.
    """
    return schema.read(Job, read_file(Path(path)), where=f"{path}: ")


def _refuse_overlap(one: str, ones: frozenset[Slot], other: str, others: frozenset[Slot], both: list[Slot]) -> None:
    if both:
        raise ConfigError(
            f"{both[0]} is in {one} ({len(ones)} slots) and in {other} ({len(others)} slots)",
            fix="name each slot once",
        )
