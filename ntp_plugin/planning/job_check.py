"""What `ntp check` finds out about a job before it runs, for any framework: accepted or not, and what a loss does.

An adapter reads the job from its framework's own arguments, and `examined` adds what planning knows of it.
"""

import dataclasses

from ntp_plugin.config.sections import CopyPolicy
from ntp_plugin.errors import Refused
from ntp_plugin.planning.expert_groups import replicas_beside
from ntp_plugin.planning.memory_fit import MemoryUse, memory_use
from ntp_plugin.planning.recovery_plan import Nominal, as_json, fullest_memory
from ntp_plugin.planning.survival import CopyMemory, Survival, copy_memory, survivals
from ntp_plugin.planning.topology import Slot, Topology


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class UnsupportedOption:
    """An option of the framework that a job cannot have, and what to do instead."""

    flag: str
    why: str
    fix: str

    def __str__(self) -> str:
        return f"{self.flag} {self.why}"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StartedRanks:
    """The processes that `ntp run` would start; None where that is not known.

    Attributes:
        size: All of them.
        per_host: Those of one host.
    """

    size: int | None = None
    per_host: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ChangedOption:
    """An option that works in a degraded layout, and differently."""

    flag: str
    change: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobMemory:
    """Bytes of one rank: on its GPU with nobody lost and with a slot of its group lost, and its copies.

    Attributes:
        parameters: Parameters of the model, each counted once.
        nominal: The fullest rank with nobody lost, without activations; None where that is not planned.
        degraded: The same where one slot of its group, or expert group, is lost; None where no group goes on then.
        copies: Host memory of the copies; None if the job makes none.
    """

    parameters: int
    nominal: MemoryUse | None
    degraded: MemoryUse | None
    copies: CopyMemory | None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class JobCheck:
    """What was found out about a job.

    Attributes:
        framework: "megatron" or "deepspeed".
        unsupported: The options for which the job is refused; empty if it is accepted.
        topology: The nominal layout.
        survivals: Which losses the job survives; empty if it is refused.
        memory: None if the job is refused, or if the number of its parameters is not known.
        changes: What changes in a degraded layout.
        notes: What the check has assumed, and what it does not know.
    """

    framework: str
    unsupported: tuple[UnsupportedOption, ...]
    topology: Topology
    survivals: tuple[Survival, ...] = ()
    memory: JobMemory | None = None
    changes: tuple[ChangedOption, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def accepted(self) -> bool:
        return not self.unsupported

    def to_json(self) -> str:
        """Encode it as one JSON object."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return as_json({"accepted": self.accepted, **fields})


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CheckedJob:
    """An accepted job as its adapter has read it.

    Attributes:
        nominal: The job with nobody lost.
        copies: How it copies what its ranks hold; None if it makes no copies.
        copied_bytes: What the optimizer steps and keeps for one parameter.
        knows_parameters: Whether the units of `nominal` have as many parameters as the model.
        knows_gpu_memory: Whether its state is what the framework keeps on a GPU.
    """

    nominal: Nominal
    copies: CopyPolicy | None
    copied_bytes: int
    knows_parameters: bool = True
    knows_gpu_memory: bool = True


def refused(check: JobCheck, error: Refused, *, flag: str) -> JobCheck:
    """Return the check with one more reason to refuse the job."""
    found = UnsupportedOption(flag=flag, why=error.what, fix=error.fix)
    return dataclasses.replace(check, unsupported=(*check.unsupported, found))


def examined(check: JobCheck, job: CheckedJob) -> JobCheck:
    """Return the check with the losses that the job survives, and its memory."""
    try:
        found = survivals(job.nominal, job.copies)
        memory = _memory(job) if job.knows_parameters else None
    except Refused as error:  # there are too few hosts for the copies
        return refused(check, error, flag="copies")
    return dataclasses.replace(check, survivals=found, memory=memory)


def _memory(job: CheckedJob) -> JobMemory:
    nominal, copies = job.nominal, None
    if job.copies is not None:
        copies = copy_memory(nominal, job.copies, bytes_per_parameter=job.copied_bytes)
    return JobMemory(
        parameters=nominal.units.elements,
        nominal=fullest_memory(nominal) if job.knows_gpu_memory else None,
        degraded=_with_a_slot_lost(nominal) if job.knows_gpu_memory else None,
        copies=copies,
    )


def _with_a_slot_lost(nominal: Nominal) -> MemoryUse | None:
    """Return the memory of the fullest rank once a slot of its group or expert group is lost, if that goes on."""
    topology, tp = nominal.topology, nominal.topology.tp
    if nominal.surviving(frozenset()).narrowest < tp:
        uses = [
            memory_use(units, tp, (tp - 1,), nominal.state, replicas=topology.dp, packing=True)
            for units in nominal.units.stages
        ]
        return max(uses, key=lambda use: use.total)
    if not topology.expert_slots or len(replicas_beside(topology, 0)) == 1:
        return None
    return fullest_memory(nominal, frozenset({Slot(replica=0, stage=0, tp=0)}))
