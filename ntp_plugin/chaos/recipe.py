"""Read a recipe of recipes/chaos/: a job, and the faults to inject into it.

[job]      arguments of `ntp run`, its environment, and the expected outcome; it may be `like` the job of another file
[[fault]]  one fault, at a step, a fault point or a time
[random]   many faults, drawn from a seed
[trace]    one fault for each outage of a trace file, at its time
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ntp_plugin.chaos.faults import INJECTED_BY_WORKER, KINDS, OF_HOSTS, SLOW, SUPERVISOR
from ntp_plugin.config.files import read_file
from ntp_plugin.config.schema import key, read
from ntp_plugin.errors import ConfigError
from ntp_plugin.recovery.fault_points import FAULT_POINTS, RECOVERY_FAULT_POINTS
from ntp_plugin.simulator.failures import DAY_S
from ntp_plugin.simulator.traces import read_trace

ANY = "any"
RUN = "{run}"
"""Placeholder in a job's arguments: the folder of the run (there are two runs)."""
_SLOT = re.compile(r"r\d+\.s\d+\.t\d+")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobSpec:
    """The job that runs with faults, and without them as the reference run."""

    like: str = key("", help="a file whose [job] gives the defaults for this one")
    run: tuple[str, ...] = key(
        (), help="arguments of `ntp run`: torchrun's flags, the script, its arguments; {run}: the folder of the run"
    )
    environment: tuple[str, ...] = key((), help="NAME=VALUE for both runs")
    spares: int = key(0, help="warm processes that replace lost ones (--ntp-spares)", at_least=0, at_most=10_000)
    hosts: int = key(
        1, help="machines that the job runs on: network namespaces of this machine", at_least=1, at_most=32
    )
    spare_hosts: int = key(0, help="more machines, which replace lost ones", at_least=0, at_most=32)
    respawns: int = key(
        0, help="replacements in all, not fewer than spares (--ntp-respawn)", at_least=0, at_most=1_000_000
    )
    fork: bool = key(False, help="fork workers from a process with the imports done (--ntp-fork)")
    thresholds: str = key("", help="when a rank is taken for lost (--ntp-thresholds)")
    reference: bool = key(True, help="run the same job once more, undisturbed, and compare")
    bound: float = key(
        1e-12, help="largest relative difference of losses and weights from the reference run's", at_least=0.0
    )
    weights_bound: float | None = key(None, help="the bound of the final weights, if it differs", at_least=0.0)
    code: int = key(0, help="the expected exit code of the job; -9: by SIGKILL", at_least=-64, at_most=255)
    returns: int = key(0, help="how many lost slots must rejoin", at_least=0, at_most=1_000_000)
    troubles: int = key(0, help="how many copies must be found corrupt or missing", at_least=0, at_most=1_000_000)
    patience_s: float = key(900.0, help="a run that takes longer counts as hung", at_least=1.0)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultSpec:
    """One fault. Without a step or a time: at the first fault point of this name that the slot reaches."""

    what: str = key(help="what breaks", choices=tuple(KINDS))
    slot: str = key(ANY, help="r0.s0.t1, or any: a live one whose loss the job can survive")
    during: str = key("", help="a fault point", choices=("", *FAULT_POINTS))
    at_step: int | None = key(None, help="in this step", at_least=1)
    at_s: float | None = key(None, help="seconds after training has begun", at_least=0.0)
    epoch: int | None = key(None, help="in the recovery that leads to this epoch", at_least=1)
    seconds: float = key(0.0, help="how long, or how much", at_least=-1e9, at_most=1e9)
    factor: float = key(1.0, help="slow only: its own work takes this many times as long", at_least=1.0, at_most=1e6)
    may_miss: bool = key(False, help="it is no failure if it never happens")

    def __post_init__(self) -> None:
        if self.slot != ANY and not _SLOT.fullmatch(self.slot):
            raise ConfigError(f"slot = {self.slot!r} is not a slot", fix="r0.s0.t1, or any")
        if self.what not in INJECTED_BY_WORKER:
            _refuse_a_fault_point(self.what, self.during)
        if self.factor != 1.0 and self.what != SLOW:
            raise ConfigError(f"what = {self.what} has no factor", fix=f"leave it out, or what = {SLOW}")
        if self.at_step is not None and (self.during in RECOVERY_FAULT_POINTS or self.epoch is not None):
            raise ConfigError(
                f"during = {self.during!r} is a fault point of a recovery, and at_step is for one of a step",
                fix="give the epoch that the recovery leads to, or leave it out",
            )
        if self.at_s is not None and self.at_step is not None:
            raise ConfigError("at_s and at_step are both given", fix="choose one")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RandomSpec:
    """Randomly drawn faults: kind, fault point and slot of each; the next comes only when the one before is over. Every
    pair of kind and fault point comes once before any comes again."""

    count: int = key(0, help="how many", at_least=0, at_most=1_000_000)
    seed: int = key(1, help="the same seed draws the same faults", at_least=0)
    what: tuple[str, ...] = key(("kill",), help="kinds to draw from")
    during: tuple[str, ...] = key(("forward", "backward", "vote"), help="fault points to draw from")
    pairs: tuple[str, ...] = key(
        (), help="instead of what and during: 'kill at vote', or a kind from outside alone (sigkill)"
    )
    every_steps: int = key(4, help="steps between the end of one and the next", at_least=1, at_most=1_000_000)
    whole_within_steps: int = key(
        40,
        help="wait this many steps for lost slots to rejoin, then go on without them",
        at_least=0,
        at_most=1_000_000,
    )
    seconds: float = key(0.5, help="how long, or how much, for kinds that need it")

    def __post_init__(self) -> None:
        for words, known in ((self.what, KINDS), (self.during, FAULT_POINTS)):
            for word in words:
                _refuse_unknown(word, known)
        for what, fault_point in self.deck() if self.pairs else ():
            _refuse_unknown(what, KINDS)
            if what in INJECTED_BY_WORKER:
                _refuse_unknown(fault_point, FAULT_POINTS)
            else:
                _refuse_a_fault_point(what, fault_point)
        if not (self.what and self.during):
            raise ConfigError("there is nothing to draw from", fix="name kinds in what, and fault points in during")

    def deck(self) -> list[tuple[str, str]]:
        """Return pairs of kind and fault point; a kind from outside ignores its fault point."""
        if not self.pairs:
            return [(what, fault_point) for what in self.what for fault_point in self.during]
        cut = (pair.partition(" at ") for pair in self.pairs)
        return [(what.strip(), fault_point.strip()) for what, _, fault_point in cut]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class TraceSpec:
    """Outages of a trace, at their pace or a faster one; each hits any slot, whatever domain it names."""

    file: str = key("", help="rows of domain, start and end in days, as CSV or JSON; beside the recipe")
    seconds_per_day: float = key(1.0, help="seconds of the run for a day of the trace", at_least=0.0, at_most=86_400.0)
    from_day: float = key(0.0, help="skip outages that began before this day", at_least=0.0)
    count: int = key(20, help="how many outages at most", at_least=1, at_most=1_000_000)
    what: str = key("sigkill", help="what breaks", choices=tuple(KINDS))
    may_miss: bool = key(False, help="it is no failure if some never happen")

    def faults(self, beside: Path) -> tuple[FaultSpec, ...]:
        """Return one fault for each outage."""
        if not self.file:
            return ()
        found = [one for one in read_trace(beside / self.file) if one.start_s >= self.from_day * DAY_S][: self.count]
        days = [one.start_s / DAY_S - self.from_day for one in found]
        return tuple(FaultSpec(what=self.what, at_s=day * self.seconds_per_day, may_miss=self.may_miss) for day in days)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """A whole recipe."""

    name: str
    job: JobSpec
    faults: tuple[FaultSpec, ...]
    random: RandomSpec


