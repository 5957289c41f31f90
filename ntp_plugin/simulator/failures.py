"""Draw failures and their durations from rates, or replay them from a trace.

The rates are those of Llama 3's training (arXiv 2407.21783, section 3.3.4): 419 unexpected interruptions in 54 days on
16,384 GPUs, 78 % of them hardware. Hardware is back after days, software after hours. Every policy of a run sees the
same faults.
"""

import dataclasses
import statistics
from collections.abc import Sequence
from random import Random

DAY_S = 86_400.0
LLAMA3_PER_GPU_DAY = 419 / 54 / 16_384


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """How often GPUs fail, and how long that lasts."""

    per_gpu_day: float = LLAMA3_PER_GPU_DAY
    hardware_share: float = 0.78
    hardware_s: float = 5 * DAY_S
    software_s: float = 3 * 3600.0
    blast_gpus: int = 1
    """So many neighbours of one domain fail together."""

    @property
    def per_gpu_s(self) -> float:
        return self.per_gpu_day / DAY_S * self.blast_gpus


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class DomainFailure:
    """Some GPUs of a domain are gone from a moment on, until another."""

    start_s: float
    end_s: float
    domain: int
    gpus: range
    expected_s: float
    """How long whoever has to choose thinks that it lasts."""


def draw_faults(
    random: Random, rates: Rates, *, domains: int, domain_gpus: int, horizon_s: float
) -> tuple[DomainFailure, ...]:
    """Poisson: as many as there are, at any moment, on any GPU."""
    per_s = rates.per_gpu_day / DAY_S * domains * domain_gpus
    places = domain_gpus // rates.blast_gpus
    found, now = [], random.expovariate(per_s)
    while now < horizon_s:
        domain, place = random.randrange(domains), random.randrange(places)
        lasts = rates.hardware_s if random.random() < rates.hardware_share else rates.software_s
        gpus = range(place * rates.blast_gpus, (place + 1) * rates.blast_gpus)
        found.append(DomainFailure(start_s=now, end_s=now + lasts, domain=domain, gpus=gpus, expected_s=lasts))
        now += random.expovariate(per_s)
    return tuple(found)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Outage:
    """A line of a trace."""

    domain: str
    start_s: float
    end_s: float


def replay_outages(
    random: Random,
    outages: Sequence[Outage],
    *,
    watched: int,
    domains: int,
    domain_gpus: int,
    gpus_per_fault: int,
    horizon_s: float,
) -> tuple[DomainFailure, ...]:
    """The trace on our domains.

    The first of ours live what the watched ones lived, in a drawn order; where we have more than were watched, the
    others live it again, shifted by a drawn time and taken round the end. Whoever chooses expects the trace's mean.
    """
    names = sorted({outage.domain for outage in outages})
    lived: dict[str, list[Outage]] = {name: [] for name in names}
    for outage in outages:
        lived[outage.domain].append(outage)
    length = max(outage.end_s for outage in outages)
    expected = statistics.fmean(outage.end_s - outage.start_s for outage in outages)
    watched_names = [*names, *[""] * (watched - len(names))]
    random.shuffle(watched_names)
    found = []
    for domain in range(domains):
        shift = random.uniform(0, length) if domain >= watched else 0.0
        for outage in lived.get(watched_names[domain % watched], []):
            start = (outage.start_s + shift) % length
            first = random.randrange(domain_gpus - gpus_per_fault + 1)
            if start < horizon_s:
                found.append(
                    DomainFailure(
                        start_s=start,
                        end_s=start + outage.end_s - outage.start_s,
                        domain=domain,
                        gpus=range(first, first + gpus_per_fault),
                        expected_s=expected,
                    )
                )
    return tuple(sorted(found, key=lambda fault: (fault.start_s, fault.domain)))
