"""The events that a job records."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """A process is about to take its first step, from the start of the job or as a joining rank."""

    number: int
    """Number of its slot, which is the rank in the nominal layout."""
    pid: int
    joiner: bool
    replicas: int
    stages: int
    tp: int
    micro_batches: list[int]
    """Micro-batches of each replica in a step; one that a replica runs in splits counts as one."""
    machine: str = ""
    """The machine on which the pid is valid (`whereabouts.py`)."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """Settings of the plugin, by their names in a configuration file."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Versions of the plugin, of torch and of the framework."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """This process has committed a step, which will not be undone."""

    step: int
    epoch: int
    """Epoch of the step's vote; after a loss the step may be recorded in a later epoch."""
    seconds: float
    """Time since the step began, recoveries in it included."""
    losses: dict[str, float]
    """Losses of the global batch, by the names that the script reports."""
    samples: list[int]
    """Indices of the training samples that this process drew for the step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """This process has completed a recovery after a change of the membership, and trains on."""

    epoch: int
    seconds: float
    """Time from the interruption of the step until training resumes."""
    lost: list[str]
    """All slots that are missing now."""
    back: list[str]
    """The slots that joined with this change."""
    widths: list[list[int]]
    """Width of each stage, replica by replica."""
    micro_batches: list[int]
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of each phase: `agree`, `regroup`, and `move` (transfer the state and verify it)."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLost:
    """The supervisor of a host has found a rank lost, and announces it to the others."""

    number: int
    """Number of its slot; the supervisor does not know the layout."""
    pid: int
    """0 if the process ran on another host that is lost."""
    kind: str
    """Kind of the failure: `ended`, `frozen`, ..."""
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hung:
    """All ranks wait for each other: a deadlock, in which no rank can be evicted."""

    waiting: int
    seconds: float
    """At least so long."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyRestored:
    """A key of the job's store was deleted or overwritten by another program; this host's supervisor restored it."""

    key: str
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The action chosen after a loss, and its alternatives."""

    action: str
    lost: list[str]
    """All slots that are missing now."""
    table: list[str]
    """One line per action: its score, or why it is impossible."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected:
    """A fault was injected into the job."""

    fault: str
    """Name of the fault in the campaign."""
    what: str
    whom: str
    """The slot, or the other target of the fault."""
    fault_point: str
    """Empty if the fault comes from outside of the process."""
    step: int
    """The step in flight; 0 if it is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A copy of this process's state is complete, on its own host and on others."""

    step: int
    size: int
    """In bytes."""
    taken_s: float
    """Time until the training may change the copied state again."""
    seconds: float
    far: int
    """Number of other hosts that hold the copy."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """This process has restored its state from copies."""

    step: int
    """The step that the copies belong to."""
    again: int
    """Number of committed steps that are repeated."""
    own: int
    """Bytes from its own copy."""
    here: int
    """Bytes from other copies on its host."""
    elsewhere: int
    rebuilt: list[str]
    """Copies that were rebuilt from parities first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyTrouble:
    """A copy was not made, is late, or differs from what was written. The training continues."""

    what: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Replicas have compared the digests of their replicated state."""

    step: int
    """The step after which they compared it."""
    values: int
    """Tensors that this process has a part of, and entries of their optimizer state."""
    odd: int
    """Number of values, over all ranks, that differ."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corrupted:
    """Replicas hold different bits of state that is replicated."""

    step: int
    what: str
    slots: list[str]
    certain: bool
    """True if these slots are known to be wrong; otherwise one of them is."""
    healed: bool
    """True if these slots leave the job and the job continues."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class SaveFailed:
    """A checkpoint could not be written. The training continues, and the next one is saved when it is due."""

    step: int
    folder: str
    why: str
    """The errors, each with the slot that had it."""
    removed: bool
    """Whether no folder is left of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """A run that was started for it has written the copies of this job as a checkpoint."""

    step: int
    folder: str
    failed: str
    """Why there is no checkpoint; empty if there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """The final weights of this process, as numbers that compare two runs (`copies/sketch.py`). Recorded only by
    workers of a campaign (`chaos/worker.py`)."""

    cut: list[float]
    """Sketch of this process's slices of the tensors that its replica shards, without shared ones."""
    cut_values: int
    """Number of elements in it."""
    alike: list[float]
    """Sketch of the tensors that all TP slots of its stage replicate."""
    alike_values: int
    shared: list[float] = dataclasses.field(default_factory=list)
    """Sketch of this process's slices of tensors that others than a replica hold together."""
    shared_values: int = 0
    shared_by: str = ""
    """Who they are, such as an expert group."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The job has ended as it should on this process."""


type Event = (
    Began
    | Committed
    | Recovered
    | RankLost
    | Hung
    | KeyRestored
    | Chosen
    | FaultInjected
    | Copied
    | Restored
    | CopyTrouble
    | Compared
    | Corrupted
    | SaveFailed
    | Exported
    | Weighed
    | Ended
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in Event.__value__.__args__}