def read_recipe(path: Path, *, job: Path | None = None, run: tuple[str, ...] = ()) -> Recipe:
    """Read a recipe from a file. `job`: a file whose job replaces the one that the recipe's is `like`; `run`: replaces
    the arguments of `ntp run`."""
    raw = _known_tables(path)
    faults = raw.get("fault", [])
    if not isinstance(faults, list):
        raise ConfigError(f"{path}: fault is not a list of tables", fix="write [[fault]], with two brackets")
    job_table = _job(path, raw, job) | ({"run": list(run)} if run else {})
    recipe = Recipe(
        name=path.stem,
        job=_section(JobSpec, job_table, f"{path}: job."),
        faults=(
            *(_section(FaultSpec, fault, f"{path}: fault {n}: ") for n, fault in enumerate(faults, start=1)),
            *_section(TraceSpec, raw.get("trace", {}), f"{path}: trace.").faults(path.parent),
        ),
        random=_section(RandomSpec, raw.get("random", {}), f"{path}: random."),
    )
    if not recipe.job.run:
        raise ConfigError(f"{path} has no job", fix="write job.run = [...], or ntp chaos FILE -- ARGUMENTS OF NTP RUN")
    if not (recipe.faults or recipe.random.count):
        raise ConfigError(f"{path} has no faults", fix="write a [[fault]], random.count, or trace.file")
    for word in recipe.job.environment:
        if "=" not in word:
            raise ConfigError(f"{path}: job.environment: {word!r} is not NAME=VALUE")
    _refuse_other_hosts(path, recipe)
    return recipe


