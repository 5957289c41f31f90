"""The checked options of `ntp simulate`, and the objects built from them."""

import dataclasses
import functools
from pathlib import Path
from random import Random

from ntp_plugin.config.schema import key, subsection
from ntp_plugin.config.sections import Batch, Model, Parallel, State, require_expert_layout
from ntp_plugin.errors import ConfigError
from ntp_plugin.planning.actions import ActionPolicy
from ntp_plugin.planning.expert_groups import units_of
from ntp_plugin.planning.topology import Topology
from ntp_plugin.planning.units import ModelUnits
from ntp_plugin.simulator.failures import DAY_S, LLAMA3_PER_GPU_DAY, DomainFailure, Rates, draw_faults, replay_outages
from ntp_plugin.simulator.fleet import MODES, SHRINK, Fleet
from ntp_plugin.simulator.machine import GpuModel, read_machine
from ntp_plugin.simulator.policies import POLICIES, DomainPolicy, policy_of
from ntp_plugin.simulator.setting import Costs, SimulationSetting
from ntp_plugin.simulator.step_time import StepModel
from ntp_plugin.simulator.traces import read_trace


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Failures:
    """What fails, how often, and for how long."""

    factor: float = key(1.0, help="times the rate of Llama 3's training (arXiv 2407.21783)", at_least=0.0, at_most=1e4)
    hardware_share: float = key(0.78, help="part of the failures that are hardware", at_least=0.0, at_most=1.0)
    repair_days: float = key(5.0, help="until failed hardware is back", at_least=0.001, at_most=10_000.0)
    software_hours: float = key(3.0, help="until a GPU that failed by software is back", at_least=0.001)
    blast_gpus: int = key(1, help="neighbours of one domain that fail together", at_least=1, at_most=1024)
    trace: str | None = key(
        None, help="replay outages from this .csv or .json (domain, start, end; in days)", metavar="FILE"
    )
    trace_gpus: int | None = key(
        None, help="GPUs that an outage of the trace takes: an assumption, which the report names", at_least=1
    )
    trace_domains: int | None = key(
        None, help="domains that the trace watched (default: those that it names)", at_least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Standstills:
    """How long a change takes, while nobody trains."""

    recover_s: float = key(5.0, help="seconds from a loss or a return to the next step, moves aside", at_least=0.0)
    swap_s: float = key(60.0, help="seconds until a ready spare domain has the state", at_least=0.0)
    cold_s: float = key(900.0, help="seconds until a cold spare domain is ready", at_least=0.0)
    restart_s: float = key(900.0, help="seconds from a loss to the first step of a restarted job", at_least=0.0)
    checkpoint_s: float = key(1800.0, help="seconds between two checkpoints", at_least=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choosing:
    """What the chooser may do."""

    forbid: tuple[str, ...] = key((), help="actions that it may not take, by name", metavar="ACTION")
    max_wait_s: float | None = key(None, help="longest wait for a spare", at_least=0.0)
    hysteresis: float = key(0.0, help="by so much another action must be better than the one in force", at_least=0.0)
    noise_scale: float | None = key(
        None, help="gradient noise scale in samples; then a batch that changes counts by its efficiency", at_least=0.0
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """Everything that `ntp simulate` is told."""

    parallel: Parallel = subsection(Parallel)
    model: Model = subsection(Model)
    batch: Batch = subsection(Batch)
    state: State = subsection(State)
    failures: Failures = subsection(Failures)
    standstills: Standstills = subsection(Standstills)
    choosing: Choosing = subsection(Choosing)
    machine: str = key("h100-nvl8", help="b200-nvl32, b200-nvl72, h100-nvl8, a100-nvl8, or a .toml file like theirs")
    policies: tuple[str, ...] = key(
        ("dp-drop", "ntp", "ntp-strict", "ntp-pw", "chooser"),
        help=f"what is compared: {', '.join(POLICIES)}",
        metavar="POLICY",
    )
    mode: str = key(SHRINK, help="what becomes of the batch while somebody is degraded", choices=MODES)
    packed: bool = key(False, help="degraded domains are put into as few replicas as possible, as a restart could")
    even: bool = key(
        False, help="work divides evenly over any width, as if heads could be cut (the NTP paper's premise)"
    )
    min_tp_width: int = key(1, help="a group narrower than this drops its replica", at_least=1, at_most=1024)
    hot: int = key(0, help="spare domains that are ready", at_least=0)
    cold: int = key(0, help="spare domains that must be started first", at_least=0)
    days: float = key(0.0, help="length of the run; 0: none", at_least=0.0, at_most=3660.0)
    failed_up_to: float = key(
        0.0, help="largest failed part of the GPUs to look at; 0: none", at_least=0.0, at_most=0.5
    )
    draws: int = key(20, help="times that the failed are drawn, for each part", at_least=1, at_most=100_000)
    spares_needed: bool = key(False, help="count the spare domains that keep the batch whole through the run")
    seed: int = key(0, help="the same seed, the same run", at_least=0)

    def __post_init__(self) -> None:
        for name in self.policies:
            policy_of(name)
        require_expert_layout(self.parallel, self.model)
        if self.parallel.cp > 1 or self.model.experts is not None:
            known = {"even": self.even, "spares_needed": self.spares_needed}
            given = [name for name, value in known.items() if value]
            if given:
                raise ConfigError(
                    f"{given[0]} is for replicas that go on narrower, and with experts or cp none does",
                    fix=f"leave {given[0]} out",
                )
        if self.failures.blast_gpus > self.parallel.tp:
            raise ConfigError(
                f"blast_gpus = {self.failures.blast_gpus} is above tp = {self.parallel.tp}",
                fix=f"choose 1 to {self.parallel.tp}",
            )
        if self.model.layers < self.parallel.pp:
            raise ConfigError(f"layers = {self.model.layers} do not fill pp = {self.parallel.pp} stages")
        if self.spares_needed and not (self.packed and self.days):
            raise ConfigError("spares_needed counts over a run of a packed fleet", fix="set packed and days")
        if self.failures.trace is not None and self.failures.trace_gpus is None:
            raise ConfigError(
                "a trace tells of whole domains or hosts, not of GPUs",
                fix="say with trace_gpus how many GPUs each outage takes",
            )
        if not (self.days or self.failed_up_to):
            raise ConfigError("nothing to simulate", fix="set days, or failed_up_to, or both")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
    """A simulation with all that it needs."""

    asked: Simulation

    @functools.cached_property
    def machine(self) -> GpuModel:
        return read_machine(self.asked.machine)

    @functools.cached_property
    def topology(self) -> Topology:
        return Topology.of(self.asked.parallel, experts=self.asked.model.experts is not None)

    @functools.cached_property
    def units(self) -> ModelUnits:
        return units_of(self.asked.model, self.asked.parallel, self.topology)

    @functools.cached_property
    def policies(self) -> tuple[DomainPolicy, ...]:
        return tuple(policy_of(name) for name in self.asked.policies)

    @functools.cached_property
    def groups_per_domain(self) -> int:
        """A domain that TP groups do not fill leaves the rest idle; groups never cross domains."""
        if self.asked.parallel.tp > self.machine.domain_gpus:
            raise ConfigError(
                f"tp = {self.asked.parallel.tp} is larger than the machine's domain of {self.machine.domain_gpus} GPUs",
                fix="choose a smaller tp, or a machine with larger domains",
            )
        return self.machine.domain_gpus // self.asked.parallel.tp

    @functools.cached_property
    def domains(self) -> int:
        return -(-self.topology.pp * self.topology.dp // self.groups_per_domain)

    @functools.cached_property
    def fleet(self) -> Fleet:
        asked, parallel = self.asked, self.asked.parallel
        model = StepModel(
            model=asked.model,
            units=self.units,
            state=asked.state,
            batch=asked.batch,
            machine=self.machine,
            topology=self.topology,
            depths=parallel.depths(asked.model.layers),
            even=asked.even,
        )
        return Fleet(
            model,
            micro_batches=asked.batch.micro_batches_per_replica(parallel.dp),
            packed=asked.packed,
            min_tp_width=asked.min_tp_width,
        )

    @functools.cached_property
    def rates(self) -> Rates:
        failures = self.asked.failures
        return Rates(
            per_gpu_day=LLAMA3_PER_GPU_DAY * failures.factor,
            hardware_share=failures.hardware_share,
            hardware_s=failures.repair_days * DAY_S,
            software_s=failures.software_hours * 3600,
            blast_gpus=failures.blast_gpus,
        )

    @functools.cached_property
    def horizon_s(self) -> float:
        return self.asked.days * DAY_S

    def faults(self, seed: int | None = None) -> tuple[DomainFailure, ...]:
        """What every policy of a run goes through."""
        random = Random(self.asked.seed if seed is None else seed)
        failures = self.asked.failures
        gpus = self.groups_per_domain * self.topology.tp
        if failures.trace is None:
            if not self.rates.per_gpu_day:
                return ()
            return draw_faults(random, self.rates, domains=self.domains, domain_gpus=gpus, horizon_s=self.horizon_s)
        outages = read_trace(Path(failures.trace))
        assert failures.trace_gpus is not None, "checked with the keys"
        return replay_outages(
            random,
            outages,
            watched=max(failures.trace_domains or 0, len({outage.domain for outage in outages})),
            domains=self.domains,
            domain_gpus=gpus,
            gpus_per_fault=min(failures.trace_gpus, gpus),
            horizon_s=self.horizon_s,
        )

    def setting(self, faults: tuple[DomainFailure, ...]) -> SimulationSetting:
        """What all policies of a run have in common; the rate that a chooser knows is that of its faults."""
        asked, standstills = self.asked, self.asked.standstills
        replayed = asked.failures.trace is not None
        measured = sum(len(fault.gpus) for fault in faults) / (self.topology.size * self.horizon_s)
        samples = None if asked.choosing.noise_scale is None else self.fleet.total * asked.batch.micro_batch
        return SimulationSetting(
            fleet=self.fleet,
            topology=self.topology,
            costs=Costs(**dataclasses.asdict(standstills)),
            mode=asked.mode,
            hot=asked.hot,
            cold=asked.cold,
            horizon_s=self.horizon_s,
            failures_per_gpu_s=measured if replayed else self.rates.per_gpu_s,
            groups_per_domain=self.groups_per_domain,
            allowed=ActionPolicy(
                forbid=asked.choosing.forbid,
                max_wait_s=asked.choosing.max_wait_s,
                hysteresis=asked.choosing.hysteresis,
                min_tp_width=asked.min_tp_width,
                batch=samples,
                noise_scale=asked.choosing.noise_scale,
            ),
        )
