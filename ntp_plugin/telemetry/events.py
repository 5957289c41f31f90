"""What can happen to a job, as it is told."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """A process is about to take its first step, from the start of the job or as a joining rank."""

    number: int
    """Of its slot, as supervisors know it."""
    pid: int
    joiner: bool
    replicas: int
    stages: int
    tp: int
    micro_batches: list[int]
    """Of each replica, in a step; one that a replica runs in pieces is one."""
    machine: str = ""
    """Where its pid is to be looked for (`whereabouts.py`)."""
    settings: dict[str, str] = dataclasses.field(default_factory=dict)
    """The plugin's own, by their names in a file of settings."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)
    """Ours, torch's and the framework's."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A step is over on this process, and will not be undone."""

    step: int
    epoch: int
    """In which all came to its vote; where a loss followed, the step is told of in a later one."""
    seconds: float
    """Since the step was begun, recoveries in it included."""
    losses: dict[str, float]
    """Of the global batch, by the names that the script reports."""
    samples: list[int]
    """Those of the training set that this process drew for it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recovered:
    """This process has come through a change of the membership, and goes on."""

    epoch: int
    seconds: float
    """From its being broken out of the work to its going on."""
    lost: list[str]
    """All slots that are not there now."""
    back: list[str]
    """Those that came with this change."""
    widths: list[list[int]]
    """Replica by replica, of each stage."""
    micro_batches: list[int]
    phases: dict[str, float] = dataclasses.field(default_factory=dict)
    """The seconds in parts: to `agree`, to `regroup`, and to `move` the state and verify it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RankLost:
    """A host's supervisor has found a process of it lost, and the others are told."""

    number: int
    """Of its slot: who tells this does not know the layout."""
    pid: int
    """0 where it was on another host, that is lost."""
    kind: str
    """What kind of a loss: `dead`, `stopped`, ..."""
    reason: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hung:
    """All wait for each other, so that nobody can be left out."""

    waiting: int
    seconds: float
    """At least."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class KeyRestored:
    """A key of the job's store was deleted or overwritten by a stranger, and this host's supervisor wrote it again."""

    key: str
    what: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """What is done about a loss, and what it was chosen from."""

    action: str
    lost: list[str]
    """All slots that are not there now."""
    table: list[str]
    """A line for each action, with its score or why it cannot be taken."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class FaultInjected:
    """Somebody breaks the job on purpose, here and now."""

    fault: str
    """Its name in the campaign."""
    what: str
    whom: str
    """The slot, or what else is struck."""
    fault_point: str
    """Empty where it comes from outside."""
    step: int
    """The one in flight; 0 where that is not known."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Copied:
    """A copy of this process's state is made, near and far."""

    step: int
    size: int
    """In bytes."""
    taken_s: float
    """Until the training may change what was copied."""
    seconds: float
    far: int
    """So many other hosts have it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """This process has its state from copies."""

    step: int
    """The one that the copies were made after."""
    again: int
    """So many steps that were over are taken again."""
    own: int
    """Bytes from its own copy."""
    here: int
    """From other copies on its host."""
    elsewhere: int
    rebuilt: list[str]
    """The copies that were put together from parities first."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class CopyTrouble:
    """A copy was not made, or is late, or is not what was written. The training goes on."""

    what: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """Replicas have compared what they hold alike, by digests."""

    step: int
    """After which they did."""
    values: int
    """Tensors of which this process has a part, and entries of their optimizer's state."""
    odd: int
    """Of those of all, so many that are not the same."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Corrupted:
    """Replicas do not hold the same bits of what they hold alike."""

    step: int
    what: str
    slots: list[str]
    certain: bool
    """Whether these are known to be wrong; else one of them is."""
    healed: bool
    """Whether they leave the job, and it goes on."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Copies of this job were written as a checkpoint by a run that was started for it."""

    step: int
    folder: str
    failed: str
    """Why there is none; empty where there is one."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Weighed:
    """The weights that this process ends with, in numbers by which two runs are compared (`copies/sketch.py`).
    RecordedEvent where the job is rehearsed."""

    cut: list[float]
    """Of the part that it has of tensors that its replica has cut."""
    cut_values: int
    """That many elements."""
    alike: list[float]
    """Of what all TP slots of its stage have alike."""
    alike_values: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ended:
    """The job is over on this process, as it should be."""


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
    | Exported
    | Weighed
    | Ended
)
KINDS: dict[str, Any] = {kind.__name__: kind for kind in Event.__value__.__args__}