def _refuse_unknown(word: str, known: Collection[str]) -> None:
    if word not in known:
        raise ConfigError(f"{word!r} is not known", fix=f"choose from {', '.join(known)}")


def _refuse_a_fault_point(what: str, fault_point: str) -> None:
    if fault_point:
        raise ConfigError(
            f"what = {what} comes from outside, at any instant: it has no fault point {fault_point!r}",
            fix="leave during out, or choose kill, stop, ...",
        )


def _refuse_other_hosts(path: Path, recipe: Recipe) -> None:
    """Raise for link faults in a job on one host, and for supervisor faults in a job on several."""
    drawn = {what for what, _ in recipe.random.deck()} if recipe.random.count else set()
    kinds = {fault.what for fault in recipe.faults} | drawn
    if recipe.job.hosts == 1 and (found := kinds & OF_HOSTS):
        raise ConfigError(
            f"{path}: what = {min(found)} is for a job on several hosts, and job.hosts is 1",
            fix="job.hosts = 2, and no --standalone in job.run",
        )
    if recipe.job.hosts > 1 and SUPERVISOR in kinds:
        raise ConfigError(
            f"{path}: what = {SUPERVISOR} is for a job on one host, and job.hosts is {recipe.job.hosts}",
            fix="what = node kills a host with its supervisor",
        )
    if recipe.job.hosts > 1 and "--standalone" in recipe.job.run:
        raise ConfigError(
            f"{path}: --standalone is for a job on one host, and job.hosts is {recipe.job.hosts}",
            fix="leave it out of job.run: the campaign sets the rendezvous",
        )


def _known_tables(path: Path) -> dict[str, Any]:
    raw = read_file(path, least="write at least [job] and a [[fault]]; recipes/chaos/ has examples")
    if unknown := raw.keys() - {"job", "fault", "random", "trace"}:
        raise ConfigError(
            f"{path}: {min(unknown)} is not a known key", fix="known keys: [job], [[fault]], [random], [trace]"
        )
    return raw


def _job(path: Path, raw: Mapping[str, Any], other: Path | None) -> dict[str, Any]:
    """Merge a recipe's [job] over the one that it is like."""
    own = raw.get("job", {})
    if not isinstance(own, Mapping):
        raise ConfigError(f"{path}: job is not a table", fix="write [job]")
    like = own.get("like")
    base = other or (path.parent / like if isinstance(like, str) and like else None)
    if base is None:
        return dict(own)
    found = _known_tables(base).get("job", {})
    if not isinstance(found, Mapping):
        raise ConfigError(f"{base}: job is not a table", fix="write [job]")
    words = {"run", "environment"} if other is not None else set()  # these belong to the replaced job
    return {**found, **{name: value for name, value in own.items() if name not in words}}


def _section[Section](section: type[Section], raw: Mapping[str, Any], where: str) -> Section:
    try:
        return read(section, raw, where=where)
    except ConfigError as error:
        if error.what.startswith(where):
            raise
        raise ConfigError(f"{where.rstrip(': .')}: {error.what}", fix=error.fix) from None
