"""Compute the throughput with a fraction of the GPUs lost, and the spare domains needed to keep the full batch.

Neither has a clock: a snapshot draws lost GPUs at random, and spares are counted at every failure of a run.
"""

import collections
import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from random import Random

from ntp_plugin.planning.actions import DROP_REPLICA
from ntp_plugin.simulator.failures import DomainFailure
from ntp_plugin.simulator.fleet import Fleet
from ntp_plugin.simulator.policies import DomainPolicy


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Loss:
    """Lost throughput of a policy, over all draws with one failed fraction."""

    policy: str
    failed: float
    mean: float
    worst: float


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Availability:
    """Part of the GPUs whose TP group is whole."""

    failed: float
    mean: float
    worst: float


def draw_lost(random: Random, fleet: Fleet, failed: float, blast_gpus: int) -> Mapping[int, int]:
    """Group -> slots lost, with that part of all GPUs gone, in bursts of neighbours."""
    tp = fleet.model.tp
    bursts = random.sample(range(fleet.groups * tp // blast_gpus), round(failed * fleet.groups * tp / blast_gpus))
    return collections.Counter(
        gpu // tp for burst in bursts for gpu in range(burst * blast_gpus, (burst + 1) * blast_gpus)
    )


def losses(
    fleet: Fleet,
    policies: Sequence[DomainPolicy],
    *,
    mode: str,
    failed: Sequence[float],
    draws: int,
    seed: int,
    blast: int,
) -> tuple[tuple[Loss, ...], tuple[Availability, ...]]:
    """Throughput that each policy loses, and what is whole; all policies see the same draws."""
    rows: list[Loss] = []
    whole: list[Availability] = []
    for fraction in failed:
        random = Random(f"{seed}/{fraction}")
        drawn = [draw_lost(random, fleet, fraction, blast) for _ in range(draws)]
        parts = [1 - len(lost) / fleet.groups for lost in drawn]
        whole.append(Availability(failed=fraction, mean=statistics.fmean(parts), worst=min(parts)))
        for policy in policies:
            lost_parts = [1 - _throughput(fleet, policy, mode, lost) for lost in drawn]
            rows.append(
                Loss(policy=policy.name, failed=fraction, mean=statistics.fmean(lost_parts), worst=max(lost_parts))
            )
    return tuple(rows), tuple(whole)


def _throughput(fleet: Fleet, policy: DomainPolicy, mode: str, lost: Mapping[int, int]) -> float:
    dropped = tuple(lost) if policy.action == DROP_REPLICA else ()
    return fleet.running(
        {} if dropped else lost,
        dropped,
        mode=policy.mode or mode,
        boosted=policy.boosted,
        whole_groups=policy.whole_groups,
    ).throughput


def spares_needed(fleet: Fleet, policy: DomainPolicy, faults: Sequence[DomainFailure], *, horizon_s: float) -> int:
    """The fewest spare domains with which the batch is whole in the nominal time, at every moment of a run.

    A spare domain takes the place of a degraded one, or `pp` of them are one more replica, whichever takes fewer.
    Needs a packed fleet with one group to a domain.
    """
    most, seen = 0, set[tuple[int, ...]]()
    for lost in _degraded_over_time(fleet, faults, horizon_s):
        if lost not in seen:
            seen.add(lost)
            most = max(most, _spares_for(fleet, policy, lost))
    return most


def _degraded_over_time(fleet: Fleet, faults: Sequence[DomainFailure], horizon_s: float) -> list[tuple[int, ...]]:
    """The losses of all degraded groups after every start of a fault, worst first."""
    changes = sorted(
        [(fault.start_s, 1, number) for number, fault in enumerate(faults)]
        + [(fault.end_s, 0, number) for number, fault in enumerate(faults)]
    )
    open_faults: dict[int, set[int]] = {}
    found = []
    for at, starts, number in changes:
        if at >= horizon_s:
            break
        domain = faults[number].domain
        if not starts:
            open_faults[domain].discard(number)
            continue
        open_faults.setdefault(domain, set()).add(number)
        counts = [len({gpu for n in numbers for gpu in faults[n].gpus}) for numbers in open_faults.values() if numbers]
        found.append(tuple(sorted((min(count, fleet.model.tp) for count in counts), reverse=True)))
    return found


def _spares_for(fleet: Fleet, policy: DomainPolicy, lost: tuple[int, ...]) -> int:
    if policy.action == DROP_REPLICA:
        return len(lost)
    best = len(lost)
    for more in range(len(lost) // fleet.pp + 2):
        extra = more * fleet.pp
        if extra >= best:
            break
        low, high = 0, best - extra
        while low < high:  # the fewest degraded domains to replace beside so many more replicas
            middle = (low + high) // 2
            if _is_enough(fleet, policy, lost[middle:], more):
                high = middle
            else:
                low = middle + 1
        if _is_enough(fleet, policy, lost[low:], more):
            best = min(best, extra + low)
    return best


def _is_enough(fleet: Fleet, policy: DomainPolicy, lost: tuple[int, ...], more: int) -> bool:
    degraded, lost_replicas = fleet.replicas(dict(enumerate(lost)))
    whole = fleet.dp + more - lost_replicas - sum(degraded.values())
    done = whole * fleet.micro_batches
    done += sum(count * fleet.capacity(losses, boosted=policy.boosted) for losses, count in degraded.items())
    return done >= fleet.total
