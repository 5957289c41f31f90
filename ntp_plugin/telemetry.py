"""What a job tells of itself, for whoever looks on: one line of JSON for each event.

Every process appends to one file, and a line is one write, so that lines of several processes do not mix (on a local
disk; where a job has several hosts, each has a file of its own). A process that is killed has told what it told. With
no file named nothing is written. A reader follows the file while the job runs, or reads it afterwards:

    for told in Follower(path).news(): ...
"""

import dataclasses
import json
import os
import time
from pathlib import Path
from typing import Any


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Began:
    """A process is about to take its first step, from the start of the job or as a newcomer."""

    pid: int
    newcomer: bool
    replicas: int
    stages: int
    tp: int
    micro_batches: list[int]
    """Of each replica, in a step."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """A step is over on this process, and will not be undone."""

    step: int
    epoch: int
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
    """A copy was not made, or is not what was written. The training goes on."""

    what: str


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
class Ended:
    """The job is over on this process, as it should be."""


type Event = Began | Committed | Recovered | Copied | Restored | CopyTrouble | Corrupted | Exported | Ended
_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (Began, Committed, Recovered, Copied, Restored, CopyTrouble, Corrupted, Exported, Ended)
}


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Told:
    """An event, who told it, and when by the clock on the wall."""

    at: float
    slot: str
    event: Event


class Teller:
    """Writes the events of one process."""

    def __init__(self, path: str | None, slot: str) -> None:
        self._slot = slot
        self._file = None if path is None else os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    @property
    def is_heard(self) -> bool:
        """Whether there is a file, so that what is costly to know is not asked for in vain."""
        return self._file is not None

    def tell(self, event: Event) -> None:
        """Append it, if there is a file."""
        if self._file is None:
            return
        line = {"at": time.time(), "slot": self._slot, "event": type(event).__name__, **dataclasses.asdict(event)}
        os.write(self._file, json.dumps(line).encode() + b"\n")

    def close(self) -> None:
        """Nothing more is told."""
        if self._file is not None:
            os.close(self._file)
            self._file = None


class Follower:
    """Reads a file that grows; it may not be there yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._read = path, 0

    def news(self) -> list[Told]:
        """What was told since the last time; a line that is not whole yet is left for the next."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole = file.read().rpartition(b"\n")[0]
        self._read += len(whole) + bool(whole)
        return [_told(json.loads(line)) for line in whole.splitlines()]


def _told(line: dict[str, Any]) -> Told:
    at, slot, kind = line.pop("at"), line.pop("slot"), _KINDS[line.pop("event")]
    return Told(at=at, slot=slot, event=kind(**line))
